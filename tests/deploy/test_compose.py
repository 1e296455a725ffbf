# SPDX-License-Identifier: Apache-2.0
"""The compose file: its containers' commands are understood, have time to drain, and serve as the page says.

The last needs podman-compose and catatonit beside what `containers` does, and has `tests/standins/docker` in
Docker's place.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.agent.cli import parse_config as agent_config
from kvferry.proxy.config import parse_config as proxy_config
from tests.deploy.conftest import Docker
from tests.deploy.containers import Containers
from tests.deploy.pages import scripts, steps
from tests.helpers.client import complete, session

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
PORT = 10001
CATATONIT = Path("/usr/libexec/podman/catatonit")
"""What podman runs as the first process where the file says `init`."""
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
    """What runs of the file, made by the commands of the page; the proxy is at a free port of this host."""

    def __init__(self, containers: Containers, docker: Docker) -> None:
        self._containers = containers
        self._docker = docker
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def type(self, script: str) -> str:
        """What a script of the page prints. Raises CalledProcessError when one of its commands fails."""
        assert str(PORT) not in script or f"http://127.0.0.1:{PORT}/" in script
        return self._docker.type(script.replace(f":{PORT}/", f":{self.port}/"), KVFERRY_PORT=str(self.port))

    def containers(self) -> dict[str, dict[str, Any]]:
        """What podman says of each, by the name of its service."""
        found = json.loads(self._containers.podman("ps", "--all", "--format", "json"))
        return {
            each["Labels"]["com.docker.compose.service"]: each
            for each in found
            if "com.docker.compose.service" in each["Labels"]
        }


@pytest.fixture
def composition(containers: Containers, image: str, docker: Docker) -> Iterator[Composition]:
    if shutil.which("podman-compose") is None or not CATATONIT.exists():
        pytest.skip("no podman-compose or catatonit here: Debian's packages have them")
    running = Composition(containers, docker)
    yield running
    running.type(f"docker compose --file {COMPOSE.relative_to(ROOT)} down --timeout 0")
    containers.podman("network", "prune", "--force")  # podman-compose leaves it


@pytest.mark.timeout(3600)  # the image may have to be built
async def test_the_commands_of_the_page_do_what_it_says(composition: Composition) -> None:
    """As they stand, but for the host's port, in podman."""
    for script in scripts("compose.md", "Image"):
        composition.type(script)
    start, ask = scripts("compose.md", "Start")
    composition.type(start)
    assert '"text":"469"' in composition.type(ask)
    url = f"http://127.0.0.1:{composition.port}"
    body = {"model": "ferry-tiny", "prompt": "417+52=", "temperature": 0, "max_tokens": 8, "stream": True}
    async with session() as http:
        answer = await complete(http, url, body)
    assert answer.choices[0].text == "469"
    assert answer.timing["pull_bytes"] and answer.timing["backend"] == "tcp"

    wait = next(line for line in start.splitlines() if line.startswith("curl "))
    upgrade, roll_back = scripts("compose.md", "Upgrade and roll back")
    for script, tag in ((upgrade, "0.3.0"), (roll_back, "0.2.0")):
        before = composition.containers()
        composition.type(script)
        composition.type(wait)
        after = composition.containers()
        assert {each["Image"] for each in after.values()} == {f"localhost/kvferry:{tag}"}
        assert not {each["Id"] for each in after.values()} & {each["Id"] for each in before.values()}
        assert '"text":"469"' in composition.type(ask)

    [read_log] = scripts("compose.md", "When")
    assert '{"listening": {"url": "http://decode:8000",' in composition.type(read_log)
    stop, down = steps("compose.md", "End")
    composition.type(stop)
    ended = {name: each["ExitCode"] for name, each in composition.containers().items() if each["Exited"]}
    assert ended == {"proxy": 0, "prefill": 0, "decode": 0}  # drained, and not killed
    composition.type(down)
    assert composition.containers() == {}
