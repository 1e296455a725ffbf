# SPDX-License-Identifier: Apache-2.0
"""The quick path of another engine's events gives what the careful path gives, or nothing at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy import sse
from kvferry.proxy.dialects.atom import Atom
from kvferry.proxy.dialects.base import Dialect
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.dialects.sglang import Sglang
from kvferry.proxy.dialects.vllm_kvferry import VllmKvferry
from kvferry.proxy.errors import BadResponse, ProxyError
from kvferry.proxy.exchange.rewrite import MAX_TEMPLATES, EventTemplates, RewrittenResponse
from kvferry.proxy.exchange.sub_requests import split_into_choices, whole_request
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import parse_request
from tests.unit.proxy.builders import registration

IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
Dump = Callable[[Any], str]
RECORDED = sorted((Path(__file__).parents[1] / "dialects/exchanges/atom").glob("*_stream.json"))


class Careful(EventTemplates):
    """Knows no quick path."""

    def fill(self, event: bytes) -> bytes | None:
        return None


def responses(
    endpoint: Endpoint, *, alone: bool, n: int, dialect: Dialect | None = None
) -> tuple[RewrittenResponse, RewrittenResponse]:
    """The response of a request's last share, or of all of it: with the quick path, and without."""
    asked = {"messages": [{"role": "user", "content": "p"}]} if "chat" in endpoint else {"prompt": "p"}
    body = {"model": "m", "stream": True, "n": n, **asked}
    request = parse_request(endpoint, json.dumps(body).encode())
    if alone:
        sub = whole_request(request, IDS, TransferId("0" * 32))
    else:
        *_, sub = split_into_choices(request, IDS, [TransferId(f"{number:032x}") for number in range(n)])
    server, spoken = registration("decode", 1), dialect or Sglang()
    made = RewrittenResponse(sub, server, spoken), RewrittenResponse(sub, server, spoken)
    made[1]._templates = Careful()
    return made


def continued(
    endpoint: Endpoint,
) -> tuple[tuple[RewrittenResponse, SentTokens], tuple[RewrittenResponse, SentTokens]]:
    """The same of a stream that goes on from ids, and what is noted of them."""
    quick, careful = responses(endpoint, alone=False, n=1)
    made = []
    for response, templates in ((quick, EventTemplates), (careful, Careful)):
        sent = SentTokens()
        response = RewrittenResponse(response.sub, registration("decode", 1), VllmKvferry(), sent)
        response._templates = templates(sent)
        response.rewrite_one = response._templates.fill
        made.append((response, sent))
    return made[0], made[1]


# What engines send, as read in their sources (docs/sources.md): each makes one event's choice.


def vllm_text(index: int, text: str, reason: str | None) -> dict[str, Any]:
    shown = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    choice = {**shown, "prompt_token_ids": None, "token_ids": None}
    return {"id": "cmpl-r-0", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def vllm_ids(index: int, text: str, reason: str | None, token_id: int) -> dict[str, Any]:
    told = vllm_text(index, text, reason)
    told["choices"][0]["token_ids"] = [token_id]
    return told


def vllm_delta(index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {
        "id": "chatcmpl-r",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def vllm_chat(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return vllm_delta(index, {"content": text}, reason)


def vllm_reasoning(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return vllm_delta(index, {"reasoning": text}, reason)


def sglang_chat(index: int, text: str, reason: str | None) -> dict[str, Any]:
    delta = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": None}
    return {
        "id": "5d", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice],
        "usage": None,
    }  # fmt: skip


def sglang_tool(index: int, text: str, reason: str | None) -> dict[str, Any]:
    call = {"id": None, "index": 0, "type": "function", "function": {"name": None, "arguments": text}}
    delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": [call]}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": None}
    return {"id": "5d", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def atom_text(index: int, text: str, reason: str | None) -> dict[str, Any]:
    choice = {"index": index, "text": text, "finish_reason": reason}
    return {"choices": [choice], "id": "cmpl-7", "object": "text_completion", "model": "m", "usage": None}


SHAPES = (vllm_text, vllm_chat, vllm_reasoning, sglang_chat, sglang_tool, atom_text)


def compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def spaced(body: Any) -> str:
    return json.dumps(body)


TEXTS = st.one_of(
    st.text(max_size=12),  # without surrogates
    st.sampled_from(
        ['"text":"', '","finish_reason":"stop"', "\\", '\\"', "\n\n", "data: [DONE]", '{"error"', "é", "\x00"]
    ),
)
OTHERS = st.sampled_from(
    [
        sse.DONE,
        b": ping\n\n",
        b"\n\n",
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
        b'data: {"id":"x","choices":[{"index":0,"text":"a","text":"b","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":"abort"}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"a"}],"error":{"message":"m","code":400}}\n\n',
        b': "text":"a"\ndata: {"choices":[{"index":0,"text":"b","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","logprobs":{"content":"c"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"x\\"text":"b","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"usage":{"text":"b"},"finish_reason":null}],"usage":{"text":9}}\n\n',
        b'data: {"choices":[{"index":0,"finish_reason":null}],"kv_transfer_params":{"text":"secret"}}\n\n',
        b"event: x\ndata: {}\n\n",
        b"data: {}\n\n",
        b"nonsense\n\n",
    ]
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events of one engine, with others among them, and some of them with a byte changed, lost or put in."""
    shape, dump = draw(st.sampled_from(SHAPES)), draw(st.sampled_from([compact, spaced]))
    events = []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 4)) == 0:
            events.append(draw(OTHERS))
            continue
        body = shape(draw(st.integers(0, 1)), draw(TEXTS), draw(st.sampled_from([None, None, None, "stop"])))
        body |= draw(st.sampled_from([{}, {}, {"created": 2}, {"kv_transfer_params": {"remote": 1}}]))
        body |= draw(st.sampled_from([{}, {}, {}, {"usage": {"prompt_tokens": 1}}, {"own": 1e300}]))
        event = b"data: " + dump(body).encode() + b"\n\n"
        if draw(st.integers(0, 3)) == 0:
            event = damaged(event, draw(st.integers(0, 2**32)))
        events.append(event)
    return events


def damaged(event: bytes, seed: int) -> bytes:
    """The event with a byte or two of its data changed, lost or put in."""
    source, data = random.Random(seed), bytearray(event[:-2])
    for _ in range(source.randint(1, 2)):
        at, byte = source.randrange(len(data)), source.choice(b'"\\{}[]:,0\x00\x1f\x80\xff\nu' + data)
        how = source.randrange(3)
        data[at : at + (how != 1)] = bytes([byte]) if how != 2 else b""
    return bytes(data).replace(b"\n\n", b"\n") + b"\n\n"


def outcome(response: RewrittenResponse, event: bytes) -> Any:
    try:
        return response.rewrite(event)
    except ProxyError as error:
        return type(error), error.message


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize(("alone", "n"), [(False, 1), (False, 2), (True, 2)])
@given(events=streams())
@settings(deadline=None, max_examples=100)
def test_the_quick_path_gives_what_the_careful_one_gives(
    endpoint: Endpoint, alone: bool, n: int, events: list[bytes]
) -> None:
    """Event by event, with the state that is kept of them; errors too."""
    quick, careful = responses(endpoint, alone=alone, n=n)
    for event in events:
        filled = quick.rewrite_one(event)
        expected = outcome(careful, event)
        if filled is not None:
            assert filled == expected
            json.loads(filled.removeprefix(b"data: "))
        assert outcome(quick, event) == expected
        assert (quick.complete, quick.usage) == (careful.complete, careful.usage)
        assert quick.envelope == careful.envelope


@st.composite
def streams_with_ids(draw: st.DrawFn) -> list[bytes]:
    """Events with ids, and some of them with a byte changed, lost or put in."""
    dump, events = draw(st.sampled_from([compact, spaced])), []
    for _ in range(draw(st.integers(1, 8))):
        text, reason = draw(TEXTS), draw(st.sampled_from([None, None, None, "stop"]))
        body = vllm_ids(draw(st.integers(0, 1)), text, reason, draw(st.integers(0, 10**6)))
        body["choices"][0] |= draw(st.sampled_from([{}, {}, {}, {"token_ids": [1, 2]}, {"token_ids": None}]))
        event = b"data: " + dump(body).encode() + b"\n\n"
        if draw(st.integers(0, 3)) == 0:
            event = damaged(event, draw(st.integers(0, 2**32)))
        events.append(event)
    return events


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@given(events=streams_with_ids())
@settings(deadline=None, max_examples=100)
def test_the_quick_path_notes_the_ids_that_the_careful_one_notes(
    endpoint: Endpoint, events: list[bytes]
) -> None:
    (quick, ours), (careful, theirs) = continued(endpoint)
    for event in events:
        assert outcome(quick, event) == outcome(careful, event)
        assert (ours.ids, ours.count_sampled, ours.complete) == (
            theirs.ids,
            theirs.count_sampled,
            theirs.complete,
        )


@pytest.mark.parametrize("dump", [compact, spaced])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_events_with_ids_take_the_quick_path_and_lose_them(endpoint: Endpoint, dump: Dump) -> None:
    (response, sent), _ = continued(endpoint)
    quick = 0
    for number in range(1, 51):
        body = vllm_ids(0, f'"{number}"\\ é', "stop" if number == 50 else None, number)
        event = b"data: " + dump(body).encode() + b"\n\n"
        shown = response.rewrite_one(event)
        quick += shown is not None
        told = json.loads((shown or response.rewrite(event)).removeprefix(b"data: "))
        (choice,) = told["choices"]
        assert not choice.get("token_ids")
        assert choice.get("text", choice.get("delta", {}).get("content")) == f'"{number}"\\ é'
        assert told["object"] == ("text_completion" if endpoint == "completions" else "chat.completion.chunk")
    assert quick == 48
    assert sent.ids == b",".join(b"%d" % number for number in range(1, 51)) and sent.complete


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_quick_path_gives_what_the_careful_one_gives_of_recorded_streams(path: Path) -> None:
    """Each event three times, so that the second and third may be quick."""
    recorded = json.loads(path.read_text())
    quick, careful = responses(recorded["endpoint"], alone=False, n=1, dialect=Atom())
    for event in sse.split(recorded["decode_answer"].encode()):
        for _ in range(3):
            filled, expected = quick.rewrite_one(event), outcome(careful, event)
            assert filled in (None, expected)
            assert outcome(quick, event) == expected
    assert quick.complete and careful.complete


def test_a_choice_that_has_ended_does_not_go_on_by_the_quick_path() -> None:
    response, _ = responses("completions", alone=True, n=2)
    events = {
        (index, reason): b"data: " + compact(vllm_text(index, "a", reason)).encode() + b"\n\n"
        for index in (0, 1)
        for reason in (None, "stop")
    }
    response.rewrite(events[0, None] + events[1, None] + events[0, "stop"] + events[1, None])
    assert response.rewrite_one(events[1, None]) is not None
    assert response.rewrite_one(events[0, None]) is None
    with pytest.raises(BadResponse):
        response.rewrite(events[0, None])


@pytest.mark.parametrize("dump", [compact, spaced])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2])
def test_all_but_the_first_and_the_last_event_of_a_choice_take_the_quick_path(
    shape: Any, dump: Dump, n: int
) -> None:
    """Choices of one server's stream come in turn."""
    response, _ = responses("chat/completions", alone=True, n=n)
    quick = 0
    for number in range(50):
        for index in range(n):
            reason = "stop" if number == 49 else None
            event = b"data: " + dump(shape(index, f'"{number}"\\ é', reason)).encode() + b"\n\n"
            if response.rewrite_one(event) is None:
                response.rewrite(event)
            else:
                quick += 1
    assert quick == 48 * n
    assert response.complete


def test_a_text_that_is_no_json_string_is_not_put_in() -> None:
    templates = EventTemplates()
    before, after = b'data: {"text":"', b'","x":null}\n\n'
    templates.learn(before + b"a" + after, b"<" + before + b"a" + after)
    assert templates.fill(before + b"b" + after) == b"<" + before + b"b" + after
    for text in (b"\x00", b"\n", b"\xff", b"\xed\xa0\x80", b"\\", b"\\x", b"\\u12", b'"', b'b","text":"c'):
        assert templates.fill(before + text + after) is None, text
    assert templates.fill(before[:-1] + after) is None
    assert templates.fill(b"") is None


def test_an_engine_cannot_make_the_proxy_keep_more_and_more() -> None:
    templates = EventTemplates()
    for number in range(3 * MAX_TEMPLATES):
        event = b'data: {"created":%d,"text":"a"}\n\n' % number
        templates.learn(event, event)
        assert templates.fill(event) == event
    assert len(templates._by_head) <= MAX_TEMPLATES
