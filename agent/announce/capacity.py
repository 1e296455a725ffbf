# SPDX-License-Identifier: Apache-2.0
"""What an engine's work takes, measured while it works: for proxies, which say how many agents are wanted.

The model. An engine works in steps. A step that decodes n sequences, one token each, takes a + n·b seconds;
a and b are fitted to the steps that did nothing else. What a step with chunks of prompts takes beyond that
went into the prompts. Without b for each sequence, it takes c + n·d seconds for n tokens of prompts. Times
are from the end of one step to the end of the next while there is work, so what is done between steps is in
them. Only times of work count: an idle engine forgets nothing.
"""

from __future__ import annotations

import math

from kvferry.proxy.wire.registration import Capacity

MEMORY_S = 60.0
"""Seconds of work after which a measurement has lost most of its weight."""
MIN_STEPS = 8
"""Steps of decoding before what they take is said: the first ones of an engine are slow."""
_CAUTION = 2.0
"""Standard errors that are added to `sequence_s`: a batch larger than any seen is not taken for free."""


class StepFit:
    """Least squares of steps' seconds over sequences, or tokens of prompts, in them, which forgets."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._n = self._s = self._nn = self._ns = self._ss = 0.0

    def add(self, n: int, seconds: float) -> None:
        """Take one step with so many sequences, or tokens."""
        keep = math.exp(-seconds / MEMORY_S)
        self._count += 1
        self._weight = self._weight * keep + 1.0
        self._n = self._n * keep + n
        self._s = self._s * keep + seconds
        self._nn = self._nn * keep + n * n
        self._ns = self._ns * keep + n * seconds
        self._ss = self._ss * keep + seconds * seconds

    def line(self, least: float = 0.0) -> tuple[float, float] | None:
        """Return `a`, which is not below `least`, and `b`, which is not negative; None before `MIN_STEPS`.

        `b` is as high as it may well be, and at most so high that a larger batch would gain nothing.
        """
        if self._count < MIN_STEPS:
            return None
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        steepest = mean_s / mean_n
        spread = self._nn / self._weight - mean_n * mean_n
        slope = steepest
        if spread > 1e-9 * mean_n * mean_n:  # not all of one size
            slope = (self._ns / self._weight - mean_n * mean_s) / spread
            unexplained = max(0.0, self._ss / self._weight - mean_s * mean_s - slope * slope * spread)
            error = math.sqrt(unexplained / (spread * self._weight))
            slope = min(max(0.0, slope) + _CAUTION * error, steepest)
        fixed = min(mean_s, max(least, mean_s - slope * mean_n if slope < steepest else 0.0))
        return fixed, min(slope, (mean_s - fixed) / mean_n)


class CapacityMeter:
    """Measures one engine.

    Args:
        max_running: Most sequences that it runs at once.
        num_blocks: Its KV blocks.
    """

    def __init__(self, max_running: int, num_blocks: int) -> None:
        self._max_running = max_running
        self._num_blocks = num_blocks
        self._prompts = 0
        self._prefill_s = self._decode_s = 0.0
        self._answers = 0
        self._answer_tokens = 0
        self._fit = StepFit()
        self._prompt_fit = StepFit()
        # Of late: seconds of prefill and tokens that they were for; blocks and the sequences that held them.
        self._late_prefill_s = self._late_tokens = 0.0
        self._late_blocks = self._late_holders = 0.0

    def step(
        self, seconds: float, *, prompt_tokens: int, decoded: int, blocks_used: int, holders: int
    ) -> None:
        """Take one step.

        Args:
            seconds: Since it began, or since the step before, if that had ended just then.
            prompt_tokens: That were computed.
            decoded: Sequences of which one token was computed.
            blocks_used: By sequences, at its end; `holders`: those sequences.
        """
        if prompt_tokens:
            self._take_prefill(seconds, prompt_tokens, decoded)
        elif decoded:
            self._fit.add(decoded, seconds)
            self._decode_s += seconds
        if decoded and holders:
            keep = math.exp(-seconds / MEMORY_S)
            self._late_blocks = self._late_blocks * keep + blocks_used
            self._late_holders = self._late_holders * keep + holders

    def cached(self, tokens: int) -> None:
        """Take tokens of a prompt that need not be computed."""
        self._late_tokens += tokens

    def prompt_done(self) -> None:
        """Count a prompt that no other agent had computed."""
        self._prompts += 1

    def answer_done(self, tokens: int) -> None:
        """Count a sequence that has ended, and its tokens that were decoded here."""
        self._answers += 1
        self._answer_tokens += tokens

    def report(self, pending_tokens: int) -> Capacity:
        """Return what was measured. `pending_tokens`: of prompts that are not computed yet."""
        line = self._fit.line()
        prompt_line = self._prompt_fit.line(0.0 if line is None else line[0])
        token_s = self._late_prefill_s / self._late_tokens if self._late_tokens else None
        return Capacity(
            prompts=self._prompts,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            answers=self._answers,
            answer_tokens=self._answer_tokens,
            slots=self._slots(),
            step_s=line and line[0],
            sequence_s=line and line[1],
            prompt_step_s=prompt_line and prompt_line[0],
            prompt_token_s=prompt_line and prompt_line[1],
            token_s=token_s,
            backlog_s=None if token_s is None else pending_tokens * token_s,
        )

    def _take_prefill(self, seconds: float, tokens: int, decoded: int) -> None:
        line = self._fit.line() if decoded else (0.0, 0.0)
        if line is None:
            decode_s = seconds * decoded / (decoded + tokens)
        else:
            decode_s = min(seconds, line[0] + line[1] * decoded)
            self._prompt_fit.add(tokens, max(0.0, seconds - line[1] * decoded))
        spent = seconds - decode_s
        keep = math.exp(-spent / MEMORY_S)
        self._prefill_s += spent
        self._decode_s += decode_s
        self._late_prefill_s = self._late_prefill_s * keep + spent
        self._late_tokens = self._late_tokens * keep + tokens

    def _slots(self) -> int:
        if not self._late_blocks:
            return self._max_running
        held = self._num_blocks * self._late_holders / self._late_blocks
        return max(1, min(self._max_running, int(held)))
