# SPDX-License-Identifier: Apache-2.0
"""`make release`: builds what a release consists of from the commit that is checked out, into build/release.

`python -m tools.release FOLDER [PART…]`; docs/releasing.md lists the parts and their files. Without PART, the
image is left out where it cannot be built. A folder that is there is replaced.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from tests.deploy.chart import HELM
from tests.deploy.containers import Containers, missing
from tests.deploy.image import build

ROOT = Path(__file__).parents[1]
CONTAINERS = ROOT / "build" / "deploy" / "containers"
SBOM_TOOLS = ROOT / "build" / "sbom-tools"
SBOM_TOOL = "cyclonedx-bom==7.5.0"
TIMEOUT_S = 1800.0
SUMS = "SHA256SUMS"
NEVER_BUILT = ("cuda", "rocm")
"""Images whose bases only registries of images have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is built, from `source`, where the commit lies without anything else, into `folder`."""

    source: Path
    folder: Path
    commit: str
    epoch_s: int
    """When the commit was made."""

    @property
    def version(self) -> str:
        """That of the wheel, which is there."""
        return next(self.folder.glob("kvferry-*.whl")).name.split("-")[1]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args(words)
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        parser.error(f"a release is built from a commit, and these files differ from it:\n{changed}")
    os.umask(0o022)  # files' modes are in archives
    left_out = [f"image for {name}: its base image is only in image registries" for name in NEVER_BUILT]
    parts = options.parts or list(PARTS)
    if not options.parts and missing():
        parts.remove("image")
        left_out.insert(0, f"image for cpu: {missing()}")
    with tempfile.TemporaryDirectory() as directory:
        release = check_out(Path(directory), options.folder.resolve())
        for part in parts:
            print(f"{part} …", flush=True)
            PARTS[part](release)
        write_provenance(release, parts)
    print((options.folder / SUMS).read_text(), end="")
    for line in left_out:
        print(f"not built: {line}")
    return 0


def check_out(directory: Path, folder: Path) -> Release:
    """Put the commit, and nothing else, below `directory`, and empty `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit = git("rev-parse", "HEAD")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], capture_output=True, check=True, timeout=TIMEOUT_S
    )
    source = directory / "source"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    return Release(
        source=source, folder=folder, commit=commit, epoch_s=int(git("log", "-1", "--format=%ct", commit))
    )


def build_packages(source: Path, folder: Path, epoch_s: int) -> None:
    """Build an sdist, and a wheel of that. The same sources give the same bytes."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source,
        environment={"SOURCE_DATE_EPOCH": str(epoch_s)})  # fmt: skip
    [sdist] = folder.glob("*.tar.gz")
    make_reproducible(sdist, epoch_s)


def make_reproducible(archive: Path, epoch_s: int) -> None:
    """Rewrite a .tar.gz in the order of names, without owners, and with one time for everything."""
    with tarfile.open(archive) as old, io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as new:
            for name in sorted(old.getnames()):
                member = old.getmember(name)
                made = tarfile.TarInfo(name)
                made.type, made.size, made.linkname = member.type, member.size, member.linkname
                made.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                made.mtime = epoch_s
                new.addfile(made, old.extractfile(member) if member.isfile() else None)
        packed = gzip.compress(buffer.getvalue(), mtime=epoch_s)
    archive.write_bytes(packed)


def build_chart(release: Release) -> None:
    run(HELM, "package", release.source / "deploy" / "helm" / "kvferry", "--destination", release.folder)
    [chart] = release.folder.glob("*.tgz")
    make_reproducible(chart, release.epoch_s)


def build_image(release: Release) -> None:
    """Build the image for CPUs, and list what is in it.

    Its base and layers stay in build/deploy, so that only the first time takes minutes.
    """
    if reason := missing():
        raise RuntimeError(reason)
    containers = Containers(CONTAINERS)
    image = f"localhost/kvferry:{release.version}"
    build(containers, CONTAINERS, repository=release.source, name=image)
    archive = release.folder / f"kvferry-{release.version}-cpu.oci.tar"
    containers.buildah("push", image, f"oci-archive:{archive}:{image}", timeout_s=TIMEOUT_S)
    container = containers.buildah("from", "--pull-never", image).strip()
    try:
        root = Path(containers.buildah("mount", container).strip())
        with tempfile.TemporaryDirectory() as directory:
            [packages] = root.glob("opt/kvferry/lib/python3*/site-packages")
            environment = make_environment(Path(directory))
            [site] = environment.glob("lib/python3*/site-packages")
            (site / "image.pth").write_text(f"{packages}\n")
            sbom = describe(release, environment, f"{archive.name.removesuffix('.oci.tar')}.cdx.json")
        content = json.loads(sbom.read_text())
        content["components"] += debian_packages(root)
        sbom.write_text(json.dumps(content, indent=2) + "\n")
    finally:
        containers.buildah("rm", container)


def debian_packages(root: Path) -> list[dict[str, str]]:
    """Return what Debian's packages below `root` are, as components of CycloneDX."""
    form = "${Package}\t${Version}\t${Architecture}\n"
    listed = subprocess.run(
        ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", f"--showformat={form}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = []
    for line in listed.stdout.splitlines():
        name, installed, architecture = line.split("\t")
        purl = f"pkg:deb/debian/{quote(name)}@{quote(installed)}?arch={architecture}"
        found.append({"type": "library", "bom-ref": purl, "name": name, "version": installed, "purl": purl})
    return found


def write_sbom(release: Release) -> None:
    """List what an environment has in which the wheel and its extra `agent` are, in CI's versions."""
    [wheel] = release.folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as directory:
        environment = make_environment(Path(directory))
        install: list[str | Path]
        install = [sys.executable, "-m", "pip", "--python", environment, "install", "-qq", "--no-compile",
                   "--constraint", ROOT / "constraints.txt"]  # fmt: skip
        if index := os.environ.get("TORCH_INDEX"):
            run(*install, "--index-url", index, "torch")
        run(*install, f"{wheel}[agent]")
        describe(release, environment, f"kvferry-{release.version}.cdx.json")


def make_environment(folder: Path) -> Path:
    """Make an environment for Python without anything in it."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    return environment


def describe(release: Release, environment: Path, name: str) -> Path:
    """Write the SBOM of an environment, in CycloneDX."""
    if not (SBOM_TOOLS / "bin" / "cyclonedx-py").exists():
        run(sys.executable, "-m", "venv", SBOM_TOOLS)
        run(SBOM_TOOLS / "bin" / "pip", "install", "-qq", SBOM_TOOL)
    sbom = release.folder / name
    run(SBOM_TOOLS / "bin" / "cyclonedx-py", "environment", "--output-reproducible",
        "--pyproject", release.source / "pyproject.toml", "--mc-type", "application",
        "--output-file", sbom, environment,
        environment={"SOURCE_DATE_EPOCH": str(release.epoch_s)})  # fmt: skip
    return sbom


PARTS: dict[str, Callable[[Release], None]] = {
    "packages": lambda release: build_packages(release.source, release.folder, release.epoch_s),
    "chart": build_chart,
    "sbom": write_sbom,
    "image": build_image,
}


def write_provenance(release: Release, parts: list[str]) -> None:
    """Write an in-toto statement with SLSA's provenance, and the checksums of it all."""
    sums = {path.name: digest(path) for path in sorted(release.folder.iterdir())}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": found}} for name, found in sums.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:kvferry:make-release:1",
                "externalParameters": {"parts": parts},
                "internalParameters": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in ("build", "setuptools")},
                    "sourceDateEpoch": release.epoch_s,
                },
                "resolvedDependencies": [
                    {"name": "kvferry", "uri": "urn:kvferry:git", "digest": {"gitCommit": release.commit}}
                ],
            },
            "runDetails": {"builder": {"id": "urn:kvferry:builder:unsigned"}},
        },
    }
    path = release.folder / f"kvferry-{release.version}.provenance.json"
    path.write_text(json.dumps(statement, indent=2) + "\n")
    sums[path.name] = digest(path)
    (release.folder / SUMS).write_text("".join(f"{found}  {name}\n" for name, found in sums.items()))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def run(*words: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a command. Raises CalledProcessError, after what it has written, when it fails."""
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
