# SPDX-License-Identifier: Apache-2.0
"""The request log: one JSON line per finished request, and its share of the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from werkzeug.exceptions import HTTPException

from kvferry.agent.api.generation import Delta, Generation
from kvferry.agent.api.metrics import AgentMetrics
from kvferry.agent.api.request_trace import end_trace
from kvferry.agent.errors import ApiError
from kvferry.common.telemetry.logs import Facts

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Span

log = logging.getLogger("kvferry.agent.request")

MAX_PROMPT_BYTES = 4096
CLIENT_GONE = 499  # as nginx logs it: the client had gone before a status was sent


class RequestLogEntry:
    """One request from its arrival to its end. Only the first `close` has an effect.

    `span`, where traces are on, is the request's; this ends it.
    """

    def __init__(
        self, metrics: AgentMetrics, request_id: str, traceparent: str | None, span: Span | None = None
    ) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._span = span
        self._facts: dict[str, Any] = {"request_id": request_id}
        if span is not None:
            self._facts["trace_id"] = span.trace_id
        elif traceparent is not None and traceparent.count("-") == 3:
            self._facts["trace_id"] = traceparent.split("-")[1]
        if traceparent is not None:
            self._facts["traceparent"] = traceparent
        self._generation: Generation | None = None
        self._has_prompt_to_count = False
        self._closed = False

    def show_prompt(self, prompt: bytes) -> None:
        """Put the beginning of the prompt, as JSON, on the line."""
        self._facts["prompt"] = prompt[:MAX_PROMPT_BYTES].decode(errors="ignore")

    def follow(self, generation: Generation, leg: str, transfer_id: str | None) -> None:
        """Put the figures of a generation on the line."""
        self._generation = generation
        self._has_prompt_to_count = leg != "decode"  # there it was counted by the prefill leg
        self._facts |= {"leg": leg, "transfer_id": transfer_id}

    def count(self, deltas: Sequence[Delta]) -> None:
        """Count what the choices gained at this agent; the prompt with the first of it.

        The first token of a streamed decode leg's choice was sampled, and counted, by the prefill leg.
        """
        generation, metrics = self._generation, self._metrics
        assert generation is not None, "a request that is not followed gains nothing"
        if self._has_prompt_to_count and deltas:
            self._has_prompt_to_count = False
            metrics.prompt_done(len(generation.request.prompt_ids), generation.cached_tokens)
        for delta in deltas:
            sampled = len(delta.token_ids) - (generation.request.streamed and delta.first)
            metrics.generation_tokens += sampled
            if delta.finish_reason is not None and (sampled or not delta.token_ids):
                metrics.choices_ended(delta.finish_reason, 1)

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the entry with the status of an exception, and re-raise it."""
        try:
            yield
        except ApiError as error:
            self.close(error.status, error.code)
            raise
        except HTTPException as error:
            self.close(error.code or 500)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.close(CLIENT_GONE)
            raise
        except BaseException:
            self.close(500)
            raise

    def close(self, status: int, code: str | None = None) -> None:
        """Write the line and count the request, once."""
        if self._closed:
            return
        self._closed = True
        timing = self._generation.timing if self._generation else None
        self._metrics.finished(status, timing)
        self._count_end(status)
        facts = self._facts | {"status": status, "seconds": round(time.monotonic() - self._start, 6)}
        if code is not None:
            facts["code"] = code
        if self._generation is not None:
            facts |= msgspec.to_builtins(self._generation.token_usage)
            facts["finish_reasons"] = [choice.finish_reason for choice in self._generation.choices]
        if timing is not None:
            facts["phases"] = {name: round(seconds, 6) for name, seconds in timing.phases().items()}
            # By a clock that the agents of one host share: their lines together show what overlapped.
            facts["prompt_done_at"], facts["first_step_at"] = timing.prompt_done_at, timing.first_step_at
        log.info("%s", Facts(facts))
        if self._span is not None:
            failed_pull = self._generation.failed_pull if self._generation else None
            about = self._described()
            end_trace(self._span, time.monotonic(), status, code, timing, about, failed_pull=failed_pull)

    def _described(self) -> dict[str, str | int]:
        """What the request's span says of it."""
        known = {"kvferry.leg": self._facts.get("leg"), "kvferry.transfer_id": self._facts.get("transfer_id")}
        about: dict[str, str | int] = {name: value for name, value in known.items() if value is not None}
        if self._generation is not None:
            usage = self._generation.token_usage
            about |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        return about

    def _count_end(self, status: int) -> None:
        """Count the length of an answer where it ends; what a failure leaves unfinished is no answer."""
        generation = self._generation
        if generation is None:
            return
        if generation.finished and status == 200:
            self._metrics.answer_tokens.observe(generation.token_usage.completion_tokens)
        elif status != 200:
            unfinished = sum(choice.finish_reason is None for choice in generation.choices)
            self._metrics.choices_ended("abort" if status == CLIENT_GONE else "error", unfinished)
