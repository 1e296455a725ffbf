# SPDX-License-Identifier: Apache-2.0
"""The Helm chart: linted, rendered with every values file, and each object checked against its schema.

`make test-deploy` gets Helm and the schemas of Kubernetes; without them these tests are skipped.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.agent.announce.attach import SidecarConfig
from kvferry.agent.cli import parse_config as agent_config
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.common.curve import ClusterKey
from kvferry.common.options import parse_flags
from kvferry.proxy.api.auth import Access, ApiKeys, authenticate
from kvferry.proxy.config import parse_config as proxy_config
from kvferry.proxy.errors import Unauthorized
from kvferry.proxy.ids import RequestId
from kvferry.proxy.request import RequestHead
from tests.deploy.chart import CHART, EXAMPLES, HELM, KUBECTL, ROOT, TOOLS, helm, pods, render
from tests.deploy.disaggregated_set import errors
from tests.deploy.pages import blocks, needing, scripts

SCHEMAS = "1.34"
NOWHERE = "http://127.0.0.1:1"
SECURE = ("--set", "security.clusterKeySecret=c", "--set", "security.apiKeysSecret=k")
# Their schemas come with what defines them, not with Kubernetes.
CUSTOM = {
    *("DisaggregatedSet", "PodMonitor", "PrometheusRule", "ScaledObject"),
    *("HTTPRoute", "InferencePool"),
}
SET = ("--set", "agents.kind=DisaggregatedSet")

pytestmark = [
    pytest.mark.skipif(not HELM.exists(), reason="no Helm here: make test-deploy gets it"),
    pytest.mark.timeout(120),
]


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
    sets = [each for each in objects if each["kind"] == "DisaggregatedSet"]
    assert len(sets) == (kind == "DisaggregatedSet")
    assert [errors(each) for each in sets] == [[]] * len(sets)


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "agents.roles.both.replicas=2"),
        ("--set", "agents.placementPolicy.type=ExclusiveSlice,agents.placementPolicy.topology=rack"),
        ("--set", "autoscaling.prefill.minReplicas=1,autoscaling.prefill.maxReplicas=3"),
    ],
    ids=["three roles", "placement", "scaled"],
)
def test_a_cluster_takes_the_disaggregated_set(words: tuple[str, ...]) -> None:
    [made] = [each for each in render(*SECURE, *SET, *words) if each["kind"] == "DisaggregatedSet"]
    assert errors(made) == []


def test_what_a_cluster_refuses_of_a_disaggregated_set_is_seen() -> None:
    [made] = [each for each in render(*SECURE, *SET) if each["kind"] == "DisaggregatedSet"]
    first, second = made["spec"]["roles"]
    for wrong, named in [
        ({**first, "replica": 1}, "replica"),
        ({**first, "spec": {**first["spec"], "replicas": "2"}}, "replicas"),
        ({**first, "spec": {**first["spec"], "replicas": 0}}, "zero"),
        ({**first, "name": second["name"]}, "two of one name"),
        ({**first, "spec": {"replicas": 1}}, "leaderWorkerTemplate"),
    ]:
        [error] = errors({**made, "spec": {"roles": [wrong, second]}})
        assert named in error
    assert errors({**made, "spec": {"roles": [first]}})


def test_one_role_alone_is_no_disaggregated_set() -> None:
    """A cluster refuses a set of fewer than two roles."""
    one = (
        "--set",
        "agents.roles.prefill.replicas=0,agents.roles.decode.replicas=0,agents.roles.both.replicas=2",
    )
    has = ("--api-versions", "disaggregatedset.x-k8s.io/v1/DisaggregatedSet")
    assert "DisaggregatedSet" not in {each["kind"] for each in render(*SECURE, *has, *one)}
    refused = helm("template", "r", CHART, *SECURE, *SET, *one)
    assert refused.returncode != 0
    assert "two roles" in refused.stderr


def test_the_defaults_pass_lint() -> None:
    """As a GitOps pipeline runs it: with no values at all."""
    linted = helm("lint", "--strict", CHART)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("kind", ["Deployment", "DisaggregatedSet"])
def test_a_cluster_without_a_free_gpu_can_be_upgraded(kind: str) -> None:
    """The example for eight GPUs uses them all, and never asks for more of them."""
    path = CHART / "examples" / "nvidia-vllm.yaml"
    values = yaml.safe_load(path.read_text())
    gpus = 0
    for role, settings in values["agents"]["roles"].items():
        most = values["autoscaling"][role]["maxReplicas"]
        gpus += max(most, settings["replicas"]) * settings["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus <= 8
    objects = render("--values", path, "--set", f"agents.kind={kind}")
    if kind == "Deployment":
        updates = [
            each["spec"]["strategy"]["rollingUpdate"]
            for each in objects
            if each["kind"] == "Deployment" and "kvferry/role" in each["metadata"]["labels"]
        ]
    else:
        [made] = [each for each in objects if each["kind"] == kind]
        updates = [
            role["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for role in made["spec"]["roles"]
        ]
    assert updates == [{"maxSurge": 0, "maxUnavailable": 1}] * 2


EXTRAS = """
proxy: {affinity: {nodeAffinity: {}}, podAnnotations: {a: b}, priorityClassName: high, serviceAccountName: s}
agents:
  affinity: {podAffinity: {}}
  topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]
  podAnnotations: {c: d}
  runtimeClassName: nvidia
  hfTokenSecret: hf
  nodeSelector: {pool: any}
  initContainers: [{name: fetch, image: i}]
  volumes: [{name: cache, emptyDir: {}}]
  volumeMounts: [{name: cache, mountPath: /cache}]
  roles: {decode: {nodeSelector: {pool: decode}}}
"""


def test_what_a_cluster_adds_to_pods_is_there(tmp_path: Path, validate: Any) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(EXTRAS)
    made = pods(render("--values", values))
    whole = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod["spec"]} for pod in made
    ]
    assert validate(whole) == ""
    of = {pod["metadata"]["labels"].get("kvferry/role", "proxy"): pod for pod in made}
    assert of["proxy"]["metadata"]["annotations"] == {"a": "b"}
    assert of["proxy"]["spec"]["affinity"] == {"nodeAffinity": {}}
    assert (of["proxy"]["spec"]["priorityClassName"], of["proxy"]["spec"]["serviceAccountName"]) == (
        "high",
        "s",
    )
    for role, pool in (("prefill", "any"), ("decode", "decode")):
        spec = of[role]["spec"]
        assert (spec["nodeSelector"], spec["affinity"]) == ({"pool": pool}, {"podAffinity": {}})
        assert (spec["runtimeClassName"], of[role]["metadata"]["annotations"]) == ("nvidia", {"c": "d"})
        assert [each["name"] for each in spec["initContainers"]] == ["fetch"]
        assert len(spec["topologySpreadConstraints"]) == 1
        [agent] = spec["containers"]
        assert {"name": "cache", "mountPath": "/cache"} in agent["volumeMounts"]
        token = {"secretKeyRef": {"name": "hf", "key": "token"}}
        assert {"name": "HF_TOKEN", "valueFrom": token} in agent["env"]


def test_a_gateway_routes_to_the_proxies() -> None:
    route = (
        "--set",
        "httpRoute.enabled=true,httpRoute.parentRefs[0].name=public,httpRoute.hostnames[0]=llm.example",
    )
    pool = ("--set", "inferencePool.enabled=true,inferencePool.endpointPicker.name=epp")
    [made] = [each for each in render(*SECURE, *route) if each["kind"] == "HTTPRoute"]
    assert (made["spec"]["parentRefs"], made["spec"]["hostnames"]) == ([{"name": "public"}], ["llm.example"])
    [backend] = made["spec"]["rules"][0]["backendRefs"]
    assert (backend["name"], backend["port"]) == ("r-kvferry", 10001)
    both = render(*SECURE, *route, *pool)
    [found] = [each for each in both if each["kind"] == "InferencePool"]
    assert found["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"
    assert found["spec"]["endpointPickerRef"] == {"name": "epp", "port": {"number": 9002}}
    [[backend]] = [
        rule["backendRefs"] for each in both if each["kind"] == "HTTPRoute" for rule in each["spec"]["rules"]
    ]
    assert (backend["kind"], backend["name"]) == ("InferencePool", found["metadata"]["name"])
    nameless = helm("template", "r", CHART, *SECURE, "--set", "httpRoute.enabled=true")
    assert nameless.returncode != 0 and "parentRefs" in nameless.stderr


def test_a_misspelt_field_is_seen(validate: Any) -> None:
    assert validate(
        [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"prts": []}}]
    )


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_containers_run_commands_that_are_understood(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument is one of ours, with a value that we take."""
    monkeypatch.setattr("kvferry.agent.cli._why_no_gpu", lambda: None)
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


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_to_be_scraped_may_be_reached(values: Path) -> None:
    objects = render("--values", values)
    monitored = {each["metadata"]["name"] for each in objects if each["kind"] == "PodMonitor"}
    [agents] = [
        each
        for each in objects
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("-agents")
    ]
    from_elsewhere = any(
        "namespaceSelector" in who for rule in agents["spec"]["ingress"] for who in rule["from"]
    )
    assert any(name.endswith("-agent") for name in monitored) == from_elsewhere


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
        (("--set", "security.clusterKeySecret="), "clusterKeySecret"),
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


SCALED = (
    *SECURE,
    "--set",
    "autoscaling.prefill.minReplicas=1,autoscaling.prefill.maxReplicas=4,autoscaling.utilizationPercent=75",
)


@pytest.mark.parametrize("kind", ["Deployment", "DisaggregatedSet"])
def test_a_role_with_bounds_is_scaled_to_the_agents_wanted(kind: str, validate: Any) -> None:
    objects = render(*SCALED, "--set", f"agents.kind={kind}")
    [scaler] = [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]
    assert validate([scaler]) == ""
    [metric] = scaler["spec"]["metrics"]
    assert metric["external"]["metric"] == {
        "name": "kvferry_proxy_wanted_agents",
        "selector": {"matchLabels": {"role": "prefill"}},
    }
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "750m"}
    assert replicas(objects)[scaler["spec"]["scaleTargetRef"]["name"]] is None
    assert replicas(objects)["r-kvferry-decode"] == 1


def test_keda_asks_the_prometheus_that_is_named() -> None:
    objects = render(*SCALED, "--set", "autoscaling.prometheus=http://prometheus:9090,agents.kind=Deployment")
    assert "HorizontalPodAutoscaler" not in {each["kind"] for each in objects}
    [scaler] = [each for each in objects if each["kind"] == "ScaledObject"]
    [trigger] = scaler["spec"]["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(kvferry_proxy_wanted_agents{namespace="n",pod=~"r-kvferry-proxy-.+",role="prefill"})',
        "threshold": "0.75",
        "ignoreNullValues": "false",
    }
    assert (scaler["spec"]["minReplicaCount"], scaler["spec"]["maxReplicaCount"]) == (1, 4)
    assert replicas(objects)[scaler["spec"]["scaleTargetRef"]["name"]] is None


def replicas(objects: list[dict[str, Any]]) -> dict[str, int | None]:
    """By the name of what is scaled; None: by somebody else."""
    found = {
        each["metadata"]["name"]: each["spec"].get("replicas")
        for each in objects
        if each["kind"] == "Deployment"
    }
    for each in objects:
        if each["kind"] == "DisaggregatedSet":
            for role in each["spec"]["roles"]:
                name = f"{each['metadata']['name']}-{role['name']}"
                found[name] = role["spec"].get("replicas")
                assert (found[name] is None) == (role.get("scaling") == {"mode": "External"})
    return found


def test_a_disaggregated_set_is_taken_where_the_cluster_has_it() -> None:
    has = ("--api-versions", "disaggregatedset.x-k8s.io/v1/DisaggregatedSet")
    assert "DisaggregatedSet" not in {each["kind"] for each in render(*SECURE)}
    assert "DisaggregatedSet" in {each["kind"] for each in render(*SECURE, *has)}


def rendered_by(command: str, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects that a `helm upgrade` of the page asks for, by kind and name."""
    helm, upgrade, *others = shlex.split(command)
    assert (helm, upgrade) == ("helm", "upgrade")
    others = [each for each in others if each not in ("--install", "--reset-then-reuse-values")]
    done = subprocess.run(
        [HELM, "template", *others, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_the_page_installs_what_its_other_commands_name() -> None:
    """With `helm template` in place of what needs a cluster."""
    install, rollout, forward = needing("kubernetes.md", "Start", "a cluster")[:3]
    objects = rendered_by(install)
    kind, name = rollout.split()[-1].split("/")
    proxy = objects[kind.capitalize(), name]
    assert proxy["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/kvferry:0.2.0"
    *_, service, port = forward.split()
    kind, name = service.split("/")
    assert int(port) in {each["port"] for each in objects[kind.capitalize(), name]["spec"]["ports"]}

    upgrade = needing("kubernetes.md", "Upgrade and roll back", "a cluster")[0]
    assert "--reset-then-reuse-values" in upgrade
    _, _, values = install.partition("--values")
    objects = rendered_by(upgrade, *shlex.split(f"--values {values}"))
    images = {
        container["image"]
        for (kind, _), each in objects.items()
        if kind == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"registry.example/kvferry:0.3.0"}


def test_the_page_makes_the_secrets_that_the_values_name(tmp_path: Path) -> None:
    """By its own commands for the keys; kubectl makes the objects, which kvferry reads as a Pod would."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for script in scripts("kubernetes.md", "Install"):
        subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, check=True, timeout=60)
    made = []
    for command in needing("kubernetes.md", "Install", "a cluster"):
        program, *words = shlex.split(command)
        assert program == "kubectl"
        done = kubectl(tmp_path, *words, "--dry-run=client", "--output=json")
        assert done.returncode == 0, done.stderr
        made.append(json.loads(done.stdout))
    namespace, *secrets = made
    assert {each["metadata"]["namespace"] for each in secrets} == {namespace["metadata"]["name"]}
    named = [yaml.safe_load(each.read_text()).get("security", {}) for each in EXAMPLES]
    taken = {"clusterKeySecret": secrets[0], "apiKeysSecret": secrets[1]}
    assert [each for each in named if not each.get("insecure")] == [
        {name: secret["metadata"]["name"] for name, secret in taken.items()}
    ] * 4
    for secret in secrets:
        for name, content in secret["data"].items():
            path = tmp_path / "mounted" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(content))
            path.chmod(0o400)
    ClusterKey.read(tmp_path / "mounted" / "cluster.key")
    keys = ApiKeys.read(tmp_path / "mounted" / "keys.txt")
    client, admin = (tmp_path / "keys.txt").read_text().splitlines()

    def head(path: str, key: str) -> RequestHead:
        return RequestHead("GET", path, {b"authorization": f"Bearer {key}".encode()}, RequestId("any"))

    assert authenticate(keys, head("/v1/models", client)).access is Access.CLIENT
    with pytest.raises(Unauthorized):
        authenticate(keys, head("/nodes", client))
    assert authenticate(keys, head("/nodes", admin.removesuffix(" admin"))).access is Access.ADMIN


def kubectl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KUBECTL, *words],
        cwd=folder,
        env={**os.environ, "KUBECONFIG": str(no_cluster(folder))},
        capture_output=True,
        text=True,
        timeout=60,
    )


def no_cluster(folder: Path) -> Path:
    """Settings of kubectl and Helm for a cluster that is not there."""
    path = folder / "kubeconfig"
    cluster = {"name": "none", "cluster": {"server": NOWHERE}}
    context = {"name": "none", "context": {"cluster": "none", "user": ""}}
    path.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "none"}))
    return path


def in_a_cluster() -> list[str]:
    """The commands of the page that need a cluster."""
    found = [each for each in blocks(ROOT / "docs" / "deploy" / "kubernetes.md") if each.needs]
    return [command for each in found for command in each.commands if not command.startswith("curl ")]


@pytest.mark.parametrize("command", in_a_cluster())
def test_what_needs_a_cluster_is_understood_up_to_there(command: str, tmp_path: Path) -> None:
    for name in ("cluster.key", "keys.txt"):
        (tmp_path / name).touch()
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    program, *words = shlex.split(command)
    done = subprocess.run(
        [{"helm": HELM, "kubectl": KUBECTL}[program], *words],
        cwd=tmp_path,
        env={**os.environ, "KUBECONFIG": str(no_cluster(tmp_path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert any(each in done.stderr for each in (NOWHERE, NOWHERE.partition("//")[2])), done.stderr


def test_monitors_and_rules_have_the_labels_by_which_a_prometheus_chooses() -> None:
    words = "monitoring.podMonitor=true,monitoring.rules=true,monitoring.labels.release=prom"
    chosen = [
        each["metadata"]["name"]
        for each in render(*SECURE, "--set", words)
        if each["metadata"].get("labels", {}).get("release") == "prom"
    ]
    assert sorted(chosen) == ["r-kvferry", "r-kvferry-agent", "r-kvferry-proxy"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: Debian's prometheus has it")
def test_promtool_takes_the_rules_of_the_chart(tmp_path: Path) -> None:
    """All of ours, as they are rendered."""
    rendered = render(*SECURE, "--set", "monitoring.rules=true,monitoring.docs=https://docs.example/")
    [rules] = [each["spec"] for each in rendered if each["kind"] == "PrometheusRule"]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yml").read_text())
    assert len(rules["groups"]) == len(ours["groups"])
    assert "runbook_url: https://docs.example/runbook.md" in path.read_text()


def test_devices_of_gpus_are_open_to_groups_that_are_named(validate: Any) -> None:
    found = pods(render(*SECURE, "--set", "agents.supplementalGroups={44,110}"))
    groups = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["spec"]["securityContext"].get(
            "supplementalGroups"
        )
        for pod in found
    }
    assert groups == {"proxy": None, "agent": [44, 110]}


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
