# SPDX-License-Identifier: Apache-2.0
"""R18, R22: every command of the README is run, on free ports in place of the printed ones.

So are the processes one by one, of the quick start with an own model. Commands of the other pages name
hosts and files that are not here: they are parsed by what would run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from kvferry.agent.announce.attach import SidecarConfig
from kvferry.agent.cli import parse_config as agent_config
from kvferry.agent.sglang.launch import SglangEngineConfig
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.common.options import collect, parse_flags
from kvferry.deploy import canary, completion, drain, keygen, status
from kvferry.deploy.bench.config import parse_config as bench_config
from kvferry.deploy.cli import COMMANDS, main
from kvferry.deploy.doctor import command as doctor
from kvferry.deploy.plan.command import PlanConfig
from kvferry.deploy.ray import down
from kvferry.deploy.up import PartOptions, UpConfig
from kvferry.proxy.api.auth import admin_key
from kvferry.proxy.config import parse_config as proxy_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
README = ROOT / "README.md"
OWN_MODEL = ROOT / "docs" / "quickstart" / "own-model.md"
SECURITY = (ROOT / "docs" / "security.md").read_text()
BIN = r"(\.venv|/opt/kvferry)/bin/"
PORTS = ("10001", "36367", "8000", "8001", "6301", "6302")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
PAGES += [ROOT / "tests" / "README.md", ROOT / "benchmarks" / "README.md"]
# Options of vLLM, SGLang, their routers, `tools.train` and tests, and those that CHANGELOG.md says are gone.
FOREIGN = {
    "--control-fault",
    "--dp",
    "--ep",
    "--kv-connector",
    "--only",
    "--pd-disaggregation",
    "--policy",
    "--quantization",
    "--quick",
    "--tcp-fault",
    "--vllm-pd-disaggregation",
    "--kv-transfer-config",
    "--page-size",
    "--scheduling-policy",
    "--enable-deterministic-inference",
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-log-stats",
    "--disaggregation-mode",
    "--disaggregation-enable-kv-checksum",
    "--enable-memory-saver",
    "--disaggregation-bootstrap-port",
    "--disaggregation-transfer-backend",
    "--kv-fault",
    "--tokens",
    "--build-arg",
    "--index-url",
    "--set",
    "--cuda",
    "--distributed-executor-backend",
    "--bind",
    "--nnodes",
    "--no-deps",
    "--data-parallel-multi-port-external-lb",
    "--data-parallel-size",
    "--dry-run",
}
# Programs of others: what follows them is their own.
PROGRAMS = {"curl", "docker", "git", "pip", "podman", "podman-compose", "python", "sha256sum"}


def blocks(page: Path) -> str:
    """Return the lines of a page's code blocks, continued lines joined."""
    return "\n".join(re.findall(r"```\w*\n(.*?)```", page.read_text(), flags=re.DOTALL)).replace("\\\n", " ")


def commands(page: Path = README) -> list[str]:
    """Return every command of a page's code blocks."""
    lines = [line.strip() for line in blocks(page).splitlines()]
    return [line for line in lines if line.startswith((".venv/bin/", "kvferry ", "make ", "curl "))]


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
    if words[0] in ("kvferry", ".venv/bin/kvferry"):
        return [sys.executable, "-m", "kvferry.deploy.cli", *words[1:]]
    return words


@asynccontextmanager
async def running(
    words: list[str], log: Path, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that runs until Ctrl-C; it must then end with status 0 and leave no child behind."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(*words, cwd=cwd, env=env, stdout=output, stderr=output)
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
    for command in commands():
        assert command.startswith(("make demo", "curl ", ".venv/bin/kvferry up ")), command


@pytest.mark.timeout(180)
async def test_make_demo(tmp_path: Path) -> None:
    """`make demo` exits 0, shows what it starts and that KV moved, and leaves no process behind."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.deploy.demo"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, progress = await process.communicate()
    assert process.returncode == 0, output + progress
    assert b"; starting prefill-0, decode-0\n" in progress and b"2 of 2 agents ready" in progress
    assert b"KV bytes" in output
    for line in psutil.process_iter(["cmdline"]):
        assert "logs/demo" not in " ".join(line.info["cmdline"] or [])


@pytest.mark.timeout(180)
async def test_up_and_curl(
    ports: dict[str, str], tmp_path: Path, trap_folder: Path, trap_env: dict[str, str]
) -> None:
    """Among modules called like our folders, which `-m` would find first."""
    [up] = [command for command in commands() if "kvferry up" in command]
    [curl] = [command for command in commands() if command.startswith("curl")]
    words = [*argv(up, ports), "--discovery-port", ports["36367"], "--log-dir", str(tmp_path)]
    async with running(words, tmp_path / "up.log", trap_folder, trap_env):
        assert await answer(argv(curl, ports)) == "469"
    assert {path.name for path in tmp_path.glob("*.log")} >= {"proxy.log", "prefill-0.log", "decode-0.log"}


@pytest.mark.timeout(180)
async def test_the_parts_one_by_one(ports: dict[str, str], tmp_path: Path) -> None:
    [curl] = [command for command in commands(OWN_MODEL) if command.startswith("curl")]
    parts = [command for command in commands(OWN_MODEL) if re.match("kvferry (proxy|agent) ", command)]
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
        (["proxy", "--no-such-flag", "1"], "no-such-flag"),
        (["agent", "--model", "ferry-tiny", "--no-such-flag", "1"], "no-such-flag"),
    ],
)
async def test_a_wrong_command_line_ends_at_once_and_names_it(words: list[str], named: str) -> None:
    """As a process; `test_mistakes.py` has many more."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.deploy.cli", *words, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert named in said


def documented() -> list[tuple[str, str]]:
    """Return the `kvferry` commands of all pages, each with its page."""
    return [
        (page.relative_to(ROOT).as_posix(), re.sub(BIN, "", line.strip()))
        for page in PAGES
        for line in blocks(page).splitlines()
        if re.match(rf"({BIN})?kvferry ", line.strip())
    ]


@pytest.fixture(scope="module")
def helps() -> dict[str, set[str]]:
    """The options that each command lists in its help."""
    commands = {name: [name] for name in COMMANDS}
    commands |= {"attach": ["agent", "--attach", "http://127.0.0.1:1"]}
    commands |= {engine: ["agent", "--engine", engine] for engine in ("vllm", "sglang")}
    return {
        name: {"--help", *re.findall(r"(?<![\w-])--[a-z][\w-]*", printed_help(words))}
        for name, words in commands.items()
    }


def printed_help(words: list[str]) -> str:
    """What a command prints when it is asked for help."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*words, "--help"]))
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize(("page", "command"), documented())
def test_a_documented_command_is_understood(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed as a start would parse it; hosts need not exist, and files and GPUs are there."""
    monkeypatch.setattr("kvferry.agent.cli._why_no_gpu", lambda: None)
    _, name, *words = shlex.split(command)
    for file in (
        "cluster.key",
        "keys.txt",
        "agent.crt",
        "agent.key",
        "proxy.crt",
        "proxy.key",
        "agents-ca.crt",
        "nodes.yml",
        "server.yaml",
        "azure_2023_conv.csv.gz",
    ):
        words = [str(tmp_path / file) if word == file else word for word in words]
        (tmp_path / file).touch()
    (tmp_path / "admin.key").write_text("0" * 48)
    words = [str(tmp_path / word) if word == "admin.key" else word for word in words]
    words = ["ferry-tiny" if word == "MODEL" else word for word in words]
    if name == "proxy":
        proxy_config(words)
    elif name == "agent" and "--attach" in words:
        parse_flags(SidecarConfig, words, prog="kvferry agent", description="")
    elif name == "agent" and "--engine" in words:
        ours = words[: words.index("--")] if "--" in words else words
        config = SglangEngineConfig if "sglang" in ours else VllmEngineConfig
        parse_flags(config, ours, prog="kvferry agent", description="")
    elif name == "agent":
        agent_config(words)
    elif name in ("up", "serve"):
        words = ["--model", *words] if name == "serve" and not words[0].startswith("-") else words
        parts = PartOptions(f"kvferry {name}", words)
        collect(UpConfig, parts.own, prog=f"kvferry {name}")
    elif name == "bench":
        bench_config(words)
    elif name == "plan":
        parse_flags(PlanConfig, words, prog="kvferry plan", description="")
    elif name in (
        parsers := {
            "canary": canary,
            "completion": completion,
            "doctor": doctor,
            "down": down,
            "drain": drain,
            "status": status,
        }
    ):
        parsers[name].build_parser().read(words)
    else:
        assert name == "keygen"
        (tmp_path / "cluster.key").unlink()
        assert keygen.main(words) == 0


def test_documented_options_exist(helps: dict[str, set[str]]) -> None:
    """Every option that prose names is one of ours, or known to be another program's."""
    known = {"--version"}.union(*helps.values())
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for words in re.findall(r"`([^`]*)`", prose):
            if words.partition(" ")[0] in PROGRAMS:
                continue
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", words)) - known - FOREIGN
            assert not unknown, (page, words)


def test_documented_options_belong_to_their_command(helps: dict[str, set[str]]) -> None:
    """`kvferry agent --verify-kv` in prose names an option of that command."""
    for page in PAGES:
        for name, rest in re.findall(r"`kvferry ([a-z]+)((?: [^`]*)?)`", page.read_text()):
            options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
            assert name in helps, (page, name)
            engine = "sglang" if "sglang" in rest else "vllm"
            mode = "attach" if "--attach" in options else engine if "--engine" in options else name
            assert options <= helps[mode], (page, name, rest)


def test_documented_targets_and_modules_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, page
        for module in re.findall(r"python -m ((?:tests|tools|kvferry)[\w.]*)", text):
            found = importlib.util.find_spec(module)
            assert found is not None, (page, module)


def test_the_certificates_and_keys_of_the_security_page_are_made(tmp_path: Path) -> None:
    [script] = [text for text in re.findall(r"```\n(.*?)```", SECURITY, flags=re.DOTALL) if "openssl" in text]
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", "agents-ca.crt", "proxy.crt", "agent.crt"], cwd=tmp_path, timeout=30
    )
    assert verified.returncode == 0
    client, admin = [line.partition(" ")[0] for line in (tmp_path / "keys.txt").read_text().splitlines()]
    assert admin_key(tmp_path / "keys.txt") == admin != client
