# SPDX-License-Identifier: Apache-2.0
"""The Helm chart: linted, rendered with every values file, and each object checked against its schema.

`make test-deploy` gets Helm and the schemas of Kubernetes; without them these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.agent.cli import parse_config as agent_config
from kvferry.deploy.sidecar import SidecarConfig
from kvferry.deploy.vllm_engine import VllmEngineConfig
from kvferry.proxy.config import parse_config as proxy_config
from kvferry.proxy.wire.flags import parse_flags

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvferry"
TOOLS = ROOT / "build" / "deploy"
HELM = TOOLS / "helm"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
SCHEMAS = "1.34"
SECURE = ("--set", "security.clusterKeySecret=c", "--set", "security.apiKeysSecret=k")
# Their schemas come with what defines them, not with Kubernetes.
CUSTOM = {"DisaggregatedSet", "PodMonitor", "PrometheusRule"}
# What disaggregatedset.x-k8s.io/v1 allows (kubernetes-sigs/lws at 060ab4d, config/crd/bases).
ROLE_FIELDS = {"name", "metadata", "scaling", "spec"}
GROUP_FIELDS = {"leaderWorkerTemplate", "networkConfig", "replicas", "rolloutStrategy", "startupPolicy"}

pytestmark = [
    pytest.mark.skipif(not HELM.exists(), reason="no Helm here: make test-deploy gets it"),
    pytest.mark.timeout(120),
]


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60)


def render(*words: str | Path) -> list[dict[str, Any]]:
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


@pytest.fixture(scope="module")
def validate() -> Any:
    """kubernetes-validate, strictly; its schemas are too many to be in everybody's environment."""
    if not (TOOLS / "site").exists():
        pytest.skip("no schemas of Kubernetes here: make test-deploy gets them")
    code = (
        "import json, sys; sys.path.append(sys.argv[1]); import kubernetes_validate\n"
        "for each in json.load(sys.stdin): kubernetes_validate.validate(each, sys.argv[2], strict=True)"
    )

    def run(objects: list[dict[str, Any]]) -> str:
        words = [sys.executable, "-c", code, str(TOOLS / "site"), SCHEMAS]
        done = subprocess.run(words, input=json.dumps(objects), capture_output=True, text=True, timeout=60)
        return done.stderr if done.returncode else ""

    return run


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["Deployment", "DisaggregatedSet"])
def test_every_values_file_gives_valid_objects(values: Path, kind: str, validate: Any) -> None:
    linted = helm("lint", "--strict", CHART, "--values", values)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    objects = render("--values", values, "--set", f"agents.kind={kind}")
    known = [each for each in objects if each["kind"] not in CUSTOM]
    known += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **pod["metadata"]}, "spec": pod["spec"]}
        for pod in pods(objects)
    ]
    assert validate(known) == ""
    for each in objects:
        if each["kind"] == "DisaggregatedSet":
            assert each["spec"].keys() <= {"placementPolicy", "roles", "slices"}
            for role in each["spec"]["roles"]:
                assert role.keys() <= ROLE_FIELDS
                assert role["spec"].keys() <= GROUP_FIELDS


def test_a_misspelt_field_is_seen(validate: Any) -> None:
    assert validate(
        [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"prts": []}}]
    )


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_containers_run_commands_that_are_understood(values: Path, tmp_path: Path) -> None:
    """Every argument is one of ours, with a value that we take."""
    for name in ("cluster.key", "keys.txt", "tls.crt", "tls.key"):
        (tmp_path / name).touch()
    seen = 0
    for pod in pods(render("--values", values)):
        for container in pod["spec"]["containers"]:
            if container.get("command", [])[:1] != ["kvferry"]:
                continue
            words = [each.replace("$(POD_IP)", "10.0.0.1") for each in container["args"]]
            words = [re.sub(r"=/etc/kvferry/\w+/", f"={tmp_path}/", each) for each in words]
            words = ["--model=ferry-tiny" if each.startswith("--model=") else each for each in words]
            ours = words[: words.index("--")] if "--" in words else words
            if container["command"] == ["kvferry", "proxy"]:
                proxy_config(ours)
            elif "--engine=vllm" in ours:
                parse_flags(VllmEngineConfig, ours, prog="kvferry agent", description="")
            elif any(each.startswith("--attach=") for each in ours):
                parse_flags(SidecarConfig, ours, prog="kvferry agent", description="")
            else:
                agent_config(ours)
            seen += 1
    assert seen >= 3


def test_pods_have_time_to_drain_and_few_rights() -> None:
    for pod in pods(render(*SECURE, "--set", "drainSeconds=100")):
        assert pod["spec"]["terminationGracePeriodSeconds"] > 100
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        [container] = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "--drain-s=100" in container["args"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert any(each.startswith("--cluster-key=") for each in container["args"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "clusterKeySecret"),
        ((*SECURE, "--set", "proxy.prt=1"), "prt"),
        ((*SECURE, "--set", "agents.engine=other"), "engine"),
        ((*SECURE, "--set", "agents.engine=vllm,agents.transfer=mori"), "transfer"),
        ((*SECURE, "--set", "autoscaling.prefill.maxReplicas=3"), "minReplicas"),
    ],
)
def test_wrong_values_are_refused_by_name(words: tuple[str, ...], named: str) -> None:
    done = helm("template", "r", CHART, *words)
    assert done.returncode != 0
    assert named in done.stderr


def test_a_disaggregated_set_is_taken_where_the_cluster_has_it() -> None:
    has = ("--api-versions", "disaggregatedset.x-k8s.io/v1/DisaggregatedSet")
    assert "DisaggregatedSet" not in {each["kind"] for each in render(*SECURE)}
    assert "DisaggregatedSet" in {each["kind"] for each in render(*SECURE, *has)}


def test_the_command_of_the_page_installs_the_chart() -> None:
    """With `template` in place of what needs a cluster."""
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
    [line] = re.findall(r"^helm upgrade --install (.*)$", page, flags=re.MULTILINE)
    done = subprocess.run(
        [HELM, "template", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "registry.example/kvferry" in done.stdout


def test_agents_find_the_proxies_by_the_name_of_the_headless_service() -> None:
    objects = render(*SECURE)
    [headless] = [each for each in objects if each["spec"].get("clusterIP") == "None"]
    assert headless["spec"]["publishNotReadyAddresses"]
    port = headless["spec"]["ports"][0]["port"]
    named = [
        each
        for pod in pods(objects)
        for container in pod["spec"]["containers"]
        for each in container["args"]
        if each.startswith("--proxy=")
    ]
    assert named == [f"--proxy=dns:{headless['metadata']['name']}:{port}"] * 2
