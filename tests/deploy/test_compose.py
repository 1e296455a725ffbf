# SPDX-License-Identifier: Apache-2.0
"""The compose file: what its containers run is understood, has time to drain, and serves in podman.

The last needs podman-compose beside what `containers` does. Docker has not run it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kvferry.agent.cli import parse_config as agent_config
from kvferry.proxy.config import parse_config as proxy_config
from tests.deploy.containers import Containers, limits
from tests.patience import patient
from tests.system.client import complete, session

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
# Of compose-spec's `service`: those that we use, so that a misspelt one is seen.
FIELDS = {
    "cap_drop", "command", "image", "init", "ports", "read_only", "restart", "security_opt", "shm_size",
    "stop_grace_period", "tmpfs", "ulimits", "volumes",
}  # fmt: skip


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services, with the defaults of the variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())
    assert "$" not in text
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def test_fields_are_those_of_the_format(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert service.keys() <= FIELDS
        assert all(isinstance(word, str) for word in service["command"])


def test_commands_are_understood_and_have_time_to_drain(services: dict[str, dict[str, Any]]) -> None:
    roles = set()
    for name, service in services.items():
        command, *words = service["command"]
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        if command == "proxy":
            proxy = proxy_config(words)
            assert grace_s > proxy.drain_s
            [published] = service["ports"]
            assert published.endswith(f":{proxy.port}") and published.startswith("127.0.0.1:")
        else:
            agent = agent_config(words)
            assert grace_s > agent.drain_s + agent.lease_s
            assert agent.advertise_host == name
            roles.add(agent.role)
            [found] = [word for word in words if word.startswith("dns:")]
            _, host, port = found.split(":")
            assert services[host]["command"][0] == "proxy"
            assert int(port) == proxy_config(services[host]["command"][1:]).discovery_port
    assert roles == {"prefill", "decode"}


class Composition:
    """The containers of the file, made by podman-compose; the proxy at a free port of this host."""

    def __init__(self, containers: Containers, image: str, folder: Path) -> None:
        self._containers = containers
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        podman = folder / "podman"
        containers.write_podman(podman)
        # It asks for more than may be had on small machines.
        fewer = folder / "limits.yaml"
        names = ("proxy", "prefill", "decode")
        fewer.write_text(yaml.safe_dump({"services": {name: {"ulimits": limits()} for name in names}}))
        self._words = ["podman-compose", "--podman-path", podman, "--file", COMPOSE, "--file", fewer]
        self._environment = {**os.environ, "KVFERRY_IMAGE": image, "KVFERRY_PORT": str(self.port)}

    def do(self, *words: str) -> None:
        """Raises CalledProcessError when podman-compose fails."""
        subprocess.run([*self._words, *words], env=self._environment, check=True, timeout=patient(300))

    def exit_codes(self) -> dict[str, int]:
        """Of the containers that have ended, by the names of their services."""
        found = json.loads(self._containers.podman("ps", "--all", "--format", "json"))
        return {
            each["Labels"]["com.docker.compose.service"]: each["ExitCode"] for each in found if each["Exited"]
        }


@pytest.fixture
def composition(containers: Containers, image: str, tmp_path: Path) -> Iterator[Composition]:
    if shutil.which("podman-compose") is None:
        pytest.skip("no podman-compose here: Debian's package has it")
    running = Composition(containers, image, tmp_path)
    yield running
    running.do("down", "--timeout", "0")
    containers.podman("network", "prune", "--force")  # podman-compose leaves it


@pytest.mark.timeout(3600)  # the image may have to be built
async def test_podman_serves_it_and_its_containers_drain(composition: Composition) -> None:
    composition.do("up", "--detach")
    url = f"http://127.0.0.1:{composition.port}"
    async with session() as http, asyncio.timeout(patient(240)):
        while not await ready(http, url):
            await asyncio.sleep(0.5)
        body = {"model": "ferry-tiny", "prompt": "417+52=", "temperature": 0, "max_tokens": 8, "stream": True}
        answer = await complete(http, url, body)
    assert answer.choices[0].text == "469"
    assert answer.timing["pull_bytes"] and answer.timing["backend"] == "tcp"
    composition.do("stop", "--timeout", "75")
    assert composition.exit_codes() == {"proxy": 0, "prefill": 0, "decode": 0}


async def ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/ready") as response:
            return response.status == 200
    except OSError:
        return False
