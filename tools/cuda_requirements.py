# SPDX-License-Identifier: Apache-2.0
"""`make cuda-requirements`: all that is in the image for NVIDIA GPUs beside kvferry, by version and hash.

pip resolves vLLM together with what kvferry needs of other packages, for the Python of the image, and
installs nothing. Run it on Debian 12: pip takes wheels for the C library that it finds. It fetches some
gigabytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "deploy" / "images" / "cuda" / "requirements.txt"
VLLM = "vllm==0.32.0"
PYTHON = "3.11"
EXTRAS = ("agent", "cuda", "nixl", "otel")
HEADER = f"""\
# Made by `make cuda-requirements`: {VLLM}, and what kvferry[{",".join(EXTRAS)}] needs, resolved together for
# Python {PYTHON} on x86-64.
"""


def wanted() -> list[str]:
    """What the image needs, kvferry itself left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in EXTRAS for each in project["optional-dependencies"][name]]
    return [VLLM, *project["dependencies"], *(each for each in extras if not each.startswith("kvferry["))]


def resolve(requirements: list[str], report: Path) -> None:
    """Write pip's report of what it would install. Raises `CalledProcessError` when nothing fits."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
         "--report", report, "--only-binary=:all:", "--python-version", PYTHON,
         "--target", report.parent / "target", *requirements],
        check=True,
    )  # fmt: skip


def lines(report: dict[str, Any]) -> list[str]:
    """Return a line for each package of pip's report.

    Raises `ValueError` for a build that is not of the public index.
    """
    found = []
    for each in report["install"]:
        name, version = each["metadata"]["name"], each["metadata"]["version"]
        if "+" in version:
            raise ValueError(f"{name} {version} is a build of this machine's own index")
        digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{digest}\n")
    return sorted(found)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        resolve(wanted(), report)
        REQUIREMENTS.write_text(HEADER + "".join(lines(json.loads(report.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
