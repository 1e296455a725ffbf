# SPDX-License-Identifier: Apache-2.0
"""What routing sees of a prompt."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvferry.proxy.fleet.routing.routing_request import (
    BYTES_PER_TOKEN,
    CHUNK_TOKENS,
    MAX_CHUNKS,
    RoutingRequest,
    routing_request,
)
from kvferry.proxy.request import parse_request

CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN


def shared(first: RoutingRequest, second: RoutingRequest) -> int:
    """How many leading chunks two prompts have in common."""
    pairs = zip(first.chunks, second.chunks, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@given(common=st.integers(0, 4 * CHUNK_BYTES), first=st.text(max_size=600), second=st.text(max_size=600))
def test_prompts_share_exactly_the_chunks_of_their_common_beginning(
    common: int, first: str, second: str
) -> None:
    one, other = "c" * common + "1" + first, "c" * common + "2" + second
    whole = min(len(one.encode()), len(other.encode())) // CHUNK_BYTES
    assert shared(RoutingRequest(model="m", prompt=one), RoutingRequest(model="m", prompt=other)) == min(
        common // CHUNK_BYTES, whole
    )


def test_ids_are_chunked_like_text_and_a_batch_of_one_is_its_prompt() -> None:
    ids = list(range(3 * CHUNK_TOKENS + 5))
    ask = RoutingRequest(model="m", prompt=ids)
    assert len(ask.chunks) == 3 and ask.tokens == len(ids)
    assert RoutingRequest(model="m", prompt=[ids]).chunks == ask.chunks
    assert (
        shared(ask, RoutingRequest(model="m", prompt=[*ids[:CHUNK_TOKENS], 9, *ids[CHUNK_TOKENS + 1 :]])) == 1
    )
    assert (
        RoutingRequest(model="m", prompt=["some text"]).tokens
        == RoutingRequest(model="m", prompt="some text").tokens
        == 3
    )


def test_a_chat_that_goes_on_shares_what_was_said() -> None:
    said: list[Any] = [{"role": "user", "content": "x" * 3 * CHUNK_BYTES}]
    later = [*said, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    assert shared(RoutingRequest(model="m", prompt=said), RoutingRequest(model="m", prompt=later)) == 3


def test_models_share_nothing_and_prompts_are_digested_up_to_a_bound() -> None:
    prompt = "x" * CHUNK_BYTES * (MAX_CHUNKS + 3)
    assert len(RoutingRequest(model="m", prompt=prompt).chunks) == MAX_CHUNKS
    assert not shared(RoutingRequest(model="a", prompt=prompt), RoutingRequest(model="b", prompt=prompt))


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("completions", {"prompt": "abc", "n": 2}, RoutingRequest(model="m", prompt=Raw(b'"abc"'), n=2)),
        (
            "completions",
            {"prompt": [1, 2], "max_tokens": 1},
            RoutingRequest(model="m", prompt=Raw(b"[1,2]"), one_token=True, max_tokens=1),
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            RoutingRequest(model="m", prompt=Raw(b'[{"role":"user","content":"hi"}]')),
        ),
    ],
)
def test_a_request_becomes_a_question(endpoint: Any, body: dict[str, Any], expected: RoutingRequest) -> None:
    request = parse_request(endpoint, msgspec.json.encode({"model": "m", **body}))
    assert routing_request(request, None) == expected
    assert routing_request(request, "s").session == "s"
