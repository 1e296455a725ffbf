# SPDX-License-Identifier: Apache-2.0
"""Whether a process makes OpenTelemetry traces. Off, nothing of OpenTelemetry is imported.

On with an endpoint, given as a setting or by OpenTelemetry's environment variables. The SDK is an extra
(`otel`), and reads what else there is to set from its own variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Attributes, Tracing

FLUSH_TIMEOUT_S = 3.0
"""For the last export, when a process ends."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_LACKING = "needs the extra otel: in a clone of kvferry, pip install '.[otel]'"

_log = logging.getLogger(__name__)


def open_tracing(endpoint: str | None, about: Attributes) -> Tracing | None:
    """Start to trace, if that is on and the SDK is installed; `about` are attributes of this process."""
    if not _is_on(endpoint):
        return None
    if not _has_sdk():
        _log.warning("traces are off: OTEL_EXPORTER_OTLP_ENDPOINT %s", _LACKING)
        return None
    from kvferry.common.telemetry.spans import Tracing

    return Tracing(endpoint, about)


def check_endpoint(endpoint: str | None) -> None:
    """Raise `ValueError` that names `otlp_endpoint` if it is no URL, or the SDK is not installed."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"otlp_endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
    if not _has_sdk():
        raise ValueError(f"otlp_endpoint {_LACKING}")


def _is_on(endpoint: str | None) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return False
    return endpoint is not None or any(os.environ.get(name) for name in _ENDPOINTS)


def _has_sdk() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
