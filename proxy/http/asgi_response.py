# SPDX-License-Identifier: Apache-2.0
"""The response to one request over ASGI's `send`, for servers that know nothing of `ClientConnection`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvferry.common.http.server import Header
from kvferry.proxy.http.client_connection import ClientResponse, Handler, Message, Receive, Send

PAUSE_BYTES = 64 * 1024
"""Beyond them the sources of a response are paused. A transport's buffer has as many."""


class AsgiResponse(ClientResponse):
    """Buffers what is written, for a task that sends it.

    Args:
        stall_s: How long the server may take to send a piece, before its client counts as disconnected.
    """

    def __init__(self, receive: Receive, send: Send, stall_s: float) -> None:
        super().__init__(self._receive_or_leave)
        self._asgi_receive = receive
        self._asgi_send = send
        self._stall_s = stall_s
        self._head: Message | None = None
        self._pieces = bytearray()
        self._is_ended = False
        self._is_paused = False
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._watching: asyncio.Task[None] | None = None

    async def serve(self, handler: Handler) -> None:
        async with self._tasks as tasks:
            serving = tasks.create_task(handler(self))
            self.on_disconnect = serving.cancel
            sending = tasks.create_task(self._send_all())
            await asyncio.wait([serving])
            if not self._is_ended:  # aborted: an application that returns early ends the connection
                sending.cancel()
            await asyncio.wait([sending])
            if self._watching is not None:
                self._watching.cancel()
        self.forget()

    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        self.start(status, ((b"content-length", b"%d" % len(body)), *headers))
        self._pieces += body
        self.end()

    def start(self, status: int, headers: Iterable[Header]) -> None:
        self._head = {"type": "http.response.start", "status": status, "headers": [*self.headers, *headers]}
        self._changed.set()

    def write(self, piece: bytes) -> None:
        self._pieces += piece
        self._changed.set()
        if len(self._pieces) > PAUSE_BYTES and not self._is_paused:
            self._is_paused = True
            self.on_pause(True)

    def end(self) -> None:
        self._is_ended = True
        self._changed.set()

    def abort(self) -> None:
        self.is_disconnected = True
        self.forget()

    async def _send_all(self) -> None:
        """Send what is written, until the response has ended."""
        try:
            while not self._is_ended or self._head is not None or self._pieces:
                await self._changed.wait()
                self._changed.clear()
                async with asyncio.timeout(self._stall_s):
                    await self._send_pending()
        except TimeoutError:
            self._leave()

    async def _send_pending(self) -> None:
        head, body, self._head, self._pieces = self._head, bytes(self._pieces), None, bytearray()
        ended = self._is_ended
        if self._is_paused:
            self._is_paused = False
            self.on_pause(False)
        if head is not None:
            await self._asgi_send(head)
        if body or ended:
            await self._asgi_send({"type": "http.response.body", "body": body, "more_body": not ended})

    async def _receive_or_leave(self) -> Message:
        """A message of the request's body; the task is cancelled if the client has disconnected."""
        message = await self._asgi_receive()
        if message["type"] == "http.disconnect":
            self._leave()
            await asyncio.sleep(0)
        elif not message.get("more_body", False):
            self._watching = self._tasks.create_task(self._watch())
        return message

    async def _watch(self) -> None:
        """Wait until the client has disconnected."""
        while (await self._asgi_receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.is_disconnected = True
        self.on_disconnect()
