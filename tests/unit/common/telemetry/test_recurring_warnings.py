# SPDX-License-Identifier: Apache-2.0
"""Warnings about what lasts."""

from __future__ import annotations

import logging

import pytest

from kvferry.common.telemetry.recurring_warnings import MAX_SUBJECTS, REPEAT_S, RecurringWarnings


def test_a_warning_comes_once_per_cause_and_subject_and_again_after_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    warnings = RecurringWarnings(logging.getLogger("kvferry.test"), lambda: now)
    for seconds in (0.0, 1.0, REPEAT_S - 0.1):
        now = seconds
        for cause in ("down", "lost"):
            for subject in ("a", "b"):
                warnings.warn(cause, subject, "%s: %s", subject, cause)
    assert sorted(caplog.messages) == ["a: down", "a: lost", "b: down", "b: lost"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    now = REPEAT_S
    warnings.warn("down", "a", "again")
    warnings.warn("down", "a", "again")
    assert caplog.messages.count("again") == 1


def test_what_is_over_is_logged_at_once_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RecurringWarnings(logging.getLogger("kvferry.test"), lambda: 0.0)
    for _ in range(2):
        warnings.warn("down", "a", "it is down")
        warnings.over("down", "a")
    warnings.over("down", "nobody")
    assert caplog.messages == ["it is down"] * 2


def test_whoever_makes_up_subjects_cannot_fill_the_log_or_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    warnings = RecurringWarnings(logging.getLogger("kvferry.test"), lambda: now)
    for number in range(10 * MAX_SUBJECTS):
        warnings.warn("down", str(number), "it is down")
    assert len(caplog.messages) == MAX_SUBJECTS
    now = REPEAT_S
    warnings.warn("down", "a", "it is down")
    assert len(caplog.messages) == MAX_SUBJECTS + 1
