# SPDX-License-Identifier: Apache-2.0
"""The compose file: what its containers run is understood, and has time to drain.

It is read here, and not by an engine for containers: that it runs is not shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.agent.cli import parse_config as agent_config
from kvferry.proxy.config import parse_config as proxy_config

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
