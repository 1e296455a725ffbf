# SPDX-License-Identifier: Apache-2.0
"""What a cluster takes for a `DisaggregatedSet`: the part of its schema that the chart writes.

Noted from `config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml` of kubernetes-sigs/lws at
060ab4d, version v1. A field that is not here is refused, where a cluster would drop it. The Pod inside is
checked by Kubernetes' own schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema_rs


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with no other fields than these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT_OR_SHARE = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
_GROUP = _object(
    ("leaderWorkerTemplate",),
    leaderWorkerTemplate=_object(
        ("workerTemplate",),
        size={"type": "integer"},
        restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        workerTemplate=_object(
            metadata=_object(annotations=_STRINGS, labels=_STRINGS),
            spec={"type": "object", "required": ["containers"]},
        ),
    ),
    networkConfig=_object(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    replicas={"type": "integer", "minimum": 0, "maximum": 1_000_000},
    rolloutStrategy=_object(
        ("type",),
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_object(
            maxSurge=_COUNT_OR_SHARE, maxUnavailable=_COUNT_OR_SHARE, partition={"type": "integer"}
        ),
    ),
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
)
_ROLE = _object(
    ("name",),
    name={"type": "string", "minLength": 1, "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    scaling=_object(mode={"enum": ["Static", "External"]}),
    spec=_GROUP,
)
SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "disaggregatedset.x-k8s.io/v1"},
    kind={"const": "DisaggregatedSet"},
    metadata=_object(("name",), name={"type": "string"}, annotations=_STRINGS, labels=_STRINGS),
    spec=_object(
        ("roles",),
        placementPolicy=_object(
            topology={"type": "string"}, type={"enum": ["None", "ExclusiveSlice", "ExclusiveTopology"]}
        ),
        roles={"type": "array", "minItems": 2, "maxItems": 10, "items": _ROLE},
        slices={"type": "integer", "minimum": 1, "maximum": 100},
    ),
)
_VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


def errors(manifest: Mapping[str, Any]) -> list[str]:
    """What a cluster would have against the object, each with the place; empty if nothing."""
    found = [
        f"{'/'.join(map(str, each.instance_path))}: {each.message}"
        for each in _VALIDATOR.iter_errors(manifest)
    ]
    if found:
        return found
    roles = manifest["spec"]["roles"]
    if len({role["name"] for role in roles}) < len(roles):
        found.append("spec/roles: two of one name")  # x-kubernetes-list-map-keys
    # x-kubernetes-validations
    static = [role.get("spec", {}) for role in roles if role.get("scaling", {}).get("mode") != "External"]
    running = [spec.get("replicas", 1) > 0 for spec in static]
    if any(running) and not all(running):
        found.append("spec: replicas are zero for some roles and not for others")
    return found
