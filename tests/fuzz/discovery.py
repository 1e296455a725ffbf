# SPDX-License-Identifier: Apache-2.0
"""Random and mutated frames at a proxy's discovery socket, beside agents that mean well."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import tracemalloc
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.snapshot import NodeState
from kvferry.proxy.server import RunningProxy, running_proxy
from kvferry.proxy.wire import registration as wire
from tests.standins.agents import StandInAgent
from tests.unit.proxy.builders import registration

FRAMES = 100_000
ROUNDS = 5
ROLES: tuple[wire.Role, ...] = ("prefill", "decode", "both")
STRANGERS = 50
"""Who the well-formed frames speak for: so what the proxy may remember of them is the same each round."""
DIGITS = "9" * 5000
"""Python makes no number of more than 4,300 of them."""
MAX_GROWTH_BYTES = 128 * 1024
"""A thousand frames, a round of CI's form, leak twice as much with msgpack 1.1."""
LAST_WORD = 1_000_000
MAX_INTERNED = 1 << 20
"""More than the interpreter's table of interned strings has room for before it is replaced."""


@dataclass(frozen=True, slots=True)
class Report:
    """`grown`: bytes that the heap gained in each round after the first, which fills what has a bound."""

    frames: int
    bad: float
    grown: tuple[int, ...]


async def fuzz(frames: int, seed: int) -> Report:
    """Send so many frames in rounds. Raises `AssertionError` when an agent is lost or memory is."""
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        _trace_interned_strings()
        proxy = await stack.enter_async_context(running_proxy(ProxyConfig(port=0, discovery_port=0)))
        agents = []
        for role in ROLES:
            agent = StandInAgent(role, (f"127.0.0.1:{proxy.discovery_port}",), ping_interval_s=0.05)
            await stack.enter_async_context(agent)
            await agent.until(lambda agent=agent: agent.acks)
            agents.append(agent)
        sizes = []
        for number in range(ROUNDS):
            await _throw(proxy, (_frame(rng) for _ in range(frames // ROUNDS)), number)
            for agent in agents:  # each is heard again after all of that
                await agent.until(lambda agent=agent, heard=agent.acks: agent.acks > heard + 1)
            registry = proxy.fleet.registry
            registry.check_integrity()
            known = registry.snapshot().nodes
            ready = {node.incarnation for node in known if node.state is NodeState.READY}
            lost = [agent.role for agent in agents if agent.incarnation not in ready]
            assert not lost, f"agents were lost in round {number}: {lost}"
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        grown = tuple(after - before for before, after in itertools.pairwise(sizes))
        assert grown[-1] < MAX_GROWTH_BYTES, f"the heap still grew in the last round: {grown}"
        return Report(frames, bad_pings(proxy), grown)


def _trace_interned_strings() -> None:
    """Have the interpreter replace its table of interned strings.

    It does so now and then, as msgpack interns the keys of frames. Of a table older than the tracing only the
    successor would be counted, and look like a leak of megabytes in one round.
    """
    for number in range(MAX_INTERNED):
        sys.intern(f"interned {number}")


def bad_pings(proxy: RunningProxy) -> float:
    """How many frames the proxy has dropped as no message at all."""
    lines = proxy.services.metrics.exposition().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvferry_proxy_bad_pings_total")
    )


async def _throw(proxy: RunningProxy, frames: Iterable[bytes], number: int) -> None:
    """Send all, and wait until the proxy has taken the last of them."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{proxy.discovery_port}")
    try:
        for frame in frames:
            await dealer.send(frame)
        # A message that is answered: whatever came before it on this socket has been taken.
        index = LAST_WORD + number
        await dealer.send(msgpack.packb(_ping(0) | {"index": index, "incarnation": f"{index:016x}"}))
        async with asyncio.timeout(120):
            while True:
                answer = wire.decode_proxy_message(await dealer.recv())
                if isinstance(answer, wire.Ack) and answer.index == index:
                    return
    finally:
        dealer.close(linger=0)
        context.term()


def _frame(rng: random.Random) -> bytes:
    """Noise, a registration with some bytes changed, or one or an ATOM ping with some fields changed."""
    kind = rng.random()
    if kind < 0.3:
        return rng.randbytes(rng.randrange(200))
    body = _atom_ping() if kind < 0.45 else _ping(rng.randrange(STRANGERS))
    if kind < 0.6:
        for _ in range(rng.randrange(1, 4)):
            name = rng.choice((*body, "new"))
            if rng.random() < 0.2:
                body.pop(name, None)
            else:
                body[name] = _value(rng)
        return msgpack.packb(body)
    raw = bytearray(msgpack.packb(body))
    for _ in range(rng.randrange(1, 6)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.2 else raw)


def _ping(stranger: int) -> dict[str, Any]:
    """What an agent that is not there would send: nobody's address, nobody's model."""
    info = registration("decode", 20_000 + stranger, incarnation=f"{stranger:016x}", model="nobody's")
    return wire.unpack_map(wire.encode(info))


def _atom_ping() -> dict[str, Any]:
    """What an ATOM server would send that is not there: where it says it is, nobody listens."""
    return {
        "type": "register", "role": "P", "index": "1", "request_address": "http://127.0.0.1:1/v1",
        "handshake_port": 6301, "dp_size": 1, "tp_size": 8, "transfer_mode": "read",
    }  # fmt: skip


def _value(rng: random.Random) -> Any:
    return rng.choice(
        (None, True, -1, 0, 2**63, 1.5, float("nan"), "", "x" * rng.randrange(500), DIGITS,
         rng.randbytes(9).hex(), b"\xff\x00", [], [1, [2, [3]]], {}, {"a": {"b": 1}}, "ready", "bye",
         "draining", "prefill")
    )  # fmt: skip
