# SPDX-License-Identifier: Apache-2.0
"""What `/v1/models`, `/ready`, `/nodes` and `/nodes/targets` show of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from kvferry.proxy.dialects.catalogue import SUPPORTED
from kvferry.proxy.fleet.compatibility import Mismatch, mismatch, reason, refused_pairs
from kvferry.proxy.fleet.registry import Leg, Node, NodeState, Snapshot
from kvferry.proxy.fleet.router import can_serve
from kvferry.proxy.fleet.slots import Slots
from kvferry.proxy.wire.messages import Register


def models_page(snapshot: Snapshot) -> dict[str, Any]:
    """OpenAI's list of the models that a ready agent serves, with the longest context among its agents."""
    lengths: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.state is NodeState.READY and node.info.dialect in SUPPORTED:
            model = node.info.model
            lengths[model] = max(lengths.get(model, 0), node.info.max_model_len)
    data = [
        {"id": model, "object": "model", "created": 0, "owned_by": "kvferry", "max_model_len": length}
        for model, length in sorted(lengths.items())
    ]
    return {"object": "list", "data": data}


def readiness(snapshot: Snapshot) -> dict[str, Any]:
    """Whether a pair can serve any model, and for each model that cannot be served, why."""
    named = {node.info.model for node in snapshot.nodes if node.info.dialect in SUPPORTED}
    models = sorted(named - {""})  # some engines' pings name none, and it takes a moment to ask for it
    reasons = {model: can_serve(snapshot, model) for model in models}
    waiting = {model: reason.value for model, reason in reasons.items() if reason is not None}
    return {"ready": len(waiting) < len(models), "waiting": waiting if models else {"": "no agent is known"}}


def nodes_page(snapshot: Snapshot, slots: Slots, now: float) -> dict[str, Any]:
    """Every known agent, every pair of them that cannot be used and every agent that was refused, with the
    reason."""
    refused = [
        {"prefill": pair.prefill.address, "decode": pair.decode.address, "reason": pair.text}
        for pair in refused_pairs(snapshot)
    ]
    nodes = [_node(node, snapshot, slots, now) for node in snapshot.nodes]
    return {"nodes": nodes, "refused_pairings": refused, "refused_agents": _refused_agents(snapshot, now)}


def scrape_targets(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The agents as Prometheus' HTTP service discovery wants them, labelled with their role and model."""
    return [
        {
            "targets": [urlsplit(node.info.address).netloc],
            "labels": {
                "__scheme__": urlsplit(node.info.address).scheme,
                "role": node.info.role,
                "model": node.info.model,
            },
        }
        for node in snapshot.nodes
    ]


def _node(node: Node, snapshot: Snapshot, slots: Slots, now: float) -> dict[str, Any]:
    info = node.info
    return {
        "address": info.address,
        "role": info.role,
        "state": node.state.value,
        "drained": node.drained,
        "breaker": node.breaker.value,
        "dialect": info.dialect,
        "model": info.model,
        "incarnation": info.incarnation,
        "control": info.control,
        "tp_size": info.tp_size,
        "transfers": list(info.transfers),
        "version": info.version,
        "load": {
            "running": info.load.running,
            "waiting": info.load.waiting,
            "kv_blocks_free": info.load.kv_blocks_free,
            "kv_blocks_total": info.load.kv_blocks_total,
            "kv_blocks_leased": info.load.kv_blocks_leased,
            "max_running": info.load.max_running,
        },
        "in_flight": slots.in_flight(node.incarnation),
        "last_ping_s": round(now - node.heard_at, 3),
        "not_paired": _not_paired(node, snapshot),
    }


def _refused_agents(snapshot: Snapshot, now: float) -> list[dict[str, Any]]:
    """Who pings in vain."""
    return [
        {
            "address": agent.address,
            "control": agent.control,
            "role": agent.role,
            "reason": agent.reason.value,
            "count": agent.count,
            "last_ping_s": round(now - agent.at, 3),
        }
        for agent in snapshot.refused
    ]


def _not_paired(node: Node, snapshot: Snapshot) -> str | None:
    """Why no request goes to this agent, or None if one could."""
    if node.info.dialect not in SUPPORTED:
        return Mismatch.DIALECT.value
    if node.state is not NodeState.READY:
        return f"it is {node.state.value}"
    reasons = [
        why for leg in ("prefill", "decode") if node.serves(leg) for why in _apart(node, leg, snapshot)
    ]
    if not reasons:
        return f"no {'decode' if node.info.role == 'prefill' else 'prefill'} agent is ready"
    return None if None in reasons else next(why for why in reasons if why is not None)


def _apart(node: Node, leg: Leg, snapshot: Snapshot) -> Iterator[str | None]:
    """For each ready agent of the other leg, what keeps it from serving with this one, if anything."""
    for other in snapshot.nodes:
        if leg == "prefill" and other.serves("decode"):
            yield _keeps_apart(node.info, other.info)
        if leg == "decode" and other.serves("prefill"):
            yield _keeps_apart(other.info, node.info)


def _keeps_apart(prefill: Register, decode: Register) -> str | None:
    why = mismatch(prefill, decode)
    return None if why is None else reason(prefill, decode, why)
