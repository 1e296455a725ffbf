# SPDX-License-Identifier: Apache-2.0
"""buildah and podman with a store, settings and networks of their own, apart from those of this machine.

Debian's packages do: buildah, podman, runc, netavark, aardvark-dns and, for the first layer, mmdebstrap.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

NETAVARK = Path("/usr/lib/podman/netavark")
COMMANDS = ("buildah", "podman", "runc", "mmdebstrap")
RUN_TIMEOUT_S = 120.0
PROCESSES = 32768  # what buildah takes for the most
# crun, podman's own choice, starts nothing on some virtual machines; and limits may not be raised there.
CONFIGURATION = """\
[containers]
default_ulimits = {limits}
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{networks}"
"""


def limits() -> dict[str, int]:
    """How many files and processes a container may have here: as many as whoever starts it."""
    return {
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "nproc": min(PROCESSES, resource.getrlimit(resource.RLIMIT_NPROC)[1]),
    }


def missing() -> str:
    """Why no container can run here; empty if they can."""
    if os.geteuid() != 0:
        return "containers are run by root here"
    absent = [each for each in COMMANDS if shutil.which(each) is None]
    absent += [] if NETAVARK.exists() else ["netavark and aardvark-dns"]
    return f"Debian's packages have what is missing here: {', '.join(absent)}" if absent else ""


class Containers:
    """The commands of buildah and podman, on a store in `folder`, which may be kept from run to run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Sockets lie there: a path may be long, but a socket's may not.
        run = Path("/run/kvferry-test") / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        self._store = ("--root", str(folder / "store"), "--runroot", str(run))
        configuration = folder / "containers.conf"
        most = json.dumps([f"{name}={count}:{count}" for name, count in limits().items()])
        configuration.write_text(CONFIGURATION.format(networks=folder / "networks", limits=most))
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}

    def buildah(self, *words: str | Path, timeout_s: float = RUN_TIMEOUT_S) -> str:
        """What the command prints. Raises AssertionError with its words when it fails."""
        return self._run(["buildah", *self._store, *words], timeout_s)

    def podman(self, *words: str | Path, timeout_s: float = RUN_TIMEOUT_S) -> str:
        """What the command prints. Raises AssertionError with its words when it fails."""
        return self._run(["podman", *self._store, *words], timeout_s)

    def images(self) -> list[str]:
        """The names of the images that there are, with their tags."""
        return self.podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()

    def start_podman(self, *words: str | Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command that goes on."""
        return subprocess.Popen(
            ["podman", *self._store, *words], env=self._environment, stdout=output, stderr=output
        )

    def write_command(self, program: str, path: Path) -> Path:
        """Write a command that is podman or buildah on this store, for programs that run them."""
        words = ["env", f"CONTAINERS_CONF={self._environment['CONTAINERS_CONF']}", program, *self._store]
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    def _run(self, words: Sequence[str | Path], timeout_s: float) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{words[0]} {words[5:]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout
