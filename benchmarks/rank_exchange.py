# SPDX-License-Identifier: Apache-2.0
"""What it costs two CPU ranks to see each other's tensors: by gloo's all-gather, and by the exchange.

`python -m benchmarks.rank_exchange` prints microseconds a call, of the clock and of one rank's CPU, for rows
of 128 floats.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from kvferry.agent.worker.shm_allgather import RankExchange

RANKS = 2
WIDTH = 128
ROWS = (1, 16, 64, 512, 4096)
WARM_UP = 20
TIMEOUT_S = 60.0

Cost = tuple[float, float]
"""Microseconds a call: elapsed, and of this rank's CPU."""


def time_calls(call: Callable[[], object], count: int) -> Cost:
    for _ in range(WARM_UP):
        call()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count * 1e6, (time.process_time() - cpu) / count * 1e6


def run_rank(rank: int, folder: Path, count: int) -> dict[int, tuple[Cost, Cost]]:
    """By rows: the costs of gloo and of the exchange, measured by turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    costs = {}
    with RankExchange(folder, rank, RANKS, barrier=dist.barrier, timeout_s=TIMEOUT_S) as exchange:
        for rows in ROWS:
            part = torch.randn(rows, WIDTH)
            parts = [torch.empty_like(part) for _ in range(RANKS)]
            gloo = time_calls(partial(dist.all_gather, parts, part), count)
            costs[rows] = gloo, time_calls(partial(exchange.gather, part), count)
    dist.destroy_process_group()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kind and size")
    count: int = parser.parse_args().calls
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as ranks,
    ):
        futures = [ranks.submit(run_rank, rank, Path(folder), count) for rank in range(RANKS)]
        costs = futures[0].result()
        futures[1].result()
    table = Table(title=f"{RANKS} ranks, µs a call (CPU of one rank)")
    for heading in ("rows", "gloo", "exchange", "ratio"):
        table.add_column(heading, justify="right")
    for rows, ((gloo, gloo_cpu), (ours, ours_cpu)) in costs.items():
        table.add_row(
            str(rows), f"{gloo:.0f} ({gloo_cpu:.0f})", f"{ours:.0f} ({ours_cpu:.0f})", f"{gloo / ours:.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
