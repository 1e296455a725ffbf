# SPDX-License-Identifier: Apache-2.0
"""Exhaustive check of I1–I3, I6 and I7 over bounded worlds, on the product's own state machines."""

from __future__ import annotations

import pytest

from tests.model.explore import Coverage, explore
from tests.model.scenarios import LONG, SHORT

EVERY_STEP = {
    *("register", "advance", "ready", "preempt", "drop", "expire", "time", "restart"),
    *("open", "renew", "lose", "unanswered", "cancel", "crash", "deliver", "repeat"),
    *("read", "damage", "verify", "break", "quiesce", "report", "report-again", "report-quiescent"),
}
EVERY_END = {
    *("pull done", "pull checksum", "pull invalid", "pull read_failed", "pull cancelled", "pull incarnation"),
    *("pull unreachable", "pull lease_unknown", "pull lease_expired", "pull lease_dropped"),
    *("pull lease_finished", "pull lease_failed", "pull lease_gone", "quarantine ended"),
    *("lease released", "lease expired", "lease dropped"),
}


@pytest.fixture(scope="module")
def visited() -> dict[str, Coverage]:
    return {}


@pytest.mark.xdist_group("coverage")
@pytest.mark.parametrize("name", SHORT)
def test_every_reachable_state_is_right(name: str, visited: dict[str, Coverage]) -> None:
    """The assertions, and which invariant each of them is, are listed in `tests/model/protocol.py`."""
    coverage = visited[name] = explore(SHORT[name])
    print(f"{coverage.states} states, {coverage.steps} steps, depth {coverage.depth}")
    assert coverage.states > 1000
    assert coverage.complete == (SHORT[name].depth == 64)


@pytest.mark.xdist_group("coverage")
def test_together_they_take_every_step_and_reach_every_end(visited: dict[str, Coverage]) -> None:
    """A check that a world never reaches proves nothing."""
    if len(visited) < len(SHORT):
        pytest.skip("needs the coverage of every world: run the whole file")
    seen = set().union(*(coverage.seen for coverage in visited.values()))
    assert seen >= EVERY_STEP | EVERY_END


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG)
def test_every_reachable_state_is_right_in_the_long_form(name: str) -> None:
    coverage = explore(LONG[name])
    print(f"{coverage.states} states, {coverage.steps} steps, depth {coverage.depth}")
