# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import select
import socket

from kvferry.transfer import net
from kvferry.transfer.backends.common import sockets


def test_both_ends_give_up_a_peer_that_vanished() -> None:
    with sockets.listen("127.0.0.1") as listener:
        dialled = sockets.dial("127.0.0.1", listener.getsockname()[1])
        select.select([listener], [], [], 5.0)
        accepted = sockets.accept(listener)
        assert accepted is not None
        for end in (dialled, accepted):
            with end:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == net.KEEPALIVE_LIMIT_MS
                assert not end.getblocking()
