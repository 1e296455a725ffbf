# SPDX-License-Identifier: Apache-2.0
"""The serving side of the tcp backend: one reader of our pool."""

from __future__ import annotations

import selectors
import socket

from kvferry.transfer.backends.common.connection import TURN_BYTES, ProtocolError
from kvferry.transfer.backends.common.handshake import HandshakeServer, ServerSession
from kvferry.transfer.backends.tcp.wire import PIECE, REQUEST, RESPONSE
from kvferry.transfer.engine import MAX_SPANS
from kvferry.transfer.memory import PoolMemory, are_inside


class TcpSession(ServerSession):
    """One reader. Its requests are answered in order, and none is received before the last was answered."""

    def __init__(self, connection: socket.socket, server: HandshakeServer, memory: PoolMemory) -> None:
        super().__init__(connection, server)
        self._memory = memory

    def _requested(self, inbox: bytearray) -> None:
        """Requests stay in the inbox until `_send` has nothing left to send."""

    def _send(self) -> None:
        budget = TURN_BYTES
        while (self._outbox or self._next_request()) and budget > 0:
            budget -= self._send_some()

    def _wanted_events(self) -> int:
        return selectors.EVENT_WRITE if self._outbox else selectors.EVENT_READ

    def _next_request(self) -> bool:
        """Answer the next complete request of the inbox; false if there is none."""
        inbox = self._inbox
        if self._deadline is not None or len(inbox) < REQUEST.size:
            return False
        number, count = REQUEST.unpack_from(inbox)
        if count > MAX_SPANS:
            raise ProtocolError(f"{count} pieces")
        size = REQUEST.size + count * PIECE.size
        if len(inbox) < size:
            return False
        pieces = list(PIECE.iter_unpack(bytes(inbox[REQUEST.size : size])))
        del inbox[:size]
        if are_inside(pieces, self._memory.sizes):
            nbytes = sum(length for _, length in pieces)
            self._respond(number, self._memory.readable(pieces), nbytes)
        else:
            self._queue(RESPONSE.pack(number, 0, 0))
        return True

    def _respond(self, number: int, body: list[memoryview], nbytes: int) -> None:
        """Queue the response to a request that is granted."""
        self._queue(RESPONSE.pack(number, 1, nbytes), *body)
