# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.proxy`, also `kvferry proxy`: runs one proxy from its command line to its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import uvloop

from kvferry.common.curve import BadClusterKey
from kvferry.common.engine_servers.description import BadEngineServer
from kvferry.common.exceptions import leaves, message_of
from kvferry.common.http.server import raise_file_limit, return_large_buffers, spare_full_collections
from kvferry.common.http.tls import BadCertificate
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.logs import configure_logging
from kvferry.proxy.api.auth import BadKeyFile
from kvferry.proxy.config import ProxyConfig, parse_config
from kvferry.proxy.server import SETTLE_S, RunningProxy, running_proxy
from kvferry.proxy.workers.supervisor import RunningWorkers, WorkersFailed, running_workers

BAD_FILES = (BadKeyFile, BadClusterKey, BadCertificate, BadEngineServer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT. Returns the exit status; 2 for a wrong command line."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    configure_logging("proxy", config.log_level, config.log_format)
    raise_file_limit()
    return_large_buffers()
    status = 0
    try:
        uvloop.run(_serve(config))
    except* (OSError, *BAD_FILES, WorkersFailed) as failed:
        status = 1
        for error in leaves(failed):
            print(f"kvferry proxy: {message_of(error)}", file=sys.stderr)
    return status


async def _serve(config: ProxyConfig) -> None:
    stop = StopRequest(config.drain_s)
    stop.on_signals()
    running: AbstractAsyncContextManager[RunningProxy | RunningWorkers]
    running = (
        running_proxy(config, stop, SETTLE_S)
        if config.workers == 1
        else running_workers(config, stop, SETTLE_S)
    )
    async with running as proxy:
        # Launchers read this line: with port 0 only the proxy knows where it listens.
        where = {"url": proxy.url, "port": proxy.port, "discovery_port": proxy.discovery_port}
        spare_full_collections()
        print(json.dumps({"listening": where}), flush=True)
        await stop.made.wait()


if __name__ == "__main__":
    sys.exit(main())
