# SPDX-License-Identifier: Apache-2.0
"""What is known of one pair from its probes, and whether it stays in rotation.

| state | an answer is as the reference's | an answer differs |
|---|---|---|
| trusted | – | → suspect |
| suspect | after `MEMORY` of them in a row → trusted | → out |
| out | after enough of them in a row → trusted | the count begins again |

One difference takes no pair out: it may be a fault of the machine at that moment. Two within `MEMORY` probes
are a fault. A pair that was out comes back after three times as many right answers as lay between its two
wrong ones, so that a fault that shows seldom is not taken for mended: the chance that it stays hidden for so
long is 5 %.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from kvferry.common.state_machine import transition

MEMORY = 1000
"""Probes of a pair in which two differences take it out."""
LEAST_RIGHT = 10
"""Right answers in a row, at least, that bring a pair back."""


class PairTrust(enum.StrEnum):
    TRUSTED = "trusted"
    SUSPECT = "suspect"
    """One answer differed."""
    OUT = "out"
    """Two did: clients' requests go to other pairs."""


TRUST_TRANSITIONS: dict[PairTrust, frozenset[PairTrust]] = {
    PairTrust.TRUSTED: frozenset({PairTrust.SUSPECT}),
    PairTrust.SUSPECT: frozenset({PairTrust.TRUSTED, PairTrust.OUT}),
    PairTrust.OUT: frozenset({PairTrust.TRUSTED}),
}


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One probe, for operators. `verdict`: "same", "different", "learning" (the tolerance is not known yet)
    or "failed"; `state`: the pair's, afterwards; `difference` and `tolerance` in nats.
    """

    model: str
    pair: str
    verdict: str
    state: PairTrust
    difference: float | None
    tolerance: float
    detail: str


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """A `PairRecord`, for operators. `age_s`: of the last probe."""

    pair: str
    state: PairTrust
    probes: int
    different: int
    failed: int
    last: str
    age_s: float


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the canary of one proxy process knows. `tolerances`: by model, in nats; `tokens`: spent on probes,
    prompts included.
    """

    pairs: list[PairReport]
    tolerances: dict[str, float]
    tokens: int


@dataclass(slots=True)
class PairRecord:
    """The probes of one pair. `state` and what it follows from are changed by `note` alone."""

    name: str
    state: PairTrust = PairTrust.TRUSTED
    probes: int = 0
    different: int = 0
    failed: int = 0
    """Probes without an answer, which say nothing about answers."""
    right_in_a_row: int = 0
    needs_right: int = LEAST_RIGHT
    """Right answers in a row after which a pair that is out comes back."""
    last: str = ""
    """The last comparison, for operators."""
    probed_at: float = float("-inf")
    """Monotonic seconds."""

    def note(self, *, is_same: bool) -> bool:
        """Count a probe that was answered. Returns whether the state has changed."""
        before = self.state
        self.probes += 1
        if is_same:
            self.right_in_a_row += 1
            needed = MEMORY if before is PairTrust.SUSPECT else self.needs_right
            if before is not PairTrust.TRUSTED and self.right_in_a_row >= needed:
                self._enter(PairTrust.TRUSTED)
            return self.state is not before
        self.different += 1
        if before is PairTrust.TRUSTED:
            self._enter(PairTrust.SUSPECT)
        elif before is PairTrust.SUSPECT:
            self.needs_right = max(LEAST_RIGHT, 3 * self.right_in_a_row)
            self._enter(PairTrust.OUT)
        self.right_in_a_row = 0
        return self.state is not before

    def report(self, now: float) -> PairReport:
        """Return what is shown of it; `now` is in monotonic seconds."""
        return PairReport(
            pair=self.name,
            state=self.state,
            probes=self.probes,
            different=self.different,
            failed=self.failed,
            last=self.last,
            age_s=round(now - self.probed_at, 1),
        )

    def _enter(self, state: PairTrust) -> None:
        self.state = transition(f"pair {self.name}", TRUST_TRANSITIONS, self.state, state)
