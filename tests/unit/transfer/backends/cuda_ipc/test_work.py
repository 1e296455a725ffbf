# SPDX-License-Identifier: Apache-2.0
"""How spans become the table of one launch, and what the kernel makes of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from kvferry.transfer.backends.cuda_ipc.work import ALIGNED_WORD_BYTES, Shape, Work
from tests.unit.transfer.backends.cuda_ipc.gather_interpreted import ROOT, case, placed


def copies(work: Work, most_programs: int, num_copied: int = 0) -> list[tuple[int, int, int]]:
    """What is copied, one after the other, (source, destination, bytes): by the kernel's programs, and then
    the last spans, so many, by the copy engines.
    """
    n = work.num_spans - num_copied
    table = np.full(work.table_size(n) + 3, -1, dtype=np.int64)
    shape = work.write_table(table, n, most_programs, words_each=1)
    assert (table[-3:] == -1).all(), "written past the table"
    word_bytes = ALIGNED_WORD_BYTES if shape.aligned else 1
    share, starts, spans = int(table[0]), table[1 : n + 2] // word_bytes, work.spans(table, n)
    copied = [(source, destination, length) for destination, source, length in spans[n:].tolist()]
    for program in range(shape.num_programs):
        position = program * share
        stop = min(position + share, starts[n])
        span = np.searchsorted(starts[1:n], position, side="right")
        while position < stop:
            end = min(starts[span + 1], stop)
            destination, source, _ = spans[span] + (position - starts[span]) * word_bytes
            copied.append((source, destination, (end - position) * word_bytes))
            position, span = end, span + 1
    return [(int(a), int(b), int(c)) for a, b, c in copied if c]


@pytest.mark.parametrize("num_programs", [1, 2, 7, 33])
@pytest.mark.parametrize("unit", [16, 2])
@pytest.mark.parametrize("num_copied", [0, 1, 11])
def test_the_programs_share_every_byte_of_every_span_and_no_other(
    num_programs: int, unit: int, num_copied: int
) -> None:
    spans, _ = case(unit, seed=num_programs)
    work = Work([placed(spans[:9], 1 << 20, 1 << 30), placed(spans[9:], 1 << 20, 1 << 40)])
    bases = [1 << 30] * 9 + [1 << 40] * (len(spans) - 9)
    wanted = {
        (base + remote + byte, (1 << 20) + local + byte)
        for (local, remote, length), base in zip(spans.tolist(), bases, strict=True)
        for byte in range(length)
    }
    got = [
        (source + byte, destination + byte)
        for source, destination, n in copies(work, num_programs, num_copied)
        for byte in range(n)
    ]
    assert len(got) == len(set(got)) == spans[:, 2].sum()
    assert set(got) == wanted


def laid_out(
    *parts: tuple[list[tuple[int, int, int]], int, int], most_programs: int = 33
) -> tuple[int, Shape]:
    """The share of each program in words, and the shape."""
    work = Work([placed(np.array(spans, dtype=np.int64), *bases) for spans, *bases in parts])
    n = work.num_spans
    table = np.zeros(work.table_size(n), dtype=np.int64)
    shape = work.write_table(table, n, most_programs, words_each=8192)
    return int(table[0]), shape


def test_one_long_span_and_many_short_ones_keep_all_programs_equally_busy() -> None:
    for spans in ([(0, 0, 1 << 26)], [(place << 16, place << 16, 1 << 16) for place in range(1024)]):
        share, shape = laid_out((spans, 0, 1 << 32), most_programs=32)
        assert (share, shape) == ((1 << 26) // 8 // 32, Shape(32, True))


def test_wide_accesses_are_for_what_is_aligned_throughout() -> None:
    """A misaligned access ends the process's CUDA context."""
    row = [(32, 64, 48)]
    assert laid_out((row, 0, 16))[1].aligned
    for spoilt in ([(32, 64, 40)], [(32, 72, 48)], [(40, 64, 48)]):
        assert not laid_out((spoilt, 0, 16))[1].aligned
    assert not laid_out((row, 0, 16), (row, 0, 8))[1].aligned
    assert not laid_out((row, 0, 16), ([(32, 64, 8), (96, 128, 8)], 0, 16))[1].aligned


def test_runs_begin_where_wide_accesses_stay_aligned() -> None:
    work = Work([np.array([(0, 1 << 20, 16 * 101)], dtype=np.int64)])
    assert all(source % 16 == destination % 16 == 0 for source, destination, _ in copies(work, 7))


def test_little_work_takes_few_programs() -> None:
    small, large = (laid_out(([(0, 0, n)], 0, 0))[1] for n in (4096, 1 << 26))
    assert (small.num_programs, large.num_programs) == (1, 33)


def run_module(name: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.transfer.backends.cuda_ipc.{name}"],
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
