# SPDX-License-Identifier: Apache-2.0
"""The spans of one request at the agent, made when it ends, of the times that its engine reports.

They have the names of the phases of `Timing`. Only where traces are on (`common.telemetry.tracing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.agent.messages.requests import FailedPull, Timing

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Attributes, Span


def end_trace(
    span: Span,
    at: float,
    status: int,
    code: str | None,
    timing: Timing | None,
    about: Attributes,
    *,
    failed_pull: FailedPull | None = None,
) -> None:
    """End the request's span, with those of its phases if the engine has reported them.

    A failed pull is reported of a request that fails, too.
    """
    if failed_pull is not None:
        _add_failed_pull(span, failed_pull)
    if timing is not None:
        _add_phases(span, timing, at)
        about = {**about, "kvferry.recomputed": timing.recomputed}
    span.set_attributes({**about, "http.response.status_code": status})
    if status >= 500:
        span.fail(code or str(status))
    elif code is not None:
        span.set_attributes({"error.type": code})
    span.end(at)


def _add_phases(span: Span, timing: Timing, ended_at: float) -> None:
    """Queue, then a prefill or a pull, then decoding: each where the leg had it."""
    if timing.arrived_at is None:
        return
    phases = timing.phases()
    admitted_at = timing.arrived_at + timing.queue_s
    _add(span, "queue", timing.arrived_at, admitted_at)
    computed_from = admitted_at
    if "prefix_pull" in phases:
        computed_from += timing.prefix_pull_s
        moved = {"kvferry.bytes": timing.prefix_pull_bytes, "kvferry.tokens": timing.prefix_tokens}
        _add(span, "prefix_pull", admitted_at, computed_from, moved, failure=timing.prefix_failure)
    if "prefill" in phases:
        computed_at = computed_from + timing.prefill_s
        if timing.failed_pull is not None:
            computed_from = timing.failed_pull.ended_at
        _add(span, "prefill", computed_from, computed_at)
    if "pull" in phases and timing.pull_began_at is not None:
        _add(span, "pull_wait", timing.pull_began_at - timing.pull_wait_s, timing.pull_began_at)
        _add_pull(span, timing, timing.pull_began_at)
    if timing.prompt_done_at is not None and timing.first_step_at is not None:
        _add(span, "decode_queue", timing.prompt_done_at, timing.first_step_at)
        _add(span, "decode", timing.first_step_at, ended_at)


def _add_pull(span: Span, timing: Timing, began_at: float) -> None:
    """The pull, and in it what each rank has read; the rest of it is the proof."""
    about: Attributes = {
        "kvferry.backend": timing.backend or "",
        "kvferry.bytes": timing.pull_bytes,
        "kvferry.descriptors": timing.pull_descriptors,
        "kvferry.early_blocks": timing.pull_early_blocks,
    }
    pull = span.child("pull", began_at, about)
    for read in timing.rank_reads:
        of_rank: Attributes = {
            "kvferry.rank": read.rank,
            "kvferry.bytes": read.nbytes,
            "kvferry.descriptors": read.descriptors,
        }
        _add(pull, "read", read.began_at, read.ended_at, of_rank)
    pull.end(began_at + timing.pull_s)


def _add_failed_pull(span: Span, pull: FailedPull) -> None:
    """A pull whose bytes, if any came, were thrown away."""
    about = {"kvferry.backend": pull.backend}
    _add(span, "pull", pull.began_at, pull.ended_at, about, failure=pull.reason)


def _add(
    span: Span,
    name: str,
    began_at: float,
    ended_at: float,
    about: Attributes | None = None,
    *,
    failure: str | None = None,
) -> None:
    child = span.child(name, began_at, about)
    if failure is not None:
        child.fail(failure)
    child.end(ended_at)
