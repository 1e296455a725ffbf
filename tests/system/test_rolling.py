# SPDX-License-Identifier: Apache-2.0
"""Every agent and both proxies are replaced one after the other, under load (docs/rolling.md).

Clients know both proxies and retry what was refused a connection, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from kvferry.deploy.drain import drain
from kvferry.deploy.launcher import LISTENING_TIMEOUT_S, STOP_GRACE_S, Process, start_process
from tests.helpers.client import Answer, RequestFailed, StreamCut, complete, mixed_bodies, session
from tests.helpers.metrics import Samples, is_shown, scrape, total
from tests.helpers.waiting import patient
from tests.system.conftest import COMMON_ARGS, MODEL

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
PROTOCOL_SINCE = ("-S", '"rejected": Rejected', "--", "proxy/wire/registration.py")
"""Finds the first commit with the protocols of today, which began anew there: the oldest to upgrade from."""
DEADLINE_S = patient(90.0)
PROXIES = ("proxy-0", "proxy-1")
ROLES = ("prefill", "decode")
Body = Callable[[], dict[str, Any]]
"""Makes one request's body."""
LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, StreamCut)
"""How a client learns that its proxy has died."""


class Fleet:
    """Two proxies, and agents that announce themselves to both. An async context: leaving it ends all."""

    proxy_module = "kvferry.proxy"
    start_timeout_s = LISTENING_TIMEOUT_S
    stop_grace_s = STOP_GRACE_S
    deadline_s = DEADLINE_S

    def __init__(
        self,
        log_dir: Path,
        agent_args: tuple[str, ...],
        proxy_args: tuple[str, ...] = (),
        older: Path | None = None,
    ) -> None:
        self._older = older
        """Where an older kvferry is, of which the first agents and the first proxy are."""
        self.processes: dict[str, Process] = {}
        self.pages: list[Samples] = []
        """The last metrics of agents that have ended."""
        self._ports = dict.fromkeys(PROXIES, (0, 0))
        self._agent_args = agent_args
        self._proxy_args = proxy_args
        self._log_dir = log_dir
        self._stack = AsyncExitStack()
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        with self._older_first():
            await self.start_proxy(PROXIES[0])
        await self.start_proxy(PROXIES[1])
        with self._older_first():
            await asyncio.gather(*(self.start_agent(role) for role in ROLES))
        await self.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.process.ask_to_end(signal.SIGINT)
        await self._stack.aclose()

    @contextmanager
    def _older_first(self) -> Iterator[None]:
        """What is started meanwhile is of the older kvferry, if there is one."""
        with pytest.MonkeyPatch.context() as patch:
            if self._older is not None:
                patch.setenv("PYTHONPATH", str(self._older))
            yield

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port, _ in self._ports.values()]

    def agents(self) -> list[str]:
        return [name for name in self.processes if name not in PROXIES]

    async def start_proxy(self, name: str) -> None:
        port, discovery_port = self._ports[name]
        words = ("-m", self.proxy_module, "--port", str(port), "--discovery-port", str(discovery_port))
        await self._start(name, *words, *self._proxy_args)
        where = self.processes[name].listening
        self._ports[name] = where["port"], where["discovery_port"]

    async def start_agent(self, role: str) -> None:
        where = [word for _, port in self._ports.values() for word in ("--proxy", f"127.0.0.1:{port}")]
        await self._start(f"{role}-{next(self._numbers)}", *self.agent_words(role, where))

    def agent_words(self, role: str, where: list[str]) -> tuple[str, ...]:
        """Return the words after `python` that start an agent. `where`: the proxies that it announces to."""
        return (
            "-m", "kvferry.agent", "--role", role, "--model", MODEL,
            "--port", "0", "--control-port", "0", *where, *COMMON_ARGS, *self._agent_args,
        )  # fmt: skip

    async def _start(self, name: str, *argv: str) -> None:
        process = await start_process(name, argv, self._log_dir, self.start_timeout_s)
        self.processes[name] = process
        self._stack.push_async_callback(process.stop, self.stop_grace_s, signal.SIGINT)

    async def wait_ready(self) -> None:
        """Wait until each proxy sees the agents that run ready."""
        wanted = {self.processes[name].url for name in self.agents()}
        async with asyncio.timeout(self.deadline_s), aiohttp.ClientSession() as http:
            for url in self.urls:
                ready: set[str] = set()
                while not wanted <= ready:
                    async with http.get(f"{url}/nodes") as response:
                        nodes = (await response.json())["nodes"]
                    ready = {node["address"] for node in nodes if node["state"] == "ready"}
                    await asyncio.sleep(0.1)

    async def end(self, name: str, how: Callable[[Process], Any]) -> int:
        """End a process, keep an agent's last metrics, and return its status."""
        process = self.processes.pop(name)
        ended = asyncio.ensure_future(process.process.wait())
        async with asyncio.timeout(self.deadline_s):
            page = None if name in PROXIES else await scrape(process.url)
            ending = asyncio.ensure_future(how(process))
            while not ended.done():
                if page is not None:
                    try:
                        page = await scrape(process.url)
                    except (OSError, aiohttp.ClientError):
                        await ended
                await asyncio.wait({ended}, timeout=0.05)
            await ending
        if page is not None:
            self.pages.append(page)
        return ended.result()

    async def replace(self, name: str, how: Callable[[Process], Any]) -> int:
        """Replace one process and return its status. An agent's successor is there before; a proxy's is at
        the same address after it.
        """
        if name in PROXIES:
            status = await self.end(name, how)
            await self.start_proxy(name)
        else:
            await self.start_agent(name.partition("-")[0])
            await self.wait_ready()
            status = await self.end(name, how)
        await self.wait_ready()
        return status


@dataclass
class Load:
    """Clients that keep requests under way, and what became of each request."""

    urls: list[str]
    concurrency: int
    at_least: int
    deadline_s: float
    """Of each request."""
    asked: Sequence[Body]
    expected: list[Answer]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answered: int = 0
    wrong: int = 0
    recomputed: int = 0
    failed: list[BaseException] = field(default_factory=list)
    lost: int = 0
    """Broken off with the proxy that was killed."""
    killed: set[str] = field(default_factory=set)
    """Proxies that are killed just now: a request to one may break off, or be reset while it connects."""
    _at: dict[int, str] = field(default_factory=dict)
    """By request: the proxy that has it."""

    async def run(self) -> None:
        """Send requests until there were enough and `over` is set.

        Each has a connection of its own: on a kept one it may cross the proxy's close (docs/rolling.md).
        """
        numbers = itertools.count()
        async with session(keep_alive=False) as http, asyncio.TaskGroup() as clients:
            for _ in range(self.concurrency):
                clients.create_task(self._client(http, numbers))

    async def _client(self, http: aiohttp.ClientSession, numbers: itertools.count[int]) -> None:
        while not self.over.is_set() or self.answered + len(self.failed) + self.lost < self.at_least:
            number = next(numbers)
            index = number % len(self.asked)
            try:
                answer = await self._ask(http, number, self.asked[index])
            except LOST as error:
                if self._at[number] in self.killed:
                    self.lost += 1
                else:
                    self.failed.append(error)
            except (RequestFailed, TimeoutError) as error:
                self.failed.append(error)
            else:
                self.answered += 1
                self.wrong += answer.same() != self.expected[index].same()
                self.recomputed += bool(answer.timing.get("recomputed"))
            finally:
                self._at.pop(number, None)

    async def _ask(self, http: aiohttp.ClientSession, number: int, body: Body) -> Answer:
        """Ask one proxy after the other, until one does not refuse the connection."""
        async with asyncio.timeout(self.deadline_s):
            for attempt in itertools.count(number):
                self._at[number] = url = self.urls[attempt % len(self.urls)]
                try:
                    return await complete(http, url, body())
                except aiohttp.ClientConnectorError as error:
                    if not isinstance(error.os_error, ConnectionRefusedError):
                        raise
                    await asyncio.sleep(0.02)
        raise AssertionError


@asynccontextmanager
async def loaded(
    fleet: Fleet, concurrency: int, at_least: int, asked: Sequence[Body] | None = None
) -> AsyncIterator[Load]:
    """Keep the fleet under load while the context is open, and until there were enough requests."""
    asked = asked or [body.copy for body in mixed_bodies(16, 48)]
    async with session() as http:
        expected = await asyncio.gather(*(complete(http, fleet.urls[0], body()) for body in asked))
    load = Load(fleet.urls, concurrency, at_least, fleet.deadline_s, asked, list(expected))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        try:
            yield load
        finally:
            load.over.set()


async def sigterm(process: Process) -> None:
    process.process.ask_to_end(signal.SIGTERM)


async def trouble(fleet: Fleet, load: Load) -> dict[str, float]:
    """What went wrong or was done twice."""
    pages = [*fleet.pages, *[await scrape(fleet.processes[name].url) for name in fleet.agents()]]
    for page in pages:
        names = {name for name, _ in page}
        assert names & RECOMPUTES and names & LEASES_ENDED.keys()
    return {
        "failed": len(load.failed) + load.lost,
        "wrong": load.wrong,
        "recomputed": load.recomputed
        + sum(total(page, name) for page in pages for name in RECOMPUTES if is_shown(page, name)),
        "expired": sum(
            total(page, name, **{label: "expired"})
            for page in pages
            for name, label in LEASES_ENDED.items()
            if is_shown(page, name)
        ),
    }


def tried_again(page: Samples) -> float:
    """How often a proxy has sent a request, or the rest of a stream, to another agent."""
    names = ("kvferry_proxy_retries_total", "kvferry_proxy_migrations_total")
    assert set(names) <= {name for name, _ in page}
    return sum(total(page, name) for name in names)


RECOMPUTES = {
    "kvferry_agent_recomputes_total", "kvferry_recomputes_total", "vllm:kvferry_recomputed_total",
}  # fmt: skip
LEASES_ENDED = {
    "kvferry_transfer_leases_ended_total": "cause",
    "kvferry_leases_ended_total": "cause",
    "vllm:kvferry_leases_ended_total": "reason",
}
"""And the label that says how. The second name of each is that of the older agents, the third is vLLM's."""
NONE = {"failed": 0, "wrong": 0, "recomputed": 0, "expired": 0}
LONG = pytest.mark.full
LEASE = ("--lease-s", "20")


@pytest.mark.timeout(patient(600.0))
@pytest.mark.parametrize(
    ("transfer", "rounds", "concurrency", "requests", "proxy_args"),
    [
        ("tcp", 1, 12, 150, ()),
        pytest.param("tcp", 2, 32, 1000, (), marks=LONG),
        pytest.param("tcp", 2, 32, 1000, ("--workers", "2"), marks=LONG),
        pytest.param("nixl", 2, 32, 1000, (), marks=LONG),
    ],
)
async def test_all_are_replaced_and_no_request_is_lost_or_computed_twice(
    log_dir: Path, transfer: str, rounds: int, concurrency: int, requests: int, proxy_args: tuple[str, ...]
) -> None:
    """Agents by SIGTERM, one by a drain that a proxy was asked for, and then the proxies."""
    where = log_dir / f"rolling-{transfer}-{rounds}{''.join(proxy_args)}"
    async with Fleet(where, (*LEASE, "--transfer", transfer), proxy_args) as fleet:

        async def through_a_proxy(process: Process) -> None:
            await drain(fleet.urls[0], process.url, None, None, DEADLINE_S)

        async with loaded(fleet, concurrency, requests) as load:
            for _ in range(rounds):
                for name in fleet.agents():
                    assert await fleet.replace(name, sigterm) == 0, name
                (decode,) = (name for name in fleet.agents() if name.startswith("decode"))
                assert await fleet.replace(decode, through_a_proxy) == 0
                for proxy in PROXIES:
                    assert not tried_again(await scrape(fleet.processes[proxy].url))
                    assert await fleet.replace(proxy, sigterm) == 0, proxy
        assert not load.failed, load.failed[:3]
        assert await trouble(fleet, load) == NONE
        assert load.answered >= requests


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The oldest kvferry with the protocols of today, to be put in front of `sys.path`."""
    found = subprocess.run(
        ["git", "log", "--reverse", "--format=%H", *PROTOCOL_SINCE], cwd=ROOT, capture_output=True, text=True
    )
    if not found.stdout:
        pytest.skip("this clone does not have the first commit with the protocols of today")
    package = tmp_path / "kvferry"
    package.mkdir()
    packed = subprocess.run(
        ["git", "archive", found.stdout.split()[0], "agent", "common", "proxy", "transfer", "deploy"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", package], input=packed.stdout, check=True)
    (package / "deploy" / "models").rename(package / "models")
    return tmp_path


@pytest.mark.timeout(patient(300.0))
async def test_agents_are_upgraded_beside_an_older_proxy_and_a_newer(log_dir: Path, older: Path) -> None:
    """As a pair: the older ones hash what they are in another way, so that older and newer do not fit."""
    async with Fleet(log_dir / "upgrade", LEASE, older=older) as fleet:
        async with loaded(fleet, 8, 60) as load:
            before = fleet.agents()
            for role in ROLES:
                await fleet.start_agent(role)
            await fleet.wait_ready()
            for name in before:
                assert await fleet.end(name, sigterm) == 0, name
        assert not load.failed, load.failed[:3]
        assert await trouble(fleet, load) == NONE
        pages = []
        async with aiohttp.ClientSession() as http:
            for url in fleet.urls:
                async with http.get(f"{url}/nodes") as response:
                    pages.append(await response.json())
        for page in pages:
            assert not page["rejected_agents"] and not page["refused_pairings"]


@pytest.mark.full
@pytest.mark.timeout(patient(600.0))
async def test_the_control_without_a_drain_loses_or_recomputes(log_dir: Path) -> None:
    async with Fleet(log_dir / "rolling-control", (*LEASE, "--drain-s", "0")) as fleet:
        async with loaded(fleet, 32, 300) as load:
            for name in fleet.agents():
                await fleet.replace(name, sigterm)
        again = [tried_again(await scrape(fleet.processes[name].url)) for name in PROXIES]
        found = await trouble(fleet, load)
        print(f"{found}, sent to another agent again {again}")
        assert found != NONE or any(again), "nothing was lost, nor computed twice"
        assert not found["wrong"]


@pytest.mark.full
@pytest.mark.timeout(patient(600.0))
@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_all_are_killed_and_nothing_is_wrong_or_hangs(log_dir: Path, transfer: str) -> None:
    """Who is cut off learns it: by a typed error, or since the connection to the killed proxy breaks."""
    async with Fleet(log_dir / f"killed-{transfer}", (*LEASE, "--transfer", transfer)) as fleet:
        async with loaded(fleet, 32, 1000) as load:
            for _ in range(2):
                await kill_all(fleet, load)
        check_killed(load)


async def kill_all(fleet: Fleet, load: Load) -> None:
    """Replace every agent and every proxy by SIGKILL, one after the other."""
    for name in [*fleet.agents(), *PROXIES]:

        async def kill(process: Process, name: str = name) -> None:
            if name in PROXIES:
                load.killed.add(process.url)
            process.process.kill()

        assert await fleet.replace(name, kill) == -signal.SIGKILL
        load.killed.clear()


def check_killed(load: Load) -> None:
    """Nothing is wrong, and what failed says why."""
    print(f"{load.answered} answered, {len(load.failed)} failed, {load.lost} lost with a proxy")
    assert not load.wrong
    untyped = [each for each in load.failed if not isinstance(each, RequestFailed)]
    assert not untyped, untyped[:3]
    assert all(each.error["code"] for each in load.failed if isinstance(each, RequestFailed))
