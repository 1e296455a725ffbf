# SPDX-License-Identifier: Apache-2.0
"""Log lines of every process of an agent: `{time} {level} {process} {message}` on stderr."""

from __future__ import annotations

import logging


def configure_logging(process: str, level: str) -> None:
    """Send this process's log records to stderr, each marked with the process that wrote it."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {process} %(message)s",
        force=True,
    )
