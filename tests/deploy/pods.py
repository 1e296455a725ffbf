# SPDX-License-Identifier: Apache-2.0
"""The chart's Pods in podman, on one network, found by the names of their Services.

Stands in for the parts of a cluster between a manifest and a Pod, and for no more than is written here:

- the controller of a Deployment: as many Pods as there are replicas, each with a name of its own;
- the network: an address for each Pod, which is put where the manifest asks for it;
- a headless Service: its name has the address of each Pod whose labels it selects, whether ready or not;
- the kubelet: a Pod's own empty volumes, its end after the grace period, and probes, asked from outside.

podman knows no `preStop` of the kind `sleep`, and neither a volume's size nor NetworkPolicies hold here.
"""

from __future__ import annotations

import copy
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.containers import RUN_TIMEOUT_S, Containers

NETWORK = "kvferry-test"
SUBNET = ipaddress.ip_network("10.78.0.0/24")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
TMPFS = ("--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=mode=1777")


@dataclass(frozen=True, slots=True)
class Pod:
    """One that runs. `probes` are the URLs that its manifest names, by the name of the probe."""

    name: str
    address: str
    probes: Mapping[str, str]
    grace_s: int


class Pods:
    """The Pods of a release. Files that podman reads are put into `folder`."""

    def __init__(self, containers: Containers, folder: Path) -> None:
        self._podman = containers.podman
        self._folder = folder

    def start(self, objects: Sequence[dict[str, Any]]) -> list[Pod]:
        """Start what the Deployments ask for, in the order of the objects."""
        self.end()
        self._podman("network", "create", "--internal", "--subnet", str(SUBNET), NETWORK)
        services = [each for each in objects if each["kind"] == "Service"]
        _gateway, *addresses = SUBNET.hosts()
        wanted = [
            (f"{each['metadata']['name']}-{number}", each["spec"]["template"])
            for each in objects
            if each["kind"] == "Deployment"
            for number in range(each["spec"]["replicas"])
        ]
        return [
            self._start(name, template, str(address), services)
            for (name, template), address in zip(wanted, addresses, strict=False)
        ]

    def _start(
        self, name: str, template: dict[str, Any], address: str, services: list[dict[str, Any]]
    ) -> Pod:
        aliases = [
            service["metadata"]["name"]
            for service in services
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        placed = place(template, name, address)
        for volume in placed.volumes:
            self._podman("volume", "create", *TMPFS, volume)
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(placed.manifest))
        options = (f"ip={address}", *(f"alias={each}" for each in aliases))
        self._podman("play", "kube", "--network", f"{NETWORK}:{','.join(options)}", path)
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        return Pod(name, address, placed.probes, grace_s)

    def logs(self, pod: Pod) -> str:
        """What the Pod's containers have written."""
        return self._podman("pod", "logs", pod.name)

    def stop(self, pod: Pod) -> list[int]:
        """SIGTERM, and SIGKILL after the grace period. Returns the exit codes of the Pod's containers."""
        self._podman(
            "pod", "stop", "--time", str(pod.grace_s), pod.name, timeout_s=pod.grace_s + RUN_TIMEOUT_S
        )
        about = json.loads(self._podman("pod", "inspect", pod.name))
        own = [each["Id"] for each in about["Containers"] if each["Id"] != about["InfraContainerID"]]
        return [json.loads(self._podman("inspect", each))[0]["State"]["ExitCode"] for each in own]

    def end(self) -> None:
        """Remove all, with volumes and network."""
        self._podman("pod", "rm", "--all", "--force", "--time", "0")
        self._podman("volume", "rm", "--all", "--force")
        self._podman("network", "rm", "--force", NETWORK)


@dataclass(frozen=True, slots=True)
class Placed:
    """A Pod as podman takes it; the URLs of its probes; its empty volumes."""

    manifest: dict[str, Any]
    probes: dict[str, str]
    volumes: list[str]


def place(template: dict[str, Any], name: str, address: str) -> Placed:
    """The Pod of a template, with a name and at an address."""
    spec = copy.deepcopy(template["spec"])
    probes: dict[str, str] = {}
    for container in spec["containers"]:
        for each in container["env"]:
            if each.get("valueFrom") == {"fieldRef": {"fieldPath": "status.podIP"}}:
                del each["valueFrom"]
                each["value"] = address
        for key, value in ((each["name"], each["value"]) for each in container["env"]):
            container["args"] = [each.replace(f"$({key})", value) for each in container["args"]]
        # podman would publish them on this host; a cluster does not.
        ports = {each["name"]: each["containerPort"] for each in container.pop("ports")}
        for probe in PROBES:
            get = container.pop(probe)["httpGet"]
            probes[probe] = (
                f"{get.get('scheme', 'HTTP').lower()}://{address}:{ports[get['port']]}{get['path']}"
            )
    # podman's own kind of an empty volume is shared by all Pods that call it the same.
    for each in spec["volumes"]:
        del each["emptyDir"]
        each["persistentVolumeClaim"] = {"claimName": f"{name}-{each['name']}"}
    volumes = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"]]
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}}
    return Placed({**manifest, "spec": spec}, probes, volumes)
