# SPDX-License-Identifier: Apache-2.0
"""The engine process's end of the channel to its own ranks: commands to all of them, and one event back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from kvferry.transfer.access_tokens import new_secret
from kvferry.transfer.checksum import SumTable, unpack_sums
from kvferry.transfer.control.messages import EngineDescription
from kvferry.transfer.events import RankRead
from kvferry.transfer.ids import TransferId
from kvferry.transfer.layout import Placement
from kvferry.transfer.options import BACKENDS
from kvferry.transfer.plane import RankAddress, RemoteRank
from kvferry.transfer.ranks import messages as wire
from kvferry.transfer.ranks.aggregate import Aggregator, Outcome
from kvferry.transfer.ranks.channel import RankConnection, RankGone, dial
from kvferry.transfer.ranks.tunnel import connect

STOP_S = 5.0
"""In which an engine that is stopped closes its plane once its ranks on other hosts have ended."""

_log = logging.getLogger(__name__)


class RankEvents(Protocol):
    """What a `RankGroup` calls when every rank has reported."""

    def link_connected(self, number: int, outcome: Outcome) -> None:
        """Every rank has tried to connect a link."""

    def read_ended(self, transfer_id: TransferId, seq: int, outcome: Outcome) -> None:
        """Every rank's part of a read is over."""

    def read_quiescent(self, transfer_id: TransferId, seq: int) -> None:
        """A read that ended before it was quiescent has become so on every rank."""

    def engine_broken(self, transfer: str) -> None:
        """Some rank's engine of this backend can never reach some peer again; called for each report."""


@dataclass(slots=True)
class _Sums:
    """Checksums that the ranks are computing."""

    num_blocks: tuple[int, ...]
    """By group."""
    on_sums: Callable[[list[SumTable]], None]
    parts: dict[int, list[SumTable]] = field(default_factory=dict)
    """By rank, then by group."""


class RankGroup:
    """All ranks of this agent as one: commands go to all, and one event comes back (I6).

    Args:
        addresses: Where they listen, in order of rank.
    """

    def __init__(self, addresses: Sequence[RankAddress]) -> None:
        self._addresses = addresses
        self._num_ranks = len(addresses)
        self._hellos: dict[int, wire.RankHello] = {}
        self._welcomed: set[int] = set()
        self._complete = asyncio.Event()
        self._connections: dict[int, RankConnection] = {}
        self._remote = {rank for rank, each in enumerate(addresses) if isinstance(each, RemoteRank)}
        """Ranks on other hosts."""
        self._links: Aggregator[tuple[int, str]] = Aggregator(self._num_ranks)
        self._reads: Aggregator[tuple[TransferId, int]] = Aggregator(self._num_ranks)
        self._sums: dict[int, _Sums] = {}
        self._sum_numbers = itertools.count()
        self.secret = new_secret()

    async def start(self, timeout_s: float, events: RankEvents) -> None:
        """Connect to every rank, and wait until each admits peers.

        Raises TimeoutError naming the ranks that do not, and OSError if one does not listen.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for rank, address in enumerate(self._addresses):
                    self._connections[rank] = await self._dial(rank, address, events)
                await self._complete.wait()
        except TimeoutError as error:
            missing = sorted(set(range(self._num_ranks)) - self._welcomed)
            raise TimeoutError(f"transfer: ranks {missing} did not report within {timeout_s} s") from error

    async def _dial(self, rank: int, address: RankAddress, events: RankEvents) -> RankConnection:
        to = connect(address) if isinstance(address, RemoteRank) else address
        try:
            return await dial(to, partial(self._received, events, rank), partial(self._lost, rank))
        except OSError as error:
            raise OSError(f"transfer: rank {rank} does not listen on {address}: {error}") from error

    @property
    def connecting(self) -> int:
        """Links that not every rank has reported yet."""
        return len(self._links)

    @property
    def transfers(self) -> tuple[str, ...]:
        """Backends that every rank has opened, best first."""
        return tuple(
            name for name in BACKENDS if all(name in hello.engines for hello in self._hellos.values())
        )

    def descriptions(self, transfer: str) -> tuple[EngineDescription, ...]:
        """The ranks' addresses for peers with one backend, in order of rank."""
        return tuple(self._hellos[rank].engines[transfer] for rank in range(self._num_ranks))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where each rank's KV lies, in order of rank."""
        return tuple(self._hellos[rank].placement for rank in range(self._num_ranks))

    def connect(self, commands: Sequence[wire.Connect]) -> None:
        """Connect every rank, in order of rank, by one link; comes to one `link_connected`."""
        self._links.expect((commands[0].link, commands[0].transfer))
        for rank, command in enumerate(commands):
            self._send(rank, command)

    def close_link(self, link: int, transfer: str) -> None:
        """Have every rank close a link, connected or not, without a report."""
        self._links.discard((link, transfer))
        self.broadcast(wire.CloseLink(link=link))

    def read(self, command: wire.Read) -> None:
        """Have every rank read its part of some blocks; comes to one `read_ended`."""
        self._reads.expect((TransferId(command.transfer_id), command.seq))
        self.broadcast(command)

    def sum_blocks(self, blocks: Sequence[Sequence[int]], on_sums: Callable[[list[SumTable]], None]) -> None:
        """Have every rank sum some blocks of each group. `on_sums` is called once, with a table for each
        group: a row per block and `layout.num_columns`, in order of rank.
        """
        self._sum_blocks(blocks, on_sums, clear=False)

    def clear_blocks(self, blocks: Sequence[Sequence[int]], on_cleared: Callable[[], None]) -> None:
        """Have every rank write zeros over some blocks of each group. `on_cleared` is called once."""
        self._sum_blocks(blocks, lambda _: on_cleared(), clear=True)

    def _sum_blocks(
        self, blocks: Sequence[Sequence[int]], on_sums: Callable[[list[SumTable]], None], *, clear: bool
    ) -> None:
        number = next(self._sum_numbers)
        self._sums[number] = _Sums(tuple(map(len, blocks)), on_sums)
        self.broadcast(wire.SumBlocks(number=number, clear=clear, blocks=tuple(map(tuple, blocks))))

    def broadcast(self, command: wire.Command) -> None:
        """Send a command to every rank."""
        for rank in range(self._num_ranks):
            self._send(rank, command)

    def check_integrity(self) -> None:
        """Raises AssertionError if more ranks have reported than there are."""
        assert len(self._hellos) <= self._num_ranks, "too many ranks"

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _send(self, rank: int, command: wire.Command) -> None:
        connection = self._connections.get(rank)
        if connection is None:
            return
        try:
            connection.send(wire.encode(command))
        except RankGone as error:
            # A rank that is gone or stuck ends its agent (I8); until then every pull has its deadline.
            _log.error("rank %d does not accept commands: %s", rank, error)

    def _lost(self, rank: int) -> None:
        """Have this engine end with a rank on another host: when it is idle, no engine watches such processes
        (I8). Not at once: an engine that is stopped ends its ranks before the plane.
        """
        if rank in self._remote and rank in self._connections:
            asyncio.get_running_loop().call_later(STOP_S, self._end, rank)

    def _end(self, rank: int) -> None:
        """Raises `RankGone`, with which the loop's handler of exceptions ends the process."""
        if rank in self._connections:
            raise RankGone(f"rank {rank}, at {self._addresses[rank]}, has gone: this engine ends too")

    def _received(self, events: RankEvents, rank: int, connection: RankConnection, frame: bytes) -> None:
        report = wire.decode_report(frame)
        match report:
            case wire.RankHello():
                self._welcome(rank, report)
            case wire.Welcomed():
                self._welcomed.add(report.rank)
                if len(self._welcomed) == self._num_ranks:
                    self._complete.set()
            case wire.Connected():
                self._connected(events, report)
            case wire.ReadEnded():
                self._read_ended(events, report)
            case wire.ReadQuiescent():
                key = (TransferId(report.transfer_id), report.seq)
                if self._reads.quiescent(key, report.rank):
                    events.read_quiescent(*key)
            case wire.BlocksSummed():
                self._blocks_summed(report)

    def _welcome(self, rank: int, hello: wire.RankHello) -> None:
        if hello.rank != rank:
            _log.error("rank %d was expected where rank %d reported: ignored", rank, hello.rank)
            return
        self._hellos[rank] = hello
        self._send(rank, wire.Welcome(secret=self.secret))

    def _connected(self, events: RankEvents, report: wire.Connected) -> None:
        if report.broken:
            events.engine_broken(report.transfer)
        ended = Outcome(ok=report.error is None, reason=report.error or "")
        outcome = self._links.report((report.link, report.transfer), report.rank, ended)
        if outcome is not None:
            events.link_connected(report.link, outcome)

    def _read_ended(self, events: RankEvents, report: wire.ReadEnded) -> None:
        key = (TransferId(report.transfer_id), report.seq)
        # Another host's clock began elsewhere.
        ahead = report.ended_at - time.monotonic() if report.rank in self._remote else 0.0
        read = RankRead(
            rank=report.rank,
            began_at=report.began_at - ahead,
            ended_at=report.ended_at - ahead,
            nbytes=report.nbytes,
            descriptors=report.descriptors,
        )
        ended = Outcome(
            ok=report.ok,
            reason=report.reason,
            quiescent=report.quiescent,
            nbytes=report.nbytes,
            descriptors=report.descriptors,
            reads=(read,),
        )
        outcome = self._reads.report(key, report.rank, ended)
        if outcome is not None:
            events.read_ended(*key, outcome)
        elif not report.ok:
            # The whole has failed already: stop the other ranks.
            self.broadcast(wire.CancelRead(transfer_id=report.transfer_id, seq=report.seq))

    def _blocks_summed(self, report: wire.BlocksSummed) -> None:
        sums = self._sums[report.number]
        sums.parts[report.rank] = [
            unpack_sums(packed, count) for packed, count in zip(report.sums, sums.num_blocks, strict=True)
        ]
        if len(sums.parts) == self._num_ranks:
            del self._sums[report.number]
            by_group = zip(*(sums.parts[rank] for rank in range(self._num_ranks)), strict=True)
            sums.on_sums([np.concatenate(tables, axis=1) for tables in by_group])
