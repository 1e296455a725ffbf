# SPDX-License-Identifier: Apache-2.0
"""Skips tests that need NVIDIA GPUs where there are too few, and says so."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def gpu_names() -> list[str]:
    """The names of all NVIDIA GPUs of this machine."""
    if not count_gpus():
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip unless the machine has that many."""
    return pytest.mark.skipif(count_gpus() < count, reason=f"needs {count} NVIDIA GPU(s)")
