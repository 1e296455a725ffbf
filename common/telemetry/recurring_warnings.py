# SPDX-License-Identifier: Apache-2.0
"""Warnings about what lasts: one per cause and subject, and again after a minute."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

REPEAT_S = 60.0
MAX_SUBJECTS = 256
"""Pairs of a cause and a subject within `REPEAT_S`; nothing is logged of more."""


class RecurringWarnings:
    """Logs a warning that is given again and again once per `REPEAT_S`. For one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}
        """The oldest first."""

    def warn(self, cause: str, subject: str, message: str, *args: object) -> None:
        """Log the warning, unless one of this cause and subject was logged within `REPEAT_S`."""
        now, logged_at = self._clock(), self._logged_at
        while logged_at and now - logged_at[oldest := next(iter(logged_at))] >= REPEAT_S:
            del logged_at[oldest]
        if (cause, subject) not in logged_at and len(logged_at) < MAX_SUBJECTS:
            logged_at[cause, subject] = now
            self._logger.warning(message, *args)

    def over(self, cause: str, subject: str) -> None:
        """Note that it does not last: when it comes back, it is logged at once."""
        self._logged_at.pop((cause, subject), None)


class StatusLog:
    """Logs the status of one peer when it changes, and a warning again once per `REPEAT_S`."""

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._status: str | None = None
        self._logged_at = -math.inf

    def note(self, status: str, level: int) -> None:
        """Log the status, unless it was logged last and is no warning that is due again."""
        now = time.monotonic()
        if status != self._status or (level >= logging.WARNING and now - self._logged_at >= REPEAT_S):
            self._status, self._logged_at = status, now
            self._logger.log(level, "%s %s", self._name, status)
