# SPDX-License-Identifier: Apache-2.0
"""What a loopback TCP connection carries between two processes that do nothing else.

python -m benchmarks.transfer.raw_socket PORT POOL_BYTES      is the sending process
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from benchmarks.transfer.reader import ROOT
from kvferry.transfer.layout import SpanTable

_ORDER = struct.Struct("<QQ")
"""Bytes per block, and how many."""


class RawSocket:
    """Receives blocks straight into their places, in a plain loop. Use as a context manager."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool = memoryview(bytearray(pool_bytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [sys.executable, "-m", "benchmarks.transfer.raw_socket"]
            port = listener.getsockname()[1]
            self._process = subprocess.Popen([*command, str(port), str(pool_bytes)], cwd=ROOT)
            listener.settimeout(20.0)
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(10.0)

    def seconds(self, spans: SpanTable) -> float:
        """How long the spans' bytes take. All spans are of one length."""
        places = [self._pool[local : local + length] for local, _, length in spans.tolist()]
        begun = time.perf_counter()
        self._socket.sendall(_ORDER.pack(int(spans[0, 2]), len(spans)))
        for place in places:
            at = 0
            while at < len(place):
                taken = self._socket.recv_into(place[at:])
                if not taken:
                    raise RuntimeError("the sending process has left")
                at += taken
        return time.perf_counter() - begun


def main(port: str, pool_bytes: str) -> None:
    pool = memoryview(b"\1" * int(pool_bytes))
    with socket.create_connection(("127.0.0.1", int(port)), timeout=20.0) as connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while order := connection.recv(_ORDER.size, socket.MSG_WAITALL):
            block, count = _ORDER.unpack(order)
            for index in range(count):
                at = index * block % (len(pool) - block + 1)
                connection.sendall(pool[at : at + block])


if __name__ == "__main__":
    main(*sys.argv[1:])
