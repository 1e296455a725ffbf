# SPDX-License-Identifier: Apache-2.0
"""`python -m agent`, also `kvferry agent`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from agent.api_process import ENGINE_MODULE, run_agent
from agent.cli import parse_config
from agent.logs import configure_logging
from agent.tls import BadCertificate
from proxy.wire import BadClusterKey

log = logging.getLogger(__name__)


def main(argv: Sequence[str], *, engine_module: str = ENGINE_MODULE) -> int:
    """Run one agent; returns its exit status. A wrong command line exits with status 2 and says why.

    `engine_module` is run as the engine process: tests put a stand-in there.
    """
    config = parse_config(argv)
    configure_logging("api", config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_agent(config, engine_module=engine_module))
    except (OSError, BadClusterKey, BadCertificate) as error:
        log.error("cannot start: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
