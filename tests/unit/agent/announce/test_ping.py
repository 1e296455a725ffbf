# SPDX-License-Identifier: Apache-2.0
"""Announcing: pings at once and each second, whatever becomes of the proxies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvferry.agent.announce.membership import Membership
from kvferry.agent.announce.ping import ACK_TIMEOUT_S, Announcer
from kvferry.agent.ids import host_id
from kvferry.common.curve import ClusterKey
from kvferry.deploy import keygen
from kvferry.proxy.wire.registration import (
    PING_INTERVAL_S,
    Ack,
    AgentMessage,
    Bye,
    Load,
    NodeState,
    ProxyMessage,
    Register,
    Rejected,
    decode_agent_message,
    encode,
)

DEADLINE_S = 20.0


class Proxy:
    """A proxy's discovery socket, worked by hand."""

    def __init__(self, context: zmq.asyncio.Context, port: int = 0) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\x00")
        self.address = endpoint.removeprefix("tcp://")
        self._peer = b""

    async def hear(self) -> AgentMessage:
        async with asyncio.timeout(DEADLINE_S):
            self._peer, frame = await self._socket.recv_multipart()
        return decode_agent_message(frame)

    async def hear_ping(self, state: str | None = None) -> Register:
        while True:
            message = await self.hear()
            if isinstance(message, Register) and state in (None, message.state):
                return message

    async def say(self, message: ProxyMessage | bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        await self._socket.send_multipart([self._peer, frame])

    def close(self) -> None:
        self._socket.close(linger=0)


@asynccontextmanager
async def announced(
    make: Callable[[zmq.asyncio.Context], list[str]],
    key: ClusterKey | None = None,
) -> AsyncIterator[tuple[Membership, zmq.asyncio.Context]]:
    context = zmq.asyncio.Context()

    def describe(index: int, state: NodeState) -> Register:
        load = Load(running=0, waiting=0, kv_blocks_free=1, kv_blocks_total=1, kv_blocks_leased=0)
        return Register(
            role="prefill", incarnation="abc", index=index, address="http://h:1", control="tcp://h:2",
            dialect="native", model="m", max_model_len=10, tp_size=1, dp_size=1, transfers=("tcp",),
            host_id="h", layout="l", weights="w", tokenizer="t", transfer_mode="read", version="0",
            state=state, steps=0, load=load,
        )  # fmt: skip

    membership = Membership(make(context), describe, interval_s=0.05, key=key)
    pinging = asyncio.ensure_future(membership.run())
    try:
        yield membership, context
    finally:
        pinging.cancel()
        await asyncio.wait({pinging})
        context.destroy(linger=0)


async def test_pings_count_up_and_a_change_of_state_is_told_at_once() -> None:
    proxies: list[Proxy] = []

    def make(context: zmq.asyncio.Context) -> list[str]:
        proxies.append(Proxy(context))
        return [proxies[0].address]

    async with announced(make) as (membership, _):
        first = await proxies[0].hear_ping()
        assert first.state == "starting"
        assert (await proxies[0].hear_ping()).index == first.index + 1
        membership._announcer._interval_s = 60.0
        membership.become_ready()
        await proxies[0].hear_ping("ready")
        # From here on the next ping would come in a minute.
        membership.start_draining()
        assert (await proxies[0].hear_ping("draining")).state == "draining"


async def test_an_agent_is_released_once_every_proxy_that_lives_has_nothing_for_it() -> None:
    proxies: list[Proxy] = []

    def make(context: zmq.asyncio.Context) -> list[str]:
        proxies.extend(Proxy(context) for _ in range(3))
        return [*(proxy.address for proxy in proxies), "127.0.0.1:9"]

    async with announced(make) as (membership, _):
        for proxy in proxies:
            ping = await proxy.hear_ping()
            await proxy.say(Ack(proxy="p", index=ping.index, in_flight=0))
            await proxy.hear_ping()
            await proxy.hear_ping()  # the ack has been read
        membership.become_ready()
        waiting = asyncio.ensure_future(membership.wait_released())
        membership.start_draining()
        # The third says nothing any more.
        one, other = proxies[:2]
        index = (await one.hear_ping("draining")).index
        await one.say(Ack(proxy="p", index=index, in_flight=2))
        await other.hear_ping("draining")
        await other.say(Ack(proxy="q", index=index - 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.5)
        silent_since = time.monotonic()
        while not waiting.done():
            for proxy in (one, other):
                index = (await proxy.hear_ping()).index
                await proxy.say(Ack(proxy="p", index=index, in_flight=0))
        assert time.monotonic() - silent_since < ACK_TIMEOUT_S + DEADLINE_S
        await waiting


async def test_a_proxy_that_comes_back_is_found_again_and_reads_no_old_news() -> None:
    proxies: list[Proxy] = []

    def make(context: zmq.asyncio.Context) -> list[str]:
        proxies.append(Proxy(context))
        return [proxies[0].address, "127.0.0.1:9"]  # nobody listens on discard; that proxy costs nothing

    async with announced(make) as (membership, context):
        last = (await proxies[0].hear_ping()).index
        port = int(proxies[0].address.rpartition(":")[2])
        proxies[0].close()
        await asyncio.sleep(0.2)  # some pings find nobody
        again = Proxy(context, port)
        membership.become_ready()
        ping = await again.hear_ping()
        assert ping.index > last
        assert ping.state == "ready"


async def test_pings_go_out_while_the_event_loop_is_busy() -> None:
    """D2: an agent that is busy is not one that is dead; how long its loop hangs the proxies are told."""
    received: list[tuple[float, float]] = []
    stopped = threading.Event()
    address: list[str] = []
    bound = threading.Event()

    def listen() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            address.append(f"127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
            bound.set()
            while not stopped.is_set():
                if socket.poll(20):
                    ping = decode_agent_message(socket.recv_multipart()[1])
                    if isinstance(ping, Register):
                        received.append((time.monotonic(), ping.loop_lag_s))

    proxy = threading.Thread(target=listen)
    proxy.start()
    try:
        bound.wait(DEADLINE_S)
        async with announced(lambda _: address) as (membership, _):
            while not received:
                await asyncio.sleep(0.01)
            busy_from = time.monotonic()
            membership._announcer._loop_due_at = busy_from - 100
            while sum(at > busy_from + PING_INTERVAL_S for at, _ in received) < 3:
                assert time.monotonic() < busy_from + DEADLINE_S
                time.sleep(0.01)  # noqa: ASYNC251 (this is what a busy loop is)
            assert received[-1][1] > 98
            while received[-1][1]:
                await asyncio.sleep(0.01)  # the loop runs again
    finally:
        stopped.set()
        proxy.join()


async def test_a_proxy_may_ask_the_agent_to_drain() -> None:
    proxies: list[Proxy] = []

    def make(context: zmq.asyncio.Context) -> list[str]:
        proxies.append(Proxy(context))
        return [proxies[0].address]

    async with announced(make) as (membership, _):
        asked = asyncio.Event()
        membership._announcer._drain = asked.set
        ping = await proxies[0].hear_ping()
        await proxies[0].say(Ack(proxy="p", index=ping.index))
        await proxies[0].hear_ping()
        assert not asked.is_set()
        await proxies[0].say(Ack(proxy="p", index=ping.index, drain=True))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()


async def test_goodbye_is_said_when_the_agent_leaves() -> None:
    context = zmq.asyncio.Context()  # its own: the agent's ends with the agent
    proxy = Proxy(context)
    try:
        async with announced(lambda _: [proxy.address]):
            await proxy.hear_ping()
        while isinstance(message := await proxy.hear(), Register):
            pass
        assert message == Bye(incarnation="abc")
    finally:
        context.destroy(linger=0)


async def test_a_refusal_is_logged_once_and_nonsense_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """X3: no answer of a peer may end the pinging."""
    caplog.set_level("INFO", "kvferry.agent.announce.ping")
    proxies: list[Proxy] = []

    def make(context: zmq.asyncio.Context) -> list[str]:
        proxies.append(Proxy(context))
        return [proxies[0].address]

    async with announced(make) as (membership, _):
        await proxies[0].hear_ping()
        for answer in (b"\xc1", Rejected(reason="no such model"), Rejected(reason="no such model")):
            await proxies[0].say(answer)
        membership.become_ready()
        await proxies[0].hear_ping("ready")
        await proxies[0].say(Ack(proxy="p1", index=1))
        await proxies[0].hear_ping()
        membership.start_draining()
        await proxies[0].hear_ping("draining")
    told = [
        record.message.partition(": ")[2]
        for record in caplog.records
        if record.name == "kvferry.agent.announce.ping"
    ]
    assert told.count("rejected: no such model") == 1
    assert any(words.startswith("invalid response") for words in told)
    assert told[-1] == "registered with p1"


@pytest.mark.parametrize("has_key", [True, False])
async def test_another_cluster_key_is_logged_and_again_while_it_lasts(
    has_key: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.common.telemetry.recurring_warnings.REPEAT_S", 0.3)
    keys = []
    for name in ("proxy.key", "agent.key"):
        assert keygen.main([str(tmp_path / name)]) == 0
        keys.append(ClusterKey.read(tmp_path / name))
    context = zmq.asyncio.Context()
    proxy = context.socket(zmq.ROUTER)
    proxy.setsockopt(zmq.CURVE_SERVER, 1)
    proxy.setsockopt(zmq.CURVE_SECRETKEY, keys[0].secret)
    port = proxy.bind_to_random_port("tcp://127.0.0.1")
    said = "another cluster key" if has_key else "a cluster key, and this agent has none"
    key = keys[1] if has_key else None
    async with announced(lambda _: [f"127.0.0.1:{port}"], key), asyncio.timeout(DEADLINE_S):
        while caplog.text.count(f"proxy 127.0.0.1:{port}: unreachable, or it has {said}") < 3:
            await asyncio.sleep(0.01)
    context.destroy(linger=0)


async def test_a_warning_that_lasts_is_not_logged_with_every_ping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with announced(lambda _: ["127.0.0.1:9"]), asyncio.timeout(DEADLINE_S):
        while "unreachable" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * PING_INTERVAL_S)
    assert caplog.text.count("unreachable") == 1


def test_the_host_id_is_the_same_for_all_processes_of_a_boot() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 16


def test_one_proxys_name_that_is_not_resolved_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ resolves on a context's I/O thread, and ends the context only after that."""
    resolved = threading.Event()
    announcer = Announcer(["127.0.0.1:9", "127.0.0.1:10"], threading.Event(), lambda index: None)
    ended: list[object] = []
    term = zmq.Context.term

    def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        resolved.wait(30.0)
        term(context)
        ended.append(context)

    monkeypatch.setattr(zmq.Context, "term", end)
    begun = time.monotonic()
    announcer.close()
    assert time.monotonic() - begun < 20.0
    resolved.set()
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(map(id, ended))) == 2
