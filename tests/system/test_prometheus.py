# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server scrapes the proxy and the agents."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.system.client import Answer, complete_all, heldout
from tests.system.conftest import StartCluster

# Names that dashboards rely on (design §10), by the process that exposes them.
PROXY_METRICS = [
    "kvferry_requests_total",
    "kvferry_ttft_seconds_bucket",
    "kvferry_tpot_seconds_bucket",
    "kvferry_itl_seconds_bucket",
    "kvferry_e2e_seconds_bucket",
    "kvferry_nodes",
]
AGENT_METRICS = [
    "kvferry_running",
    "kvferry_waiting",
    "kvferry_kv_blocks",
    "kvferry_transfer_bytes_total",
    "kvferry_recomputes_total",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(120)
async def test_prometheus_scrapes_every_process(start_cluster: StartCluster, tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    assert binary, "install Debian's prometheus (see .ci/run)"
    async with start_cluster() as cluster:
        results = await complete_all(
            cluster.url,
            [
                {
                    "model": "ferry-tiny",
                    "prompt": prompt.prompt,
                    "max_tokens": 8,
                    "ignore_eos": True,
                    "stream": True,
                }
                for prompt in heldout(4)
            ],
            concurrency=4,
        )
        assert all(isinstance(result, Answer) for result in results)
        targets = {process.name: process.url.removeprefix("http://") for process in cluster.processes}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [target]}]}
                for name, target in targets.items()
            ],
        }
        path = tmp_path / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        port = free_port()
        server = await asyncio.create_subprocess_exec(
            binary,
            f"--config.file={path}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await check(f"http://127.0.0.1:{port}", set(targets))
        finally:
            server.terminate()
            await server.wait()


async def check(url: str, jobs: set[str]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:

        async def query(expression: str) -> list[dict[str, dict[str, str]]]:
            try:
                async with http.get(f"{url}/api/v1/query", params={"query": expression}) as response:
                    return (await response.json())["data"]["result"] if response.status == 200 else []
            except aiohttp.ClientConnectionError:
                return []

        async with asyncio.timeout(60):
            while {result["metric"]["job"] for result in await query("up == 1")} != jobs:
                await asyncio.sleep(0.2)
        wanted = {(name, "proxy") for name in PROXY_METRICS}
        wanted |= {(name, job) for name in AGENT_METRICS for job in jobs - {"proxy"}}
        for name, job in sorted(wanted):
            assert await query(f'{name}{{job="{job}"}}'), (name, job)
        [finished] = await query('sum(kvferry_requests_total{job="proxy"})')
        assert float(finished["value"][1]) == 4
