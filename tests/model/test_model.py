# SPDX-License-Identifier: Apache-2.0
"""Exhaustive check of I1–I3, I6 and I7 over bounded worlds, on the product's own state machines."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.scenarios import LONG, SHORT

pytestmark = pytest.mark.long

EVERY_STEP = {
    *("register", "advance", "ready", "preempt", "drop", "expire", "time", "restart"),
    *("open", "renew", "lose", "unanswered", "cancel", "crash", "deliver", "repeat"),
    *("read", "damage", "verify", "clear", "break", "quiesce", "report", "report-again", "report-quiescent"),
}
EVERY_END = {
    *("pull done", "pull checksum", "pull invalid", "pull read_failed", "pull cancelled", "pull incarnation"),
    *("pull unreachable", "pull lease_unknown", "pull lease_expired", "pull lease_dropped"),
    *("pull lease_finished", "pull lease_withdrawn", "pull lease_gone", "quarantine ended"),
    *("lease released", "lease expired", "lease dropped"),
}


@pytest.mark.timeout(300)
def test_every_reachable_state_is_right_and_every_step_and_end_is_reached(subtests: pytest.Subtests) -> None:
    """The assertions, and which invariant each of them is, are listed in `tests/model/protocol.py`.

    One test for all worlds: a check that none of them reaches proves nothing, and that only all can tell.
    """
    seen: set[str] = set()
    for name, world in SHORT.items():
        with subtests.test(msg=name):
            coverage = explore(world)
            print(f"{name}: {coverage.states} states, {coverage.steps} steps, depth {coverage.depth}")
            assert coverage.states > 1000
            assert coverage.complete == (world.depth == 64)
            seen |= coverage.seen
    assert seen >= EVERY_STEP | EVERY_END


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG)
def test_every_reachable_state_is_right_in_the_long_form(name: str) -> None:
    coverage = explore(LONG[name])
    print(f"{coverage.states} states, {coverage.steps} steps, depth {coverage.depth}")
