# SPDX-License-Identifier: Apache-2.0
"""The image for CPUs, built once for all tests that run it, and a shell for the pages about images."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import ROOT, TOOLS
from tests.deploy.containers import Containers, limits, missing
from tests.deploy.image import BASE, build
from tests.helpers.waiting import patient

FOLDER = TOOLS / "containers"
SERVICES = ("proxy", "prefill", "decode")


@pytest.fixture(scope="session")
def containers() -> Containers:
    """Skips the test where no container can run."""
    if missing():
        pytest.skip(missing())
    return Containers(FOLDER)


@pytest.fixture(scope="session")
def image(containers: Containers) -> str:
    """Its last step has run `kvferry doctor`."""
    return build(containers, FOLDER)


class Docker:
    """A shell in the root of the repository, where `docker` is `tests/standins/docker`."""

    def __init__(self, containers: Containers, folder: Path) -> None:
        commands = folder / "bin"
        commands.mkdir()
        (commands / "docker").symlink_to(ROOT / "tests" / "standins" / "docker")
        # The file of Compose asks for more than may be had on small machines.
        fewer = folder / "limits.yaml"
        fewer.write_text(yaml.safe_dump({"services": {name: {"ulimits": limits()} for name in SERVICES}}))
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PODMAN": str(containers.write_command("podman", folder / "podman")),
            "BUILDAH": str(containers.write_command("buildah", folder / "buildah")),
            "LIMITS": str(fewer),
            "BASE": BASE,
            "WHEELS": str(FOLDER / "wheels"),
        }

    def type(self, script: str, **environment: str) -> str:
        """What a script prints. Raises CalledProcessError when one of its commands fails."""
        return subprocess.run(
            ["bash", "-e", "-c", script], cwd=ROOT, env={**self._environment, **environment},
            check=True, text=True, stdout=subprocess.PIPE, timeout=patient(1800),
        ).stdout  # fmt: skip


@pytest.fixture
def docker(containers: Containers, image: str, tmp_path: Path) -> Docker:
    """The image is there in layers, so that its build takes seconds."""
    return Docker(containers, tmp_path)
