# SPDX-License-Identifier: Apache-2.0
"""The phases of a request, as metrics, logs and the `Server-Timing` header name them."""

from __future__ import annotations

from kvferry.agent.engine.messages import Timing


def phases(timing: Timing) -> dict[str, float]:
    """Seconds by phase; those of a pull only where there was one, and its tail only where it had a head."""
    seconds = {
        "queue": timing.queue_s,
        "prefill": timing.prefill_s,
        "pull_wait": timing.pull_wait_s,
        "pull": timing.pull_s,
        "pull_tail": timing.pull_tail_s,
        "decode_queue": timing.decode_queue_s,
        "first_step": timing.first_step_s,
    }
    if timing.backend is None:
        del seconds["pull_wait"], seconds["pull"]
    if not timing.pull_early_blocks:
        del seconds["pull_tail"]
    return seconds
