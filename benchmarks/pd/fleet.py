# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: two vLLM servers on GPUs, behind our proxy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import aiohttp

from kvferry.deploy.launcher import start_process
from kvferry.proxy.wire.registration import Role
from tests.helpers.metrics import is_shown, scrape, total
from tests.helpers.servers import free_port, running_server

MODEL = "m"
START_S, STOP_S = 420.0, 30.0
READY_S = 60.0
ROOT = Path(__file__).parents[2]
TIMELINE_VARIABLE = "KVFERRY_BENCH_TIMELINE"
"""Names the file to which `timed_connector` writes."""

System = Literal[
    "kvferry-cuda_ipc",
    "kvferry-nixl",
    "kvferry-tcp",
    "kept",
    "by-hand",
    "auto",
    "auto-both",
    "nixl",
    "together",
    "plain",
]
"""`kvferry-…` are pairs with our connector over that backend that serve every request, `kept` is the first
of them with turns of conversations kept by decode servers, `nixl` is a pair with
vLLM's NixlConnector, `together` two servers that take whole requests in turn, and `plain` one alone, without
a proxy. The others use `cuda_ipc`: with `by-hand` the decode server alone serves prompts under 512 tokens,
with `auto` the proxy chooses for each request, with `auto-both` of two servers that can do both."""
_PAIR: tuple[Role, Role] = ("prefill", "decode")
_BOTH: tuple[Role, Role] = ("both", "both")
_EVERY_PROMPT = ("--split-min-tokens", "0")
_OBJECTIVES = ("--ttft-objective-s", "2", "--tpot-objective-s", "0.015")
"""What the proxy chooses by: the stricter ones of `load.OBJECTIVES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all systems have in common.

    Args:
        python: vLLM's.
        model: Directory of the model.
        gpus: Those of each server (`CUDA_VISIBLE_DEVICES`), one or several.
        arguments: Further ones of every vLLM server.
        prefill_arguments, decode_arguments: Further ones of the first server and those that only prefill, and
            of the others.
        settings: Further settings of our connector.
        router: Command of vllm-router; empty: there is none.
        timeline: File for the times of each transfer in the decode server's scheduler; None: none is noted.
        log_dir: Where the logs of all processes go.
    """

    python: str
    model: Path
    gpus: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    router: tuple[str, ...] = ()
    timeline: Path | None = None
    log_dir: Path


class Kind(NamedTuple):
    """What a system is made of.

    `connector`: whose counters tell what was moved; None: nothing is. `transfer`: a backend of ours, if it is
    ours. `roles`: of both servers. `words`: flags of the proxy.
    """

    connector: Literal["kvferry", "nixl"] | None
    transfer: str = "cuda_ipc"
    roles: tuple[Role, Role] = _PAIR
    words: tuple[str, ...] = ()


KINDS: Mapping[System, Kind] = MappingProxyType(
    {
        "kvferry-cuda_ipc": Kind("kvferry", words=_EVERY_PROMPT),
        "kvferry-nixl": Kind("kvferry", "nixl", words=_EVERY_PROMPT),
        "kvferry-tcp": Kind("kvferry", "tcp", words=_EVERY_PROMPT),
        "kept": Kind("kvferry", words=(*_EVERY_PROMPT, "--keep-turns-s", "120")),
        "by-hand": Kind("kvferry", words=("--split-min-tokens", "512")),
        "auto": Kind("kvferry", words=_OBJECTIVES),
        "auto-both": Kind("kvferry", roles=_BOTH, words=_OBJECTIVES),
        "nixl": Kind("nixl", words=("--dialect", "vllm-nixl", *_EVERY_PROMPT)),
        "together": Kind(None, "tcp", _BOTH, ("--split-min-tokens", "1000000000")),
        "plain": Kind(None),
    }
)


SHARING: tuple[System, ...] = ("kvferry-cuda_ipc", "by-hand", "auto-both", "together")
"""Two servers with our connector over `cuda_ipc` that can do both serve as each of these."""


@dataclass(frozen=True, slots=True)
class Running:
    """A system that serves.

    Attributes:
        url: What clients ask.
        servers: The vLLM servers' URLs, those that prefill first.
        pids: Theirs.
        proxy_log: It has a line for each request; None where there is no proxy.
    """

    url: str
    servers: tuple[str, ...]
    pids: tuple[int, ...]
    proxy_log: Path | None


KV_ROLES: Mapping[Role, str] = MappingProxyType(
    {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
)


@asynccontextmanager
async def running(system: System, setup: Setup) -> AsyncIterator[Running]:
    """Start a system. Raises `AssertionError` with the end of a log if it does not start, or a group."""
    async with AsyncExitStack() as stack:
        if system == "plain":
            port = free_port()
            own = replace(setup, arguments=(*setup.arguments, *setup.prefill_arguments))
            pid = await stack.enter_async_context(_vllm("plain", own, port, setup.gpus[0], None))
            yield Running(url_of(port), (url_of(port),), (pid,), None)
            return
        roles = KINDS[system].roles
        ports = [free_port() for _ in roles]
        servers = ["--prefill", url_of(ports[0]), "--decode", url_of(ports[1])] if system == "nixl" else []
        discovery_port = free_port()
        proxy_url = await stack.enter_async_context(proxied(system, setup, discovery_port, servers))
        pids = await stack.enter_async_context(servers_running(system, setup, roles, ports, discovery_port))
        await _until_ready(proxy_url)
        yield Running(proxy_url, tuple(map(url_of, ports)), pids, setup.log_dir / "proxy.log")


async def ready_nodes(url: str, number: int) -> list[dict[str, Any]]:
    """Wait until the proxy has so many ready servers, and return what it says of them."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/nodes") as response:
                nodes = [node for node in (await response.json())["nodes"] if node["state"] == "ready"]
            if len(nodes) == number:
                return nodes
            await asyncio.sleep(0.1)


async def pin_roles(url: str, roles: Sequence[Role]) -> None:
    """Wait for as many servers as there are roles, and have the proxy use each for one."""
    nodes = await ready_nodes(url, len(roles))
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        for node, role in zip(nodes, roles, strict=True):
            async with http.post(f"{url}/nodes/{node['incarnation']}/role/{role}") as response:
                response.raise_for_status()


@asynccontextmanager
async def proxied(
    system: System, setup: Setup, discovery_port: int, further: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Our proxy as the system has it; its URL. Raises as `running` does."""
    words = ("--port", "0", "--discovery-port", str(discovery_port), "--decode-only-fallback", "false")
    argv = ("-m", "kvferry.proxy", *words, *KINDS[system].words, *further)
    proxy = await start_process("proxy", argv, setup.log_dir)
    try:
        yield proxy.url
    finally:
        await proxy.stop()


@asynccontextmanager
async def sharing(
    systems: Sequence[System], setup: Setup
) -> AsyncIterator[AsyncIterator[tuple[System, Running]]]:
    """Two servers that can do both, for systems one after the other: each has a proxy of its own, which pins
    their roles. Raises as `running` does.
    """
    discovery_port, ports = free_port(), [free_port() for _ in _BOTH]

    async def each() -> AsyncIterator[tuple[System, Running]]:
        for system in systems:
            async with proxied(system, setup, discovery_port) as url:
                await pin_roles(url, KINDS[system].roles)
                yield system, Running(url, tuple(map(url_of, ports)), pids, setup.log_dir / "proxy.log")

    async with servers_running("auto-both", setup, _BOTH, ports, discovery_port) as pids:
        yield each()


@asynccontextmanager
async def servers_running(
    system: System, setup: Setup, roles: Sequence[Role], ports: Sequence[int], discovery_port: int
) -> AsyncIterator[tuple[int, ...]]:
    """The system's vLLM servers, which announce themselves to that port; their process ids, once all serve.

    Raises as `running` does.
    """
    servers = []
    for at, (role, port, gpu) in enumerate(zip(roles, ports, setup.gpus, strict=True)):
        transfer = _transfer(system, KV_ROLES[role], setup, url_of(port), f"127.0.0.1:{discovery_port}")
        words = setup.prefill_arguments if role == "prefill" or at == 0 else setup.decode_arguments
        own = replace(setup, arguments=(*setup.arguments, *words))
        servers.append(_vllm(f"{system}-{role}-{at}", own, port, gpu, transfer))
    async with AsyncExitStack() as stack:
        if len(set(setup.gpus)) == len(setup.gpus) or "--kv-cache-memory-bytes" in setup.arguments:
            async with asyncio.TaskGroup() as starting:
                pids = [starting.create_task(stack.enter_async_context(server)) for server in servers]
            yield tuple(pid.result() for pid in pids)
        else:
            # One by one: on one GPU the second would count on memory that the first is about to take, unless
            # it is told how much it takes.
            yield tuple([await stack.enter_async_context(server) for server in servers])


@asynccontextmanager
async def vllm_router(setup: Setup, servers: Sequence[str]) -> AsyncIterator[str]:
    """vllm-router in front of a prefill and a decode server of NixlConnector; its URL.

    Raises as `running` does.
    """
    port, prometheus_port = free_port(), free_port()
    words = (
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus_port)),
        *("--policy", "round_robin", "--vllm-pd-disaggregation", "--kv-connector", "nixl"),
        *("--prefill", servers[0], "--decode", servers[1], "--log-level", "error"),
    )
    async with running_server(
        (*setup.router, *words),
        os.environ,
        f"{url_of(port)}/health",
        setup.log_dir / "vllm-router.log",
        start_timeout_s=READY_S,
        stop_timeout_s=STOP_S,
    ):
        yield url_of(port)


def _transfer(system: System, role: str, setup: Setup, url: str, discovery: str) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config`."""
    if system == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role}
    settings = {
        "advertise_url": url,
        "proxy": [discovery],
        "control_port": 0,
        "transfer": KINDS[system].transfer,
        **setup.settings,
    }
    name, module = "KvferryConnector", "kvferry.agent.vllm.connector"
    if setup.timeline is not None:
        name, module = "TimedConnector", "benchmarks.pd.timed_connector"
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


@asynccontextmanager
async def _vllm(
    name: str, setup: Setup, port: int, gpu: str, transfer: dict[str, Any] | None
) -> AsyncIterator[int]:
    words = [
        *("--model", str(setup.model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), *setup.arguments),
    ]
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if transfer is not None and transfer["kv_connector"] == "NixlConnector":
        # Elsewhere this port, another each time, would only have vLLM compile the model anew at each start.
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    if setup.timeline is not None:
        paths = (str(ROOT), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment[TIMELINE_VARIABLE] = str(setup.timeline.absolute())
    async with running_server(
        (setup.python, "-m", "vllm.entrypoints.openai.api_server", *words),
        environment,
        f"{url_of(port)}/health",
        setup.log_dir / f"{name}.log",
        start_timeout_s=START_S,
        stop_timeout_s=STOP_S,
    ) as pid:
        yield pid


async def _until_ready(url: str) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class KvMoved:
    """What some servers have fetched since their start; `seconds` is the sum over transfers."""

    transfers: float
    nbytes: float
    seconds: float

    def since(self, before: KvMoved) -> dict[str, float]:
        """As figures: transfers, GB, and GB/s of the time that transfers took."""
        nbytes, seconds = self.nbytes - before.nbytes, self.seconds - before.seconds
        return {
            "transfers": self.transfers - before.transfers,
            "gb": round(nbytes / 1e9, 3),
            "gb_s": round(nbytes / seconds / 1e9, 2) if seconds else 0.0,
        }


_KV_COUNTERS = {
    "kvferry": (
        "vllm:kvferry_transfers_total",
        "vllm:kvferry_transfer_bytes_total",
        "vllm:kvferry_transfer_seconds_total",
    ),
    "nixl": (
        "vllm:nixl_xfer_time_seconds_count",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_xfer_time_seconds_sum",
    ),
}


async def kv_moved(connector: str, urls: Sequence[str]) -> KvMoved:
    """By the counters of a connector, `kvferry` or `nixl`, which may not be there from the start."""
    pages = [await scrape(url) for url in urls]
    names = _KV_COUNTERS[connector]
    return KvMoved(*[sum(total(page, name) for page in pages if is_shown(page, name)) for name in names])


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"
