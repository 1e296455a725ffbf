# SPDX-License-Identifier: Apache-2.0
"""The log of a process, on stderr: lines of text, or one JSON object a line (`--log-format`)."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]

_log = logging.getLogger(__name__)


class Facts:
    """Named values as the last argument of a log call: JSON in a line of text, members of a JSON line."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = facts

    def __str__(self) -> str:
        return _json(self.facts)


class TextFormatter(logging.Formatter):
    """`{time in UTC} {level} {process} {message}`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')} %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _utc(record.created, " ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `process`, `message`, then what the
    record carries: `request_id` and `trace_id` (from `extra`), the members of `Facts`, `exception`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message, facts = _split(record)
        line: dict[str, object] = {
            "time": _utc(record.created, "T"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": message,
        }
        for name in ("request_id", "trace_id"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return _json(line)


def configure_logging(process: str, level: str, form: LogFormat) -> None:
    """Send log records of at least this level to stderr. `process` is named in every line.

    With `json`, Python's warnings and an exception that ends the process become such lines too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("uncaught exception", exc_info=(kind, error, trace))


def _split(record: logging.LogRecord) -> tuple[str, Mapping[str, object]]:
    """Return a record's message without its facts, and these. Of nothing else it is the logger's name."""
    args = record.args
    if not isinstance(args, tuple) or not args or not isinstance(args[-1], Facts):
        return record.getMessage(), {}
    message = (str(record.msg) % (*args[:-1], "")).strip()
    return message or record.name.rpartition(".")[2], args[-1].facts


def _json(value: Mapping[str, object]) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError):  # half of a surrogate pair, as names of files may have
        return json.dumps(value, default=str)


def _utc(seconds: float, separator: str) -> str:
    """Return Unix seconds as ISO 8601 in UTC, with milliseconds."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime(f'%Y-%m-%d{separator}%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"
