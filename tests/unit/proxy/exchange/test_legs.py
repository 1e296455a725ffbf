# SPDX-License-Identifier: Apache-2.0
"""A leg's deadlines, and what its circuit breaker learns from how it ends."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.errors import AgentLost, AgentRejected, AgentTimeout, BadResponse
from kvferry.proxy.exchange.legs import AGENT_FAILURES, Legs, read_events, require_json, require_stream
from kvferry.proxy.exchange.sub_requests import join
from kvferry.proxy.wire.registration import Incarnation, Register
from tests.unit.proxy.builders import registration

SERVER = registration("decode", 8001)
LEG = LegRequest(path="/v1/completions", headers={}, body=b"{}")
LOST = AgentLost("lost", Incarnation(SERVER.incarnation))
REJECTED = AgentRejected(400, None)
DEADLINE = 1e9


class Upstream:
    """Notes the deadlines of what is posted; a request fails on entering if `fails` is set."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.posted: list[dict[str, float]] = []
        self.exits = 0
        self._fails = fails

    def post(
        self, agent: Register, *_: Any, headers_deadline: float, deadline: float, can_retry: Any, on_end: Any
    ) -> Upstream:
        now = asyncio.get_running_loop().time()
        self.posted.append({"headers": headers_deadline - now, "end": deadline - now})
        self._on_end = partial(on_end, agent)
        return self

    async def __aenter__(self) -> str:
        if self._fails is not None:
            self._on_end(self._fails)
            raise self._fails
        return "response"

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.exits += 1
        self._on_end(error)


class Breakers:
    """Notes what is reported of agents."""

    def __init__(self) -> None:
        self.reports: list[str] = []

    def leg_failed(self, agent: Incarnation, error: Exception) -> None:
        assert agent == SERVER.incarnation
        assert isinstance(error, AGENT_FAILURES)
        self.reports.append("failed")

    def leg_cancelled(self, agent: Incarnation) -> None:
        assert agent == SERVER.incarnation
        self.reports.append("cancelled")

    def leg_succeeded(self, agent: Incarnation) -> None:
        assert agent == SERVER.incarnation
        self.reports.append("succeeded")


def legs(upstream: Upstream, breakers: Breakers | None = None, deadline: float = DEADLINE) -> Legs:
    breakers = breakers or Breakers()
    return Legs(
        cast(Any, upstream),
        breakers.leg_succeeded,
        cast(Any, breakers),
        first_byte_timeout_s=10.0,
        deadline=deadline,
        can_retry=lambda: False,
    )


async def test_each_leg_has_its_deadlines() -> None:
    """A prefill's body is due as its headers are; a whole response may take all the time that there is."""
    upstream, now = Upstream(), asyncio.get_running_loop().time()
    opens = legs(upstream)
    opens.open_prefill(SERVER, LEG)
    opens.open_decode(SERVER, LEG, stream=True)
    opens.open_decode(SERVER, LEG, stream=True, patience=2)
    opens.open_decode(SERVER, LEG, stream=True, accept_deadline=now + 3.0)
    opens.open_decode(SERVER, LEG, stream=False, patience=2, accept_deadline=now + 3.0)
    assert [round(each["headers"]) for each in upstream.posted] == [10, 10, 20, 3, round(DEADLINE - now)]
    assert [round(each["end"]) for each in upstream.posted] == [10] + [round(DEADLINE - now)] * 4


async def test_no_leg_outlasts_its_request() -> None:
    upstream = Upstream()
    opens = legs(upstream, deadline=asyncio.get_running_loop().time() + 5.0)
    opens.open_prefill(SERVER, LEG)
    opens.open_decode(SERVER, LEG, stream=True)
    assert [(round(each["headers"]), round(each["end"])) for each in upstream.posted] == [(5, 5), (5, 5)]


FAILURES = [LOST, AgentTimeout("late"), BadResponse("what?")]
SILENT = [REJECTED, ZeroDivisionError()]


@pytest.mark.parametrize(
    ("error", "reports"),
    [
        (None, ["succeeded"]),
        (asyncio.CancelledError(), ["cancelled"]),
        *((error, ["failed"]) for error in FAILURES),
        *((error, []) for error in SILENT),
    ],
    ids=repr,
)
async def test_the_breaker_learns_how_a_leg_ended(error: BaseException | None, reports: list[str]) -> None:
    """A rejection and an error of our own say nothing about the agent."""
    upstream, breakers = Upstream(), Breakers()
    try:
        async with legs(upstream, breakers).open_decode(SERVER, LEG, stream=True) as response:
            assert cast(Any, response) == "response"
            if error is not None:
                raise error
    except BaseException as raised:  # noqa: BLE001 (whatever it is, it must be that one)
        assert raised is error
    assert breakers.reports == reports
    assert upstream.exits == 1


@pytest.mark.parametrize(("error", "reports"), [(LOST, ["failed"]), (REJECTED, [])], ids=repr)
async def test_the_breaker_learns_of_a_leg_that_was_never_answered(
    error: Exception, reports: list[str]
) -> None:
    breakers = Breakers()
    with pytest.raises(type(error)):
        async with legs(Upstream(error), breakers).open_prefill(SERVER, LEG):
            pass
    assert breakers.reports == reports


@pytest.mark.parametrize("error", [None, LOST, AgentTimeout("late")], ids=repr)
@pytest.mark.parametrize("done", [True, False])
async def test_a_stream_must_reach_done_and_what_follows_is_of_no_consequence(
    done: bool, error: Exception | None
) -> None:
    async def stream_to(feed: Any, _: Any) -> None:
        feed(b"piece")
        if error is not None:
            raise error

    pieces: list[bytes] = []
    response = SimpleNamespace(stream_to=stream_to)
    reader = SimpleNamespace(feed=pieces.append, done=done, num_held=lambda: 0)
    reading = read_events(
        cast(Any, response), SERVER, reader, cast(Any, SimpleNamespace(throttling=nullcontext))
    )
    if done:
        await reading
    else:
        with pytest.raises(type(error or LOST), match="DONE" if error is None else None):
            await reading
    assert pieces == [b"piece"]


@pytest.mark.parametrize(
    ("content_type", "stream", "whole"),
    [
        ("text/event-stream; charset=utf-8", True, False),
        ("application/json", False, True),
        ("text/html", False, False),
    ],
)
def test_only_what_was_asked_for_is_passed_on(content_type: str, stream: bool, whole: bool) -> None:
    """A page that a browser would run never comes from where the operator's page is."""
    response: Any = SimpleNamespace(content_type=content_type)
    for require, fine in ((require_stream, stream), (require_json, whole)):
        if fine:
            require(response, SERVER)
        else:
            with pytest.raises(BadResponse, match=content_type.partition(";")[0]):
                require(response, SERVER)


class Failing:
    """Two tasks: one fails, and the other takes a while to end when it is cancelled."""

    def __init__(self) -> None:
        self.is_ending = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def fail(self) -> None:
        raise AgentTimeout("lost")

    async def run_on(self) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            self.is_ending.set()
            await self.may_end.wait()
            self.has_ended = True

    async def joined(self) -> None:
        await join([asyncio.ensure_future(each) for each in (self.run_on(), self.fail())])


async def test_the_failure_of_one_ends_the_others_first() -> None:
    failing = Failing()
    joining = asyncio.ensure_future(failing.joined())
    await failing.is_ending.wait()
    assert not joining.done()
    failing.may_end.set()
    with pytest.raises(ExceptionGroup) as caught:
        await joining
    assert failing.has_ended and isinstance(caught.value.exceptions[0], AgentTimeout)


async def test_a_cancellation_that_comes_while_others_end_is_not_lost() -> None:
    """`asyncio.TaskGroup` would raise the failure alone, and the request be retried for nobody."""
    failing = Failing()
    joining = asyncio.ensure_future(failing.joined())
    await failing.is_ending.wait()
    joining.cancel()
    await asyncio.sleep(0)
    failing.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert failing.has_ended


async def test_results_are_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await join([asyncio.ensure_future(after(turns)) for turns in (3, 0, 1)]) == [3, 0, 1]
