# SPDX-License-Identifier: Apache-2.0
"""Threads for the long work on texts: decoding large bodies, templates and tokenizing."""

from __future__ import annotations

from kvferry.agent.errors import unavailable
from kvferry.common.work_pool import WorkPool

SHORT_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Most bytes of all texts that wait or are being worked on."""
TEXT_TIMEOUT_S = 30.0
"""How long a request waits for its text, the work included."""


def text_pool() -> WorkPool:
    """Return the threads of a process. Work that they do not come to raises `ApiError` 503."""
    return WorkPool(
        "texts",
        short_bytes=SHORT_BYTES,
        max_bytes=MAX_QUEUED_BYTES,
        timeout_s=TEXT_TIMEOUT_S,
        busy=lambda why: unavailable("tokenizer_busy", f"long texts wait for the tokenizer: {why}"),
    )
