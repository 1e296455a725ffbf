# SPDX-License-Identifier: Apache-2.0
"""Measures what vLLM's work takes, as the connector sees it in the scheduler: step by step, without outputs.

A step ends when vLLM takes its outputs, and begins when the one before it ended, which may be long after it
was scheduled: vLLM schedules steps ahead. Time in which nothing is scheduled does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.agent.announce.capacity import CapacityMeter
from kvferry.proxy.wire.registration import Capacity

REPORT_INTERVAL_S = 0.2
MAX_STEPS_AHEAD = 64
"""Steps that are scheduled and have not ended: vLLM has two, or as many as it has pipeline stages."""


@dataclass(slots=True)
class _Request:
    """One that has not ended. `request` is vLLM's, which says how far it is.

    `fetches`: its prompt is computed elsewhere. `decoded`: steps that decoded a token of it.
    """

    request: Any
    fetches: bool
    is_scheduled: bool = False
    is_prompt_done: bool = False
    decoded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """`at`: when it was scheduled."""

    at: float
    requests: tuple[str, ...]
    prompt_tokens: int
    decoded: int


class StepMeter:
    """Called by the scheduler's thread; others may read `capacity`.

    Args:
        blocks_used: How many KV blocks sequences hold now.
        clock: Monotonic seconds.
        count_prompt: Called for each prompt that is computed here when it begins: its tokens, and how many of
            them the prefix cache had.
    """

    def __init__(
        self,
        max_running: int,
        num_blocks: int,
        blocks_used: Callable[[], int],
        clock: Callable[[], float],
        count_prompt: Callable[[int, int], None],
    ) -> None:
        self._meter = CapacityMeter(max_running, num_blocks)
        self._blocks_used = blocks_used
        self._clock = clock
        self._count_prompt = count_prompt
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS_AHEAD)
        self._ended_at = float("-inf")
        self._is_working = False
        """Requests of the last step that ended go on: until the next one begins, too, vLLM works."""
        self._reported_at = float("-inf")
        self.capacity: Capacity = self._meter.report(0)
        """At most `REPORT_INTERVAL_S` old."""

    def begun(self, request: Any, *, fetches: bool) -> None:
        """Note a request of vLLM's. `fetches`: another server has computed its prompt."""
        self._requests[request.request_id] = _Request(request, fetches)

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """Take a step, before vLLM counts its tokens as computed: how many of each request are in it."""
        prompt_tokens = decoded = 0
        for request_id, count in tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                of_prompt, is_decoded = self._classify(request, count)
                prompt_tokens += of_prompt
                decoded += is_decoded
        self._steps.append(
            _Step(at=self._clock(), requests=tuple(tokens), prompt_tokens=prompt_tokens, decoded=decoded)
        )

    def outputs_taken(self) -> None:
        """End the oldest step: vLLM has its outputs, and has ended the requests that end with it."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        if step.requests:
            began_at = self._ended_at if self._is_working else max(step.at, self._ended_at)
            self._meter.step(
                now - began_at,
                prompt_tokens=step.prompt_tokens,
                decoded=step.decoded,
                blocks_used=self._blocks_used(),
                holders=len(step.requests),
            )
        self._is_working = any(request_id in self._requests for request_id in step.requests)
        self._ended_at = now
        if not self._requests or now - self._reported_at >= REPORT_INTERVAL_S:
            self._report(now)

    def ended(self, request_id: str) -> None:
        """Note that a request has ended, in whatever way."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.decoded:
            self._meter.answer_done(request.decoded)
        if not self._requests:
            self._report(self._clock())

    def _classify(self, taken: _Request, count: int) -> tuple[int, bool]:
        """Note one request's part of a step; return its tokens of the prompt, and whether one was decoded."""
        length, computed = taken.request.num_prompt_tokens, taken.request.num_computed_tokens
        if not taken.is_scheduled:
            taken.is_scheduled = True
            if not taken.fetches:
                self._meter.cached(min(computed, length))
                self._count_prompt(length, min(computed, length))
        # vLLM computes the last token of a prompt that it has fetched, to sample from it: that is decoding. A
        # request that was preempted is computed again from its beginning, which is not.
        is_decoded = computed + 1 >= length and (taken.is_prompt_done or (taken.fetches and count == 1))
        if not taken.is_prompt_done and computed + count >= length:
            taken.is_prompt_done = True
            if not taken.fetches:
                self._meter.prompt_done()
        taken.decoded += is_decoded
        return 0 if is_decoded else count, is_decoded

    def _report(self, now: float) -> None:
        self._reported_at = now
        self.capacity = self._meter.report(sum(map(_pending_tokens, self._requests.values())))


def _pending_tokens(taken: _Request) -> int:
    if taken.fetches:
        return 0
    return max(0, int(taken.request.num_prompt_tokens) - int(taken.request.num_computed_tokens))
