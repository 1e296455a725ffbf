# SPDX-License-Identifier: Apache-2.0
"""One backend between two processes: a reader in this one, and a peer that owns the other pool."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from benchmarks.transfer.pools import POISON, count_wrong, random_pool, settle
from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.engine import EngineOptions, Peer, Status, Transfer, open_engine
from kvferry.transfer.layout import SpanTable

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 60.0


class PeerProcess:
    """The other process. It starts at once; `described` waits for it. Use as a context manager."""

    def __init__(self, backend: str, pool_bytes: int, *, device: str = "cpu", seed: int = 1) -> None:
        self.backend = backend
        self.pool_bytes = pool_bytes
        self.device = device
        self.seed = seed
        self.secret = new_secret()
        command = [sys.executable, "-m", "benchmarks.transfer.peer", backend, device]
        self._process = subprocess.Popen(
            [*command, str(pool_bytes), str(seed), self.secret.hex()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._described: tuple[bytes, bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def described(self) -> tuple[bytes, bytes]:
        """Its engine and its region. Raises RuntimeError if it ended instead."""
        if self._described is None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            while line and not line.startswith(b"{"):
                line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the {self.backend} peer ended before it was ready")
            said = json.loads(line)
            self._described = bytes.fromhex(said["engine"]), bytes.fromhex(said["region"])
        return self._described


class Reader:
    """An engine of this process that reads a peer's pool into `pool`. Use as a context manager."""

    def __init__(
        self,
        peer: PeerProcess,
        pool: torch.Tensor,
        backend_options: dict[str, str] | None = None,
        *,
        computing: bool = False,
    ) -> None:
        """`computing`: the engine is told that a model runs on the device."""
        self.pool = pool
        self._owner = peer
        options = EngineOptions(
            name=f"bench-reader-{peer.secret.hex()[:8]}",
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
            backend_options=backend_options or {},
        )
        if computing:
            options.computing.set()
        self.engine = open_engine(peer.backend, options)
        self.engine.register([pool])
        self._peer = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    def begin(self, spans: SpanTable) -> Transfer:
        """Post a read and let it set off."""
        transfer = self.engine.read(self._peer, spans, _DEADLINE_S)
        self.engine.progress()
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Wait for it as a transfer thread does. Raises RuntimeError if it failed."""
        descriptor = self.engine.fileno()
        while transfer.poll() is Status.PENDING:
            if descriptor is not None:
                select.select([descriptor], [], [], 1.0)
            self.engine.progress()
        if transfer.poll() is Status.FAILED:
            raise RuntimeError(f"read failed: {transfer.reason}")

    def seconds(self, spans: SpanTable) -> float:
        """How long one read takes."""
        begun = time.perf_counter()
        self.finish(self.begin(spans))
        return time.perf_counter() - begun

    def check(self, spans: SpanTable) -> None:
        """Read once into a poisoned pool, and raise RuntimeError unless exactly the spans' bytes came."""
        self.pool.fill_(POISON)
        settle(self.pool)
        self.seconds(spans)
        owner = self._owner
        theirs = random_pool(owner.pool_bytes, owner.seed, owner.device).to(self.pool.device)
        wrong = count_wrong(self.pool, theirs, spans)
        if wrong:
            raise RuntimeError(f"{owner.backend}: {wrong} blocks are not what they should be")

    def _connect(self) -> Peer:
        engine, region = self._owner.described()
        peer = self.engine.connect(engine, [region], mint(self._owner.secret), _DEADLINE_S)
        while not peer.poll():
            self.engine.progress()
            time.sleep(0.0005)
        return peer
