# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm's own binary, which `make test-deploy` gets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvferry"
TOOLS = ROOT / "build" / "deploy"
HADOLINT = TOOLS / "hadolint"
HELM = TOOLS / "helm"
KUBECTL = TOOLS / "kubectl"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60)


def render(*words: str | Path) -> list[dict[str, Any]]:
    """The objects of a release `r` in the namespace `n`. Raises AssertionError with Helm's words."""
    done = helm("template", "r", CHART, "--namespace", "n", *words)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Pod template of every workload."""
    found = [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]
    for each in objects:
        if each["kind"] == "DisaggregatedSet":
            found += [
                role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in each["spec"]["roles"]
            ]
    return found
