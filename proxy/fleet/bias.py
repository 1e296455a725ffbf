# SPDX-License-Identifier: Apache-2.0
"""How wrong predictions of an agent were lately, and the factors that correct its later ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MAX_BIAS = 4.0
MAX_RATIO = 16.0
"""A prediction that was more wrong than this counts as so wrong."""
LONGEST_S = 1e6
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

    def note(self, predicted_s: float, actual_s: float, bias: float) -> float | None:
        """Count a prediction that had this correction. Returns its error, the actual time over the predicted
        one; None, and counts nothing, where one of them is no time.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < LONGEST_S):
            return None
        ratio = min(max(actual_s / predicted_s, 1.0 / MAX_RATIO), MAX_RATIO)
        plain_s = actual_s / ratio / bias
        if not self.predicted_s:
            self.predicted_s = self.actual_s = plain_s
        self.predicted_s += (plain_s - self.predicted_s) * GAIN
        self.actual_s += (actual_s - self.actual_s) * GAIN
        return ratio

    @property
    def bias(self) -> float:
        """The factor for later predictions."""
        if not self.predicted_s:
            return 1.0
        return min(max(self.actual_s / self.predicted_s, 1.0 / MAX_BIAS), MAX_BIAS)
