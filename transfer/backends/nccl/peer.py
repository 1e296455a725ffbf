# SPDX-License-Identifier: Apache-2.0
"""The reading side of the nccl backend: one producer rank.

The pair's thread receives into messages; only `progress`, on the transfer thread, copies from those into the
pool. So a transfer that has failed is quiescent as soon as no such copy is under way.
"""

from __future__ import annotations

import queue
import secrets
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.transfer.backends.common.handshake import HandshakePeer, PeerState
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.nccl.communicator import Communicator, PairBroken
from kvferry.transfer.backends.nccl.pair import GRACE_S, PairState, PairThread, reader_end
from kvferry.transfer.backends.nccl.staging import Copy, staging
from kvferry.transfer.backends.nccl.wire import (
    HELLO,
    ID_BYTES,
    PIECE,
    PROTOCOL,
    REQUEST,
    WELCOME,
    NcclAddress,
    Pieces,
    split,
)
from kvferry.transfer.engine import MAX_SPANS, Status
from kvferry.transfer.layout import SpanTable, check_bounds
from kvferry.transfer.memory import region_sizes

if TYPE_CHECKING:
    import torch

_MESSAGES = 2
"""One is received while the other is copied out."""


class NcclTransfer(BaseTransfer):
    """One read; see `transfer.engine.Transfer`. `parts` are the destinations of the stream, message by
    message.

    Parts that arrive after it has failed are discarded.
    """

    def __init__(self, spans: SpanTable, deadline: float) -> None:
        super().__init__(int(spans[:, 2].sum()), len(spans), deadline)
        self.read_id = secrets.token_bytes(ID_BYTES)
        self.parts = split(zip(spans[:, 0].tolist(), spans[:, 2].tolist(), strict=True))
        self._left = len(self.parts)
        self._copying = 0
        if not self.parts:
            self.succeed()

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING and not self._copying

    def begin_copy(self) -> None:
        self._copying += 1

    def end_copy(self) -> None:
        """Succeed with the last part: the pool holds one more."""
        self._copying -= 1
        self._left -= 1
        if self._left == 0:
            self.succeed()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One part, received and not copied out yet."""

    transfer: NcclTransfer
    part: Pieces
    message: torch.Tensor


class NcclPeer(HandshakePeer[NcclTransfer]):
    """One producer rank; see `transfer.engine.Peer`. Ready once both ends have built their communicator.

    `sizes` are those of its pool's regions, in bytes.
    """

    def __init__(
        self,
        address: NcclAddress,
        sizes: Sequence[int],
        token: bytes,
        pool: Sequence[torch.Tensor],
        own_host: str,
        selector: selectors.BaseSelector,
        waker: Waker,
        timeout_s: float,
    ) -> None:
        pair_id = secrets.token_bytes(ID_BYTES)
        own = HELLO.pack(pair_id, _milliseconds(timeout_s))
        deadline = time.monotonic() + timeout_s
        super().__init__(address.fabric, address, token, selector, deadline, PROTOCOL, own)
        self._address = address
        self._sizes = sizes
        self._own_sizes = region_sizes(pool)
        self._own_host = own_host
        self._waker = waker
        self._staging = staging(pool)
        self._pair_id = pair_id
        self._pair: PairThread | None = None
        self._free: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._arrived: deque[Arrival] = deque()
        self._copies: deque[tuple[Copy, Arrival]] = deque()

    @property
    def finished(self) -> bool:
        """Lost, and no copy of its reads is in flight."""
        return self.state is PeerState.LOST and not self._copies

    @property
    def _built(self) -> bool:
        return self._pair is not None and self._pair.state is PairState.READY

    def poll(self) -> bool:
        return super().poll() and self._built

    def end(self, timeout_s: float) -> None:
        """Close, wait for copies into the pool, then for the thread, at most `timeout_s`."""
        self.close()
        for copy, arrival in self._copies:
            copy.synchronize()
            arrival.transfer.end_copy()
        self._copies.clear()
        if self._pair is not None:
            self._pair.join(timeout_s)

    def read(self, spans: SpanTable, timeout_s: float) -> NcclTransfer:
        """Queue a read. Raises ValueError for a span outside either pool, or for too many of them."""
        check_bounds(spans, self._own_sizes, self._sizes)
        if len(spans) > MAX_SPANS:
            raise ValueError(f"{len(spans)} spans in one read; at most {MAX_SPANS}")
        transfer = NcclTransfer(spans, time.monotonic() + timeout_s)
        if self._pair is None or self.closed or not self._built:
            transfer.fail("peer_lost")
        elif transfer.poll() is Status.PENDING:
            self._request(self._pair, transfer, spans, timeout_s)
        return transfer

    def progress(self, now: float) -> None:
        """Copy out what has arrived, and notice what has ended."""
        self._finish_copies()
        while self._arrived:
            self._copy_out(self._arrived.popleft())
        self.transfers = [each for each in self.transfers if each.poll() is Status.PENDING]
        if not self._built and self._deadline <= now:
            self._end("no communicator within the deadline")
        for transfer in self.transfers:
            if transfer.deadline <= now:
                transfer.fail("deadline")
                self._end("a transfer passed its deadline")
        if self._pair is not None and self._pair.state is PairState.BROKEN:
            self._end(self._pair.error)

    def next_deadline(self) -> float | None:
        """Now, while a GPU copies: that has no descriptor."""
        if self._copies:
            return time.monotonic()
        times = [transfer.deadline for transfer in self.transfers]
        if not self._built and not self.closed:
            times.append(self._deadline)
        return min(times, default=None)

    def _request(self, pair: PairThread, transfer: NcclTransfer, spans: SpanTable, timeout_s: float) -> None:
        try:
            pair.submit(lambda thread: self._receive_parts(thread, transfer))
        except queue.Full:
            transfer.fail("refused")
            return
        self.transfers.append(transfer)
        pieces = b"".join(PIECE.pack(remote, length) for _, remote, length in spans.tolist())
        self.send(REQUEST.pack(transfer.read_id, _milliseconds(timeout_s), len(spans)) + pieces)

    # On the pair's thread.

    def _build(self, port: int) -> Communicator:
        return reader_end(self._address.host, port, self._address.fabric, self._own_host, self._deadline)

    def _receive_first(self, pair: PairThread) -> None:
        """Check that the communicator works, and that both ends mean this pair."""
        for _ in range(_MESSAGES):
            self._free.put(self._staging.new_message())
        first = self._message(self._deadline)
        pair.receive(first, self._pair_id, 0, 0, self._deadline)
        self._free.put(first)

    def _receive_parts(self, pair: PairThread, transfer: NcclTransfer) -> None:
        deadline = transfer.deadline + GRACE_S
        for number, part in enumerate(transfer.parts):
            message = self._message(deadline)
            nbytes = sum(length for _, length in part)
            pair.receive(message, transfer.read_id, number, nbytes, deadline)
            self._arrived.append(Arrival(transfer, part, message))
            self._waker.wake()

    def _message(self, deadline: float) -> torch.Tensor:
        try:
            message = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise PairBroken("messages that had arrived were not copied out in time") from None
        if message is None:
            raise PairBroken("closed")
        return message

    # On the transfer thread again.

    def _accepted(self, welcome: bytes) -> None:
        (port,) = WELCOME.unpack(welcome)
        self._pair = PairThread(
            self._pair_id, self._staging, lambda: self._build(port), self._receive_first, self._waker
        )

    def _copy_out(self, arrival: Arrival) -> None:
        if arrival.transfer.poll() is not Status.PENDING:
            self._free.put(arrival.message)
            return
        arrival.transfer.begin_copy()
        self._copies.append((self._staging.scatter(arrival.message, arrival.part), arrival))
        self._finish_copies()

    def _finish_copies(self) -> None:
        while self._copies and self._copies[0][0].query():
            _, arrival = self._copies.popleft()
            arrival.transfer.end_copy()
            self._free.put(arrival.message)

    def _ended(self, reason: str) -> None:
        """End the pair; the other end notices by the socket."""
        super()._ended(reason)
        if self._pair is not None:
            self._pair.close()
        self._free.put(None)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
