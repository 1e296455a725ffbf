# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads here: the exchange itself does not care."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kvferry.agent.worker.shm_allgather import SLOT_BYTES, RankExchange, RankLost
from kvferry.agent.worker.tensor_parallel import Group

T = TypeVar("T")

WAIT_S = 30.0


def on_ranks(
    run_dir: Path, size: int, work: Callable[[Group, RankExchange], T], timeout_s: float = WAIT_S
) -> list[T]:
    """What `work` returns on each rank, in order."""
    barrier = threading.Barrier(size, timeout=WAIT_S)

    def run(rank: int) -> T:
        made = RankExchange(run_dir, rank, size, barrier=barrier.wait, timeout_s=timeout_s)
        with made as exchange:
            return work(Group(rank, size, exchange), exchange)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size), timeout=WAIT_S))


def tensor_of(rank: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(random.Random(call).randint(1, 5000), generator=generator)


def test_every_rank_sees_every_part_until_its_next_call(tmp_path: Path) -> None:
    """Whoever is slow to look still sees this call's bytes, whatever the others have gone on to show."""

    def work(group: Group, exchange: RankExchange) -> None:
        pause = random.Random(group.rank)
        for call in range(300):
            parts = exchange.gather(tensor_of(group.rank, call))
            if pause.random() < 0.3:
                time.sleep(0.001)
            for rank, part in enumerate(parts):
                assert torch.equal(part, tensor_of(rank, call)), (group.rank, rank, call)

    on_ranks(tmp_path, 3, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, SLOT_BYTES // 1024 + 3])
def test_sums_are_added_in_rank_order_however_many_slots_they_take(
    tmp_path: Path, rows: int, dtype: torch.dtype
) -> None:
    parts = [torch.randn(rows, 2, 512, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    parts = [part.to(dtype) for part in parts]
    sums = on_ranks(tmp_path, 3, lambda group, _: group.sum(parts[group.rank]))
    expected = parts[0] + parts[1] + parts[2]
    assert all(torch.equal(each, expected) and each.shape == expected.shape for each in sums)


@pytest.mark.parametrize("rows", [1, SLOT_BYTES // 400 + 3])
def test_parts_are_joined_along_the_last_dimension(tmp_path: Path, rows: int) -> None:
    parts = [torch.randn(rows, 200, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    joined = on_ranks(tmp_path, 2, lambda group, _: group.concat(parts[group.rank]))
    assert all(torch.equal(each, torch.cat(parts, dim=-1)) for each in joined)


def test_a_rank_that_leaves_is_noticed_at_once(tmp_path: Path) -> None:
    def work(group: Group, exchange: RankExchange) -> float:
        exchange.gather(torch.zeros(1))
        if group.rank == 1:
            exchange.close()
            return 0.0
        begun = time.monotonic()
        with pytest.raises(RankLost, match="has left"):
            exchange.gather(torch.zeros(1))
            exchange.gather(torch.zeros(1))
        return time.monotonic() - begun

    assert max(on_ranks(tmp_path, 2, work)) < WAIT_S / 2


def test_a_silent_rank_is_waited_for_only_so_long(tmp_path: Path) -> None:
    noticed = threading.Event()

    def work(group: Group, exchange: RankExchange) -> None:
        if group.rank == 1:
            assert noticed.wait(WAIT_S)
            return
        with pytest.raises(RankLost, match=r"did not answer within 0\.2 s"):
            exchange.gather(torch.zeros(1))
        noticed.set()

    on_ranks(tmp_path, 2, work, timeout_s=0.2)
