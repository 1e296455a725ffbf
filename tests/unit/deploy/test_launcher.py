# SPDX-License-Identifier: Apache-2.0
"""The log of a process that `kvferry up` has started: it stays bounded, and says why the process ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvferry.common.telemetry.logs import JsonFormatter, LogFormat, TextFormatter
from kvferry.deploy import launcher
from kvferry.deploy.launcher import LogFile, how_it_ended, reason_in


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogFile:
    """A log of which the first line is of another run."""
    monkeypatch.setattr(launcher, "MAX_LOG_BYTES", 20)
    path = tmp_path / "proxy.log"
    path.write_text("earlier\n")
    return LogFile(path, start=8)


def test_a_large_log_is_moved_aside_and_the_process_writes_on(log: LogFile) -> None:
    with log.path.open("a", buffering=1) as process:
        process.write("one\n")
        log.rotate()
        assert log.tail(5) == "one"
        process.write("two, and that is enough\n")
        log.rotate()
        assert log.path.read_text() == ""
        assert Path(f"{log.path}.1").read_text() == "earlier\none\ntwo, and that is enough\n"
        process.write("three\n")
    assert log.path.read_text() == "three\n"
    assert log.tail(5) == "three"


def test_a_log_is_emptied_even_where_it_cannot_be_kept(log: LogFile) -> None:
    log.path.write_text("x" * 100)
    Path(f"{log.path}.1").mkdir()
    log.rotate()
    assert log.path.read_text() == ""
    log.path.unlink()
    log.rotate()


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_reason_of_an_end_is_the_first_error_in_either_format(form: LogFormat) -> None:
    """With `json` it was the last line, whatever that was about."""
    formatter = JsonFormatter("agent") if form == "json" else TextFormatter("agent")
    lines = [
        formatter.format(logging.makeLogRecord({"levelname": level, "msg": message}))
        for level, message in (
            ("INFO", "loads"),
            ("ERROR", "no such model"),
            ("ERROR", "ends"),
            ("INFO", "x"),
        )
    ]
    assert reason_in(lines) == "no such model"
    assert reason_in([*lines[:1], "a library's own words"]) == "a library's own words"
    assert reason_in(['{"torn', "{}"]) == "{}"
    assert reason_in([]) == "its log is empty"


def test_an_exception_that_ended_a_process_is_a_reason() -> None:
    line = '{"level": "CRITICAL", "message": "uncaught exception", "exception": "Traceback\\nValueError: no"}'
    assert reason_in([line, "last"]) == "uncaught exception: ValueError: no"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "0"),
        (1, "1: 503 draining"),
        (-6, "-6: 503 draining"),
        (-9, "-9: it was killed (SIGKILL), as the kernel does when memory runs out"),
    ],
)
def test_a_process_that_was_killed_has_not_written_why(log: LogFile, status: int, said: str) -> None:
    """Its last line, of some request that went well, was given as the reason."""
    log.path.write_text("earlier\n503 draining\n")
    assert how_it_ended(status, log) == said
