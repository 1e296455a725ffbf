# SPDX-License-Identifier: Apache-2.0
"""All-gather between tensor-parallel ranks of one host: shared memory, and a byte through a socket as signal.

A small model calls this a dozen times a step. gloo's all-gather takes 300 to 800 µs for it between two ranks,
nearly all of them in waking threads of its own; this takes about 15 (`python -m benchmarks.rank_exchange`).
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

SLOT_BYTES = 4 << 20
_SIGNAL = b"!"
_HELLO = struct.Struct("<I")


class RankLost(RuntimeError):
    """Another rank has ended, or did not answer in time; the group cannot go on."""


class RankExchange:
    """One rank's end. Every rank calls `gather` equally often, and with tensors of one shape and dtype.

    Each rank owns a memory file of two slots, which all of them map, and writes to the slots in turn. A rank
    that has signalled a call is done with the tensors of the call before, so a slot is free again two calls
    later.

    Args:
        run_dir: The agent's private directory, in which the ranks find each other.
        rank: This rank, of `size`.
        barrier: Returns once every rank has called it.
        timeout_s: How long to wait for a rank.

    Raises:
        RankLost: a rank did not come.
    """

    def __init__(
        self, run_dir: Path, rank: int, size: int, *, barrier: Callable[[], object], timeout_s: float
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._calls = 0
        self._peers: dict[int, socket.socket] = {}
        self._memory: dict[int, mmap.mmap] = {}
        own = os.memfd_create(f"kvferry-rank-{rank}")
        try:
            os.ftruncate(own, 2 * SLOT_BYTES)
            self._memory[rank] = mmap.mmap(own, 2 * SLOT_BYTES)
            self._meet(run_dir, size, own, barrier)
        except OSError as error:
            self.close()
            raise RankLost(f"the ranks did not meet: {error}") from error
        finally:
            os.close(own)
        self._order = [self._memory[each] for each in range(size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return one flat tensor per rank, in rank order, valid until the next call.

        Args:
            part: This rank's tensor: contiguous, on the CPU, at most `SLOT_BYTES`.

        Raises:
            RankLost: a rank has left, or did not call within the timeout.
        """
        start = self._calls % 2 * SLOT_BYTES
        self._calls += 1
        parts = [
            torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=start)
            for memory in self._order
        ]
        parts[self._rank].copy_(part.view(-1))
        try:
            for peer in self._peers.values():
                peer.send(_SIGNAL)
            for rank, peer in self._peers.items():
                if peer.recv(1) != _SIGNAL:
                    raise RankLost(f"rank {rank} has left")
        except BlockingIOError:
            raise RankLost(f"a rank did not answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise RankLost(f"a rank has left: {error}") from error
        return parts

    def close(self) -> None:
        """Close the sockets. The memory is freed with its last user."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _meet(self, run_dir: Path, size: int, own: int, barrier: Callable[[], object]) -> None:
        """Connect to every lower rank and accept every higher one; exchange memory files with each."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(_address(run_dir, self._rank)))
            listener.listen(size)
            listener.settimeout(self._timeout_s)
            barrier()  # everyone listens
            for rank in range(self._rank):
                self._peers[rank] = peer = socket.socket(socket.AF_UNIX)
                self._set_timeout(peer)
                peer.connect(str(_address(run_dir, rank)))
                self._swap(peer, own)
            for _ in range(self._rank + 1, size):
                peer, _address_of_peer = listener.accept()
                peer.setblocking(True)
                self._set_timeout(peer)
                self._peers[self._swap(peer, own)] = peer
        self._peers = dict(sorted(self._peers.items()))

    def _swap(self, peer: socket.socket, own: int) -> int:
        """Exchange memory files with a peer. Returns the peer's rank."""
        socket.send_fds(peer, [_HELLO.pack(self._rank)], [own])
        hello, files, _flags, _sender = socket.recv_fds(peer, _HELLO.size, 1)
        if len(hello) != _HELLO.size or len(files) != 1:
            raise RankLost("a rank left while the ranks met")
        try:
            (rank,) = _HELLO.unpack(hello)
            self._memory[rank] = mmap.mmap(files[0], 2 * SLOT_BYTES)
        finally:
            os.close(files[0])
        return int(rank)

    def _set_timeout(self, peer: socket.socket) -> None:
        # The kernel's timeouts, not Python's, which cost another system call each time.
        fraction, seconds = math.modf(self._timeout_s)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _address(run_dir: Path, rank: int) -> Path:
    return run_dir / f"exchange-{rank}"
