# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from tests.standins.faults.tcp import Fault, FaultInjector, flip, parse_fault


def test_every_kind_is_read() -> None:
    assert parse_fault("flip:start=4096,end=8192") == Fault(kind="flip", start=4096, end=8192)
    assert parse_fault("drop:after=10,count=2") == Fault(kind="drop", after=10, count=2)
    assert parse_fault("stall") == Fault(kind="stall")
    assert parse_fault("truncate:after=3") == Fault(kind="truncate", after=3)
    assert parse_fault("delay:seconds=0.5") == Fault(kind="delay", seconds=0.5)
    assert parse_fault("reorder:seconds=2,count=1") == Fault(kind="reorder", seconds=2.0, count=1)


@pytest.mark.parametrize(
    "spec", ["", "melt", "flip:from=1", "drop:after=x", "drop:after=-1", "delay:after=1"]
)
def test_a_fault_that_makes_no_sense_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match="tcp fault"):
        parse_fault(spec)


@pytest.mark.parametrize(("item_bytes", "top"), [(4, 3), (2, 1)])
def test_only_the_top_byte_of_elements_within_the_range_is_flipped(item_bytes: int, top: int) -> None:
    stream = np.arange(64, dtype=np.uint8)
    views = [memoryview(stream[:24]), memoryview(stream[24:40]), memoryview(stream[40:])]
    damaged = flip(views, Fault(kind="flip", start=20, end=48), item_bytes)
    result = np.concatenate([np.frombuffer(view, dtype=np.uint8) for view in damaged])
    changed = [index for index in range(20, 48) if index % item_bytes == top]
    assert np.flatnonzero(result ^ stream).tolist() == changed
    assert set((result ^ stream)[changed].tolist()) == {0x40}
    assert stream.tolist() == list(range(64))


def test_a_count_is_shared_by_all_connections() -> None:
    injector = FaultInjector(parse_fault("drop:count=2"))
    assert [injector.next() is not None for _ in range(4)] == [True, True, False, False]
