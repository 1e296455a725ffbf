# SPDX-License-Identifier: Apache-2.0
"""`kvferry up` and `kvferry serve` pass options on, and restart what dies while the streams go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.helpers.client import Answer, complete, heldout, session
from tests.helpers.waiting import patient

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
START_TIMEOUT_S = patient(180.0)
RESTART_TIMEOUT_S = patient(120.0)


class Up:
    """A running `kvferry up`, and what it prints."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """Read on until a line has the pattern."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                self.lines.append(line.decode())
                if found := re.search(pattern, self.lines[-1]):
                    return found
        raise AssertionError(f"it ended: {''.join(self.lines)}")

    def child(self, word: str) -> int:
        """Return the pid of its first child that has a word in its command line."""
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if word in child.cmdline())


@asynccontextmanager
async def up(
    log_dir: Path,
    *words: str,
    command: str = "up",
    program: Sequence[str | Path] = (sys.executable, "-m", "kvferry.deploy"),
    cwd: Path = ROOT,
) -> AsyncIterator[Up]:
    process = await asyncio.create_subprocess_exec(
        *(*program, *command.split(), "--port", "0", "--discovery-port", "0"),
        *("--log-dir", str(log_dir), *words),
        stdout=asyncio.subprocess.PIPE,
        cwd=cwd,
    )
    try:
        yield Up(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 30)
    assert process.returncode == 0


async def nodes(http: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/nodes") as response:
        listed: list[dict[str, Any]] = (await response.json())["nodes"]
    return listed


async def feed(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what the operator's page is told now."""
    async with http.get(f"{url}/ui/events") as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                told: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return told
    raise AssertionError("the feed ended")


@pytest.mark.timeout(patient(600))
@pytest.mark.parametrize(
    "killed",
    [
        ("decode-0", "prefill-0"),
        pytest.param(("decode-0", "prefill-0", "decode-1", "prefill-1"), marks=pytest.mark.full),
    ],
    ids=["one of a role", "all"],
)
async def test_what_dies_is_restarted_and_the_streams_go_on(tmp_path: Path, killed: tuple[str, ...]) -> None:
    """The page and `kvferry status` show what happened; `kvferry doctor` reaches all that is there."""
    options = (
        "--prefill=2",
        "--decode",
        "2",
        "--agent.max-model-len",
        "1536",
        "--proxy.decode-policy=round_robin",
    )
    async with up(tmp_path, *options) as cluster, session() as http:
        url = (await cluster.until(r"serving ferry-tiny at (\S+)/v1;", START_TIMEOUT_S))[1]
        async with http.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 1536
        body = {"model": "ferry-tiny", "max_tokens": 250, "ignore_eos": True, "stream": True}
        bodies = [{**body, "prompt": each.prompt, "seed": seed} for seed, each in enumerate(heldout(4))]
        expected = await asyncio.gather(*(complete(http, url, each) for each in bodies))
        was = {node["name"]: node["address"] for node in await nodes(http, url)}
        for name in killed:
            running = [asyncio.ensure_future(complete(http, url, each)) for each in bodies]
            async with asyncio.timeout(START_TIMEOUT_S):
                while not all(
                    node["in_flight"] for node in await nodes(http, url) if node["role"] == "decode"
                ):
                    await asyncio.sleep(0.02)
            os.kill(cluster.child(name), signal.SIGKILL)
            await cluster.until(rf"{name} ended with -9: it was killed \(SIGKILL\)", patient(30))
            for answer, same in zip(await asyncio.gather(*running), expected, strict=True):
                assert isinstance(answer, Answer) and answer.same() == same.same()
            await cluster.until(rf"{name} is started again: process \d+", RESTART_TIMEOUT_S)
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                while [node["state"] for node in await nodes(http, url)] != ["ready"] * 4:
                    await asyncio.sleep(0.1)
            await assert_shown(http, url, name, was[name])
        assert {node["name"]: node["address"] for node in await nodes(http, url)} == was
        checked = await kvferry("doctor", "--proxy", url)
        for name, address in was.items():
            assert re.search(
                rf"^peer: {name} at {address}: responds .*, clock agrees$", checked, re.MULTILINE
            )
            assert f"peer: {name} at {address}: KV control at " in checked
        # The proxy keeps its ports, so the agents and clients find the next one.
        os.kill(cluster.child("kvferry.proxy"), signal.SIGKILL)
        await cluster.until(r"proxy is started again: process \d+", RESTART_TIMEOUT_S)
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while [node["state"] for node in await nodes(http, url)] != ["ready"] * 4:
                await asyncio.sleep(0.1)
        assert (await complete(http, url, bodies[0])).same() == expected[0].same()


async def assert_shown(http: aiohttp.ClientSession, url: str, name: str, address: str) -> None:
    """The page and `kvferry status` say that the agent was gone, and that it is back at its address."""
    page, table = await feed(http, url), await kvferry("status", url)
    kinds = [event["kind"] for event in page["events"] if event["name"] == name]
    assert {"lost", "replaced"} & {*kinds} and kinds[0] == "ready" and not page["lost"]
    gone = rf"ago: {name} at {address} .*: (lost|replaced) *$"
    assert re.search(gone, table, re.MULTILINE), table


async def kvferry(*words: str) -> str:
    """Return what a command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.deploy", *words), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, printed.decode()
    return printed.decode()


@pytest.mark.timeout(patient(300))
async def test_one_agent_serves_alone_and_its_options_come_from_a_file(tmp_path: Path) -> None:
    settings = tmp_path / "fleet.yaml"
    settings.write_text(
        "proxy: {decode-policy: round_robin}\nagent: {max-model-len: 1536}\nboth: {verify-kv: true}\n"
    )
    async with (
        up(tmp_path, "--config", str(settings), "--host", "0.0.0.0", command="serve ferry-tiny") as cluster,
        session() as http,
    ):
        url = (await cluster.until(r"serving ferry-tiny at (\S+)/v1;", START_TIMEOUT_S))[1]
        async with http.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 1536
        body = {"model": "ferry-tiny", "prompt": heldout(1)[0].prompt, "max_tokens": 4}
        assert isinstance(await complete(http, url, body), Answer)
        (node,) = json.loads(await kvferry("status", url, "--json"))["nodes"]
        assert (node["role"], node["state"], node["model"]) == ("both", "ready", "ferry-tiny")
        table = await kvferry("status", url)
        assert re.search(
            rf"{re.escape(node['address'])} +both +ready +native +ferry-tiny +0 of \d+ +0 ", table
        )
        load = ("--concurrency", "2", "--requests", "4", "--prompt-tokens", "40", "--output-tokens", "6")
        figures = await kvferry("bench", f"alone={url}", *load, "--ttft-ms", "60000")
        assert re.search(r"^alone +4 +0 .* 100.0 % ", figures, re.MULTILINE), figures


@pytest.mark.timeout(patient(300))
async def test_ctrl_c_is_acknowledged_at_once_and_a_second_one_obeyed(tmp_path: Path) -> None:
    """A stream would run for the 3 s that the first one leaves."""
    async with up(tmp_path, command="serve ferry-tiny") as cluster, session() as http:
        url = (await cluster.until(r"serving ferry-tiny at (\S+)/v1;", START_TIMEOUT_S))[1]
        body = {
            "model": "ferry-tiny",
            "prompt": "1+1=",
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            await answer.content.readline()
            children = psutil.Process(cluster.process.pid).children(recursive=True)
            cluster.process.send_signal(signal.SIGINT)
            await cluster.until(r"^stopping: what runs has 3 s to finish; Ctrl-C again stops at once$", 2.0)
            cluster.process.send_signal(signal.SIGINT)
            await cluster.until(r"^stopping at once$", 2.0)
            assert await asyncio.wait_for(cluster.process.wait(), patient(2.5)) == 0
            _, left = psutil.wait_procs(children, timeout=patient(2.0))
            assert not left
