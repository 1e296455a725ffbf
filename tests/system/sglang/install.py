# SPDX-License-Identifier: Apache-2.0
"""Makes a virtual environment that holds SGLang, NIXL, Mooncake and kvferry (7 GB).

Used by `make test-sglang`.

SGLang has no build for CPUs on the index: it is the one for NVIDIA GPUs, without the packages of kernels, and
with what `cpu/` has in their place.

`python -m tests.system.sglang.install DIRECTORY VERSION` installs only kvferry anew when it has been done
before.
"""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.system.vllm.install import DONE, MSGPACK, ROOT, pip, requirements

UNWANTED = (
    "av", "build", "cuda-python", "decord2", "deepseek-recipe", "flash-attn", "flashinfer", "humming-kernels",
    "nvidia-cutlass", "nvidia-mathdx", "nvshmem4py", "quack-kernels", "sgl-", "sglang-kernel", "tilelang",
    "tml-renderers", "torch_memory_saver", "torchaudio", "torchcodec", "torchvision",
)  # fmt: skip
"""Kernels for GPUs, and what texts do not need."""
BESIDE = (
    "torchvision==0.29.1", "nixl==1.5.1", "nixl-cu13==1.5.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
)  # fmt: skip
"""SGLang imports torchvision, whose build must be that of its torch."""


def main(directory: Path, version: str) -> int:
    """Raises `CalledProcessError` when pip fails."""
    if not (directory / DONE).exists():
        _install_sglang(directory, version)
    pip(directory, "install", "--no-deps", "--editable", str(ROOT))
    pip(directory, "install", MSGPACK)
    return 0


def _install_sglang(directory: Path, version: str) -> None:
    venv.create(directory, with_pip=True)
    wheels = directory / "wheels"
    pip(directory, "download", "--no-deps", f"sglang=={version}", "--dest", str(wheels))
    [wheel] = wheels.glob("sglang-*.whl")
    pip(directory, "install", *requirements(wheel, UNWANTED), *BESIDE)
    pip(directory, "install", "--no-deps", str(wheel))
    with TemporaryDirectory() as copy:  # pip leaves files where it builds
        shutil.copytree(Path(__file__).parent / "cpu", copy, dirs_exist_ok=True)
        pip(directory, "install", "--no-deps", copy)
    (directory / DONE).touch()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
