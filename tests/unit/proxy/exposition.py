# SPDX-License-Identifier: Apache-2.0
"""Samples of a metrics page, named as they are written there."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sample(page: str, name: str) -> float:
    """The sum of the samples of this name, `metric` or `metric{label="value",…}`; 0 where there is none.

    They may have other labels besides.
    """
    metric, wanted = parse_sample(name)
    lines = [line for line in page.splitlines() if line.startswith((f"{metric} ", f"{metric}{{"))]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line, labels in zip(lines, _labels("".join(f"{line}\n" for line in lines)), strict=True)
        if wanted.items() <= labels.items()
    )


def parse_sample(name: str) -> tuple[str, dict[str, str]]:
    """Return the metric and the labels of a sample's name."""
    [labels] = _labels(f"{name} 0\n")
    return name.partition("{")[0], labels


def _labels(lines: str) -> list[dict[str, str]]:
    return [sample.labels for family in text_string_to_metric_families(lines) for sample in family.samples]
