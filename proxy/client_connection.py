# SPDX-License-Identifier: Apache-2.0
"""One client's connection: uvicorn's, with a way for a request's answer to be written without an await.

The only place that knows uvicorn's insides (its version is pinned): `ClientReply` marks on uvicorn's cycle
what `send` would have marked. Everything else on the connection is uvicorn's own: parsing, keep-alive,
pipelining, TLS, the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

EXTENSION = "kvferry.reply"
"""The ASGI extension of a request's scope whose `reply` is its `ClientReply`."""

Header = tuple[bytes, bytes]


def _nobody(_: bool) -> None:
    """For `ClientReply.paused` while there is nobody to tell."""


def _unmoved() -> None:
    """For `ClientReply.lost` while nobody would mind."""


class ClientReply:
    """The answer to one request: whole by `whole`, or streamed by `begin`, `write`… and `end`.

    `lost` is called when the client goes away before the end; `paused(True)` when it does not take what was
    written, and `paused(False)` when it does again. What is written meanwhile is kept in memory.
    """

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport
        self.lost: Callable[[], object] = _unmoved
        self.paused: Callable[[bool], None] = _nobody

    @property
    def begun(self) -> bool:
        """Whether the client may have seen anything of the answer."""
        return self._cycle.response_started

    @property
    def is_lost(self) -> bool:
        """Whether the client has gone away."""
        return self._cycle.disconnected

    @property
    def body(self) -> bytes | None:
        """The request's body, if it is all here."""
        return None if self._cycle.more_body else bytes(self._cycle.body)

    def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Give the whole answer."""
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, (length, *headers))
        self._transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def begin(self, status: int, headers: Iterable[Header]) -> None:
        """Begin a streamed answer."""
        self._cycle.chunked_encoding = True
        self._transport.write(self._head(status, ((b"transfer-encoding", b"chunked"), *headers)))

    def write(self, piece: bytes) -> None:
        """Give a piece of a streamed answer; not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """End a streamed answer."""
        self._transport.write(b"0\r\n\r\n")
        self._complete()

    def give_up(self) -> None:
        """Break the connection off. Nothing else would tell the client that this is not the end."""
        self._cycle.disconnected = True
        self._transport.abort()

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        assert not cycle.response_started, "answered twice"
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in (*self._connection.server_state.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection, for use as its `http` class.

    Args:
        stall_s: A client that takes nothing for so long, while as much waits for it as the transport holds
            (64 KiB), is cut off.
    """

    def __init__(self, *args: Any, stall_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_s = stall_s
        self._stalled: asyncio.TimerHandle | None = None
        self._reply: ClientReply | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._reply = ClientReply(self, cycle)
        cycle.scope["extensions"] = {EXTENSION: {"reply": self._reply}}
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # uvicorn stopped at 64 KiB, and takes it up with an application that asks for more. Nobody asks after
        # the end of the body; but only who reads sees the client leave.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._reply = None
        super().on_response_complete()

    def eof_received(self) -> None:
        # The event loop closes the connection now, but first waits for a client that may never read again.
        if self._reply is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._take_notice()
        if (reply := self._reply) is not None:
            self._reply = None
            reply._cycle.disconnected = True  # of a pipelined request, uvicorn marks the last one only
            reply.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._stall_s, self.transport.abort)
        if self._reply is not None:
            self._reply.paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_notice()
        if self._reply is not None:
            self._reply.paused(False)

    def _take_notice(self) -> None:
        """The client takes what it is given, or is gone."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
