# SPDX-License-Identifier: Apache-2.0
"""How spans become the table of one launch, and what the kernel makes of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.transfer.gather_interpreted import ROOT, case
from transfer.backends.cuda_ipc_work import Work


def copies(work: Work, num_programs: int) -> list[tuple[int, int, int]]:
    """What the kernel's programs copy, one after the other: (source, destination, bytes)."""
    table = np.full(work.table_size(num_programs) + 3, -1, dtype=np.int64)
    work.write_table(table, num_programs)
    assert (table[-3:] == -1).all(), "written past the table"
    n = work.num_spans
    starts, sources, destinations = table[: n + 1], table[n + 1 : 2 * n + 1], table[2 * n + 1 : 3 * n + 1]
    bounds, firsts = table[3 * n + 1 : 3 * n + 2 + num_programs], table[3 * n + 2 + num_programs : -3]
    copied = []
    for program in range(num_programs):
        position, span = bounds[program], firsts[program]
        while position < bounds[program + 1]:
            assert starts[span] <= position, "a program begins before its span"
            end = min(starts[span + 1], bounds[program + 1])
            at = (position - starts[span]) * work.word_bytes
            copied.append((sources[span] + at, destinations[span] + at, (end - position) * work.word_bytes))
            position, span = end, span + 1
    return [(int(a), int(b), int(c)) for a, b, c in copied if c]


@pytest.mark.parametrize("num_programs", [1, 2, 7, 33])
@pytest.mark.parametrize("unit", [16, 2])
def test_the_programs_share_every_byte_of_every_span_and_no_other(num_programs: int, unit: int) -> None:
    spans, _ = case(unit, seed=num_programs)
    work = Work([(spans[:9], 1 << 20, 1 << 30), (spans[9:], 1 << 20, 1 << 40)])
    bases = [1 << 30] * 9 + [1 << 40] * (len(spans) - 9)
    wanted = {
        (base + remote + byte, (1 << 20) + local + byte)
        for (local, remote, length), base in zip(spans.tolist(), bases, strict=True)
        for byte in range(length)
    }
    got = [
        (source + byte, destination + byte)
        for source, destination, n in copies(work, num_programs)
        for byte in range(n)
    ]
    assert len(got) == len(set(got)) == work.nbytes
    assert set(got) == wanted


def test_one_long_span_and_many_short_ones_keep_all_programs_equally_busy() -> None:
    for spans in ([(0, 0, 1 << 26)], [(place << 16, place << 16, 1 << 16) for place in range(1024)]):
        work = Work([(np.array(spans, dtype=np.int64), 0, 1 << 32)])
        table = np.zeros(work.table_size(32), dtype=np.int64)
        work.write_table(table, 32)
        bounds = table[3 * work.num_spans + 1 :][:33]
        assert (np.diff(bounds) == (1 << 26) // 8 // 32).all()


def test_wide_accesses_are_for_what_is_aligned_throughout() -> None:
    """A misaligned access ends the process's CUDA context."""
    row = np.array([(32, 64, 48)], dtype=np.int64)
    assert Work([(row, 0, 16)]).aligned
    for spoilt in ([(32, 64, 40)], [(32, 72, 48)], [(40, 64, 48)]):
        assert not Work([(np.array(spoilt, dtype=np.int64), 0, 16)]).aligned
    assert not Work([(row, 0, 16), (row, 0, 8)]).aligned


def test_runs_begin_where_wide_accesses_stay_aligned() -> None:
    work = Work([(np.array([(0, 0, 16 * 101)], dtype=np.int64), 0, 1 << 20)])
    assert all(source % 16 == destination % 16 == 0 for source, destination, _ in copies(work, 7))


def test_little_work_takes_few_programs() -> None:
    small, large = (Work([(np.array([(0, 0, n)], dtype=np.int64), 0, 0)]) for n in (4096, 1 << 26))
    assert (small.num_programs(33, 8192), large.num_programs(33, 8192)) == (1, 33)


def run_module(name: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.transfer.{name}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_the_kernel_copies_what_the_table_says() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    assert run_module("gather_interpreted", TRITON_INTERPRET="1") == ["same"] * 6


@needs_triton
def test_the_kernel_compiles_for_a_gpu_that_is_not_here_and_moves_16_bytes_at_once() -> None:
    assert run_module("gather_compiled") == ["wide", "narrow"]
