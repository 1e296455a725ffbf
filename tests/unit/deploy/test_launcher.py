# SPDX-License-Identifier: Apache-2.0
"""The log of a process that `kvferry up` has started stays bounded, whatever becomes of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.deploy import launcher
from kvferry.deploy.launcher import LogFile


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
