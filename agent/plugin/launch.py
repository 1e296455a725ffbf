# SPDX-License-Identifier: Apache-2.0
"""Starts a server of another engine with our plane inside, and has one fate with it (I8).

The plane announces the server; this process passes flags on, waits until it serves, and ends when it does,
and vice versa. Asked to end, it has the plane drain the server first.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import aiohttp

from kvferry.agent.announce.drain_socket import Drainer
from kvferry.agent.announce.options import ServerOptions
from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.plugin.settings import NotServed, PluginTransfer
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.common.addresses import host_port
from kvferry.common.child_process import WAS_KILLED, ChildProcess
from kvferry.common.options import parse_flags
from kvferry.common.shared_options import LogOptions
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.logs import configure_logging
from kvferry.transfer.net import CannotBind, check_can_bind
from kvferry.transfer.options import PlaneOptions

_PROBE_S = 0.5
_PROGRESS_S = 10.0
_STOP_S = 30.0
START_S = 1800.0
"""How long an engine may take until it serves: it downloads, loads and compiles."""
_LAST_LINES_S = 1.0
_READ_BYTES = 65_536
_KEPT_BYTES = 262_144
_EXCEPTION = re.compile(r"\b(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|NotServed): .*")
_INSPECT_S = 120.0
_INSPECT_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
needed = (sys.argv[1], "kvferry", "msgpack", "zmq", "msgspec")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
version = None
for name in sys.argv[2].split():
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
"""Run by the engine's Python; importing the engine takes many seconds."""
PROG = "kvferry agent"

log = logging.getLogger(__name__)


class CannotStart(RuntimeError):
    """The engine cannot be started; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """What a Python has installed that serves.

    Attributes:
        version: The engine's.
        gpus: How many GPUs its PyTorch sees; 0 if that was not asked for.
    """

    version: str
    gpus: int


def inspect_engine(
    python: str,
    engine: str,
    distributions: Sequence[str],
    check_version: Callable[[str], None],
    *,
    count_gpus: bool = False,
) -> EngineEnvironment:
    """Have a Python say what its environment has. Takes a second, and some more where it counts GPUs.

    Args:
        engine: Its name, which in lower case is its package's.
        distributions: What it is called in package indexes.
        check_version: Raises `NotServed`.

    Raises `CannotStart` that names what is missing, or that this version of the engine is not served.
    """
    argv = [python, "-c", _INSPECT_SCRIPT, engine.lower(), " ".join(distributions)]
    try:
        looked = subprocess.run(
            [*argv, *(["gpus"] if count_gpus else [])], capture_output=True, timeout=_INSPECT_S, check=False
        )
        missing, version, gpus = json.loads(looked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise CannotStart(f"{python} is no Python that runs: {error}") from error
    if missing:
        raise CannotStart(
            f"{python} lacks {', '.join(missing)}: install {engine} there, then "
            "`pip install --no-deps .` in a clone of kvferry and `pip install 'msgpack>=1.2.3,<2'`, or name "
            "another with --engine-python"
        )
    if version is not None:
        try:
            check_version(version)
        except NotServed as error:
            raise CannotStart(f"{python}: {error}") from error
    return EngineEnvironment(version or "of an unknown version", gpus)


@dataclass(frozen=True, kw_only=True)
class EngineServerOptions(ServerOptions, PlaneOptions, LogOptions):
    """How another engine's server is started.

    Model:
        model: Model as the engine names it: a directory, a name on Hugging Face, or a bundled model's name.

    Engine:
        engine_python: Python of the environment in which the engine and kvferry are installed. Default: the
            Python that runs this command.

    KV transfer:
        transfer: KV transfer backend; auto uses the best that works between two servers.
        verify_kv: Share of the prompts, from 0 to 1, whose KV is checksummed; prefill servers need as large a
            share as the decode servers.

    Timeouts:
        start_timeout_s: How long the engine may take until it serves.

    Logs:
        log_format: text, or json for one JSON object a line; the engine's own lines are as they are.
    """

    engine_name: ClassVar[str]
    """As its makers write it; in lower case it is what `--engine` takes."""
    has_off_flags: ClassVar[bool] = False
    """Whether the engine has a flag `--no-…` for each that turns something on."""
    bootstrap_port: ClassVar[tuple[str, int] | None] = None
    """The option for the port of a prefill server's bootstrap server and its default, if it has one."""
    model: str
    engine_python: str = sys.executable
    transfer: PluginTransfer = "auto"
    verify_kv: float = 0.0
    start_timeout_s: float = START_S

    @property
    def url(self) -> str:
        """Where proxies reach the API. A port that the OS chooses is not known yet: 1 stands for it."""
        return f"http://{host_port(self.advertised_host, self.port or 1)}"

    def plane_settings(self, drain_socket: str = "") -> dict[str, Any]:
        """The fields of `PluginSettings` that are not as by default."""
        settings = {
            "advertise_url": self.url,
            "name": self.name,
            "bind_host": self.host,
            "control_port": self.control_port,
            "proxy": list(self.proxy),
            "transfer": self.transfer,
            "transfer_options": self.transfer_options,
            "verify_kv": self.verify_kv,
            "lease_s": self.lease_s,
            "pull_timeout_s": self.pull_timeout_s,
            "drain_socket": drain_socket,
        }
        return settings if self.cluster_key is None else {**settings, "cluster_key": self.cluster_key}

    def named_model(self) -> tuple[str, str | None]:
        """The model, a bundled one as a directory, and the name that clients ask for, if it has another."""
        bundled = BUNDLED_MODELS / self.model
        is_bundled = bundled.is_dir() and not os.path.isdir(self.model)
        model, name = (str(bundled), self.model) if is_bundled else (self.model, None)
        return model, self.served_model_name or name

    @classmethod
    def inspect(cls, python: str, *, count_gpus: bool = False) -> EngineEnvironment:
        """See `inspect_engine`."""
        raise NotImplementedError

    @staticmethod
    def cpu_environment(threads: int) -> dict[str, str]:
        """Variables with which the engine computes on so many cores."""
        raise NotImplementedError

    @staticmethod
    def cpu_words() -> tuple[str, ...]:
        """Words for the engine to compute on a CPU."""
        return ()

    def command(self, rest: Sequence[str], drain_socket: str) -> list[str]:
        """What starts the server; `rest` are words for the engine."""
        raise NotImplementedError

    def environment(self, drain_socket: str) -> Mapping[str, str]:
        """The server's variables beside ours."""
        return {}


async def run(config: EngineServerOptions, rest: Sequence[str]) -> int:
    """Run the server until it is asked to end and has drained (returns 0), or ends by itself (returns 1).

    Prints one JSON line on stdout once it serves: `{"listening": {"url"}}`. Raises `CannotStart`.
    """
    stop = StopRequest(config.drain_s)
    stop.on_signals()
    await asyncio.to_thread(config.inspect, config.engine_python)
    api = f"{config.engine_name}'s API"
    with private_run_dir() as run_dir, port_kept(api, config.host, config.port) as port:
        config, drainer = replace(config, port=port), Drainer(stop)
        async with drainer.listening(run_dir / "drain"):
            return await _run(config, rest, str(run_dir / "drain"), drainer, stop)


@contextmanager
def port_kept(what: str, host: str, port: int) -> Iterator[int]:
    """Keep a port, any if it is 0, from being given to others until the engine has bound it, which shares it
    by SO_REUSEADDR, some versions of vLLM by SO_REUSEPORT. `what` is who binds it, for messages.

    Raises `CannotBind` if a server listens there: some versions would share its connections.
    """
    check_can_bind(what, host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, port))
        yield int(kept.getsockname()[1])


async def _run(
    config: EngineServerOptions, rest: Sequence[str], drain_socket: str, drainer: Drainer, stop: StopRequest
) -> int:
    name = config.engine_name
    python, *words = config.command(rest, drain_socket)
    process = await ChildProcess.start(
        words,
        name,
        python=python,
        environment=config.environment(drain_socket),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        ends_with_us=signal.SIGKILL,
    )
    log.info("%s is process %d; it loads %s", name, process.pid, config.model)
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
                log.warning("not drained: %s is ended with what it has", name)
            return 0
        await asyncio.wait({relaying}, timeout=_LAST_LINES_S)
        why = WAS_KILLED if process.returncode == -signal.SIGKILL else output.reason()
        log.error("%s ended with status %s: %s", name, process.returncode, why)
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


async def _serving(config: EngineServerOptions) -> None:
    """Wait until the API answers, and say so. Raises `CannotStart` if it takes too long."""
    loop = asyncio.get_running_loop()
    begun, reported, name = loop.time(), loop.time(), config.engine_name
    url = f"http://{host_port(config.host, config.port)}/health"
    timeout = aiohttp.ClientTimeout(total=_PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
        while not await _answers(http, url):
            await asyncio.sleep(_PROBE_S)
            if (now := loop.time()) - begun > config.start_timeout_s:
                raise CannotStart(f"{name} did not serve within {config.start_timeout_s:.0f} s")
            if now - reported >= _PROGRESS_S:
                reported = now
                log.info("%s has been loading for %.0f s", name, now - begun)
    log.info("%s serves %s at %s after %.0f s", name, config.model, config.url, loop.time() - begun)
    print(json.dumps({"listening": {"url": config.url}}), flush=True)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def serve(settings: type[EngineServerOptions], argv: Sequence[str]) -> int:
    """Run the command line of `kvferry agent` for an engine. Returns the exit status; a wrong command line
    exits with 2.
    """
    words, name = list(argv), settings.engine_name
    at = words.index("--") if "--" in words else len(words)
    config = parse_flags(
        settings,
        words[:at],
        prog=PROG,
        description=f"Start a server of {name} with kvferry's plane inside. Words after -- go to {name}.",
    )
    configure_logging(f"{name.lower()}-engine", config.log_level, config.log_format)
    try:
        return asyncio.run(run(config, words[at + 1 :]))
    except (CannotStart, CannotBind) as error:
        log.error("cannot start: %s", error)
        return 1
