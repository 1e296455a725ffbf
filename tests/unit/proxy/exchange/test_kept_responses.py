# SPDX-License-Identifier: Apache-2.0
"""The responses to parts of one request count for as long as they are kept (`KeptResponses`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from kvferry.proxy.errors import ProxyError, TooManyResponses
from kvferry.proxy.exchange import sub_requests
from kvferry.proxy.exchange.sub_requests import KeptResponses, SubResponse, whole_request
from kvferry.proxy.http.upstream_connection import ResponseBounds
from kvferry.proxy.ids import AnswerId, Identity, RequestId, TransferId
from kvferry.proxy.request import parse_request
from tests.helpers.waiting import until
from tests.standins.agents import Fault, StandInAgent
from tests.standins.engines import SERVERS, Fabric
from tests.unit.proxy.conftest import Stage

SOON_S = 10.0
PARTS = 4
IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
TRANSFER = TransferId("0" * 32)
BODY = {"model": "stand-in", "prompt": ["a", "b", "c", "d"], "seed": 7, "max_tokens": 8}


class Trickle:
    """A response that holds a byte (`HeldResponse`)."""

    def fail(self, error: ProxyError) -> None:
        raise error


async def native(stage: Stage) -> StandInAgent:
    """The decode agent of a pair."""
    return (await stage.pair())[1]


async def foreign(stage: Stage) -> object:
    """The decode server of a pair of another engine's, which samples each choice in a leg of its own."""
    fabric = Fabric()
    for role in ("prefill", "decode"):
        server = SERVERS["vllm-nixl"](role=role, proxies=(stage.discovery,), fabric=fabric)
        await stage.bring(server)
    return server


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response may have a kilobyte."""
    monkeypatch.setattr(sub_requests, "MAX_BODY_BYTES", 1024)


@pytest.mark.parametrize("bring", [native, foreign])
async def test_they_are_counted_until_they_are_one(
    stage: Stage, bring: Callable[[Stage], Awaitable[StandInAgent]]
) -> None:
    """Those that were complete were counted no more: up to 64 MiB a request, or 64 for each choice."""
    decode = await bring(stage)
    bounds = stage.proxy.services.upstream.bounds
    unused = bounds.left
    assert (await stage.ask(BODY))[0] == 200
    for client_leaves in (True, False):
        decode.asked.clear()
        decode.faults.append(Fault("decode", "hang"))
        asking = asyncio.ensure_future(stage.ask(BODY))
        await until(
            lambda: not (len(decode.asked) < PARTS or sum(bounds.held.values()) < (PARTS - 1) * 100), SOON_S
        )
        assert len(bounds.held) == 1
        if client_leaves:
            asking.cancel()
            await asyncio.wait([asking])
            # What fetches the KV that nobody reads is a leg as well, and would take the next fault.
            await until(lambda: not bounds.held, SOON_S)
            await stage.proxy.services.drops.settle()
        else:  # it holds most when there is room for no more
            left, bounds.left = bounds.left, 0
            bounds.hold(trickle := Trickle(), 1)
            status, body = await asking
            assert (status, body["error"]["code"]) == (503, "too_many_responses")
            bounds.release(trickle)
            bounds.left += left
        await until(lambda: not bounds.held, SOON_S)
        assert bounds.left == unused


@pytest.mark.parametrize("bring", [native, foreign])
async def test_together_they_are_no_larger_than_one_may_be(
    stage: Stage, few: None, bring: Callable[[Stage], Awaitable[StandInAgent]]
) -> None:
    await bring(stage)
    assert (await stage.ask({**BODY, "prompt": ["a"]}))[0] == 200
    status, body = await stage.ask({**BODY, "n": 4})
    assert (status, body["error"]["code"]) == (503, "too_many_responses")


class Response(SubResponse):
    """A part's whole response."""

    complete, usage = True, None
    reader = read_whole = read_prefilled = show = show_opening = end_without_server = None  # type: ignore[assignment]

    def __init__(self, size: int) -> None:
        super().__init__(
            whole_request(parse_request("completions", json.dumps(BODY).encode()), IDS, TRANSFER)
        )
        self.size = size


async def test_what_gives_way_between_two_attempts_ends_the_next() -> None:
    bounds, response = ResponseBounds(100), Response(90)
    kept = KeptResponses(bounds)
    kept.add(response)
    with pytest.raises(TooManyResponses):
        bounds.hold(Trickle(), 95)
    assert kept.find(response.sub) is response, "the other one held more"
    bounds.hold(Trickle(), 20)
    assert kept.find(response.sub) is None
    hanging = asyncio.ensure_future(asyncio.sleep(SOON_S))
    with pytest.raises(TooManyResponses):
        await kept.join([hanging])
    assert hanging.cancelled()


async def test_streams_of_which_nothing_is_kept_are_not_counted() -> None:
    """Each left an entry behind for ever."""
    bounds = ResponseBounds(100)
    kept = KeptResponses(bounds)
    kept.add(Response(0))
    kept.release()
    assert not bounds.held
