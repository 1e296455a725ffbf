# SPDX-License-Identifier: Apache-2.0
"""The two sockets between API and engine process: each request hears its own, once, and blocks no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvferry.agent.api.engine_client import BadEngineMessage, EngineClient, EngineStream
from kvferry.agent.errors import ApiError
from kvferry.agent.messages.requests import (
    Abort,
    Drain,
    Drained,
    FromEngine,
    Output,
    Outputs,
    RequestFailed,
    SamplingParams,
    StopChoice,
    Submit,
    ToEngine,
    Token,
)

DEADLINE_S = 20.0


class Engine:
    """The engine's ends of both sockets, worked by hand."""

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path) -> None:
        self._receiver = context.socket(zmq.PULL)
        self._receiver.bind(f"ipc://{run_dir}/to-engine")
        self._sender = context.socket(zmq.PUSH)
        self._sender.connect(f"ipc://{run_dir}/from-engine")

    async def hear(self) -> ToEngine:
        async with asyncio.timeout(DEADLINE_S):
            frame = await self._receiver.recv()
        message: ToEngine = msgspec.msgpack.decode(frame, type=ToEngine)
        return message

    async def say(self, message: FromEngine) -> None:
        await self._sender.send(msgspec.msgpack.encode(message))

    async def say_raw(self, frame: bytes) -> None:
        await self._sender.send(frame)


@asynccontextmanager
async def connected(run_dir: Path) -> AsyncIterator[tuple[EngineClient, Engine, asyncio.Task[None]]]:
    context = zmq.asyncio.Context()
    client, engine = EngineClient(context, run_dir), Engine(context, run_dir)
    reader = asyncio.ensure_future(client.run())
    try:
        yield client, engine, reader
    finally:
        reader.cancel()
        await asyncio.wait({reader})
        client.close()
        context.destroy(linger=0)


def submission(name: str, max_tokens: int = 4, timeout_s: float = DEADLINE_S) -> Submit:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    return Submit(request_id=name, prompt_ids=(1,), sampling=sampling, timeout_s=timeout_s)


def output(name: str, token_id: int, done: bool = False) -> Output:
    return Output(request_id=name, tokens=(Token(index=0, token_id=token_id),), done=done)


async def token_of(reply: EngineStream) -> int:
    async with asyncio.timeout(DEADLINE_S):
        return (await reply.next()).tokens[0].token_id


async def test_each_request_hears_its_own_outputs_in_order(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        async with client.submit(submission("a")) as a, client.submit(submission("b")) as b:
            assert {(await engine.hear()).request_id for _ in "ab"} == {"a", "b"}
            await engine.say(Outputs(items=(output("a", 1), output("b", 2))))
            await engine.say(Outputs(items=(output("b", 3, done=True), output("a", 4, done=True))))
            assert [await token_of(a), await token_of(a)] == [1, 4]
            assert [await token_of(b), await token_of(b)] == [2, 3]
        assert client.in_flight == 0
        await asyncio.wait_for(client.wait_idle(), 0.1)


async def test_leaving_before_the_end_aborts_and_after_it_does_not(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        async with client.submit(submission("whole")) as reply:
            await engine.hear()
            await engine.say(Outputs(items=(output("whole", 1, done=True),)))
            await reply.next()
        async with client.submit(submission("left")):
            assert isinstance(await engine.hear(), Submit)
        assert await engine.hear() == Abort(request_id="left")
        # An output that was already on its way is nobody's, and the client lives on.
        await engine.say(Outputs(items=(output("left", 1),)))
        async with client.submit(submission("next")) as reply:
            await engine.hear()
            await engine.say(Outputs(items=(output("next", 7, done=True),)))
            assert await token_of(reply) == 7


async def test_a_failure_comes_after_what_was_sent_before_it_and_needs_no_abort(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        async with client.submit(submission("a")) as reply:
            await engine.hear()
            await engine.say(Outputs(items=(output("a", 1),)))
            await engine.say(RequestFailed(request_id="a", status=502, code="lost", message="gone"))
            assert await token_of(reply) == 1
            with pytest.raises(ApiError) as caught:
                await reply.next()
            assert (caught.value.status, caught.value.code) == (502, "lost")
        async with client.submit(submission("b")):
            assert (await engine.hear()) == submission("b")


async def test_a_silent_engine_is_a_504_and_the_request_is_aborted(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        with pytest.raises(ApiError) as caught:
            async with client.submit(submission("a")) as reply:
                await engine.hear()
                await reply.next(timeout_s=0.05)
        assert caught.value.status == 504
        assert await engine.hear() == Abort(request_id="a")


async def test_an_engine_that_sends_more_than_was_asked_for_cannot_fill_the_memory(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        async with client.submit(submission("a", max_tokens=2)) as reply:
            await engine.hear()
            await engine.say(Outputs(items=tuple(output("a", number) for number in range(50))))
            heard = 0
            with pytest.raises(ApiError) as caught:
                while True:
                    await reply.next()
                    heard += 1
        assert caught.value.code == "reply_overrun"
        assert heard == 3
        assert await engine.hear() == Abort(request_id="a")


async def test_a_stop_string_is_told_to_the_engine_unless_it_has_ended_already(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _), client.submit(submission("a")) as reply:
        await engine.hear()
        reply.stop_choice(0)
        assert await engine.hear() == StopChoice(request_id="a", index=0)
        await engine.say(Outputs(items=(output("a", 1, done=True),)))
        await reply.next()
        reply.stop_choice(0)
        client.drop_transfer("t")
        assert not isinstance(await engine.hear(), StopChoice)


async def test_when_the_engine_dies_all_requests_fail_and_no_more_are_taken(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _), client.submit(submission("a")) as reply:
        await engine.hear()
        died = ApiError(500, "engine_died", "dead")
        client.refuse(died)
        client.fail_all(died)
        with pytest.raises(ApiError, match="dead"):
            await reply.next()
        with pytest.raises(ApiError, match="dead"):
            client.submit(submission("b"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.wait_idle(), 0.01)


async def test_an_engine_that_was_told_to_drain_says_when_it_has(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, engine, _):
        draining = asyncio.ensure_future(client.wait_drained())
        assert isinstance(await engine.hear(), Drain)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(draining), 0.01)
        await engine.say(Drained())
        await asyncio.wait_for(draining, DEADLINE_S)


async def test_a_frame_that_is_no_message_ends_the_reader(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, engine, reader):
        await engine.say_raw(b"\x93nonsense")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({reader})
        assert isinstance(reader.exception(), BadEngineMessage)


async def test_not_being_ready_in_time_is_a_timeout(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _, _):
        with pytest.raises(TimeoutError):
            await client.wait_ready(0.01)


async def test_the_same_request_id_twice_is_two_requests(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _, _):
        assert client.engine_id("x") != client.engine_id("x")
        assert client.engine_id("x").startswith("x#")
