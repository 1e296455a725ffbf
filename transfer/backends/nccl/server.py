# SPDX-License-Identifier: Apache-2.0
"""The serving side of the nccl backend: one reader, whose requests the pair's thread answers in order."""

from __future__ import annotations

import functools
import queue
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.transfer.backends.common.waker import Waker
from kvferry.transfer.backends.nccl.connection import BadPeer, PairSocket
from kvferry.transfer.backends.nccl.fabric import Communicator
from kvferry.transfer.backends.nccl.pair import GRACE_S, PairState, PairThread, Rendezvous, server_end
from kvferry.transfer.backends.nccl.staging import staging
from kvferry.transfer.backends.nccl.wire import (
    GREETING,
    MAGIC,
    MAX_PIECES,
    PIECE,
    REQUEST,
    WELCOME,
    Pieces,
    pack_head,
    split,
)

if TYPE_CHECKING:
    import torch

_GREETING_S = 5.0
"""A connection that has not said who it is by then is closed."""
_LONGEST_S = 3600.0
"""No reader makes us wait for longer than this."""


class ServedPair:
    """One reader's pair. `check` tells whether a nonce and a token are admitted."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        pool: torch.Tensor,
        hosts: tuple[str, str],
        fabric: str,
        check: Callable[[bytes, bytes], bool],
        waker: Waker,
    ) -> None:
        self.closed = False
        self._pool_bytes = pool.numel() * pool.element_size()
        self._staging = staging(pool)
        self._bind_host, self._own_host = hosts
        self._fabric = fabric
        self._check = check
        self._waker = waker
        self._greeting_due = time.monotonic() + _GREETING_S
        self._pair: PairThread | None = None
        self._messages: list[torch.Tensor] = []
        self._socket = PairSocket(connection, selector, self._take, lambda reason: self.close())

    def progress(self, now: float) -> None:
        """Close when the thread has ended, or a stranger is silent."""
        if self._pair is None:
            if self._greeting_due <= now:
                self.close()
        elif self._pair.state is PairState.BROKEN:
            self.close()

    def next_deadline(self) -> float | None:
        return self._greeting_due if self._pair is None else None

    def close(self) -> None:
        """Tear the pair down here; its reader notices by the socket."""
        if self.closed:
            return
        self.closed = True
        self._socket.close()
        if self._pair is not None:
            self._pair.close()

    def end(self, timeout_s: float) -> None:
        """Close, and wait a while for the thread."""
        self.close()
        if self._pair is not None:
            self._pair.join(timeout_s)

    def _take(self, inbox: bytearray) -> None:
        if self._pair is None:
            if len(inbox) >= GREETING.size:
                self._greeted(inbox)
        else:
            while self._next_request(self._pair, inbox):
                continue

    def _greeted(self, inbox: bytearray) -> None:
        magic, nonce, pair_id, build_ms, token = GREETING.unpack_from(inbox)
        del inbox[: GREETING.size]
        if magic != MAGIC or not self._check(nonce, token):
            raise BadPeer("not admitted")
        deadline = time.monotonic() + min(build_ms / 1000, _LONGEST_S)
        rendezvous = Rendezvous(self._bind_host)
        self._socket.send(WELCOME.pack(MAGIC, 1, rendezvous.port))
        self._pair = PairThread(
            pair_id,
            self._staging,
            functools.partial(self._build, rendezvous, deadline),
            functools.partial(self._meet, deadline),
            self._waker,
        )

    def _next_request(self, pair: PairThread, inbox: bytearray) -> bool:
        """Act on the next complete request; false if there is none."""
        if len(inbox) < REQUEST.size:
            return False
        read_id, ms, count = REQUEST.unpack_from(inbox)
        if count > MAX_PIECES:
            raise BadPeer(f"{count} pieces")
        size = REQUEST.size + count * PIECE.size
        if len(inbox) < size:
            return False
        pieces: Pieces = list(PIECE.iter_unpack(bytes(inbox[REQUEST.size : size])))
        del inbox[:size]
        if any(offset + length > self._pool_bytes for offset, length in pieces):
            raise BadPeer("a piece lies outside the pool")
        deadline = time.monotonic() + min(ms / 1000, _LONGEST_S) + GRACE_S
        try:
            pair.submit(functools.partial(self._answer, read_id, pieces, deadline))
        except queue.Full:
            raise BadPeer("too many reads at once") from None
        return True

    # On the pair's thread.

    def _build(self, rendezvous: Rendezvous, deadline: float) -> Communicator:
        try:
            return server_end(rendezvous, self._fabric, self._own_host, deadline)
        finally:
            rendezvous.close()

    def _meet(self, deadline: float, pair: PairThread) -> None:
        self._messages = [self._staging.new_message() for _ in range(2)]
        first = self._staging.fill(self._messages[0], pack_head(pair.pair_id, 0, 0), [])
        pair.wait(pair.send(first, pair.pair_id, 0), deadline)

    def _answer(self, read_id: bytes, pieces: Pieces, deadline: float, pair: PairThread) -> None:
        """Send the parts of a read; one is gathered while the one before it is under way."""
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
