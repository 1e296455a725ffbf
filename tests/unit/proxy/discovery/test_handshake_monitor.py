# SPDX-License-Identifier: Apache-2.0
"""The watch over handshakes ends with its proxy. What it reports is in `test_warnings`."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest
import zmq
import zmq.asyncio

from kvferry.proxy.discovery.handshake_monitor import HandshakeFailure, watch_handshakes


def connect_to(listener: zmq.asyncio.Socket) -> socket.socket:
    host, _, port = listener.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_peers_that_connect_while_the_proxy_stops_do_not_hang_it(after_s: float) -> None:
    """ZMQ waits without a limit until what its monitor writes is read."""

    async def watch_and_stop() -> None:
        context = zmq.asyncio.Context()
        listener = context.socket(zmq.ROUTER)
        listener.bind("tcp://127.0.0.1:*")
        watch_handshakes(listener, context, has_key=False, report=lambda *_: None)
        await asyncio.sleep(after_s)
        for _ in range(3):
            connect_to(listener).close()
        listener.close()
        context.term()
        for thread in [each for each in threading.enumerate() if each.name == "handshakes"]:
            thread.join(5.0)
            assert not thread.is_alive()

    stopping = threading.Thread(target=asyncio.run, args=(watch_and_stop(),), daemon=True)
    stopping.start()
    stopping.join(10.0)
    assert not stopping.is_alive()


async def test_a_descriptor_that_is_another_files_by_now_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZMQ closes that of a failed handshake at once, and the next Unix socket gets its number."""
    reported: asyncio.Queue[tuple[HandshakeFailure, str | None]] = asyncio.Queue()
    context = zmq.asyncio.Context()
    listener = context.socket(zmq.ROUTER)
    listener.bind("tcp://127.0.0.1:*")
    other, end = socket.socketpair()
    duplicated = asyncio.Event()
    loop = asyncio.get_running_loop()
    dup = os.dup

    def dup_other(_: int) -> int:
        loop.call_soon_threadsafe(duplicated.set)
        return dup(other.fileno())

    with other, end, listener:
        watch_handshakes(
            listener, context, has_key=False, report=lambda *failure: reported.put_nowait(failure)
        )
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", dup_other)
            with connect_to(listener):
                await asyncio.wait_for(duplicated.wait(), 5.0)
        with connect_to(listener) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.1)
        assert await asyncio.wait_for(reported.get(), 5.0) == (HandshakeFailure.NOT_ZMQ, "127.0.0.1")
    context.term()
