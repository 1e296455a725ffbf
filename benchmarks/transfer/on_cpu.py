# SPDX-License-Identifier: Apache-2.0
"""On any machine: nixl beside a plain block copy, tcp beside a raw socket."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.transfer.pools import poisoned_pool, random_pool, scattered
from benchmarks.transfer.raw_socket import RawSocket
from benchmarks.transfer.reader import PeerProcess, Reader
from benchmarks.transfer.report import Chart, Report
from kvferry.transfer.engine import usable
from kvferry.transfer.layout import SpanTable

POOL_BYTES = 256 << 20
READ_BYTES = 128 << 20
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
LARGE = 1 << 20
ROUNDS = 25


def run(report: Report) -> None:
    """Every ratio is of the best of many samples taken in turn: other work on the machine only ever adds."""
    tables = {block: scattered(block, READ_BYTES // block, POOL_BYTES, seed=block) for block in BLOCKS}
    _compare(report, "nixl", "numpy block copy", tables, BlockCopy().seconds, bound=0.8)
    with RawSocket(POOL_BYTES) as raw:
        _compare(report, "tcp", "raw loopback socket", tables, raw.seconds, bound=0.7)


def _compare(
    report: Report,
    backend: str,
    rival: str,
    tables: dict[int, SpanTable],
    rival_seconds: Callable[[SpanTable], float],
    bound: float,
) -> None:
    verdict = usable(backend)
    if not verdict.ok:
        print(f"{backend} left out: {verdict.reason}")
        return
    rates: dict[str, list[float]] = {backend: [], rival: []}
    with (
        PeerProcess(backend, POOL_BYTES) as peer,
        Reader(peer, poisoned_pool(POOL_BYTES, "cpu")) as reader,
    ):
        for block, spans in tables.items():
            reader.check(spans)
            rival_seconds(spans)
            pairs = [(reader.seconds(spans), rival_seconds(spans)) for _ in range(ROUNDS)]
            ours, theirs = (min(samples) for samples in zip(*pairs, strict=True))
            report.detail[f"{backend}, {rival}: seconds at {block >> 10} KiB"] = pairs
            for name, seconds in ((backend, ours), (rival, theirs)):
                rates[name].append(READ_BYTES / seconds / 1e9)
            report.add(
                f"{backend} ÷ {rival}, {block >> 10} KiB blocks ({rates[backend][-1]:.2f} GB/s)",
                theirs / ours,
                "×",
                bound if block >= LARGE else None,
            )
    report.charts.append(
        Chart(
            f"{backend}-cpu", "KiB per block", "GB/s", [block / 1024 for block in tables], rates, log_x=True
        )
    )


class BlockCopy:
    """Plain copies between two arrays of this process."""

    def __init__(self) -> None:
        self._source = random_pool(POOL_BYTES, 1, "cpu").numpy()
        self._destination = np.zeros(POOL_BYTES, dtype=np.uint8)

    def seconds(self, spans: SpanTable) -> float:
        rows = spans.tolist()
        begun = time.perf_counter()
        for local, remote, length in rows:
            self._destination[local : local + length] = self._source[remote : remote + length]
        return time.perf_counter() - begun
