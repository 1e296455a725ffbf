# SPDX-License-Identifier: Apache-2.0
"""Stand-in fleet: the pings of many agents over one real ZMQ socket, and nothing behind them.

For the operator's page and whatever else needs a large fleet but no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from kvferry.proxy.wire import registration as wire


@dataclass(slots=True)
class PingingFleet:
    """Half prefill, half decode agents. `silent`: numbers of those that do not ping any more."""

    proxy: str
    size: int
    interval_s: float = 1.0
    silent: set[int] = field(default_factory=set)
    state: dict[int, wire.NodeState] = field(default_factory=dict)
    """Of agents that are not ready."""
    acks: int = 0
    _pings: int = 0

    def address(self, number: int) -> str:
        """Where agent `number` says that it listens."""
        return f"http://10.7.{number // 250}.{number % 250 + 1}:8000"

    def name(self, number: int) -> str:
        """The name that agent `number` has for operators."""
        return f"prefill-{number}" if number < self.size // 2 else f"decode-{number - self.size // 2}"

    def registration(self, number: int) -> wire.Register:
        """What agent `number` says of itself now: its load and its work differ from ping to ping."""
        is_prefill, turn = number < self.size // 2, self._pings
        return wire.Register(
            role="prefill" if is_prefill else "decode",
            name=self.name(number),
            incarnation=wire.Incarnation(f"{number:016x}"),
            index=turn,
            address=self.address(number),
            control=f"tcp://10.7.{number // 250}.{number % 250 + 1}:6301",
            dialect="native",
            model="stand-in",
            max_model_len=4096,
            tp_size=1,
            dp_size=1,
            transfers=("nixl", "tcp"),
            host_id=f"host-{number}",
            layout="stand-in",
            weights="stand-in",
            tokenizer="stand-in",
            transfer_mode="read",
            version="0",
            state=self.state.get(number, "ready"),
            steps=turn,
            load=wire.Load(
                running=(7 * number + turn) % 48,
                waiting=max(0, (5 * number + turn) % 17 - 12),
                kv_blocks_free=4096 - (61 * number + 31 * turn) % 3600,
                kv_blocks_total=4096,
                kv_blocks_leased=(13 * number + turn) % 300 if is_prefill else 0,
                max_running=64,
            ),
            work=self._work(number, is_prefill, turn),
            device="NVIDIA H200",
            uptime_s=5400.0 + turn,
            geometry={"block_size": "16", "dtype": "bfloat16"},
        )

    def _work(self, number: int, is_prefill: bool, turn: int) -> wire.WorkReport:
        if is_prefill:
            return wire.WorkReport(prompt_tokens=4000 * turn, cached_tokens=(1500 + number) * turn)
        pulls = [0] * (len(wire.PULL_BUCKETS) + 1)
        pulls[3], pulls[4], pulls[6] = 6 * turn, 3 * turn, turn
        links = tuple(
            wire.LinkUse(
                producer=wire.Incarnation(f"{producer:016x}"),
                backend="nixl",
                pulls=3 * turn,
                failures=turn // 50,
                nbytes=turn * (120_000_000 + 1_000_000 * producer),
                seconds=0.02 * turn,
            )
            for producer in ((number + each) % (self.size // 2) for each in range(3))
        )
        return wire.WorkReport(
            pull_bytes=turn * 360_000_000,
            pulls=tuple(pulls),
            failures={"lease_expired": turn // 50},
            recomputes=turn // 50,
            links=links,
        )

    @asynccontextmanager
    async def pinging(self) -> AsyncIterator[PingingFleet]:
        """Ping while the context is open."""
        task = asyncio.ensure_future(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{self.proxy}")
        reading = asyncio.ensure_future(self._read(dealer))
        try:
            while True:
                self._pings += 1
                for number in range(self.size):
                    if number not in self.silent:
                        await dealer.send(wire.encode(self.registration(number)))
                await asyncio.sleep(self.interval_s)
        finally:
            reading.cancel()
            dealer.close()
            context.term()

    async def _read(self, dealer: zmq.asyncio.Socket) -> None:
        while True:
            self.acks += isinstance(wire.decode_proxy_message(await dealer.recv()), wire.Ack)
