# SPDX-License-Identifier: Apache-2.0
"""Samples read from a page in Prometheus' text format."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.telemetry.prometheus_text import MAX_SAMPLES, samples, total

PAGE = b"""# HELP a_total of engines
# TYPE a_total counter
a_total{engine="0",why="a \\"b\\" }, c"} 1.0
a_total{engine="1"} 2.0 1395066363000
a_total_created 7
b 5
"""


def test_only_samples_of_the_names_asked_for_are_returned() -> None:
    found = [(sample.name, sample.labels, sample.value) for sample in samples(PAGE, {"a_total", "c"})]
    assert found == [
        ("a_total", {"engine": "0", "why": 'a "b" }, c'}, 1.0),
        ("a_total", {"engine": "1"}, 2.0),
    ]


def test_a_counters_samples_are_added_up() -> None:
    assert total(PAGE, "a_total") == 3.0
    text = b'# HELP a_total x\na_total{rank="0"} 2.0\na_total{rank="1"} 1.0\na_total_more 9.0\n'
    assert total(text, "a_total") == 3.0 and total(text, "b_total") is None
    assert total(PAGE, "a") is None


@pytest.mark.parametrize(
    "line", [b"a what\n", b"a{\n", b"a\n", b'a{b="} 1\n', b"a NaN\n", b"a \xff\n", b"a{} \n"]
)
def test_a_line_that_cannot_be_parsed_is_no_number(line: bytes) -> None:
    assert [math.isnan(sample.value) for sample in samples(line + b"a 1\n", {"a"})] == [True, False]
    assert total(line + b"a 1\n", "a") is None


def test_a_long_page_is_cut() -> None:
    assert len(samples(b"a 1\n" * (MAX_SAMPLES + 1), {"a"})) == MAX_SAMPLES


@given(st.binary(max_size=64))
def test_no_page_raises(tail: bytes) -> None:
    samples(b"a" + tail, {"a"})
    samples(b"a{" + tail, {"a"})
