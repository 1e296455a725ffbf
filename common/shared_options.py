# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have. A settings class inherits those of each concern that it has.

None of these classes has slots: Python lets no class inherit from two that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.common.telemetry.logs import LogFormat
from kvferry.common.telemetry.tracing import check_endpoint

LogLevel = Literal["debug", "info", "warning", "error"]
MAX_PORT = 65535


def check_ports(**ports: int) -> None:
    """Raise ValueError that names one that is none."""
    for name, port in ports.items():
        if not 0 <= port <= MAX_PORT:
            raise ValueError(f"{name} must be a port number (0-{MAX_PORT}), got {port}")


def check_not_negative(**numbers: float) -> None:
    """Raise ValueError that names one that is; or that is no number."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} must not be negative, got {number}")


def check_positive(**numbers: float | None) -> None:
    """Raise ValueError that names one that is given and is not greater than 0."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be greater than 0, got {number}")


def check_at_least_1(**numbers: int | None) -> None:
    """Raise ValueError that names one that is given and is less."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How a process writes its log.

    Logs:
        log_level: Least severe log line written.
        log_format: text, or json for one JSON object per line.
    """

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Where a process sends its traces.

    Logs:
        otlp_endpoint: Base URL of an OpenTelemetry collector to which traces are sent by OTLP over HTTP, such
            as http://localhost:4318. Default: the value of OTEL_EXPORTER_OTLP_ENDPOINT, or no traces.
    """

    otlp_endpoint: str | None = None

    def check_traces(self) -> None:
        """Raise ValueError that names the wrong option."""
        check_endpoint(self.otlp_endpoint)


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How a process serves HTTP.

    Limits:
        max_body_bytes: Largest request body accepted.

    Security:
        tls_cert: PEM file with the certificate (and its chain) for serving by https; needs tls_key.
        tls_key: PEM file with the key that belongs to it, without a password.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    tls_cert: str | None = None
    tls_key: str | None = None

    def check_http(self) -> None:
        """Raise ValueError that names the wrong option."""
        check_at_least_1(max_body_bytes=self.max_body_bytes)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
