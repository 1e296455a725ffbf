# SPDX-License-Identifier: Apache-2.0
"""A small DNS server (RFC 1035 over UDP) whose names may change, be unknown to it, or get no answer."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading

A, AAAA, IN = 1, 28, 1
SERVFAIL, NXDOMAIN = 2, 3
_RESPONSE = 0x8180  # response, recursion desired and available


class DnsServer:
    """Answers A and AAAA queries for `names` from a thread, until left."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        self.fails = False
        """Whether it answers SERVFAIL to everything."""
        self.queries = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, port))
        self._socket.settimeout(0.1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dns")

    def __enter__(self) -> DnsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                query, peer = self._socket.recvfrom(1500)
            except TimeoutError:
                continue
            self.queries += 1
            self._socket.sendto(self._answer(query), peer)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode())
            at += 1 + length
        kind, _ = struct.unpack_from("!HH", query, at + 1)
        question = query[12 : at + 5]
        known = self.names.get(".".join(labels).lower())
        code = SERVFAIL if self.fails else NXDOMAIN if known is None else 0
        packed = [ipaddress.ip_address(each).packed for each in known or () if code == 0]
        right = [each for each in packed if kind == (A if len(each) == 4 else AAAA)]
        # 0xC00C: the name is the question's. A TTL of 0: nobody may keep it.
        records = b"".join(struct.pack("!HHHIH", 0xC00C, kind, IN, 0, len(each)) + each for each in right)
        head = query[:2] + struct.pack("!HHHHH", _RESPONSE | code, 1, len(right), 0, 0)
        return head + question + records
