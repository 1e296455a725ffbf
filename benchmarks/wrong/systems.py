# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: a prefill and a decode server behind a router or a proxy, all on one CPU."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import aiohttp

from benchmarks.proxy_cost import PAIR_FLAGS, RIVALS
from kvferry.deploy.launcher import start_process
from tests.helpers.metrics import blocks, is_shown, scrape, total
from tests.helpers.servers import descendants, free_port, paused, running_server
from tests.standins import faults
from tests.standins.faults import tcp
from tests.system.conftest import wait_ready
from tests.system.sglang.servers import PYTHON as SGLANG_PYTHON
from tests.system.sglang.servers import sglang_server
from tests.system.vllm.servers import MODEL, vllm_server
from tests.system.vllm.servers import PYTHON as VLLM_PYTHON

Role = Literal["prefill", "decode"]
Variant = Literal["base", "prefix", "flip"]
"""How servers are started: as all, with prefix caches, or with a flipped bit in the KV of each prompt."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
KV_ROLES: Mapping[Role, str] = MappingProxyType({"prefill": "kv_producer", "decode": "kv_consumer"})
LEASE_S = 3
POOL_TOKENS = 12_800
"""Of each server's KV."""
MAX_RUNNING = 32
READY_S = 60.0
SETTLED_S = LEASE_S + 10.0
"""After the last answer; blocks that are still in use then are left."""
VLLM_BLOCK, AGENT_BLOCK = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What a system is made of.

    Args:
        title: In tables.
        engine: What both servers are.
        connector: What moves KV in servers of other engines: our plane in them, or their own NIXL.
        router: What clients ask: our proxy, or vllm-router.
        verify: Whether our connector or agents checksum all KV.
        kv_fault: That the prefill agent's KV has (`faults.kv`): a control.
        faults: Those that are tried of it; empty: all.
    """

    title: str
    engine: Literal["vllm", "sglang", "agents"] = "vllm"
    connector: Literal["kvferry", "nixl"] = "kvferry"
    router: Literal["kvferry", "vllm-router"] = "kvferry"
    verify: bool = False
    kv_fault: str = ""
    faults: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether all of its KV goes by a transfer plane of ours."""
        return self.connector == "kvferry" and not self.kv_fault

    @property
    def counts_moves(self) -> bool:
        """SGLang's decode servers do not count what they fetch. They compute no prompt themselves."""
        return self.engine != "sglang"

    @property
    def is_installed(self) -> bool:
        return {"vllm": VLLM_PYTHON, "sglang": SGLANG_PYTHON, "agents": Path(sys.executable)}[
            self.engine
        ].exists()


_NO_FLIP = ("none", "late-reader", "clock-stopped", "aborts", "prefill-killed", "restarted", "stale-prefix")
SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "nixl-router": System(
            title="vLLM, NixlConnector, vllm-router", connector="nixl", router="vllm-router"
        ),
        "nixl-proxy": System(title="vLLM, NixlConnector, kvferry proxy", connector="nixl"),
        "kvferry": System(title="vLLM, KvferryConnector, kvferry proxy"),
        "kvferry-verify": System(
            title="vLLM, KvferryConnector with `verify_kv`, kvferry proxy", verify=True, faults=("flip",)
        ),
        "sglang-nixl": System(
            title="SGLang, nixl, kvferry proxy", engine="sglang", connector="nixl", faults=_NO_FLIP
        ),
        "sglang": System(title="SGLang, kvferry plane, kvferry proxy", engine="sglang", faults=_NO_FLIP),
        "agents": System(title="kvferry agents", engine="agents"),
        "agents-verify": System(
            title="kvferry agents with `--verify-kv`", engine="agents", verify=True, faults=("flip",)
        ),
        "agents-stale": System(
            title="kvferry agents, planted stale block (control)",
            engine="agents",
            kv_fault="stale",
            faults=("stale-prefix",),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs, by the process that was started."""

    url: str
    pid: int

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.pid, *descendants(self.pid))

    @property
    def runs(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False


class Pair:
    """A running system. `url`: what its clients ask."""

    def __init__(self, system: System, variant: Variant, log_dir: Path) -> None:
        self.url = ""
        self.servers: dict[Role, Server] = {}
        self._system = system
        self._variant = variant
        self._log_dir = log_dir
        self._stack = AsyncExitStack()
        self._own: dict[Role, AsyncExitStack] = {role: AsyncExitStack() for role in ROLES}
        # A server that is started again keeps its addresses: HTTP, and NIXL's side channel or our control.
        self._ports: dict[Role, tuple[int, int]] = {role: (free_port(), free_port()) for role in ROLES}
        self._discovery = f"127.0.0.1:{free_port()}"
        self._router_pid = 0
        self._starts = count()
        os.environ[tcp.VARIABLE] = "bit:"  # only `FaultyConnector` reads it

    async def __aenter__(self) -> Pair:
        try:
            async with asyncio.TaskGroup() as starting:
                for role in ROLES:
                    self._stack.push_async_callback(self._own[role].aclose)
                    starting.create_task(self.start(role))
            router = self._vllm_router() if self._system.router == "vllm-router" else self._proxy()
            self.url, self._router_pid = await self._stack.enter_async_context(router)
            assert await self.recovers(), "no request is answered"
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, role: Role) -> None:
        """Start a server, or start it again after its end."""
        await self._own[role].aclose()
        start = {"vllm": self._vllm, "sglang": self._sglang, "agents": self._agent}[self._system.engine]
        name = f"{role}-{next(self._starts)}"
        self.servers[role] = await self._own[role].enter_async_context(start(role, name))

    async def recovers(self) -> bool:
        """Whether both servers run and a request is answered, within `READY_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
                while all(server.runs for server in self.servers.values()):
                    with suppress(aiohttp.ClientError):
                        if await _ask_little(http, self.url):
                            return True
                    await asyncio.sleep(0.2)
        return False

    async def kill(self, role: Role) -> None:
        """Kill all processes of a server at once."""
        victim = self.servers[role]
        for pid in victim.pids:
            os.kill(pid, 9)
        async with asyncio.timeout(READY_S):
            while victim.runs:
                await asyncio.sleep(0.05)

    @contextmanager
    def decode_stopped(self) -> Iterator[None]:
        """The decode server's engine stands still, its API goes on."""
        with paused(descendants(self.servers["decode"].pid)):
            yield

    @contextmanager
    def all_stopped(self) -> Iterator[None]:
        """Every process stands still, the router too."""
        pids: list[int] = [self._router_pid, *descendants(self._router_pid)]
        for server in self.servers.values():
            pids += server.pids
        with paused(pids):
            yield

    async def recycle(self) -> None:
        """Have other prompts overwrite the prefill server's pool. What it has not free stays as it is."""
        url = f"{self.servers['prefill'].url}/v1/completions"
        # SGLang's name for prompts whose KV goes nowhere.
        fake: dict[str, Any] = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
        nowhere = fake if self._system.engine == "sglang" else {}

        async def one(http: aiohttp.ClientSession, number: int) -> None:
            asked = {"model": MODEL, "prompt": f"{number} " * 480, "max_tokens": 1} | nowhere
            async with http.post(url, json=asked) as response:
                await response.read()

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S)) as http:
            await asyncio.gather(*(one(http, number) for number in range(POOL_TOKENS // 960 + 1)))

    async def left(self) -> int:
        """Blocks in use of both servers, once there is none, or when waiting is over.

        Raises `TimeoutError` if they have not said it until then.
        """
        found: int | None = None
        try:
            async with asyncio.timeout(SETTLED_S):
                while found := await self._in_use():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            if found is None:
                raise
        return found

    async def _in_use(self) -> int:
        found = 0
        for server in self.servers.values():
            if not server.runs:
                continue
            if self._system.engine == "sglang":
                async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/loads") as response:
                    found += sum(load["num_used_tokens"] for load in (await response.json())["loads"])
            elif self._system.engine == "agents":
                states = await blocks(server.url)
                found += sum(count for state, count in states.items() if state != "free")
            else:
                async with aiohttp.ClientSession() as http:  # figures are told with a step
                    await _ask_little(http, server.url)
                share = total(await scrape(server.url), "vllm:kv_cache_usage_perc")
                found += round(share * POOL_TOKENS / VLLM_BLOCK)
        return found

    async def moved(self) -> int:
        """Prompts whose KV the decode server has fetched since its start; 0 where it does not count them."""
        names = (
            "vllm:kvferry_transfers_total",
            "vllm:nixl_xfer_time_seconds_count",
            "kvferry_transfer_pulls_total",
        )
        if not (self._system.counts_moves and self.servers["decode"].runs):
            return 0
        page = await scrape(self.servers["decode"].url)
        return int(sum(total(page, name) for name in names if is_shown(page, name)))

    @asynccontextmanager
    async def _vllm(self, role: Role, name: str) -> AsyncIterator[Server]:
        connector: dict[str, Any] = {}
        if self._system.connector == "kvferry":
            connector = {
                "settings": {"control_port": self._ports[role][1], "verify_kv": float(self._system.verify)}
            }
        if self._variant == "flip":
            faulty = ("FaultyConnector", "tests.standins.faulty_connector")
            flipping = ("FlippingNixlConnector", "tests.standins.flipping_nixl_connector")
            kind, module = faulty if self._system.connector == "kvferry" else flipping
            connector |= {"kv_connector": kind, "kv_connector_module_path": module}
        caching = "--enable-prefix-caching" if self._variant == "prefix" else "--no-enable-prefix-caching"
        async with vllm_server(
            name, KV_ROLES[role], self._log_dir, ports=self._ports[role], lease_s=LEASE_S, transfer="tcp",
            num_blocks=POOL_TOKENS // VLLM_BLOCK, max_running=MAX_RUNNING, words=(caching,),
            connector=connector, proxy=self._discovery if self._system.connector == "kvferry" else None,
        ) as server:  # fmt: skip
            yield Server(server.url, server.pid)

    @asynccontextmanager
    async def _sglang(self, role: Role, name: str) -> AsyncIterator[Server]:
        ours = self._system.connector == "kvferry"
        words = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING))
        async with sglang_server(
            name, role, self._log_dir, ports=self._ports[role], backend="kvferry" if ours else "nixl",
            proxy=self._discovery if ours else None, settings={"KVFERRY_LEASE_S": str(LEASE_S)},
            words=words if self._variant == "prefix" else (*words, "--disable-radix-cache"),
        ) as server:  # fmt: skip
            yield Server(server.url, server.pid)

    @asynccontextmanager
    async def _agent(self, role: Role, name: str) -> AsyncIterator[Server]:
        port, control_port = map(str, self._ports[role])
        caching = str(self._variant == "prefix").lower()
        is_faulty = self._variant == "flip" or self._system.kv_fault
        words = ["-m", faults.AGENT if is_faulty else "kvferry.agent", "--role", role, "--model", MODEL]
        words += ["--port", port, "--control-port", control_port, "--proxy", self._discovery]
        words += ["--transfer", "tcp", "--lease-s", str(LEASE_S), "--threads", "1"]
        words += ["--kv-blocks", str(POOL_TOKENS // AGENT_BLOCK), "--max-num-seqs", str(MAX_RUNNING)]
        words += ["--prefix-cache", caching, "--verify-kv", str(self._system.verify).lower()]
        if self._variant == "flip":
            words += ["--tcp-fault", "bit:"]
        if self._system.kv_fault and role == "prefill":
            words += ["--kv-fault", self._system.kv_fault]
        process = await start_process(name, words, self._log_dir)
        try:
            await wait_ready(process)
            yield Server(process.url, process.pid)
        finally:
            await process.stop()

    @asynccontextmanager
    async def _proxy(self) -> AsyncIterator[tuple[str, int]]:
        words = ["-m", "kvferry.proxy", "--port", "0", "--discovery-port", self._discovery.rpartition(":")[2]]
        if self._system.connector == "nixl":
            prefill, decode = (self.servers[role].url for role in ROLES)
            if self._system.engine == "sglang":
                prefill += f",bootstrap_port={self._ports['prefill'][1]}"
            words += ["--dialect", "sglang" if self._system.engine == "sglang" else "vllm-nixl"]
            words += ["--nixl-lease-s", str(LEASE_S), "--prefill", prefill, "--decode", decode]
        process = await start_process("proxy", words, self._log_dir)
        try:
            yield process.url, process.pid
        finally:
            await process.stop()

    @asynccontextmanager
    async def _vllm_router(self) -> AsyncIterator[tuple[str, int]]:
        url, prometheus_port = f"http://127.0.0.1:{(port := free_port())}", free_port()
        prefill, decode = (self.servers[role].url for role in ROLES)
        words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus_port)]
        words += [
            "--policy",
            "round_robin",
            *PAIR_FLAGS["vllm-router"],
            "--prefill",
            prefill,
            "--decode",
            decode,
        ]
        # By default it looks every minute, and a server that has come back is served at the second look.
        words += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
        log = self._log_dir / "vllm-router.log"
        async with running_server(
            (*RIVALS["vllm-router"], *words), os.environ, f"{url}/health", log,
            start_timeout_s=READY_S, stop_timeout_s=10.0,
        ) as pid:  # fmt: skip
            yield url, pid


async def _ask_little(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a short request is answered."""
    asked = {"model": MODEL, "prompt": "qa=1234;?qa=", "max_tokens": 2}
    async with http.post(f"{url}/v1/completions", json=asked) as response:
        await response.read()
        return response.status == 200
