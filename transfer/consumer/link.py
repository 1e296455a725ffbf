# SPDX-License-Identifier: Apache-2.0
"""The consumer's connection to one producer: a control connection, and the ranks' connections to its ranks.

There is one link per producer, however many transfers need it at first contact (R30). It is never repaired:
once it is lost, or a read over it failed, the next transfer makes a new one.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec
import zmq

from kvferry.common.curve import ClusterKey
from kvferry.common.state_machine import transition, transitions
from kvferry.transfer.checksum import SumTable, first_mismatch, row_widths, split_rows
from kvferry.transfer.consumer.pull import GroupRead
from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import ControlClient
from kvferry.transfer.control.messages import VERSIONS, Grant
from kvferry.transfer.ids import TransferId
from kvferry.transfer.layout import (
    Placement,
    ReadPlan,
    column_numbers,
    num_columns,
    pair_blocks,
    plan_reads,
    source_columns,
)
from kvferry.transfer.net import resolve
from kvferry.transfer.plane import PlaneConfig, RemotePrompt
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import Connect, Read, pack_blocks, pack_plan

HANDSHAKE_S = 5.0
RESPONSE_TIMEOUT_S = 2.0
"""Limit for a response, on top of the wait that a request allows."""
MAX_SILENCE_S = 5.0
"""A producer that has answered nothing for so long, although leases were to be renewed, is lost."""

_log = logging.getLogger(__name__)


class LinkState(enum.Enum):
    NEGOTIATING = "negotiating"
    """Dialling, then choosing a backend by `hello`."""
    CONNECTING = "connecting"
    """The producer accepted; the ranks are connecting to its ranks."""
    READY = "ready"
    LOST = "lost"


LINK_TRANSITIONS = transitions(
    {
        LinkState.NEGOTIATING: {LinkState.CONNECTING, LinkState.LOST},
        LinkState.CONNECTING: {LinkState.READY, LinkState.NEGOTIATING, LinkState.LOST},
        LinkState.READY: {LinkState.LOST},
    }
)


@dataclass(frozen=True, slots=True)
class Source:
    """An incarnation of a producer, the address of its control channel as a request gave it, and which of our
    heads are read there (the first and the last; None: all).

    All identify a link: a failure at one address says nothing about the same incarnation at another, or one
    wrong request would cost the right ones their producer.
    """

    engine_id: str
    host: str
    port: int
    heads: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


def source_of(remote: RemotePrompt) -> Source:
    return Source(remote.engine_id, remote.host, remote.port, remote.heads)


class Link:
    """One producer as seen by a consumer.

    `on_ready` is called once if the handshake succeeds; `on_lost` once with a stable reason and a detail,
    unless `close` came first. Every request calls its `on_response` once: with the response, or None if there
    is none in time.
    """

    def __init__(
        self,
        number: int,
        source: Source,
        config: PlaneConfig,
        ranks: RankGroup,
        key: ClusterKey | None,
        *,
        on_ready: Callable[[Link], None],
        on_lost: Callable[[Link, str, str], None],
    ) -> None:
        self.number = number
        self.source = source
        self.state = LinkState.NEGOTIATING
        self.transfer = ""
        self.tp_size = 0
        self.num_blocks = 0
        self.version = VERSIONS[0]
        """Of the control channel: the highest that both speak, once the producer has accepted."""
        self.refusal = ""
        """Why these two agents can never work together; empty as far as is known."""
        self._config = config
        self._ranks = ranks
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._client = ControlClient(self._broken, key)
        self._dialling: asyncio.Task[None] | None = None
        self._offer: tuple[str, ...] = ranks.transfers
        self._deadline: asyncio.TimerHandle | None = None
        self._answered_at = 0.0
        """When the last response came, or the handshake ended."""
        self._columns: list[list[int]] = []
        """By group, where our columns of checksums come from; empty if we do not verify."""
        self._our_columns: list[list[int]] = []
        """By group, which of our columns are read there."""
        self._their_columns: list[int] = []
        """How many columns they have, by group."""

    def __repr__(self) -> str:
        return f"<Link {self.number} to {self.source} {self.state.value}>"

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Begin the handshake."""
        self._deadline = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self.lose, "unreachable", "no handshake within the deadline"
        )
        self._dialling = asyncio.create_task(self._dial(context))

    async def _dial(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Resolve the host here: ZMQ would do it on the I/O thread that all links share."""
        host, port = self.source.host, self.source.port
        try:
            self._client.start(context, await resolve(host), port)
        except (OSError, ValueError, zmq.ZMQError) as error:
            self.lose("unreachable", f"cannot dial {host}:{port}: {error}")
            return
        self._send_hello()

    def close(self) -> None:
        """Close; pending requests get None. Idempotent."""
        if self.state is LinkState.LOST:
            return
        self._transition(LinkState.LOST)
        self._stop_deadline()
        if self._dialling is not None:
            self._dialling.cancel()
        self._ranks.close_link(self.number, self.transfer)
        self._client.close()

    def lose(self, reason: str, detail: str) -> None:
        """Close and report the loss. Idempotent."""
        if self.state is LinkState.LOST:
            return
        _log.info("lost %r: %s: %s", self, reason, detail)
        self.close()
        self._on_lost(self, reason, detail)

    # Requests.

    def open(
        self,
        transfer_id: str,
        have: int,
        wait_s: float,
        num_readers: int,
        on_response: Callable[[wire.Response | None], None],
    ) -> None:
        request = wire.Open(
            v=self.version,
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            transfer_id=transfer_id,
            consumer=self._config.incarnation,
            have=have,
            wait_s=wait_s,
            num_readers=num_readers if num_readers > 1 else msgspec.UNSET,
        )
        self._request(request, wait_s + RESPONSE_TIMEOUT_S, on_response)

    def lend(
        self,
        transfer_id: str,
        hashes: tuple[bytes, ...],
        limit_s: float,
        on_response: Callable[[wire.Response | None], None],
    ) -> None:
        request = wire.Lend(
            v=self.version,
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            transfer_id=transfer_id,
            consumer=self._config.incarnation,
            hashes=hashes,
            limit_s=limit_s,
        )
        self._request(request, RESPONSE_TIMEOUT_S, on_response)

    def renew(self, transfer_ids: Sequence[str], on_response: Callable[[wire.Response | None], None]) -> None:
        for first in range(0, len(transfer_ids), wire.MAX_IDS):
            request = wire.Renew(
                v=self.version,
                seq=self._client.next_seq(),
                incarnation=self.source.engine_id,
                consumer=self._config.incarnation,
                transfer_ids=tuple(transfer_ids[first : first + wire.MAX_IDS]),
            )
            self._request(request, RESPONSE_TIMEOUT_S, partial(self._renewed, on_response))

    def _renewed(
        self, on_response: Callable[[wire.Response | None], None], response: wire.Response | None
    ) -> None:
        """Lose a producer whose host is down: no connection to it breaks, and reads would last to their
        deadline.
        """
        silent_s = time.monotonic() - self._answered_at
        if response is None and self.state is LinkState.READY and silent_s > MAX_SILENCE_S:
            self.lose("unreachable", f"no response for {silent_s:.1f} s")
        else:
            on_response(response)

    def release(
        self, transfer_id: str, read_ok: bool, on_response: Callable[[wire.Response | None], None]
    ) -> None:
        request = wire.Release(
            v=self.version,
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            transfer_id=transfer_id,
            consumer=self._config.incarnation,
            read_ok=read_ok,
        )
        self._request(request, RESPONSE_TIMEOUT_S, on_response)

    def drop(self, transfer_id: str) -> None:
        self._request(
            wire.Drop(
                v=self.version,
                seq=self._client.next_seq(),
                incarnation=self.source.engine_id,
                transfer_id=transfer_id,
            ),
            RESPONSE_TIMEOUT_S,
            _ignore,
        )

    # Blocks.

    def grant(self, opened: wire.Opened) -> Grant:
        """Unpack an `opened`. Raises ValueError for blocks that the producer does not have."""
        if opened.block_ids and max(opened.block_ids) >= self.num_blocks:
            raise ValueError(f"block {max(opened.block_ids)} of {self.num_blocks}")
        checksums: tuple[bytes, ...] = ()
        if self._columns and opened.checksums:
            counts = [count for _, count in opened.groups]
            widths = row_widths(self._their_columns, counts, opened.first_block, len(opened.block_ids))
            checksums = split_rows(opened.checksums, widths)
        return Grant(
            ready=opened.state == "ready",
            first_block=opened.first_block,
            block_ids=opened.block_ids,
            num_tokens=opened.num_tokens,
            ids_hash=opened.ids_hash,
            checksums=checksums,
            first_tokens=opened.first_tokens,
            groups=opened.groups,
        )

    def read(
        self,
        transfer_id: TransferId,
        seq: int,
        reads: Sequence[GroupRead],
        timeout_s: float,
    ) -> None:
        """Have every rank read its part of the producer's blocks; comes to one `RankEvents.read_ended`."""
        blocks = {each.group: pair_blocks(each.local_blocks, each.remote_blocks) for each in reads}
        self._ranks.read(
            Read(
                link=self.number,
                transfer_id=transfer_id,
                seq=seq,
                blocks=pack_blocks(blocks),
                timeout_s=timeout_s,
            )
        )

    def verify(
        self,
        local_blocks: Sequence[Sequence[int]],
        checksums: Sequence[bytes],
        on_verified: Callable[[str], None],
    ) -> None:
        """Compare blocks of each group that were read with the producer's checksums.

        Calls `on_verified` once, with the first mismatch or an empty string.
        """

        def compare(tables: Sequence[SumTable]) -> None:
            rows = iter(checksums)
            found = [
                first_mismatch(sums[:, ours], list(islice(rows, len(blocks))), blocks, theirs)
                for sums, blocks, ours, theirs in zip(
                    tables, local_blocks, self._our_columns, self._columns, strict=True
                )
            ]
            on_verified(next(filter(None, found), ""))

        self._ranks.sum_blocks(local_blocks, compare)

    # The handshake.

    def connected(self, outcome: Outcome) -> None:
        """Every rank has tried to connect."""
        if self.state is not LinkState.CONNECTING:
            return
        if outcome.ok:
            self._transition(LinkState.READY)
            self._answered_at = time.monotonic()
            self._stop_deadline()
            _log.info("%r: KV comes over %s", self, self.transfer)
            self._on_ready(self)
            return
        _log.warning("%r: %s does not work between us: %s", self, self.transfer, outcome.reason)
        self._offer = tuple(name for name in self._offer if name != self.transfer)
        if self._offer:
            self._transition(LinkState.NEGOTIATING)
            self._send_hello()
        else:
            self.lose("unreachable", outcome.reason)

    def _send_hello(self) -> None:
        config = self._config
        ranks = tuple(
            {name: self._ranks.descriptions(name)[rank] for name in self._offer}
            for rank in range(config.num_ranks)
        )
        hello = wire.Hello(
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            consumer=config.incarnation,
            geometry=config.geometry,
            layout=config.geometry.fingerprint(),
            weights=config.weights,
            transfers=self._offer,
            host_id=config.host_id,
            verify_kv=float(config.verify_kv),
            ranks=ranks,
            versions=VERSIONS,
        )
        self._request(hello, HANDSHAKE_S, self._hello_responded)

    def _hello_responded(self, response: wire.Response | None) -> None:
        if self.state is not LinkState.NEGOTIATING:
            return
        match response:
            case wire.HelloOk():
                self._accepted(response)
            case wire.RequestRefused():
                detail = f"{response.field}: theirs {response.ours}, ours {response.theirs}"
                if response.field != "transfers" or self._offer == self._ranks.transfers:
                    self.refusal = detail
                self.lose("refused", detail)
            case None:
                self.lose("unreachable", "no response to hello")
            case _:
                self.lose("refused", f"unexpected response to hello: {type(response).__name__}")

    def _accepted(self, response: wire.HelloOk) -> None:
        try:
            plans = self._plan(response)
        except ValueError as error:
            self.refusal = str(error)
            self.lose("refused", str(error))
            return
        if response.transfer not in self._offer:
            self.lose("refused", f"transfer {response.transfer} was not offered")
            return
        self.version = response.v
        self.transfer = response.transfer
        self.tp_size = len(response.ranks)
        self.num_blocks = response.num_blocks
        self._transition(LinkState.CONNECTING)
        self._ranks.connect(
            [
                Connect(
                    link=self.number,
                    transfer=response.transfer,
                    ranks=response.ranks,
                    plan=pack_plan(plan),
                    token=response.token,
                    timeout_s=HANDSHAKE_S / 2,
                )
                for plan in plans
            ]
        )

    def _plan(self, response: wire.HelloOk) -> list[ReadPlan]:
        """Which bytes of a block each rank reads from which of theirs. Raises ValueError if that makes no
        sense.
        """
        placements = response.placements
        if len(placements) != len(response.ranks):
            raise ValueError(f"{len(placements)} placements of {len(response.ranks)} ranks")
        if any(each.num_blocks < response.num_blocks for each in placements):
            raise ValueError(f"not every rank has {response.num_blocks} blocks")
        ours: Sequence[Placement] = self._ranks.placements
        if self.source.heads is not None:
            first, last = self.source.heads
            ours = [each.narrowed(range(first, last + 1)) for each in ours]
        plans = plan_reads(ours, placements)
        if self._config.verify_kv:
            groups = range(len(placements[0].groups))
            self._their_columns = [num_columns(placements, group) for group in groups]
            self._columns = [source_columns(ours, placements, group) for group in groups]
            self._our_columns = [column_numbers(self._ranks.placements, ours, group) for group in groups]
        return plans

    def _request(
        self, request: wire.Request, timeout_s: float, on_response: Callable[[wire.Response | None], None]
    ) -> None:
        def settled(response: wire.Response | None) -> None:
            if response is not None:
                self._answered_at = time.monotonic()
            if isinstance(response, wire.RequestRefused) and response.field == "incarnation":
                self.refusal = f"incarnation: {response.ours} is there now, not {self.source}"
                self.lose("incarnation", self.refusal)
            else:
                on_response(response)

        self._client.request(request, timeout_s, settled)

    def _broken(self) -> None:
        self.lose("unreachable", "the control connection failed")

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _transition(self, to: LinkState) -> None:
        self.state = transition(f"link {self.number}", LINK_TRANSITIONS, self.state, to)


def _ignore(response: wire.Response | None) -> None:
    """Discard the response."""
