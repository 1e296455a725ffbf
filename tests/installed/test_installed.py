# SPDX-License-Identifier: Apache-2.0
"""What `make release` has built, installed where no clone is: every command, a request, a kill, a drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.cli import COMMANDS
from kvferry.deploy.launcher import start_process
from tests.helpers.client import RequestFailed, complete, session
from tests.helpers.commands import AGENT
from tests.helpers.waiting import patient, until
from tests.installed.conftest import PYTHON, Installed, version_text
from tests.system.test_up import START_TIMEOUT_S, nodes, up
from tests.unit.test_packages import OF_EXTRA
from tests.versions import install_uv

pytestmark = [
    pytest.mark.installed,
    pytest.mark.timeout(patient(1500)),  # the environment is made first
    pytest.mark.skipif(not PYTHON, reason="needs a release: see `make test-installed`"),
]
BROUGHT = {
    "": "kvferry.proxy.server",
    "agent": "kvferry.agent.engine.process",
    "bench": "kvferry.deploy.bench.plot",
    "cuda": "kvferry.transfer.backends.cuda_ipc.kernel",
    "mooncake": "mooncake.engine",
    "nixl": "nixl",
    "otel": "kvferry.common.telemetry.spans",
    "ray": "kvferry.deploy.ray.fleet",
}
"""For each extra a module that cannot be imported without it."""
SUM = {"model": "ferry-tiny", "prompt": "417+52=", "temperature": 0, "max_tokens": 8, "stream": True}
LONG = {
    "model": "ferry-tiny",
    "prompt": "1+1=",
    "max_tokens": 400,
    "ignore_eos": True,
    "seed": 7,
    "stream": True,
}
Install = Callable[[str], Installed]


def test_every_extra_is_installed() -> None:
    """Except `mori`: where glibc is too old for its wheel, nothing would be installed."""
    assert BROUGHT.keys() == {"", *OF_EXTRA} - {"mori"}


@pytest.fixture(scope="module", params=BROUGHT, ids=lambda extra: extra or "none")
def extra(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_extra_brings_what_it_is_for(install: Install, extra: str) -> None:
    installed = install(extra)
    code = f"import {BROUGHT[extra]}, kvferry.common.options as ours; print(ours.__file__)"
    where = installed.run(installed.python, "-c", code).strip()
    assert Path(where).is_relative_to(installed.environment)
    installed.run(install_uv(), "pip", "check", "--python", installed.python)


def test_every_command_shows_its_help(install: Install, extra: str) -> None:
    installed = install(extra)
    for name in COMMANDS:
        assert installed.run(installed.kvferry, name, "--help").startswith("usage: kvferry"), name


def test_the_version_names_the_commit(install: Install) -> None:
    installed = install("")
    assert installed.run(installed.kvferry, "--version").startswith(version_text())


async def check_fleet(installed: Installed, url: str, kill_decode_agent: Callable[[], None]) -> None:
    """One streamed request, one kill while others are answered, and one drain."""
    async with session() as http:

        async def ready() -> bool:
            return [node["state"] for node in await nodes(http, url)] == ["ready"] * 3

        await until(ready, START_TIMEOUT_S, 0.2)
        answer = await complete(http, url, SUM)
        assert answer.choices[0].text == "469"
        assert answer.timing["pull_bytes"]

        expected = await complete(http, url, LONG)
        running = [asyncio.ensure_future(complete(http, url, LONG)) for _ in range(4)]

        async def busy() -> bool:
            return all(node["in_flight"] for node in await nodes(http, url) if node["role"] == "decode")

        await until(busy, patient(30), 0.02)
        kill_decode_agent()
        for answer_or_error in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(answer_or_error, RequestFailed):
                assert answer_or_error.error["code"]
            else:
                assert not isinstance(answer_or_error, BaseException), answer_or_error
                assert answer_or_error.same() == expected.same()

        printed = await asyncio.to_thread(
            installed.run, installed.kvferry, "drain", url, "prefill-0", timeout_s=patient(100)
        )
        assert printed == "prefill-0 has drained and ended\n"
        assert (await complete(http, url, SUM)).choices[0].text == "469"


async def test_up_serves_the_bundled_model(install: Install, tmp_path: Path) -> None:
    installed = install("agent")
    words = ("--prefill", "1", "--decode", "2", "--proxy.decode-policy", "round_robin")
    async with up(tmp_path, *words, program=(installed.kvferry,), cwd=installed.cwd) as cluster:
        url = (await cluster.until(r"serving ferry-tiny at (\S+)/v1;", START_TIMEOUT_S))[1]
        await check_fleet(installed, url, lambda: os.kill(cluster.child("decode-0"), signal.SIGKILL))


@asynccontextmanager
async def proxy(installed: Installed) -> AsyncIterator[dict[str, Any]]:
    """Start the installed proxy, and yield the addresses that it listens at."""
    process = await asyncio.create_subprocess_exec(
        *(installed.kvferry, "proxy", "--port", "0", "--discovery-port", "0"),
        *("--decode-policy", "round_robin"),
        stdout=asyncio.subprocess.PIPE, cwd=installed.cwd,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        yield json.loads(line)["listening"]
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), patient(30)) == 0


async def test_the_proxy_without_extras_serves_agents_of_another_environment(
    install: Install, tmp_path: Path
) -> None:
    """They are of this clone: where no CPU build of torch is, the proxy runs on that Python all the same."""
    installed = install("")
    async with proxy(installed) as listening, AsyncExitStack() as stack:
        agents = {}
        for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")):
            words = ("--role", role, "--name", name, "--model", "ferry-tiny", "--threads", "1")
            agents[name] = await start_process(
                name, (*AGENT, *words, "--proxy", f"127.0.0.1:{listening['discovery_port']}"), tmp_path
            )
            stack.push_async_callback(agents[name].stop)
        await check_fleet(
            installed, listening["url"], lambda: os.kill(agents["decode-0"].pid, signal.SIGKILL)
        )
