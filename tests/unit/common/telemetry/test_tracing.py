# SPDX-License-Identifier: Apache-2.0
"""When traces are on, and what that takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.common.telemetry.tracing import check_endpoint, open_tracing

LONG_STATE = ",".join(f"k{number}={'v' * 200}" for number in range(3))
IMPORTS = """
import sys
import kvferry.proxy.__main__, kvferry.agent.cli
from kvferry.common.telemetry.tracing import open_tracing
assert open_tracing(None, {"service.name": "x"}) is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
NOT_INSTALLED = """
import logging, sys
sys.modules["opentelemetry"] = None
from kvferry.common.telemetry.logs import configure_logging
from kvferry.common.telemetry.tracing import open_tracing
configure_logging("proxy", "info", "text")
assert open_tracing(None, {"service.name": "x"}) is None
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, env=env
    )


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    assert run(IMPORTS).stdout.strip() == "[]"


def test_an_environment_that_asks_for_traces_without_the_sdk_gets_a_warning() -> None:
    done = run(NOT_INSTALLED, OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:4318")
    assert "WARNING" in done.stderr and "pip install '.[otel]'" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "console"}],
)
def test_the_environment_can_switch_traces_off(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert open_tracing("http://localhost:4318", {"service.name": "x"}) is None


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://x:port"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"otlp_endpoint must be a URL such as http://localhost:4318, got"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", [None, "http://localhost:4318", "https://[::1]:4318/otlp/"])
def test_an_endpoint_is_the_url_of_a_collector(endpoint: str | None) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(("state", "passed_on"), [("a=b", "a=b"), (LONG_STATE, None)])
def test_a_long_tracestate_is_not_read(state: str, passed_on: str | None) -> None:
    """60,000 spaces in one held the proxy for 26 s, with OpenTelemetry 1.34."""
    tracing = open_tracing("http://127.0.0.1:9", {})
    assert tracing is not None
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    span = tracing.serve("POST", 0.0, {"traceparent": parent, "tracestate": state}, {})
    assert span.trace_id == "1" * 32
    assert span.headers().get("tracestate") == passed_on
