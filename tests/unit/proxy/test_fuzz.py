# SPDX-License-Identifier: Apache-2.0
"""Random input, for a moment: `make fuzz-api` and `make fuzz-discovery` go on for long."""

from __future__ import annotations

import pytest

from kvferry.proxy.fleet.registry import MAX_NODES
from tests.fuzz import api, discovery
from tests.unit.proxy.builders import TimedRegistry, registration


async def test_no_request_breaks_the_proxys_own_description_of_itself() -> None:
    """X1, X26: no 5xx, and nothing but what `/openapi.json` says."""
    assert await api.fuzz(40, seed=1, phases="fuzzing") == 0


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_20000_requests_do_not_either() -> None:
    assert await api.fuzz(api.CASES, seed=2) == 0


async def test_no_frame_costs_a_node_or_memory(caplog: pytest.LogCaptureFixture) -> None:
    """X3: the long form's rounds, with fewer frames. None of them shows a defect that is merely outlived."""
    report = await discovery.fuzz(5_000, seed=1)
    assert report.bad > 1_000
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_100000_frames_do_not_either() -> None:
    await discovery.fuzz(discovery.FRAMES, seed=2)


def test_names_of_models_are_remembered_within_bounds() -> None:
    """Otherwise pings could fill the memory with names, which outlive the nodes."""
    registry = TimedRegistry()
    for number in range(2 * MAX_NODES):
        registry.at(number / 1000).register(registration("decode", 1, model=f"m{number}"))
    assert len(registry.at(2 * MAX_NODES / 1000).snapshot().models) <= MAX_NODES
