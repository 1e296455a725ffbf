# SPDX-License-Identifier: Apache-2.0
"""Loads that turn from one kind of request to another."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvferry.deploy.bench.arrivals import SizedArrival

Kind = tuple[int, int, float]
"""Tokens of a prompt and of an answer, and requests per second."""


def turning(kinds: Sequence[Kind], turns: int, turn_s: float, seed: int = 3) -> list[SizedArrival]:
    """Return the arrivals of each kind in turn for so many seconds, with exponential gaps."""
    rng, load = Random(seed), list[SizedArrival]()
    for turn in range(turns):
        prompt, answer, rate = kinds[turn % len(kinds)]
        at = turn * turn_s
        while (at := at + rng.expovariate(rate)) < (turn + 1) * turn_s:
            load.append(SizedArrival(at, prompt, answer))
    return load
