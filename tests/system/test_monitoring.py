# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server scrapes a cluster; `deploy/monitoring` is loaded by its programs, and fits."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, complete_all, heldout
from tests.helpers.servers import free_port
from tests.system.conftest import StartCluster

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
SELECTOR = re.compile(r"\b(kvferry_(?:proxy|agent|transfer)_\w+)(?:\{([^}]*)\})?")
DASHBOARDS = sorted(MONITORING.glob("grafana-*.json"))
OF_TARGETS = ("model_name", "role", "name", "instance")
"""Labels that agents' series get from the target (`/nodes/targets`), not from the page."""
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}

# Names that dashboards rely on (docs/reference/metrics.md), by the process that exposes them.
PROXY_METRICS = [
    "kvferry_proxy_requests_total",
    "kvferry_proxy_time_to_first_token_seconds_bucket",
    "kvferry_proxy_request_time_per_output_token_seconds_bucket",
    "kvferry_proxy_inter_token_latency_seconds_bucket",
    "kvferry_proxy_e2e_request_latency_seconds_bucket",
    "kvferry_proxy_nodes",
]
AGENT_METRICS = [
    "kvferry_agent_num_requests_running",
    "kvferry_agent_num_requests_waiting",
    "kvferry_agent_kv_blocks",
    "kvferry_transfer_bytes_total",
    "kvferry_agent_recomputes_total",
]

Exposed = dict[str, list[dict[str, str]]]

pytestmark = pytest.mark.timeout(180)


def promtool(*args: str) -> str:
    """Run promtool in `deploy/monitoring`; fails unless it is content."""
    assert shutil.which("promtool"), "install Debian's prometheus (see .ci/run)"
    done = subprocess.run(["promtool", *args], cwd=MONITORING, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels(dashboard: Path) -> list[dict[str, Any]]:
    content = json.loads(dashboard.read_text())
    return [panel for panel in content["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """Every expression of the dashboards, as Grafana would send it with all models and agents chosen."""
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m")
                yield expression.replace("$model", ".*").replace("$agent", ".*")


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "rules.yml")


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "rules_test.yml")
    alerts = set(re.findall(r"- alert: (\w+)", (MONITORING / "rules.yml").read_text()))
    tested = set(re.findall(r"- alertname: (\w+)", (MONITORING / "rules_test.yml").read_text()))
    assert tested == alerts


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_well_formed(dashboard: Path) -> None:
    """Panels have ids of their own and do not lie on one another; each says what it shows."""
    shown = panels(dashboard)
    variables = {each["name"] for each in json.loads(dashboard.read_text())["templating"]["list"]}
    assert variables == {"datasource", "model", "agent"}
    expressions = " ".join(target["expr"] for panel in shown for target in panel["targets"])
    assert set(re.findall(r"\$(\w+)", expressions)) == {"model", "agent", "__rate_interval"}
    assert len({panel["id"] for panel in shown}) == len(shown)
    cells = [
        (column, line)
        for place in (panel["gridPos"] for panel in shown)
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(column < 24 for column, _ in cells)
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in shown)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    """One that has answered six requests."""
    async with start_cluster() as cluster:
        bodies: list[dict[str, Any]] = [
            {
                "model": "ferry-tiny",
                "prompt": prompt.prompt,
                "max_tokens": 8,
                "ignore_eos": True,
                "stream": True,
            }
            for prompt in heldout(6)
        ]
        assert all(
            isinstance(answer, Answer) for answer in await complete_all(cluster.url, bodies, concurrency=3)
        )
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
async def test_prometheus_scrapes_every_process(cluster: Cluster, tmp_path: Path) -> None:
    """Under its own name each; what dashboards rely on is there."""
    targets = {process.name: process.url.removeprefix("http://") for process in cluster.processes}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in targets.items()
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    async with prometheus(tmp_path) as ask:
        async with asyncio.timeout(60):
            while {found["metric"]["job"] for found in await ask("query", query="up == 1")} != set(targets):
                await asyncio.sleep(0.2)
        wanted = {(name, "proxy") for name in PROXY_METRICS}
        wanted |= {(name, job) for name in AGENT_METRICS for job in targets.keys() - {"proxy"}}
        for name, job in sorted(wanted):
            assert await ask("query", query=f'{name}{{job="{job}"}}'), (name, job)
        [finished] = await ask("query", query='sum(kvferry_proxy_requests_total{job="proxy"})')
        assert float(finished["value"][1]) == 6


@pytest.mark.asyncio(loop_scope="module")
async def test_it_fits_a_real_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Prometheus finds every agent through the proxy; every metric, label and value that is used exists."""
    exposed = {
        "kvferry-proxy": await exposition(cluster.proxy.url),
        "kvferry-agent": await exposition(cluster.agents["decode-0"].url),
    }
    used = [*queries(), (MONITORING / "rules.yml").read_text()]
    for name, matchers in {found for text in used for found in SELECTOR.findall(text)}:
        assert_exposed(exposed, name, matchers)

    address = f"127.0.0.1:{cluster.proxy.listening['port']}"
    config = (MONITORING / "prometheus.yml").read_text().replace("127.0.0.1:10001", address)
    (tmp_path / "prometheus.yml").write_text(re.sub(r"(interval): \d+s", r"\1: 1s", config))
    shutil.copy(MONITORING / "rules.yml", tmp_path)
    async with prometheus(tmp_path) as ask:
        async with asyncio.timeout(60):
            while len(await ask("query", query="up == 1")) != 3:
                await asyncio.sleep(0.2)
        roles = {
            found["metric"].get("role")
            for found in await ask("query", query="kvferry_agent_num_requests_running")
        }
        assert roles == {"prefill", "decode"}
        for query in queries():
            await ask("query", query=query)
        rules = await healthy_rules(ask)
        firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
        assert not firing


def assert_exposed(exposed: dict[str, Exposed], name: str, matchers: str) -> None:
    """One selector of an expression names a metric of that job, with labels and values that exist there."""
    wanted = {label: (how, value) for label, how, value in MATCHER.findall(matchers)}
    _, job = wanted.pop("job", ("=", ""))
    pages = [exposed[job]] if job else list(exposed.values())
    found = [page[name] for page in pages if name in page]
    assert found, f"nothing of {job} exposes {name}"
    for label, (how, value) in wanted.items():
        if job == "kvferry-agent" and label in OF_TARGETS:
            continue
        seen = {labels.get(label) for samples in found for labels in samples}
        assert seen - {None}, f"{name} has no label {label}"
        if how == "=":
            assert value in seen, f"{name} never has {label}={value!r}"


async def exposition(url: str) -> Exposed:
    """The labels of every sample by name; a name without samples yet has an empty list."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    found: Exposed = {}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = []
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[Any]:
    """Debian's Prometheus on the configuration in a folder; yields a function that asks its API."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:

            async def ask(path: str, **params: str) -> Any:
                try:
                    async with http.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=params) as response:
                        if response.status == 503:
                            return []  # still starting
                        answer = await response.json()
                except aiohttp.ClientConnectionError:
                    return []
                assert answer["status"] == "success", (params, answer)
                return answer["data"]["result"] if path == "query" else answer["data"]

            yield ask
    finally:
        server.terminate()
        await server.wait()


async def healthy_rules(ask: Any) -> list[dict[str, Any]]:
    """Every rule, once each has been evaluated without an error."""
    async with asyncio.timeout(30):
        while True:
            groups = (await ask("rules"))["groups"]
            rules: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
            if rules and all(rule["health"] == "ok" for rule in rules):
                return rules
            assert not [rule for rule in rules if rule["health"] == "err"]
            await asyncio.sleep(0.2)
