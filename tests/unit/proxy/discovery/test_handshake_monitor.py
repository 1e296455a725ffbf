# SPDX-License-Identifier: Apache-2.0
"""The watch over handshakes ends with its proxy. What it reports is in `test_warnings`."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import zmq
import zmq.asyncio

from kvferry.proxy.discovery.handshake_monitor import watching_handshakes


class SlowToStop(zmq.asyncio.Socket):
    """A peer connects between the decision to stop and the end of the monitor, and its thread wakes."""

    def disable_monitor(self) -> None:
        host, _, port = self.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))):
            time.sleep(0.3)
        super().disable_monitor()


def test_a_peer_that_connects_while_the_proxy_stops_does_not_hang_it() -> None:
    """ZMQ waits without a limit for somebody to read that the monitor has stopped."""

    async def watch_and_stop() -> None:
        context = zmq.asyncio.Context()
        with context.socket(zmq.ROUTER, socket_class=SlowToStop) as listener:
            listener.bind("tcp://127.0.0.1:*")
            with watching_handshakes(listener, context, has_key=False, report=lambda *_: None):
                await asyncio.sleep(0.1)
        context.term()

    stopping = threading.Thread(target=asyncio.run, args=(watch_and_stop(),), daemon=True)
    stopping.start()
    stopping.join(10.0)
    assert not stopping.is_alive()
