# SPDX-License-Identifier: Apache-2.0
"""How wrong predictions of an agent were lately, and the factors that correct its later ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MAX_BIAS = 4.0
MAX_RATIO = 16.0
"""A prediction that was more wrong than this counts as so wrong."""
LONGEST_S = 3600.0
"""A time that is predicted or taken to be longer tells nothing."""
FORGET_S = 60.0
"""Time constant with which a correction that nothing confirms returns to 1."""
GAIN = 0.02
"""Weight of one request in the means: they remember about 50."""


class Bias(NamedTuple):
    """Corrects predictions of an agent: of the time to the first token (prefill), and per token (decode)."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(slots=True)
class MeanError:
    """Means of the seconds that were predicted, without a correction, and of those that it took.

    Means of seconds, and not of their ratios: long prompts tell more than short ones.
    """

    predicted_s: float = 0.0
    actual_s: float = 0.0
    updated_at: float = 0.0

    def update(self, predicted_s: float, actual_s: float, bias: float, now: float) -> float | None:
        """Count a prediction that had this correction. Returns its error, the actual time over the predicted
        one; None, and counts nothing, where one of them is no time.
        """
        if not (0.0 < predicted_s < LONGEST_S and 0.0 < actual_s < LONGEST_S):
            return None
        ratio = min(max(actual_s / predicted_s, 1.0 / MAX_RATIO), MAX_RATIO)
        uncorrected_s = predicted_s / bias
        if not self.predicted_s:
            self.predicted_s = self.actual_s = uncorrected_s
        self.predicted_s += (uncorrected_s - self.predicted_s) * GAIN
        self.actual_s += (ratio * predicted_s - self.actual_s) * GAIN
        self.updated_at = now
        return ratio

    def bias(self, now: float) -> float:
        """The factor for later predictions. It returns to 1 while there are none: an agent that was slow once
        would get no request, and never be measured again.
        """
        if not self.predicted_s:
            return 1.0
        bias = min(max(self.actual_s / self.predicted_s, 1.0 / MAX_BIAS), MAX_BIAS)
        return float(bias ** math.exp(min(0.0, (self.updated_at - now) / FORGET_S)))
