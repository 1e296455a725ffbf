# SPDX-License-Identifier: Apache-2.0
"""Runs one agent from its command line to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import uvloop

from kvferry.agent.api.process import run_agent
from kvferry.agent.cli import parse_config
from kvferry.agent.logs import configure_logging
from kvferry.agent.tls import BadCertificate
from kvferry.proxy.wire.messages import BadClusterKey

log = logging.getLogger(__name__)


def run(argv: Sequence[str], engine_module: str) -> int:
    """Run one agent; returns its exit status. A wrong command line exits with status 2 and says why."""
    config = parse_config(argv)
    configure_logging("api", config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_agent(config, engine_module=engine_module))
    except (OSError, BadClusterKey, BadCertificate) as error:
        log.error("cannot start: %s", error)
        return 1
