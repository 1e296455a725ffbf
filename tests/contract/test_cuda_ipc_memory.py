# SPDX-License-Identifier: Apache-2.0
"""What only the cuda_ipc backend has to show: how a killed owner's memory fares, and both ways to copy."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.transfer.engine import Status
from tests.contract.conftest import DEADLINE_S, PEER_GPU, READER_GPU, Reader, ServingPeer
from tests.contract.test_backend import expected, scattered
from tests.helpers.gpu import needs_gpus

LEASE_S = 10.0
SHARE = 3
"""The owner takes a third of its GPU: far more than what other tests take beside this one."""


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader("cuda_ipc", READER_GPU)
    yield made
    made.engine.close()


def free_bytes() -> int:
    return torch.cuda.mem_get_info(PEER_GPU)[0]


@pytest.mark.gpu
@needs_gpus(1)
def test_a_killed_owners_gpu_memory_comes_back_and_it_can_start_again(reader: Reader) -> None:
    """An owner of the same size starts only where the dead one's memory is free."""
    pool_bytes = torch.cuda.mem_get_info(PEER_GPU)[1] // SHARE
    free_before = free_bytes()
    for _ in range(2):
        owner = ServingPeer("cuda_ipc", device=PEER_GPU, pool_bytes=pool_bytes)
        try:
            transfer = reader.read(reader.connect(owner), [(0, 0, 1 << 20)])
            assert reader.finish(transfer) is Status.DONE
            assert free_bytes() < free_before - pool_bytes // 2
        finally:
            owner.close()
        killed = time.monotonic()
        reader.wait(lambda: free_bytes() > free_before - pool_bytes // 2)
        assert time.monotonic() - killed < min(LEASE_S + 1, DEADLINE_S)


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize(
    "spans",
    [
        scattered(1 << 20, 8),
        scattered(4096, 512),
        [(3, 5, 999_999), (2_000_001, 0, 1), (5 << 20, 7 << 20, 0)],
    ],
)
def test_what_is_read_while_the_model_computes_is_the_same(
    spans: list[tuple[int, int, int]], served_bytes: np.ndarray
) -> None:
    """Long spans go by the copy engines then, short ones by a kernel that leaves the model its share."""
    reader, owner = Reader("cuda_ipc", READER_GPU, computing=True), ServingPeer("cuda_ipc", device=PEER_GPU)
    try:
        transfer = reader.read(reader.connect(owner), spans)
        assert reader.finish(transfer) is Status.DONE
        assert np.array_equal(reader.pool, expected(spans, served_bytes))
    finally:
        owner.close()
        reader.engine.close()


@pytest.mark.gpu
@needs_gpus(1)
def test_a_table_that_grows_is_not_where_the_gpu_still_writes_for_the_model(
    reader: Reader, served_bytes: np.ndarray
) -> None:
    """torch gives memory away that the model has freed, although the GPU has yet to run what writes there."""
    owner = ServingPeer("cuda_ipc", device=PEER_GPU)
    spans = scattered(256, 60_000)  # 240,002 entries: the first table has room for 65,536
    table_bytes = 8 << (4 * len(spans)).bit_length()
    try:
        peer = reader.connect(owner)
        freed = torch.empty(table_bytes, dtype=torch.uint8, device=READER_GPU)
        everywhere = torch.randint(table_bytes, (1 << 26,), device=READER_GPU)
        torch.cuda.synchronize(READER_GPU)
        for _ in range(200):  # a second of zeros, again and again
            freed.scatter_(0, everywhere, 0)
        busy = torch.cuda.Event()
        busy.record(torch.cuda.current_stream(READER_GPU))
        del freed
        transfer = reader.read(peer, spans)
        assert reader.finish(transfer) is Status.DONE
        assert not busy.query(), "the model's work was over before the read was: this shows nothing"
        torch.cuda.synchronize(READER_GPU)
        assert np.array_equal(reader.pool, expected(spans, served_bytes))
    finally:
        owner.close()
