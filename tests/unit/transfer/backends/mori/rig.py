# SPDX-License-Identifier: Apache-2.0
"""Two mori engines in one process, on the stand-in, with pools of known bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.backends.common.settings import parse_settings
from kvferry.transfer.backends.mori.engine import MoriEngine
from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.backends.mori.settings import MoriSettings
from kvferry.transfer.backends.mori.transfer import MoriTransfer
from kvferry.transfer.engine import EngineOptions, Peer, Status
from tests.helpers.waiting import wait_until
from tests.standins import mori_io

BLOCK = 1024
BLOCKS = 256
DEADLINE_S = 10.0
FIRST = 1
"""The number of a queue pair's first work request after those of meeting a peer (`QueuePairMaker`)."""


class Pair:
    """A reader and the owner of what it reads. `faults` are the reader's, `options` both sides'."""

    def __init__(self, **options: str) -> None:
        self.secret = new_secret()
        self.theirs = np.random.default_rng(7).integers(1, 256, (BLOCKS, BLOCK), dtype=np.uint8)
        self.ours = np.zeros_like(self.theirs)
        with fault(""):
            self.owner = open_quickly("owner", options)
        self.reader = open_quickly("reader", options)
        self.engines = [self.reader, self.owner]
        self.owner.admit(self.secret)
        self.described = [each.describe() for each in self.owner.register([torch.from_numpy(self.theirs)])]
        assert self.owner.pool is not None
        self.owned = self.owner.pool
        self.reader.register([torch.from_numpy(self.ours)])

    def meet(self, token: bytes | None = None, timeout_s: float = 5.0) -> Peer:
        """Connect and wait until reads may be posted. Raises what the backend raises."""
        peer = self.reader.connect(
            self.owner.describe(), self.described, token or mint(self.secret), timeout_s
        )
        self.wait(peer.poll)
        return peer

    def read(self, peer: Peer, blocks: list[tuple[int, int]], timeout_s: float = 5.0) -> MoriTransfer:
        """Begin to read theirs[remote] into ours[local] for each (local, remote)."""
        spans = [(local * BLOCK, remote * BLOCK, BLOCK) for local, remote in blocks]
        return self.reader.read(peer, np.array(spans, dtype=np.int64).reshape(-1, 3), timeout_s)

    def finish(self, transfer: MoriTransfer) -> Status:
        self.wait(lambda: transfer.poll() is not Status.PENDING)
        return transfer.poll()

    def settle(self, transfer: MoriTransfer) -> None:
        self.wait(lambda: transfer.quiescent)

    def _progress(self) -> None:
        for engine in self.engines:
            engine.progress()

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, DEADLINE_S, step=self._progress)

    def close(self, *engines: MoriEngine) -> None:
        for engine in engines:
            engine.close()
            self.engines.remove(engine)


def open_quickly(name: str, options: dict[str, str]) -> MoriEngine:
    """An engine without the child process that tries first."""
    library = MoriLibrary(name, "127.0.0.1", parse_settings("mori", MoriSettings, options))
    return MoriEngine(EngineOptions(name=name, bind_host="127.0.0.1", advertise_host="127.0.0.1"), library)


@contextlib.contextmanager
def fault(text: str) -> Iterator[None]:
    """Engines made meanwhile do this wrong; see `mori.io.faults`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(mori_io.FAULT, text)
        yield


def scattered(count: int) -> list[tuple[int, int]]:
    """Blocks of which no two are neighbours on the producer's side, so that nothing is merged."""
    random = np.random.default_rng(11)
    local = random.permutation(BLOCKS)[:count]
    remote = random.permutation(BLOCKS // 2)[:count] * 2
    return [(int(a), int(b)) for a, b in zip(local, remote, strict=True)]
