# SPDX-License-Identifier: Apache-2.0
"""Hosts to follow a page on: Debian 12 with a booted systemd, each a container with an address of its own.

They have no way out: pip finds wheels in a folder, by its own settings; what pages have apt install is there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.containers import Containers
from tests.deploy.image import BASE, copy_of_the_repository, fetch_wheels, make_base

IMAGE = "localhost/host:test"
NETWORK = "kvferry-hosts"
CLONE = "/root/kvferry-clone"
# What a Debian host has; python3-venv and curl the pages install, which must find them installed.
PACKAGES = ("ca-certificates", "curl", "iproute2", "procps", "python3-venv", "systemd", "systemd-sysv")
CONTAINERFILE = f"""\
FROM {BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends {" ".join(PACKAGES)}
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/root
CMD ["/lib/systemd/systemd"]
"""
# A host on which a unit failed is "degraded": some of Debian's own may, in a container.
BOOTED = "systemctl is-system-running 2> /dev/null | grep --quiet --extended-regexp '^(running|degraded)$'"
BUILD_TIMEOUT_S = 600.0
BOOT_TIMEOUT_S = 60.0
TYPING_TIMEOUT_S = 600.0


class Host:
    """One that is booted."""

    def __init__(self, containers: Containers, name: str) -> None:
        self._containers = containers
        self._name = name

    def type(self, script: str, *, timeout_s: float = TYPING_TIMEOUT_S) -> str:
        """What a script prints, in a clone of the repository. Raises AssertionError if a command fails."""
        words = ("exec", "--workdir", CLONE, self._name, "bash", "-e", "-c", script)
        return self._containers.podman(*words, timeout_s=timeout_s)

    @contextmanager
    def terminal(self, script: str, contents: Path) -> Iterator[Terminal]:
        """A script that goes on meanwhile, in a terminal of its own."""
        words = ("exec", "--workdir", CLONE, self._name, "bash", "-e", "-c", script)
        with contents.open("wb") as output:
            process = self._containers.start_podman(*words, output=output)
        try:
            yield Terminal(process, contents)
        finally:
            process.kill()
            process.wait()


class Terminal:
    """A script that goes on, and a file with what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], contents: Path) -> None:
        self._process = process
        self._contents = contents

    def until(self, pattern: str, timeout_s: float) -> None:
        """Wait until it has printed something. Raises AssertionError with all it has printed."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, said := self._contents.read_text()):
            assert self._process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> int:
        """The status with which it ends. Raises TimeoutExpired."""
        return self._process.wait(timeout_s)


@contextmanager
def hosts(
    containers: Containers, kept: Path, folder: Path, addresses: Mapping[str, str], *extras: str
) -> Iterator[list[Host]]:
    """Boot hosts by their names and addresses of one network. Each has a clone of its own; all have one /opt.

    `kept` has base and wheels from run to run, those of the extras too; the clones are in `folder`.
    """
    make_base(containers, kept)
    wheels = fetch_wheels(kept / "wheels", *extras)
    if IMAGE not in containers.images():
        (kept / "host").mkdir(exist_ok=True)
        (kept / "host" / "Containerfile").write_text(CONTAINERFILE)
        containers.buildah(
            "bud", "--isolation", "chroot", "--tag", IMAGE, kept / "host", timeout_s=BUILD_TIMEOUT_S
        )
    clone = copy_of_the_repository(folder)
    opt = folder / "opt"
    opt.mkdir()
    network = next(iter(addresses.values())).rpartition(".")[0]
    _remove(containers, addresses)  # what a run that was killed has left
    try:
        containers.podman(
            "network", "create", "--internal", "--subnet", f"{network}.0/24", "--gateway", f"{network}.254",
            NETWORK,
        )  # fmt: skip
        for name, address in addresses.items():
            own = shutil.copytree(clone, folder / name)
            containers.podman(
                "run", "--detach", "--privileged", "--systemd", "always", "--name", name, "--hostname", name,
                "--network", f"{NETWORK}:ip={address}", "--shm-size", "1g",
                "--volume", f"{own}:{CLONE}", "--volume", f"{wheels}:/wheels:ro", "--volume", f"{opt}:/opt",
                IMAGE,
            )  # fmt: skip
        found = [Host(containers, name) for name in addresses]
        for host in found:
            host.type(f"until {BOOTED}; do sleep 0.1; done", timeout_s=BOOT_TIMEOUT_S)
        yield found
    finally:
        _remove(containers, addresses)


def _remove(containers: Containers, names: Iterable[str]) -> None:
    for name in names:
        containers.podman("rm", "--force", "--ignore", "--time", "0", name)
    containers.podman("network", "rm", "--force", NETWORK)
