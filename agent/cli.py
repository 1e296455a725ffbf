# SPDX-License-Identifier: Apache-2.0
"""The command line of an agent: flags and a YAML file become one checked `AgentConfig`, which runs."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import uvloop

from kvferry.agent.architectures import (
    REFUSED_STATUS,
    architecture_of,
    is_tested,
    read_config,
    refusal,
    refusal_line,
)
from kvferry.agent.checkpoint import BadCheckpoint, check_weights
from kvferry.agent.config import BUNDLED_MODELS, AgentConfig
from kvferry.common.curve import BadClusterKey
from kvferry.common.http.tls import BadCertificate
from kvferry.common.options import check_files, flag_parser, parse_flags
from kvferry.common.telemetry.logs import configure_logging
from kvferry.transfer.engine import parse_backend_options

log = logging.getLogger(__name__)

_PROG = "kvferry agent"
_DESCRIPTION = (
    "Run a model, serve it over HTTP, and announce it to proxies. "
    "With --attach URL, announce a running server of another engine instead: "
    "kvferry agent --attach URL --help lists the options of that. "
    "With --engine vllm or --engine sglang, start such a server with kvferry's transfer plane inside: "
    "kvferry agent --engine vllm --help lists the options of that."
)
_SELF_CHECK_TIMEOUT_S = 1800.0
_GPU_DRIVERS = ("nvidiactl", "nvmap", "kfd", "dxg")
"""Device files of NVIDIA's drivers, AMD's, and Windows' in WSL."""


def run(argv: Sequence[str], engine_module: str) -> int:
    """Run one agent; returns its exit status.

    A wrong command line exits with status 2 and a message, and so does a model that this engine would not
    serve right, or a checkpoint that is not whole, before any port opens.
    """
    config = parse_config(argv)
    # Not at the top: --help, and completion, need neither the time nor the extra that these take.
    from kvferry.agent.api.process import run_agent
    from kvferry.common.http.server import raise_file_limit, return_large_buffers

    configure_logging("api", config.log_level, config.log_format)
    raise_file_limit()
    return_large_buffers()
    refused = model_refusal(config)
    if refused is not None:
        print(f"{_PROG}: {refused}", file=sys.stderr)
        return REFUSED_STATUS
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_agent(config, engine_module=engine_module))
    except (OSError, BadCheckpoint, BadClusterKey, BadCertificate) as error:
        log.error("cannot start: %s", error)
        return 1


def model_refusal(config: AgentConfig) -> str | None:
    """Return in one line why an architecture that no test covers cannot be served here, or None.

    It is tried, in a process of its own: see `self_check`.
    """
    model = read_config(Path(config.model))
    if config.self_check == "off" or (config.self_check == "auto" and is_tested(model)):
        return None
    argv = [sys.executable, "-m", "kvferry.agent.worker.process", "--self-check"]
    boot = {"config": config, "incarnation": ""}
    try:
        checked = subprocess.run(
            argv,
            input=msgspec.json.encode(boot),
            stdout=subprocess.PIPE,
            timeout=_SELF_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return refusal_line(
            architecture_of(model), f"its self-check took more than {_SELF_CHECK_TIMEOUT_S:.0f} s"
        )
    if checked.returncode == 0:
        return None
    printed = checked.stdout.decode(errors="replace").strip()
    return printed or refusal_line(
        architecture_of(model), f"its self-check ended with status {checked.returncode}"
    )


def parse_config(argv: Sequence[str]) -> AgentConfig:
    """Read flags, and the YAML file that `--config` names.

    Prints a message that names the flag, key or value at fault and exits with status 2 when one is wrong.
    """
    return parse_flags(
        AgentConfig,
        argv,
        prog=_PROG,
        description=_DESCRIPTION,
        check=checked,
    )


def build_parser() -> argparse.ArgumentParser:
    """One flag per field of `AgentConfig`, spelled with dashes and described by the class's docstring."""
    return flag_parser(AgentConfig, prog=_PROG, description=_DESCRIPTION)


def with_model_directory(config: AgentConfig) -> AgentConfig:
    """Resolve the model to a checkpoint directory: a path, or the name of a bundled model or of one in the
    Hugging Face cache on this machine. Nothing is downloaded.

    Raises:
        ValueError: there is none of them, a file that every checkpoint has is missing or not whole, or
            generation_config.json has a value out of its range.
    """
    from kvferry.agent.api.openai_schema import read_sampling_defaults  # not at the top, as above

    candidates = (Path(config.model), BUNDLED_MODELS / config.model)
    directory = next((path.resolve() for path in candidates if path.is_dir()), None)
    if directory is None:
        directory, served = _cached_model(config.model), config.served_model_name or config.model
    else:
        served = config.served_model_name or directory.name
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ValueError(f"model: {directory} has no {name}")
    read_sampling_defaults(directory, config.generation_config)
    if config.load_format == "safetensors":
        check_weights(directory)
    return dataclasses.replace(config, model=str(directory), served_model_name=served)


def _cached_model(name: str) -> Path:
    """Return the newest snapshot of a model that is in the Hugging Face cache. Raises ValueError."""
    # Not at the top: most models are directories, and this takes a while.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        bundled = ", ".join(sorted(path.parent.name for path in BUNDLED_MODELS.glob("*/config.json")))
        hint = f"; to fetch it: hf download {name}" if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) else ""
        raise ValueError(
            f"model: {name!r} is no directory, no bundled model ({bundled}), "
            f"and not in the Hugging Face cache{hint}"
        ) from None


def checked(config: AgentConfig) -> AgentConfig:
    """Return the settings with the model's directory.

    Raises ValueError for what this machine lacks, and for a model that this engine does not serve.
    """
    config.check_traces()
    check_files(config, ("tls_cert", "tls_key"))
    parse_backend_options(config.transfer_options)
    config.check_reachable()
    missing = None if config.first_gpu is None else _why_no_gpu()
    if missing is not None:
        raise ValueError(f"device {config.device}: {missing}")
    resolved = with_model_directory(config)
    refused = refusal(read_config(Path(resolved.model)), config.tp)
    if refused is not None:
        raise ValueError(refused)
    return resolved


def _why_no_gpu() -> str | None:
    """Return why torch cannot see a GPU here, without the seconds that importing it takes; None if it may."""
    build = version("torch")
    if build.endswith("+cpu"):
        return f"torch {build} is a build without GPUs"
    if not any(Path("/dev", name).exists() for name in _GPU_DRIVERS):
        return f"this machine has no driver of a GPU: none of {', '.join(_GPU_DRIVERS)} is in /dev"
    return None
