# SPDX-License-Identifier: Apache-2.0
"""R18, R22: every command of the README is run, on free ports in place of the printed ones."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PORTS = ("10001", "36367", "8000", "8001", "6301", "6302")
# `make test` is what runs this file.
TARGETS = {"make demo", "make test", "make bench-proxy"}


def commands() -> list[str]:
    """Every line of the README's shell blocks, continued lines joined."""
    blocks = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.startswith((".venv/bin/", "make ", "curl "))]


@pytest.fixture
def ports() -> dict[str, str]:
    """A free port for each port of the README."""
    probes = [socket.socket() for _ in PORTS]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    chosen = {printed: str(probe.getsockname()[1]) for printed, probe in zip(PORTS, probes, strict=True)}
    for probe in probes:
        probe.close()
    return chosen


def argv(command: str, ports: dict[str, str]) -> list[str]:
    for printed, chosen in ports.items():
        command = re.sub(rf"(?<!\d){printed}(?!\d)", chosen, command)
    words = shlex.split(command)
    if words[0] == ".venv/bin/kvferry":
        return [sys.executable, "-m", "kvferry.deploy.cli", *words[1:]]
    return words


@asynccontextmanager
async def running(words: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that runs until Ctrl-C; it must then end with status 0 and leave no child behind."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        assert process.returncode is None, log.read_text()[-2000:]
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        status = await asyncio.wait_for(process.wait(), 30)
    assert status == 0, log.read_text()[-2000:]
    assert not [child for child in children if child.is_running()]


async def answer(words: list[str]) -> str:
    """Run the README's curl until the cluster answers it."""
    async with asyncio.timeout(90):
        while True:
            process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            assert process.stdout is not None
            body = await process.stdout.read()
            if await process.wait() == 0 and "choices" in (reply := json.loads(body)):
                return str(reply["choices"][0]["text"])
            await asyncio.sleep(0.5)


def test_every_command_is_covered() -> None:
    known = (
        "make ",
        "curl ",
        ".venv/bin/kvferry up ",
        ".venv/bin/kvferry proxy ",
        ".venv/bin/kvferry agent ",
    )
    for command in commands():
        assert command.startswith(known), command
    assert {command for command in commands() if command.startswith("make ")} <= TARGETS


@pytest.mark.timeout(180)
async def test_make_demo(tmp_path: Path) -> None:
    """`make demo` exits 0, shows that KV moved, and leaves no process behind."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.deploy.demo", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    output = (await process.stdout.read()).decode()
    assert await process.wait() == 0, output
    assert "2 of 2 agents ready" in output
    assert "KV bytes" in output
    for line in psutil.process_iter(["cmdline"]):
        assert "logs/demo" not in " ".join(line.info["cmdline"] or [])


@pytest.mark.timeout(180)
async def test_up_and_curl(ports: dict[str, str], tmp_path: Path) -> None:
    [up] = [command for command in commands() if "kvferry up" in command]
    [curl] = [command for command in commands() if command.startswith("curl")]
    words = [*argv(up, ports), "--discovery-port", ports["36367"], "--log-dir", str(tmp_path)]
    async with running(words, tmp_path / "up.log"):
        assert await answer(argv(curl, ports)) == "469"
    assert {path.name for path in tmp_path.glob("*.log")} >= {"proxy.log", "prefill-0.log", "decode-0.log"}


@pytest.mark.timeout(180)
async def test_the_parts_one_by_one(ports: dict[str, str], tmp_path: Path) -> None:
    [curl] = [command for command in commands() if command.startswith("curl")]
    parts = [command for command in commands() if re.search("kvferry (proxy|agent)", command)]
    assert len(parts) == 3
    async with AsyncExitStack() as stack:
        for index, part in enumerate(parts):
            await stack.enter_async_context(running(argv(part, ports), tmp_path / f"{index}.log"))
        assert await answer(argv(curl, ports)) == "469"
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{ports['10001']}/ready") as ready,
        ):
            assert ready.status == 200


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nonsense"], "nonsense"),
        (["up", "--no-such-flag", "1"], "no-such-flag"),
        (["up", "--prefill", "none"], "prefill"),
        (["up", "--prefill", "0"], "prefill"),
        (["proxy", "--no-such-flag", "1"], "no-such-flag"),
        (["proxy", "--port", "70000"], "port"),
        (["agent", "--model", "ferry-tiny", "--no-such-flag", "1"], "no-such-flag"),
        (["agent", "--model", "ferry-tiny", "--role", "both-ish"], "role"),
        (["agent", "--model", "no-such-model"], "no-such-model"),
    ],
)
async def test_a_wrong_command_line_ends_at_once_and_names_it(words: list[str], named: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.deploy.cli", *words, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert named in said
