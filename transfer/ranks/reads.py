# SPDX-License-Identifier: Apache-2.0
"""One rank's links to producers, and its reads from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.transfer.engine import (
    MAX_SPANS,
    Peer,
    PeerBroken,
    PeerUnreachable,
    Status,
    Transfer,
    TransferEngine,
)
from kvferry.transfer.layout import BlockPairs, ReadPlan, SpanTable
from kvferry.transfer.ranks import messages as wire

_INVALID_ARGUMENT = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError)
"""What libraries raise for invalid arguments."""

_BUSY_POLL_MS = 1
_IDLE_POLL_MS = 20
"""While no peer waits for us, but a cancelled read may have to end. A poll takes up to 200 µs after a sleep,
and a rank without work must stay below a hundredth of a core.
"""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RankLink:
    """A producer: its ranks as peers of one engine. `connecting` until the outcome has been reported."""

    engine: TransferEngine
    plan: ReadPlan
    peers: list[Peer] = field(default_factory=list)
    connecting: bool = True


@dataclass(slots=True)
class _Read:
    """One rank's part of one read. `reported` once its end was; it stays here until it is quiescent."""

    engine: TransferEngine
    transfers: list[Transfer]
    reported: bool = False
    began_at: float = field(default_factory=time.monotonic)


class RankReader:
    """Carries out commands on the rank's engines and reports how they ended. Single-threaded."""

    def __init__(
        self, rank: int, engines: Mapping[str, TransferEngine], report: Callable[[wire.Report], None]
    ) -> None:
        self._rank = rank
        self._engines = engines
        self._report = report
        self._links: dict[int, _RankLink] = {}
        self._reads: dict[tuple[str, int], _Read] = {}
        self._serving = wire.Serve(on=False, awaited=False)

    @property
    def poll_ms(self) -> int | None:
        """How soon to poll the backends that have to be; None while none has work."""
        busy = list(self._engines.values()) if self._serving.awaited else []
        busy += [link.engine for link in self._links.values() if link.connecting]
        busy += [read.engine for read in self._reads.values()]
        if any(engine.fileno() is None for engine in busy):
            return _BUSY_POLL_MS
        if self._serving.on and any(engine.fileno() is None for engine in self._engines.values()):
            return _IDLE_POLL_MS
        return None

    def handle(self, command: wire.Command) -> None:
        """Carry out one command."""
        match command:
            case wire.Welcome():
                for engine in self._engines.values():
                    engine.admit(command.secret)
                self._report(wire.Welcomed(rank=self._rank))
            case wire.Serve():
                self._serving = command
            case wire.Connect():
                self._connect(command)
            case wire.CloseLink():
                self._close_link(command.link)
            case wire.Read():
                self._read(command)
            case wire.CancelRead():
                read = self._reads.get((command.transfer_id, command.seq))
                for transfer in read.transfers if read else ():
                    transfer.cancel()

    def engine_destroyed(self, engine: TransferEngine) -> None:
        """Drop the links of an engine that was closed, and report its reads: they are quiescent."""
        for number, link in list(self._links.items()):
            if link.engine is engine:
                if link.connecting:
                    self._connected(number, "the engine was rebuilt")
                self._links.pop(number, None)
        for key, read in list(self._reads.items()):
            if read.engine is engine:
                del self._reads[key]
                self._end_destroyed(key, read)

    def _end_destroyed(self, key: tuple[str, int], read: _Read) -> None:
        if read.reported:
            self._report(wire.ReadQuiescent(rank=self._rank, transfer_id=key[0], seq=key[1]))
        elif all(transfer.poll() is Status.DONE for transfer in read.transfers):
            self._report_success(key, read)
        else:
            self._ended(*key, began_at=read.began_at, ok=False, reason="peer_lost")

    def collect(self) -> None:
        """Report every link and read that has come to an end since the last call."""
        for number, link in list(self._links.items()):
            if link.connecting:
                self._collect_link(number, link)
        for key, read in list(self._reads.items()):
            self._collect_read(key, read)

    def _connect(self, command: wire.Connect) -> None:
        engine = self._engines[command.transfer]
        link = _RankLink(engine, wire.unpack_plan(command.plan))
        self._links[command.link] = link
        try:
            for rank in command.ranks:
                link.peers.append(engine.connect(rank.engine, rank.regions, command.token, command.timeout_s))
        except PeerUnreachable as error:
            self._connected(command.link, str(error), broken=isinstance(error, PeerBroken))
        except _INVALID_ARGUMENT as error:
            # The peer sent the description: whatever a library raises for it costs this link only.
            _log.warning("invalid description of a peer", exc_info=True)
            self._connected(command.link, f"invalid description: {error!r}")

    def _collect_link(self, number: int, link: _RankLink) -> None:
        try:
            ready = [peer.poll() for peer in link.peers]
        except PeerUnreachable as error:
            self._connected(number, str(error))
            return
        if all(ready):
            self._connected(number, None)

    def _connected(self, number: int, error: str | None, *, broken: bool = False) -> None:
        link = self._links[number]
        link.connecting = False
        if error is not None:
            self._close_link(number)
        self._report(
            wire.Connected(
                rank=self._rank, link=number, transfer=link.engine.name, error=error, broken=broken
            )
        )

    def _close_link(self, number: int) -> None:
        link = self._links.pop(number, None)
        for peer in link.peers if link else ():
            peer.close()

    def _read(self, command: wire.Read) -> None:
        link = self._links.get(command.link)
        if link is None:
            now = time.monotonic()
            self._ended(command.transfer_id, command.seq, began_at=now, ok=False, reason="peer_lost")
            return
        key = (command.transfer_id, command.seq)
        self._reads[key] = read = _Read(link.engine, [])
        try:
            for rank, spans in _spans(link.plan, wire.unpack_blocks(command.blocks)):
                for part in np.split(spans, range(MAX_SPANS, len(spans), MAX_SPANS)):
                    read.transfers.append(link.engine.read(link.peers[rank], part, command.timeout_s))
        except ValueError as error:
            _log.warning("read %s/%d: %s", *key, error)
            self._fail(key, read, "refused")

    def _collect_read(self, key: tuple[str, int], read: _Read) -> None:
        statuses = [transfer.poll() for transfer in read.transfers]
        if not read.reported:
            if Status.FAILED in statuses:
                self._fail(key, read, read.transfers[statuses.index(Status.FAILED)].reason or "failed")
            elif Status.PENDING not in statuses:
                del self._reads[key]
                self._report_success(key, read)
        elif all(transfer.quiescent for transfer in read.transfers):
            del self._reads[key]
            self._report(wire.ReadQuiescent(rank=self._rank, transfer_id=key[0], seq=key[1]))

    def _report_success(self, key: tuple[str, int], read: _Read) -> None:
        nbytes = sum(transfer.nbytes for transfer in read.transfers)
        descriptors = sum(transfer.descriptors for transfer in read.transfers)
        self._ended(*key, began_at=read.began_at, ok=True, nbytes=nbytes, descriptors=descriptors)

    def _fail(self, key: tuple[str, int], read: _Read, reason: str) -> None:
        for transfer in read.transfers:
            transfer.cancel()
        quiescent = all(transfer.quiescent for transfer in read.transfers)
        _log.info("read %s/%d failed: %s%s", *key, reason, "" if quiescent else ", not quiescent yet")
        if quiescent:
            del self._reads[key]
        read.reported = True
        self._ended(*key, began_at=read.began_at, ok=False, reason=reason, quiescent=quiescent)

    def _ended(
        self,
        transfer_id: str,
        seq: int,
        *,
        began_at: float,
        ok: bool,
        reason: str = "",
        quiescent: bool = True,
        nbytes: int = 0,
        descriptors: int = 0,
    ) -> None:
        self._report(
            wire.ReadEnded(
                rank=self._rank,
                transfer_id=transfer_id,
                seq=seq,
                ok=ok,
                reason=reason,
                quiescent=quiescent,
                nbytes=nbytes,
                descriptors=descriptors,
                began_at=began_at,
                ended_at=time.monotonic(),
            )
        )


def _spans(plan: ReadPlan, blocks: Mapping[int, BlockPairs]) -> Iterator[tuple[int, SpanTable]]:
    """Yield what is to be read of some blocks by group, by the producer's rank."""
    for rank, templates in plan.items():
        tables = [each.spans(blocks[group]) for group, each in templates.items() if group in blocks]
        if tables:
            yield rank, np.concatenate(tables)
