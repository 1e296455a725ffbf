# SPDX-License-Identifier: Apache-2.0
"""uvicorn as a part of a process that handles its own signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process that owns it decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers as they are."""
        yield

    def close_connections(self) -> None:
        """Stop listening, and close every connection once its pending output is sent.

        uvicorn itself would end the requests that are still running with a 500 in plain text.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.close()
