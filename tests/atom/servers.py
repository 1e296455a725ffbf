# SPDX-License-Identifier: Apache-2.0
"""ATOM's code at one commit, out of a repository given by path, and servers made of it (`server.py`)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers.servers import free_port, running_server

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "atom"
"""What ATOM's server imports and nothing of ours does (`make test-atom` installs it)."""
SEED = "0c982ea9299a64c15ea4e66656d66b43a35a99b9"
HEAD = "ffdf3bb5ddf8a15a64d521a2eeb3bc7438f9ac21"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


class NoAtom(RuntimeError):
    """ATOM's code cannot be had; the message says what to do."""


def extract(repository: Path, commit: str, to: Path) -> Path:
    """Put `atom/` of one commit under `to`. Raises `NoAtom`."""
    command = ("git", "-C", str(repository), "archive", commit, "atom")
    result = subprocess.run(command, capture_output=True)
    if result.returncode != 0:
        raise NoAtom(f"ATOM={repository} has no commit {commit[:9]}: {result.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(to, filter="data")
    return to


@dataclass(frozen=True, slots=True)
class AtomServer:
    """A server that answers."""

    url: str
    port: int
    handshake_port: int

    async def harness(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """What it was asked and answered, and what is still pinned; no rank of it may have died."""
        async with http.get(f"{self.url}/harness") as response:
            report: dict[str, Any] = await response.json()
        assert not report["died"], report["died"]
        return report


@asynccontextmanager
async def atom_server(code: Path, role: str, folder: Path, *options: object) -> AsyncIterator[AtomServer]:
    """Start a server and wait until it is healthy; else raise `AssertionError` with the end of its log."""
    port, handshake_port = free_port(), free_port()
    words = ("--root", code, "--fabric", folder, "--role", role, "--port", port)
    ports = ("--handshake-port", handshake_port)
    url = f"http://127.0.0.1:{port}"
    async with _running(
        ("tests.atom.server", *words, *ports, *options), folder / f"{role}-{port}.log", f"{url}/health"
    ):
        yield AtomServer(url, port, handshake_port)


@asynccontextmanager
async def atom_proxy(code: Path, folder: Path, http_port: int, discovery_port: int) -> AsyncIterator[str]:
    """Start ATOM's own proxy; yield its URL."""
    url = f"http://127.0.0.1:{http_port}"
    words = ("tests.atom.proxy", code, http_port, discovery_port)
    async with _running(words, folder / "atom-proxy.log", url):
        yield url


def _running(words: Sequence[object], log: Path, answers_at: str) -> AbstractAsyncContextManager[int]:
    return running_server(
        (sys.executable, "-m", *map(str, words)),
        {**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}", "OMP_NUM_THREADS": "1"},
        answers_at,
        log,
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=STOP_TIMEOUT_S,
    )
