# SPDX-License-Identifier: Apache-2.0
"""Lines of a log, in both formats; read as another process would see them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from kvferry.common.telemetry.logs import Facts, JsonFormatter, LogFormat, TextFormatter

WRITES = """
import logging, sys, warnings
from kvferry.common.telemetry.logs import Facts, configure_logging
configure_logging("pro%cess", "info", sys.argv[1])
log = logging.getLogger("kvferry.some.request")
log.debug("not shown")
log.info("request %s", Facts({"request_id": "r\\n1", "status": 200, "level": "mine", "parts_s": {"a": 0.5}}))
log.info("%s", Facts({"request_id": "r2"}))
log.warning("two\\nlines of %d", 2, extra={"request_id": "r3", "trace_id": "0af7"})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
warnings.warn("old")
raise SystemError("the end")
"""


def written(form: LogFormat) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", WRITES, form],
        capture_output=True,
        text=True,
        timeout=30,
        env={"TZ": "Asia/Tokyo"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_json_is_one_object_a_line_whatever_is_logged() -> None:
    request, bare, warning, failed, warned, uncaught = (json.loads(line) for line in written("json"))
    assert list(request)[:5] == ["time", "level", "logger", "process", "message"]
    at = datetime.fromisoformat(request.pop("time"))
    assert at.utcoffset() == timedelta() and abs(at - datetime.now(UTC)) < timedelta(minutes=1)
    assert request == {
        "level": "INFO",
        "logger": "kvferry.some.request",
        "process": "pro%cess",
        "message": "request",
        "request_id": "r\n1",
        "status": 200,
        "parts_s": {"a": 0.5},
    }
    assert (bare["message"], bare["request_id"]) == ("request", "r2")
    assert warning["message"] == "two\nlines of 2"
    assert (warning["level"], warning["request_id"], warning["trace_id"]) == ("WARNING", "r3", "0af7")
    assert "ZeroDivisionError" in failed["exception"] and failed["message"] == "failed"
    assert warned["logger"] == "py.warnings" and "old" in warned["message"]
    assert (uncaught["level"], uncaught["message"]) == ("CRITICAL", "uncaught exception")
    assert "SystemError: the end" in uncaught["exception"]


def test_text_has_the_time_in_utc_and_facts_as_json() -> None:
    first = written("text")[0]
    found = re.fullmatch(r"(\S+ \S+Z) INFO pro%cess request (\{.*\})", first)
    assert found is not None, first
    assert abs(datetime.fromisoformat(found[1]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert json.loads(found[2])["request_id"] == "r\n1"


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_below_the_level_is_not_written(form: LogFormat) -> None:
    assert not [line for line in written(form) if "not shown" in line]


def test_a_line_is_never_lost_for_a_value_that_is_no_text() -> None:
    """A file's name may have bytes that are no UTF-8, which Python has as halves of surrogate pairs."""
    record = logging.LogRecord("kvferry", logging.INFO, "", 1, "%s: %s", ("a\udcff", Facts({"b": {1}})), None)
    line = json.loads(JsonFormatter("agent").format(record))
    assert (line["message"], line["b"]) == ("a\udcff:", "{1}")
    record.args = (Facts({"file": "a\udcff"}), "")
    assert TextFormatter("agent").format(record).endswith(r'INFO agent {"file": "a\udcff"}: ')
