# SPDX-License-Identifier: Apache-2.0
"""Ray nodes on this machine, each with an address of its own, in a network that holds nothing but loopback.

Ray binds all addresses of a host; in a network namespace there is none that anybody else could reach.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
"""Of the loopback device of the namespace. The first node is the head."""
GCS_PORT = 6379
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_RAY = Path(sys.executable).with_name("ray")


@contextmanager
def own_network() -> Iterator[None]:
    """Put this thread, and what it starts, into a new network namespace meanwhile. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for address in ADDRESSES:
                subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
            yield
        finally:
            libc.setns(before, _CLONE_NEWNET)
    finally:
        os.close(before)


class RayNodes:
    """A Ray cluster of three nodes, of which each has room for two agents that take one `slot`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the head, then the others. Raises AssertionError with Ray's words if one does not start."""
        head, *others = ADDRESSES
        self._start(head, "--head", "--port", str(GCS_PORT), "--include-dashboard", "false")
        self._wait(head)
        for address in others:
            self._start(address, "--address", f"{head}:{GCS_PORT}")
        for address in others:
            self._wait(address)

    def processes(self, address: str) -> list[psutil.Process]:
        """Ray's processes of one node, and what Ray has started there."""
        node = psutil.Process(self._nodes[address].pid)
        return [node, *node.children(recursive=True)]

    def kill_raylet(self, address: str) -> None:
        """SIGKILL to the process that is the node."""
        [raylet] = [each for each in self.processes(address) if each.name() == "raylet"]
        raylet.kill()

    def end(self) -> None:
        """End all nodes, the head last, and what they have started."""
        for address in reversed(self._nodes):
            family = self.processes(address)
            self._nodes[address].terminate()
            try:
                self._nodes[address].wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._nodes[address].kill()
                self._nodes[address].wait()
            for process in family:
                if process.is_running():
                    process.kill()

    def _start(self, address: str, *words: str) -> None:
        log = (self._folder / f"{address}.log").open("wb")
        with log:
            self._nodes[address] = subprocess.Popen(
                [
                    _RAY, "start", *words, "--block", "--node-ip-address", address, "--num-cpus", "4",
                    "--resources", '{"slot": 2}', "--object-store-memory", "80000000",
                    "--temp-dir", str(self._folder / address), "--disable-usage-stats",
                    "--include-log-monitor", "false",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip

    def _wait(self, address: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in (said := (self._folder / f"{address}.log").read_text()):
            assert self._nodes[address].poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
