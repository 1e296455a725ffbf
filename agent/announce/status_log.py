# SPDX-License-Identifier: Apache-2.0
"""Logs the status of a peer: when it changes, and a warning again while its cause lasts."""

from __future__ import annotations

import logging
import math
import time

REMINDER_S = 60.0
"""How long after a warning it is logged again."""


class StatusLog:
    """The log lines about one peer."""

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._status: str | None = None
        self._logged_at = -math.inf

    def note(self, status: str, level: int) -> None:
        """Log the status if it is new, or a warning that was last logged `REMINDER_S` ago."""
        now = time.monotonic()
        if status != self._status or (level >= logging.WARNING and now - self._logged_at >= REMINDER_S):
            self._status, self._logged_at = status, now
            self._log.log(level, "%s %s", self._name, status)
