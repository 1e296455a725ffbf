# SPDX-License-Identifier: Apache-2.0
"""The command line of an agent: flags and a YAML file become one checked `AgentConfig`, which runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import uvloop
from jsonargparse import ArgumentParser

from kvferry.agent.api.process import run_agent
from kvferry.agent.config import AgentConfig, configure_logging
from kvferry.proxy.wire.addresses import check_host_port
from kvferry.proxy.wire.cluster_key import BadClusterKey
from kvferry.proxy.wire.flags import flag_parser, parse_flags
from kvferry.proxy.wire.tls import BadCertificate

log = logging.getLogger(__name__)

BUNDLED_MODELS = Path(str(files("kvferry.models")))
_PROG = "kvferry agent"
_DESCRIPTION = (
    "Run a model, serve it over HTTP, and announce it to proxies. "
    "With --attach URL, announce a running server of another engine instead: "
    "kvferry agent --attach URL --help lists the options of that."
)
_WILDCARDS = ("0.0.0.0", "::", "")


def run(argv: Sequence[str], engine_module: str) -> int:
    """Run one agent; returns its exit status. A wrong command line exits with status 2 and a message."""
    config = parse_config(argv)
    configure_logging("api", config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_agent(config, engine_module=engine_module))
    except (OSError, BadClusterKey, BadCertificate) as error:
        log.error("cannot start: %s", error)
        return 1


def parse_config(argv: Sequence[str]) -> AgentConfig:
    """Read flags, and the YAML file that `--config` names.

    Prints a message that names the flag, key or value at fault and exits with status 2 when one is wrong.
    """
    return parse_flags(
        AgentConfig,
        argv,
        prog=_PROG,
        description=_DESCRIPTION,
        check=lambda config: with_model_directory(_checked(config)),
    )


def build_parser() -> ArgumentParser:
    """One flag per field of `AgentConfig`, spelled with dashes and described by the class's docstring."""
    return flag_parser(AgentConfig, prog=_PROG, description=_DESCRIPTION)


def with_model_directory(config: AgentConfig) -> AgentConfig:
    """Resolve the model to a checkpoint directory: a path, or else the name of a bundled model.

    Raises:
        ValueError: neither exists, or a file that every checkpoint has is missing.
    """
    candidates = (Path(config.model), BUNDLED_MODELS / config.model)
    directory = next((path for path in candidates if path.is_dir()), None)
    if directory is None:
        raise ValueError(f"model: {config.model!r} is neither a directory nor a bundled model")
    directory = directory.resolve()
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ValueError(f"model: {directory} has no {name}")
    served = config.served_model_name or directory.name
    return dataclasses.replace(config, model=str(directory), served_model_name=served)


def _checked(config: AgentConfig) -> AgentConfig:
    for address in config.proxy:
        check_host_port("proxy", address)
    if config.proxy and config.advertised_host in _WILDCARDS:
        raise ValueError(f"advertise_host is needed when host is {config.host!r}, which peers cannot dial")
    return config
