# SPDX-License-Identifier: Apache-2.0
"""The serving side of the nccl backend: one reader, whose requests the pair's thread answers in order."""

from __future__ import annotations

import functools
import queue
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.transfer.backends.common.connection import ProtocolError
from kvferry.transfer.backends.common.handshake import HandshakeServer, ServerSession
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.nccl.communicator import Communicator
from kvferry.transfer.backends.nccl.pair import GRACE_S, PairState, PairThread, Rendezvous, server_end
from kvferry.transfer.backends.nccl.staging import staging
from kvferry.transfer.backends.nccl.wire import (
    HELLO,
    PIECE,
    REQUEST,
    WELCOME,
    Pieces,
    pack_head,
    split,
)
from kvferry.transfer.engine import MAX_SPANS
from kvferry.transfer.memory import are_inside, region_sizes

if TYPE_CHECKING:
    import torch

_LONGEST_S = 3600.0
"""Cap of the durations that a reader requests."""


class NcclSession(ServerSession):
    """One reader, served over a pair's communicator. `hosts`: the one that we bind, and our own."""

    def __init__(
        self,
        connection: socket.socket,
        server: HandshakeServer,
        pool: Sequence[torch.Tensor],
        hosts: tuple[str, str],
        fabric: str,
        waker: Waker,
    ) -> None:
        super().__init__(connection, server)
        self._sizes = region_sizes(pool)
        self._staging = staging(pool)
        self._bind_host, self._own_host = hosts
        self._fabric = fabric
        self._waker = waker
        self._pair: PairThread | None = None
        self._messages: list[torch.Tensor] = []

    def progress(self, now: float) -> None:
        super().progress(now)
        if self._pair is not None and self._pair.state is PairState.BROKEN:
            self.close()

    def end(self, timeout_s: float) -> None:
        """Close, and wait for the thread, at most `timeout_s`."""
        self.close()
        if self._pair is not None:
            self._pair.join(timeout_s)

    def _accepted(self, hello: bytes) -> bytes:
        pair_id, build_ms = HELLO.unpack(hello)
        deadline = time.monotonic() + min(build_ms / 1000, _LONGEST_S)
        rendezvous = Rendezvous(self._bind_host)
        self._pair = PairThread(
            pair_id,
            self._staging,
            functools.partial(self._build, rendezvous, deadline),
            functools.partial(self._send_first, deadline),
            self._waker,
        )
        return WELCOME.pack(rendezvous.port)

    def _requested(self, inbox: bytearray) -> None:
        while self._pair is not None and self._next_request(self._pair, inbox):
            continue

    def _ended(self, reason: str) -> None:
        """End the pair; its reader notices by the socket."""
        super()._ended(reason)
        if self._pair is not None:
            self._pair.close()

    def _next_request(self, pair: PairThread, inbox: bytearray) -> bool:
        """Act on the next complete request; false if there is none."""
        if len(inbox) < REQUEST.size:
            return False
        read_id, ms, count = REQUEST.unpack_from(inbox)
        if count > MAX_SPANS:
            raise ProtocolError(f"{count} pieces")
        size = REQUEST.size + count * PIECE.size
        if len(inbox) < size:
            return False
        pieces: Pieces = list(PIECE.iter_unpack(bytes(inbox[REQUEST.size : size])))
        del inbox[:size]
        if not are_inside(pieces, self._sizes):
            raise ProtocolError("a piece lies outside the pool")
        deadline = time.monotonic() + min(ms / 1000, _LONGEST_S) + GRACE_S
        try:
            pair.submit(functools.partial(self._send_read, read_id, pieces, deadline))
        except queue.Full:
            raise ProtocolError("too many reads at once") from None
        return True

    # On the pair's thread.

    def _build(self, rendezvous: Rendezvous, deadline: float) -> Communicator:
        try:
            return server_end(rendezvous, self._fabric, self._own_host, deadline)
        finally:
            rendezvous.close()

    def _send_first(self, deadline: float, pair: PairThread) -> None:
        self._messages = [self._staging.new_message() for _ in range(2)]
        first = self._staging.fill(self._messages[0], pack_head(pair.pair_id, 0, 0), [])
        pair.wait(pair.send(first, pair.pair_id, 0), deadline)

    def _send_read(self, read_id: bytes, pieces: Pieces, deadline: float, pair: PairThread) -> None:
        """Send the parts of a read; one is gathered while the previous one is sent."""
        before: Any = None
        for number, part in enumerate(split(pieces)):
            head = pack_head(read_id, number, sum(length for _, length in part))
            message = self._staging.fill(self._messages[number % 2], head, part)
            work = pair.send(message, read_id, number)
            if before is not None:
                pair.wait(before, deadline)
            before = work
        if before is not None:
            pair.wait(before, deadline)
