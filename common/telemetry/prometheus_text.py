# SPDX-License-Identifier: Apache-2.0
"""Read chosen samples from a page in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MAX_SAMPLES = 4096
"""Parsing a sample takes some 20 µs in the event loop; a page with more of those asked for is cut here."""


def samples(exposition: bytes, names: Collection[str]) -> list[Sample]:
    """Return the samples of these names, in the page's order.

    Only their lines are parsed: a server's page has thousands of others. A line that cannot be parsed is a
    sample without labels whose value is NaN.
    """
    found: list[Sample] = []
    for line in exposition.decode(errors="replace").split("\n"):
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            found.append(_sample(name, line))
            if len(found) == MAX_SAMPLES:
                break
    return found


def total(exposition: bytes, counter: str) -> float | None:
    """Return the sum of a counter's samples; None when there is none, or one of them is no number."""
    values = [sample.value for sample in samples(exposition, (counter,))]
    return sum(values) if values and not any(map(math.isnan, values)) else None


def _sample(name: str, line: str) -> Sample:
    try:
        return next(sample for family in text_string_to_metric_families(line) for sample in family.samples)
    except (ValueError, IndexError, StopIteration):
        return Sample(name, {}, math.nan)
