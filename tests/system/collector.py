# SPDX-License-Identifier: Apache-2.0
"""Rotel, an OpenTelemetry collector, as a process of a test: takes OTLP over HTTP and exports it anew.

`make test-traces` installs it; the binary is inside its Python package.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.helpers.servers import free_port, running_server

ROTEL = Path(__file__).parents[2] / "build/collector/rotel/rotel-agent"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 15.0


@asynccontextmanager
async def rotel(behind: str, directory: Path) -> AsyncIterator[str]:
    """A collector that exports to the base URL `behind`; yields its own. Ending, it exports what it has."""
    grpc, http = free_port(), free_port()
    command = [
        str(ROTEL),
        "start",
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
        *("--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", behind),
        *("--pid-file", str(directory / "rotel.pid")),
    ]
    url = f"http://127.0.0.1:{http}"
    async with running_server(
        command,
        os.environ,
        f"{url}/v1/traces",
        directory / "rotel.log",
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=STOP_TIMEOUT_S,
    ):
        yield url
