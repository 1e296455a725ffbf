# SPDX-License-Identifier: Apache-2.0
"""The gather kernel in Triton's interpreter, over host memory; TRITON_INTERPRET=1 has to be set for it.

    python -m tests.unit.transfer.backends.cuda_ipc.gather_interpreted

prints `same` for each case that came out right.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.transfer.backends.cuda_ipc.work import Work
from kvferry.transfer.layout import SpanTable

ROOT = Path(__file__).resolve().parents[5]
POOL_BYTES = 1 << 16
_BLOCK = 32


def case(unit: int, seed: int) -> tuple[SpanTable, npt.NDArray[np.uint8]]:
    """Spans of random lengths at random places, all multiples of `unit`, some empty; and a pool to read."""
    random = np.random.default_rng(seed)
    count = 20
    places = np.arange(count) * 100 + random.integers(0, 40, count)
    lengths = random.integers(0, 60, count)
    spans = np.stack([places, random.permutation(places), lengths], axis=1).astype(np.int64) * unit
    return spans, random.integers(0, 256, POOL_BYTES, dtype=np.uint8)


def placed(spans: SpanTable, destination: int, source: int) -> SpanTable:
    """Offsets into two pools as addresses."""
    return np.add(spans, (destination, source, 0))


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin at a multiple of 16."""
    room = np.zeros(nbytes + 16, dtype=np.uint8)
    first = -room.ctypes.data % 16
    return room[first : first + nbytes]


def main() -> None:
    import torch

    from kvferry.transfer.backends.cuda_ipc.kernel import gather

    for unit in (16, 1):
        for num_programs in (1, 3, 8):
            spans, theirs = case(unit, seed=num_programs)
            source, destination = aligned(POOL_BYTES), aligned(POOL_BYTES)
            source[:] = theirs
            work = Work(
                [placed(half, destination.ctypes.data, source.ctypes.data) for half in (spans[:7], spans[7:])]
            )
            gathered = work.num_spans - 3
            table = torch.zeros(work.table_size(gathered), dtype=torch.int64)
            shape = work.write_table(table.numpy(), gathered, num_programs, words_each=1)
            assert (shape.num_programs, shape.aligned) == (num_programs, unit == 16)
            gather[(num_programs,)](table, gathered, ALIGNED=shape.aligned, BLOCK=_BLOCK)
            wanted = np.zeros_like(destination)
            for local, remote, length in spans[:gathered].tolist():
                wanted[local : local + length] = source[remote : remote + length]
            print("same" if np.array_equal(destination, wanted) else "different", flush=True)


if __name__ == "__main__":
    main()
