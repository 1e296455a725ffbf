# SPDX-License-Identifier: Apache-2.0
"""The image for CPUs, built by buildah from `deploy/images/cpu/Containerfile` without a registry of images.

Its base is a Debian made on the spot, without documentation, as the published slim images are. Packages come
from a folder of wheels that pip fills outside the build, which so needs nothing of this machine's settings.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.containers import Containers

ROOT = Path(__file__).parents[2]
CONTAINERFILE = Path("deploy/images/cpu/Containerfile")
SOURCES = ("agent", "common", "deploy", "proxy", "transfer")
BASE = "localhost/debian:12"
IMAGE = "localhost/kvferry:test"
SUITE = "bookworm"
LEFT_OUT = ("doc", "info", "locale", "man")  # of /usr/share
BASE_TIMEOUT_S = 600.0
WHEELS_TIMEOUT_S = 1800.0
BUILD_TIMEOUT_S = 1800.0


def build(containers: Containers, folder: Path, *, repository: Path = ROOT, name: str = IMAGE) -> str:
    """Build the image of a repository and return its name.

    The base, the wheels and the layers that `folder` has are used again.
    """
    make_base(containers, folder)
    wheels = fetch_wheels(folder / "wheels")
    containers.buildah(
        "bud", "--isolation", "chroot", "--layers", "--pull-never", "--tag", name,
        "--file", repository / CONTAINERFILE,
        "--volume", f"{wheels}:/wheels:ro", "--build-arg", f"BASE={BASE}",
        "--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels", repository,
        timeout_s=BUILD_TIMEOUT_S,
    )  # fmt: skip
    return name


def make_base(containers: Containers, folder: Path) -> None:
    """Make Debian's smallest set of packages into the image `BASE`, if there is none."""
    if BASE not in containers.images():
        archive = folder / "base.tar"
        options = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in LEFT_OUT]
        _run(["mmdebstrap", "--quiet", "--variant=minbase", *options, SUITE, archive], BASE_TIMEOUT_S)
        containers.podman("import", archive, BASE, timeout_s=BASE_TIMEOUT_S)
        archive.unlink()


def copy_of_the_repository(folder: Path) -> Path:
    """Copy what images are built from, with its times, and return where it is."""
    copied = folder / "repository"
    for each in SOURCES:
        shutil.copytree(ROOT / each, copied / each, ignore=shutil.ignore_patterns("__pycache__"))
    for each in (".dockerignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"):
        shutil.copy2(ROOT / each, copied / each)
    return copied


def fetch_wheels(folder: Path, *extras: str) -> Path:
    """Have pip put what agents need, and what builds the package, into a folder, for Debian 12's Python.

    What further extras of ours need is put there too.
    """
    wanted = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    done = folder / hashlib.sha256("".join([*wanted, *extras]).encode()).hexdigest()
    if done.exists():
        return folder
    project = tomllib.loads(wanted[0])
    optional = project["project"]["optional-dependencies"]
    needed = project["project"]["dependencies"] + [
        word for each in ("agent", *extras) for word in optional[each]
    ]
    needed = [word for word in needed if not word.startswith("kvferry[")]
    words: list[str | Path]
    words = [sys.executable, "-m", "pip", "download", "-qq", "--only-binary=:all:", "--python-version=3.11",
             "--dest", folder, "--find-links", folder, "--constraint", ROOT / "constraints.txt"]  # fmt: skip
    if os.environ.get("TORCH_INDEX"):
        _run([*words, "--index-url", os.environ["TORCH_INDEX"], "torch"], WHEELS_TIMEOUT_S)
    _run([*words, *needed, *project["build-system"]["requires"]], WHEELS_TIMEOUT_S)
    done.touch()
    return folder


def _run(words: Sequence[str | Path], timeout_s: float) -> None:
    subprocess.run(words, check=True, timeout=timeout_s)
