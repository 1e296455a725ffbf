# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --attach`: a process beside a server of another engine, and proxies that hear of it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry.deploy.cli import main as kvferry
from kvferry.deploy.keygen import main as keygen
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.address_rules import RejectReason
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.server import RunningProxy, running_proxy
from tests.helpers.servers import free_port
from tests.helpers.waiting import until
from tests.standins.watched_server import WatchedServer

DEADLINE_S = 20.0
IDLE = 'process_start_time_seconds {started}\nvllm:num_requests_running{{engine="0"}} 0.0\n'


STEPPED = IDLE + 'vllm:iteration_tokens_total_count{{engine="0"}} 7.0\n'
NEVER_STEPPED = STEPPED.replace("7.0", "0.0")


@asynccontextmanager
async def sidecar(
    server: WatchedServer, *args: str, stderr: int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ("agent", "--attach", server.url, "--dialect", "vllm-nixl", "--role", "prefill", *args)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.deploy.cli", *words, stderr=stderr
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def nodes(proxy: RunningProxy) -> list[Node]:
    return list(proxy.fleet.registry.snapshot().nodes)


def said_bye(proxy: RunningProxy, node: Node) -> bool:
    """Whether it left with a goodbye, not by falling silent: then its pings are not believed any more."""
    return proxy.fleet.registry.register(node.info) is RejectReason.RETIRED


async def test_it_says_that_the_server_is_down() -> None:
    """W3: it was silent for as long as the server did not come."""
    url = f"http://127.0.0.1:{free_port()}"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.deploy.cli", "agent", "--attach", url, "--dialect",
        "vllm-nixl", "--role", "prefill", "--proxy", "127.0.0.1:9", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stderr is not None
        wanted = f"WARNING sidecar the prefill server {url} is down: cannot connect"
        async with asyncio.timeout(DEADLINE_S):
            while wanted not in (await child.stderr.readline()).decode():
                pass
    finally:
        child.kill()
        await child.wait()


async def test_it_announces_the_server_and_notices_restarts_and_ends(tmp_path: Path) -> None:
    """Under the cluster key; row 4 of docs/sources.md#failures: a restarted server is another one."""
    key = tmp_path / "cluster.key"
    assert keygen([str(key)]) == 0
    config = ProxyConfig(port=0, discovery_port=0, cluster_key=key)
    async with running_proxy(config) as proxy, WatchedServer() as server:
        where = ("--proxy", f"127.0.0.1:{proxy.discovery_port}", "--advertise-url", "http://10.0.0.1:8200")
        async with (
            sidecar(server, *where) as stranger,
            sidecar(
                server, *where, "--cluster-key", str(key), "--max-running", "9", "--lease-s", "0"
            ) as child,
        ):
            await until(lambda: nodes(proxy))
            [node] = nodes(proxy)
            assert (node.info.address, node.info.role, node.info.dialect) == (
                "http://10.0.0.1:8200", "prefill", "vllm-nixl",
            )  # fmt: skip
            assert (node.info.model, node.info.max_model_len) == ("m", 512)
            assert (node.info.load.running, node.info.load.max_running) == (5, 9)

            server.started += 100.0
            await until(lambda: nodes(proxy) and nodes(proxy)[0].incarnation != node.incarnation)
            assert len(nodes(proxy)) == 1

            [restarted] = nodes(proxy)
            server.health = 503
            await until(lambda: not nodes(proxy))
            assert said_bye(proxy, restarted)
            server.health = 200
            await until(lambda: nodes(proxy))

            [last] = nodes(proxy)
            server.metrics = IDLE
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
            await until(lambda: not nodes(proxy))
            assert said_bye(proxy, last)
            assert stranger.returncode is None, "without the key it runs, and nobody hears it"


@pytest.mark.parametrize("asked", ["by signal", "through a proxy", "twice"])
async def test_it_ends_once_nobody_needs_the_server(asked: str) -> None:
    """It has requests, and then KV that may still be read; meanwhile it is announced as draining."""
    config = ProxyConfig(port=0, discovery_port=0)
    async with running_proxy(config) as proxy, WatchedServer() as server:
        where = ("--proxy", f"127.0.0.1:{proxy.discovery_port}", "--lease-s", "1")
        async with sidecar(server, *where) as child:
            await until(lambda: nodes(proxy))
            [node] = nodes(proxy)
            if asked == "through a proxy":
                assert proxy.fleet.drain(node.incarnation)
            else:
                child.send_signal(signal.SIGTERM)
            await until(lambda: nodes(proxy)[0].info.state == "draining")
            probed = server.metrics_asked
            for _ in range(3):
                probed.clear()
                await asyncio.wait_for(probed.wait(), DEADLINE_S)
            assert child.returncode is None and nodes(proxy)[0].info.load.running == 5
            began = time.monotonic()
            if asked == "twice":
                child.send_signal(signal.SIGTERM)
            else:
                server.metrics = IDLE
            assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
            assert asked == "twice" or time.monotonic() - began >= 1.0, "KV was still lent"
            await until(lambda: not nodes(proxy))
            assert said_bye(proxy, node)


@pytest.mark.parametrize(
    ("metrics", "lease_s", "said"),
    [
        (NEVER_STEPPED, "60", ""),
        (STEPPED, "60", "may lend KV of its last requests"),
        (IDLE, "60", "may lend KV of its last requests"),
        (STEPPED.replace("running", "waiting").replace("0.0", "1.0"), "0", "has requests"),
    ],
    ids=["nothing ever ran", "something ran", "what ran is not known", "a request waits"],
)
async def test_what_was_not_waited_for_is_said(metrics: str, lease_s: str, said: str) -> None:
    """Ctrl-C does not wait for long: nor need it, where the server's count of steps says that nothing ran."""
    async with running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy, WatchedServer() as server:
        server.metrics = metrics
        where = ("--proxy", f"127.0.0.1:{proxy.discovery_port}", "--lease-s", lease_s)
        async with sidecar(server, *where, stderr=asyncio.subprocess.PIPE) as child:
            await until(lambda: nodes(proxy))
            child.send_signal(signal.SIGINT)
            _, written = await asyncio.wait_for(child.communicate(), DEADLINE_S)
            assert child.returncode == 0
            [line] = [line for line in written.decode().splitlines() if "not drained" in line] or [""]
            assert said in line and bool(said) == bool(line)


async def test_a_lease_counts_from_the_last_step() -> None:
    """A server that has been idle for long is not waited for."""
    async with running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy, WatchedServer() as server:
        server.metrics = STEPPED
        where = ("--proxy", f"127.0.0.1:{proxy.discovery_port}", "--lease-s", "6")
        async with sidecar(server, *where) as child:
            await until(lambda: nodes(proxy))
            await asyncio.sleep(6)  # the lease itself
            began = time.monotonic()
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
            assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--attach", "http://a:1"], "dialect"),
        (["--attach", "http://a:1", "--dialect", "vllm-nixl"], "proxy"),
        (["--attach", "http://a:1", "--dialect", "vllm-nixl", "--proxy", "nowhere"], "nowhere"),
        (["--attach=http://a:1", "--dialect", "vllm-moriio", "--proxy", "a:1"], "--handshake-port"),
        (
            ["--attach", "http://a:1", "--dialect", "vllm-nixl", "--proxy", "a:1", "--model-len", "5"],
            "model-len",
        ),
        (
            ["--attach", "http://a:1", "--dialect", "vllm-nixl", "--proxy", "a:1", "--notify-port", "1"],
            "--notify-port",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_its_name(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """R22."""
    with pytest.raises(SystemExit) as stop:
        kvferry(["agent", *words])
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert named in line
