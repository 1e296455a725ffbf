# SPDX-License-Identifier: Apache-2.0
"""Traces that are read, and those that are none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvferry.deploy.bench.arrivals import SizedArrival, read_trace

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = b'{"timestamp": 1500, "input_length": 7, "output_length": 0}\n'


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_both_formats(tmp_path: Path, pack: type[bytes]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pack(AZURE + b"2023-11-16 18:17:04.5,5,6\n2023-11-16 18:17:03.9799600,374,44\n"))
    assert read_trace(path) == [SizedArrival(0.0, 374, 44), SizedArrival(pytest.approx(0.52, abs=1e-3), 5, 6)]
    path.write_bytes(pack(MOONCAKE + MOONCAKE.replace(b"1500", b"0")))
    assert read_trace(path) == [SizedArrival(0.0, 7, 1), SizedArrival(1.5, 7, 1)]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "holds no requests"),
        (b"a,b\n1,2\n", "no column 'TIMESTAMP'"),
        (AZURE + b"x,1,1\n", "Invalid isoformat"),
        (AZURE + b"2023-11-16 18:17:03,1\n", "damaged, or no trace"),
        # Not the time of day: workers would name the tests by different bytes.
        (gzip.compress(MOONCAKE, mtime=0)[:-6], "damaged, or no trace"),
        (gzip.compress(MOONCAKE, mtime=0)[:12] + b"\xff" * 40, "damaged, or no trace"),
        (AZURE + b"x" * 200_000 + b",1,1\n", "damaged, or no trace"),
        (b'{"timestamp": "x"}', "Expected `float`"),
        (MOONCAKE.replace(b"7", b"99999999999"), "more than 10000000"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=says):
        read_trace(path)
