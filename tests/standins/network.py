# SPDX-License-Identifier: Apache-2.0
"""Hosts of a small network, in which a test can take a host's link down.

Each host is a network namespace with a link to a bridge, where the caller is. The caller runs in namespaces
of its own (`APART`): there it may make namespaces and links, and nothing is left when it ends.
"""

from __future__ import annotations

import subprocess

APART = ("unshare", "--user", "--map-root-user", "--mount", "--net")
"""Before a command that makes a `Network`."""
BRIDGE_ADDRESS = "10.77.0.1"


def can_be_made() -> bool:
    """Whether this machine lets its users make namespaces, and has `ip`."""
    try:
        return subprocess.run([*APART, "ip", "link"], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


class Network:
    """The bridge, with `BRIDGE_ADDRESS`, and the hosts that were added to it."""

    def __init__(self) -> None:
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")  # where `ip netns` keeps its namespaces
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "address", "add", f"{BRIDGE_ADDRESS}/24", "dev", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        self._num_hosts = 0

    def add_host(self, name: str) -> str:
        """Add a host, and return its address."""
        self._num_hosts += 1
        address = f"10.77.0.{10 + self._num_hosts}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "uplink", "netns", name)
        _run("ip", "link", "set", name, "master", "bridge", "up")
        for words in (("link", "set", "lo", "up"), ("link", "set", "uplink", "up")):
            _run("ip", "-netns", name, *words)
        _run("ip", "-netns", name, "address", "add", f"{address}/24", "dev", "uplink")
        return address

    def take_down(self, name: str) -> None:
        """Take a host's link down: nothing reaches it any more, and no connection is closed for that."""
        _run("ip", "link", "set", name, "down")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)
