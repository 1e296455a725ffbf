# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --engine vllm` with a stand-in for vLLM's server: flags, progress, and one fate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.plugin.launch import port_kept
from kvferry.agent.vllm.launch import VllmEngineConfig, with_chosen_engine
from kvferry.common.options import take_option
from kvferry.transfer.net import CannotBind
from tests.helpers.servers import free_port
from tests.helpers.waiting import patient, until

ROOT = Path(__file__).parents[4]
SERVER = """
import http.server, json, os, socket, subprocess, sys, threading
print("stand-in", json.dumps([os.getpid(), sys.argv[1:]]), flush=True)
if "--fails" in sys.argv:
    print("(EngineCore pid=7) ERROR 11-25 07:00:00 [core.py:9] kvferry.x.NotServed: cp must be 1, got 2")
    print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
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
    await until(lambda: not (Path(f"/proc/{pid}/stat").exists() and is_running(pid)), patient(5.0))


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
        assert told["kv_connector_extra_config"]["transfer"] == "auto"
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
        if victim == "server":
            assert (await agent.line("vLLM ended with status ")).startswith("-9: it was killed (SIGKILL)")
        assert await agent.ended() != 0
        for each in (pid, child):
            await gone(each)


async def test_a_server_that_does_not_start_ends_the_command_with_its_status(python: Path) -> None:
    async with running(python, "--model", "m", "--port", str(free_port()), "--", "--fails") as agent:
        said = await agent.line("vLLM ended with status ")
        assert said == "3: kvferry.x.NotServed: cp must be 1, got 2"
        assert await agent.ended() == 1


async def test_what_is_missing_is_named() -> None:
    async with running(Path(sys.executable), "--model", "m") as agent:
        assert "vllm" in await agent.line(f"{sys.executable} lacks ")
        assert await agent.ended() == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("name", "x" * 65),
        ("tp", 0),
        ("drain_s", -1.0),
        ("lease_s", 0.0),
        ("proxy", ("nowhere",)),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        VllmEngineConfig(**{"model": "m", field: value})


async def test_a_port_is_chosen_and_a_taken_one_is_refused_before_vllm_loads(python: Path) -> None:
    """Two servers of some versions would share it."""
    async with running(python, "--model", "m", "--port", "0", "--name", "one") as agent:
        _, argv = json.loads(await agent.line("stand-in "))
        port = argv[argv.index("--port") + 1]
        settings = of_transfer(argv)["kv_connector_extra_config"]
        assert int(port) and settings["advertise_url"] == f"http://127.0.0.1:{port}"
        assert settings["name"] == "one"
        assert agent.process.stdout is not None
        await asyncio.wait_for(agent.process.stdout.readline(), patient(20.0))
        async with running(python, "--model", "m", "--port", port) as other:
            assert (
                await other.line("cannot bind vLLM's API to ") == f"127.0.0.1:{port}: Address already in use"
            )
            assert await other.ended() == 1


@pytest.mark.parametrize("options", [(socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_port_is_kept_for_vllm(options: tuple[int, ...]) -> None:
    """With the options of vLLM 0.32 and of 0.24."""
    with port_kept("vLLM's API", "127.0.0.1", 0) as port, socket.socket() as vllms:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        for option in options:
            vllms.setsockopt(socket.SOL_SOCKET, option, 1)
        vllms.bind(("127.0.0.1", port))
        vllms.listen()
        with pytest.raises(CannotBind, match="in use"), port_kept("vLLM's API", "127.0.0.1", port):
            pass


def test_a_bundled_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = VllmEngineConfig(model="ferry-tiny").command((), "")
    assert words[words.index("--model") + 1] == str(BUNDLED_MODELS / "ferry-tiny")
    assert words[words.index("--served-model-name") + 1] == "ferry-tiny"
    (tmp_path / "ferry-tiny").mkdir()
    words = VllmEngineConfig(model="ferry-tiny").command((), "")
    assert words[words.index("--model") + 1] == "ferry-tiny" and "--served-model-name" not in words


@pytest.mark.parametrize(("num_gpus", "engine"), [(0, "kvferry"), (2, "vllm")])
def test_auto_takes_vllm_where_it_is_installed_and_has_a_gpu(
    num_gpus: int, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '[[], \"0.32.0\", {num_gpus}]'\n")
    script.chmod(0o755)
    words = ["--model", "m", "--engine=auto", "--engine-python", str(script), "--port", "1"]
    chosen = with_chosen_engine(words)
    why = "sees no GPU" if engine == "kvferry" else "has vLLM 0.32.0, and its PyTorch sees 2 GPUs"
    assert f"--engine auto takes {engine}: " in (said := capsys.readouterr().err) and why in said
    plain = ["--model", "m", "--port", "1"]
    vllms = ["--engine", "vllm", "--model", "m", "--engine-python", str(script), "--port", "1"]
    assert chosen == (plain if engine == "kvferry" else vllms)


def test_auto_takes_ours_where_vllm_is_not_installed_and_refuses_words_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert with_chosen_engine(["--model", "m", "--engine", "auto"]) == ["--model", "m"]
    assert "takes kvferry: " in (said := capsys.readouterr().err) and "lacks vllm" in said
    with pytest.raises(SystemExit) as stop:
        with_chosen_engine(["--model", "m", "--engine", "auto", "--", "--dtype", "float32"])
    assert stop.value.code == 2 and "has no use for words after --" in capsys.readouterr().err


def test_the_engine_is_read_from_our_flags_and_not_from_vllms() -> None:
    plain = ["--model", "m"]
    for given in (["--engine", "vllm"], ["--engine=vllm"], ["--engine", "auto", "--engine=vllm"]):
        assert take_option([*plain, *given, "--", "x"], "--engine") == ("vllm", [*plain, "--", "x"])
    for others in (plain, [*plain, "--", "--engine", "vllm"], [*plain, "--engine"]):
        assert take_option(others, "--engine") == (None, others)
