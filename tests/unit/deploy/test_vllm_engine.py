# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --engine vllm` with a stand-in for vLLM's server: flags, progress, and one fate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.cli import names_vllm
from kvferry.deploy.vllm_engine import VllmEngineConfig
from tests.patience import patient
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
SERVER = """
import http.server, json, os, socket, subprocess, sys, threading
print("stand-in", json.dumps([os.getpid(), sys.argv[1:]]), flush=True)
if "--fails" in sys.argv:
    sys.exit(3)
# As an engine with our connector: it ends when its API has.
waiting = "import os, sys, time\\nwhile os.getppid() == int(sys.argv[1]):\\n    time.sleep(0.05)"
child = subprocess.Popen([sys.executable, "-c", waiting, str(os.getpid())])
print("child", child.pid, flush=True)
def drain():
    settings = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(settings["kv_connector_extra_config"]["drain_socket"])
        print("connected", flush=True)
        if "--drains" in sys.argv:
            print("asked", connection.recv(100).decode().strip(), flush=True)
            connection.recv(1) if "--slowly" in sys.argv else connection.sendall(b"drained\\n")
        else:
            connection.sendall(b"drained\\n")
        connection.recv(1)
if "--drains" in sys.argv or "--asked-by-a-proxy" in sys.argv:
    threading.Thread(target=drain, daemon=True).start()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose environment has a stand-in for vLLM."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parents[1]):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


class Running:
    """The command, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []

    async def line(self, start: str) -> str:
        """The next line of the log that begins so, without that."""
        assert self.process.stderr is not None
        async with asyncio.timeout(patient(30.0)):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if start in line:
                    return line.partition(start)[2].strip()
        raise AssertionError("".join(self.log))

    async def ended(self) -> int:
        async with asyncio.timeout(patient(40.0)):
            return await self.process.wait()


@asynccontextmanager
async def running(python: Path, *words: str) -> AsyncIterator[Running]:
    argv = ("-m", "kvferry.deploy", "agent", "--engine", "vllm", "--engine-python", str(python), *words)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def gone(pid: int) -> None:
    async with asyncio.timeout(patient(5.0)):
        while Path(f"/proc/{pid}/stat").exists() and is_running(pid):
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def of_transfer(words: list[str]) -> dict[str, Any]:
    return dict(json.loads(words[words.index("--kv-transfer-config") + 1]))


async def test_it_starts_vllm_with_the_connector_passes_flags_on_and_ends_with_it(python: Path) -> None:
    port = free_port()
    words = ("--model", "m", "--port", str(port), "--role", "prefill", "--proxy", "127.0.0.1:9")
    async with running(python, *words, "--", "--dtype", "float32") as agent:
        pid, argv = json.loads(await agent.line("stand-in "))
        child = int(await agent.line("child "))
        assert agent.process.stdout is not None
        listening = json.loads(await asyncio.wait_for(agent.process.stdout.readline(), patient(20.0)))
        assert listening == {"listening": {"url": f"http://127.0.0.1:{port}"}}
        assert argv[:6] == ["--model", "m", "--host", "127.0.0.1", "--port", str(port)]
        assert argv[-2:] == ["--dtype", "float32"]
        told = of_transfer(argv)
        assert (told["kv_connector"], told["kv_role"]) == ("KvferryConnector", "kv_producer")
        assert told["kv_connector_extra_config"]["proxy"] == ["127.0.0.1:9"]
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.ended() == 0
        for each in (pid, child):
            await gone(each)


@pytest.mark.parametrize("words", [("--drains",), ("--asked-by-a-proxy",), ("--drains", "--slowly")])
async def test_it_ends_once_the_connector_has_drained_the_server_or_time_is_up(
    python: Path, words: tuple[str, ...]
) -> None:
    limit = "0.5" if "--slowly" in words else "30"
    options = ("--model", "m", "--port", str(free_port()), "--drain-s", limit)
    async with running(python, *options, "--", *words) as agent:
        pid, _ = json.loads(await agent.line("stand-in "))
        await agent.line("connected")
        if "--drains" in words:
            agent.process.send_signal(signal.SIGTERM)
            assert await agent.line("asked ") == "drain"
        if "--slowly" in words:
            await agent.line("not drained")
        assert await agent.ended() == 0
        await gone(pid)


@pytest.mark.parametrize("victim", ["server", "command"])
async def test_neither_goes_on_without_the_other(python: Path, victim: str) -> None:
    """I8"""
    async with running(python, "--model", "m", "--port", str(free_port())) as agent:
        pid, _ = json.loads(await agent.line("stand-in "))
        child = int(await agent.line("child "))
        os.kill(pid if victim == "server" else agent.process.pid, signal.SIGKILL)
        assert await agent.ended() != 0
        for each in (pid, child):
            await gone(each)


async def test_a_server_that_does_not_start_ends_the_command_with_its_status(python: Path) -> None:
    async with running(python, "--model", "m", "--port", str(free_port()), "--", "--fails") as agent:
        assert "status 3" in await agent.line("vLLM ended with")
        assert await agent.ended() == 1


async def test_what_is_missing_is_named() -> None:
    async with running(Path(sys.executable), "--model", "m") as agent:
        assert "vllm" in await agent.line(f"{sys.executable} lacks ")
        assert await agent.ended() == 1


@pytest.mark.parametrize(
    ("field", "value"), [("port", 0), ("tp", 0), ("drain_s", -1.0), ("lease_s", 0.0), ("proxy", ("nowhere",))]
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        VllmEngineConfig(**{"model": "m", field: value})


def test_the_engine_is_read_from_our_flags_and_not_from_vllms() -> None:
    assert names_vllm(["--model", "m", "--engine", "vllm"]) and names_vllm(["--engine=vllm"])
    assert not names_vllm(["--model", "m"]) and not names_vllm(["--model", "m", "--", "--engine", "vllm"])
