# SPDX-License-Identifier: Apache-2.0
"""`kvferry up --on ray`: three real Ray nodes, of which one is killed under load; the page, on three hosts.

`make test-deploy` installs Ray; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy.conftest import FOLDER
from tests.deploy.containers import Containers
from tests.deploy.hosts import Terminal, hosts
from tests.deploy.pages import scripts, steps
from tests.deploy.ray_nodes import ADDRESSES, RayNodes, own_network
from tests.helpers.client import Answer, complete_all, heldout, session
from tests.helpers.metrics import scrape, total, wait_running
from tests.helpers.waiting import patient, until
from tests.system.test_up import Up, nodes

ROOT = Path(__file__).parents[2]
HEAD, DOOMED, _ = ADDRESSES
START_TIMEOUT_S = patient(90.0)
BACK_TIMEOUT_S = patient(90.0)
STREAMS = 8
UP = ("--on", "ray", "--host", HEAD, "--ray-resources", "slot=1", "--discovery-port", "0", "--port", "0")
AGENTS = ("decode-0", "decode-1", "prefill-0", "prefill-1")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray here: make test-deploy gets it"
    ),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    try:
        network = own_network()
        network.__enter__()
    except PermissionError:
        pytest.skip("a network namespace cannot be made here")
    made = RayNodes(tmp_path_factory.mktemp("ray"))
    try:
        made.start()
        yield made
    finally:
        made.end()
        network.__exit__(None, None, None)


async def kvferry(*words: str) -> tuple[int | None, str]:
    """Return the status of a command and what it prints on both streams."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.deploy", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), patient(60))
    return process.returncode, printed.decode()


@asynccontextmanager
async def up(*words: str, **environment: str) -> AsyncIterator[Up]:
    """A running `kvferry up --on ray`; at the end it gets Ctrl-C, unless it has ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.deploy", "up", *UP, *words),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        yield Up(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), patient(60))
    assert process.returncode == 0


def agent_processes() -> list[psutil.Process]:
    """The agents' processes of this network."""
    here = Path("/proc/thread-self/ns/net").readlink()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith("kvferry.agent") for word in process.info["cmdline"] or ()):
            try:
                if Path(f"/proc/{process.pid}/ns/net").readlink() == here:
                    found.append(process)
            except OSError:
                pass
    return found


async def where() -> dict[str, dict[str, Any]]:
    """What `kvferry status --on ray` says of each agent."""
    status, printed = await kvferry("status", "--on", "ray", "--json")
    assert status == 0, printed
    return {agent["name"]: agent for agent in json.loads(printed)["agents"]}


async def all_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    await until(
        lambda: not any(process.is_running() and process.status() != "zombie" for process in processes),
        timeout_s,
    )


async def test_a_node_dies_under_load_and_its_agents_come_back_elsewhere(
    ray_nodes: RayNodes, tmp_path: Path
) -> None:
    options = (
        "--prefill",
        "2",
        "--decode",
        "2",
        "--agent.max-model-len",
        "1536",
        "--agent.prefix-cache=false",
    )
    async with up(*options, "--log-dir", str(tmp_path)) as cluster, session() as http:
        url = (await cluster.until(r"serving ferry-tiny at (\S+)/v1;", START_TIMEOUT_S))[1]
        before = await where()
        assert sorted(before) == list(AGENTS)
        assert {agent["node"] for agent in before.values() if agent["name"].endswith("1")} == {DOOMED}
        assert {agent["url"] for agent in before.values()} == {
            node["address"] for node in await nodes(http, url)
        }

        body = {"model": "ferry-tiny", "max_tokens": 360, "ignore_eos": True, "stream": True, "logprobs": 1}
        bodies = [
            {**body, "prompt": each.prompt, "seed": seed, "temperature": seed % 2}
            for seed, each in enumerate(heldout(STREAMS))
        ]
        expected = await complete_all(url, bodies, STREAMS)
        running = asyncio.ensure_future(complete_all(url, bodies, STREAMS))
        await wait_running(before["decode-1"]["url"])
        family = ray_nodes.processes(DOOMED)
        ray_nodes.kill_raylet(DOOMED)
        for ours, theirs in zip(await running, expected, strict=True):
            assert isinstance(theirs, Answer), theirs
            assert isinstance(ours, Answer), ours
            assert ours.same() == theirs.same()
        assert total(await scrape(url), "kvferry_proxy_migrations_total") > 0
        # With the node its agents end: what is on its GPUs must not be there when it comes back.
        await all_gone(family, BACK_TIMEOUT_S)

        await cluster.until(r"1 is running on (?!10\.77\.0\.2:)", BACK_TIMEOUT_S)
        async with asyncio.timeout(BACK_TIMEOUT_S):
            while [node["state"] for node in await nodes(http, url)] != ["ready"] * 4:
                await asyncio.sleep(0.1)
        after = await where()
        assert {agent["state"] for agent in after.values()} == {"running"}
        assert DOOMED not in {agent["node"] for agent in after.values()}
        for name in ("prefill-0", "decode-0"):
            assert after[name] == before[name]
        for ours, theirs in zip(await complete_all(url, bodies, STREAMS), expected, strict=True):
            assert isinstance(ours, Answer) and isinstance(theirs, Answer) and ours.same() == theirs.same()
        assert (tmp_path / "decode-1.log").read_text()

        left = agent_processes()
        assert left
        status, printed = await kvferry("down")
        assert (status, sorted(printed.splitlines())) == (0, [f"{name} has ended" for name in AGENTS])
        await cluster.until("all agents were ended", patient(30))
        assert await asyncio.wait_for(cluster.process.wait(), patient(30)) == 0
    await all_gone(left, patient(10))
    assert agent_processes() == []
    assert await kvferry("down") == (0, "no agents run in the Ray namespace kvferry\n")


async def test_an_agent_is_restarted_and_ctrl_c_leaves_nothing(ray_nodes: RayNodes, tmp_path: Path) -> None:
    """On a terminal, which rich takes this for, there is a line about the fleet below what is printed."""
    words = ("--prefill", "0", "--decode", "0", "--both", "1", "--ray-namespace", "other")
    async with up(*words, "--log-dir", str(tmp_path), TTY_COMPATIBLE="1", TERM="xterm") as cluster:
        pid = int((await cluster.until(r"both-0 is running on \S+: process (\d+)", START_TIMEOUT_S))[1])
        await cluster.until("serving", START_TIMEOUT_S)
        status, printed = await kvferry("up", *UP, "--ray-namespace", "other")
        assert status == 1 and "kvferry down" in printed
        psutil.Process(pid).kill()
        await cluster.until(r"both-0 on \S+ is paused: ended with -9", patient(30))
        again = int((await cluster.until(r"both-0 is running on \S+: process (\d+)", BACK_TIMEOUT_S))[1])
        assert again != pid
        # The line has no end: it stands before what was printed next.
        assert "1 of 1 agents ready, 0 running, 0 waiting" in "".join(cluster.lines)
        assert (await kvferry("status", "--on", "ray", "--ray-namespace", "other"))[1].count("both-0") == 1
    assert agent_processes() == []
    assert "no agents run" in (await kvferry("down", "--ray-namespace", "other"))[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--host", "127.0.0.1"), "--host 127.0.0.1"),
        (("--ray-address", f"{HEAD}:1"), f"no Ray cluster at {HEAD}:1"),
    ],
)
async def test_what_cannot_be_started_is_said_in_one_line(
    ray_nodes: RayNodes, tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    """And leaves nothing."""
    status, printed = await kvferry("up", *UP, *words, "--log-dir", str(tmp_path))
    assert status == 1
    assert named in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert "no agents run" in (await kvferry("down"))[1]


ENVIRONMENT = ". /opt/kvferry/bin/activate\n"


@pytest.mark.timeout(3600)
def test_the_commands_of_the_page_do_what_it_says(containers: Containers, tmp_path: Path) -> None:
    """As they stand, on three hosts at the page's addresses. All have one /opt, and so what is installed."""
    addresses = {name: f"198.51.100.{number}" for number, name in enumerate(("head", "second", "third"), 1)}
    with hosts(containers, FOLDER, tmp_path, addresses, "ray") as (head, *others):
        [install] = scripts("ray.md", "Install")
        assert ENVIRONMENT in install
        head.type(install)
        begin, join, up, look = scripts("ray.md", "Start")
        head.type(ENVIRONMENT + begin)
        for host in others:
            host.type(ENVIRONMENT + join)

        def fleet(script: str, name: str) -> AbstractContextManager[Terminal]:
            return head.terminal(ENVIRONMENT + script, tmp_path / name)

        [end, stop] = scripts("ray.md", "End")
        with fleet(up, "first") as first:
            first.until(r"serving ferry-tiny at http://198\.51\.100\.1:10001/v1", START_TIMEOUT_S)
            seen = head.type(ENVIRONMENT + look)
            for name in ("prefill-0", "decode-0"):
                assert f"{name} " in seen
            assert '"text":"469"' in seen, seen
            assert len(re.findall(r"http://198\.51\.100\.\d:\d+ +(?:prefill|decode) +ready ", seen)) == 2, (
                seen
            )
            [status] = steps("ray.md", "When")
            assert "CPU" in head.type(ENVIRONMENT + status)
            head.type(ENVIRONMENT + end)
            assert first.wait(patient(60)) == 0

        beside, end_the_first = scripts("ray.md", "Upgrade and roll back")
        with fleet(up, "blue") as blue, fleet(beside, "green") as green:
            blue.until(r"serving ferry-tiny at http://198\.51\.100\.1:10001/v1", START_TIMEOUT_S)
            green.until(r"serving ferry-tiny at http://198\.51\.100\.1:10002/v1", START_TIMEOUT_S)
            head.type(ENVIRONMENT + end_the_first)
            assert blue.wait(patient(60)) == 0
            ask = "curl " + look.partition("curl ")[2]
            assert '"text":"469"' in head.type(ask.replace(":10001/", ":10002/"))
            head.type(ENVIRONMENT + "kvferry down --ray-namespace green")
            assert green.wait(patient(60)) == 0
        for host in (*others, head):
            host.type(ENVIRONMENT + stop)
            assert host.type("pgrep raylet || true") == ""
