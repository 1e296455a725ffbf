# SPDX-License-Identifier: Apache-2.0
"""The fleet as clients and operators see it: `/v1/models`, `/ready`, `/nodes`, the dashboard.

Pages are made from snapshots, in slices between which requests are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy.errors import CannotDrain, NotFound, RoleFixed
from kvferry.proxy.fleet.address_rules import RejectedAgent
from kvferry.proxy.fleet.snapshot import (
    MAX_PAIRINGS,
    NodeState,
    NoPair,
    Snapshot,
    UnpairedReasons,
    count_incompatible,
    incompatible_pairs,
)
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.event_log import EventLog, FleetEvent
from kvferry.proxy.telemetry.history import FailureCount, History
from kvferry.proxy.telemetry.metrics import MAX_MODELS, MODEL
from kvferry.proxy.wire.dialects import DIALECTS
from kvferry.proxy.wire.registration import Incarnation

_T = TypeVar("_T")

JSON = "application/json"
MAX_SHOWN = 200
"""Entries of each list in the feed of the operator's page, and of events in `/nodes`."""

MAX_LOST = 50
"""Agents that were lost, in both."""
_EVENT_FIELDS = ("kind", "agent", "name", "address", "role", "model", "detail", "count")

SLICE_S = 0.002
"""How long a page is worked on before requests are served again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A response about the fleet."""

    body: bytes
    status: int = 200
    content_type: str = JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The fleet at one moment.

    `not_served`: says why no request for a model can be served (`FleetSettings.not_served`). `in_flight`:
    sequences of this proxy at an agent. `down`: servers named by flags or a file that are down.
    `rejected`: agents whose registrations were rejected lately. `events`: puts together what has happened to
    agents.
    """

    snapshot: Snapshot
    not_served: Callable[[Snapshot, str], NoPair | None]
    in_flight: Callable[[Incarnation], int]
    down: Sequence[Mapping[str, object]]
    rejected: Sequence[RejectedAgent]
    events: Callable[[], EventLog]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFacts:
    """Which proxy this is, and where agents announce themselves.

    `discovery_host`: the address bound; empty where that is every address of this machine.
    """

    cluster_name: str = ""
    machine: str = ""
    version: str = ""
    discovery_host: str = ""
    discovery_port: int = 0
    has_cluster_key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What goes on, beside the fleet itself, as the operator's page shows it.

    `in_flight`: requests now in each phase.
    """

    in_flight: Mapping[str, int]
    history: History
    failures: Sequence[FailureCount]
    agents: AgentReports
    proxy: ProxyFacts


async def fleet_page(name: Literal["models", "ready", "nodes", "targets"], view: FleetView) -> Page:
    """Return a page that shows the fleet alone."""
    match name:
        case "models":
            return _json(models_page(view.snapshot))
        case "ready":
            report = await readiness(view)
            return _json(report, 200 if report["ready"] else 503)
        case "nodes":
            return Page(body=await _written(nodes_page(view)))
        case "targets":
            return Page(body=await _written_list(scrape_targets(view.snapshot)))


def node_page(view: FleetView, agent: Incarnation) -> Page:
    """Return an agent's entry in `/nodes`, or a 404."""
    for position, node in enumerate(view.snapshot.nodes):
        if node.incarnation == agent:
            return _json(_node(position, view, UnpairedReasons(view.snapshot)))
    return _no_agent(agent)


def agent_page(view: FleetView, agent: Incarnation, reports: AgentReports) -> Page:
    """Return what the operator's page shows of one agent, or a 404."""
    for position, node in enumerate(view.snapshot.nodes):
        if node.incarnation == agent:
            info = node.info
            return _json(
                {
                    **_node(position, view, UnpairedReasons(view.snapshot)),
                    "device": info.device,
                    "uptime_s": info.uptime_s,
                    "max_model_len": info.max_model_len,
                    "geometry": info.geometry,
                    **reports.charts(agent),
                }
            )
    return _no_agent(agent)


def drain_page(asked: bool | None, view: FleetView, agent: Incarnation) -> Page:
    """Return what an operator sees who drains an agent: `asked`, as `Registry.drain` returns it."""
    if asked is False:
        error = CannotDrain("this agent cannot be drained through the proxy: stop it where it was started")
        return Page(status=error.status, body=error.body())
    page = node_page(view, agent)
    return page if page.status != 200 else replace(page, status=202)


def role_page(pinned: bool | None, view: FleetView, agent: Incarnation) -> Page:
    """Return what an operator sees who pins an agent's role: `pinned`, as `Registry.pin_role` returns it."""
    if pinned is False:
        error = RoleFixed("only an agent that registered with the role 'both' can be given another one")
        return Page(status=error.status, body=error.body())
    return node_page(view, agent)


def timeline_page(request_id: str, timeline: dict[str, Any] | None) -> Page:
    """Return the way of a request, or a 404."""
    if timeline is None:
        error = NotFound(404, f"no request {request_id!r} is among the latest that are remembered")
        return Page(status=error.status, body=error.body())
    return _json(timeline)


async def dashboard_page(view: FleetView, activity: Activity, model: str = "") -> Page:
    """Return one snapshot for the operator's page: of each list its first entries, and their number.

    With `model`, the charts, agents, events and errors of that model alone.
    """
    snapshot, now = view.snapshot, view.now
    history = activity.history.of_model(model) if model else activity.history
    shown = [
        position for position, node in enumerate(snapshot.nodes) if not model or node.info.model == model
    ]
    body = await _written(
        {
            "time": time.time(),
            "proxy": activity.proxy,
            "readiness": await readiness(view),
            "models": sorted({node.info.model for node in snapshot.nodes} - {""})[:MAX_MODELS],
            "nodes": _nodes(view, shown[:MAX_SHOWN]),
            "num_nodes": len(shown),
            **_events(view, model),
            "refused_pairings": _refused_pairings(view, MAX_SHOWN),
            "num_refused_pairings": count_incompatible(snapshot).total(),
            "rejected_agents": _rejected_agents(view),
            "in_flight": activity.in_flight,
            "charts": history.charts(),
            "hour": history.hour(),
            "failures": [
                {**msgspec.to_builtins(each.last), "count": each.count, "age_s": round(now - each.at, 1)}
                for each in activity.failures
                if not model or each.last.model == model
            ],
            "pairs": (
                {
                    "producer": pair.producer,
                    "consumer": pair.consumer,
                    "backend": pair.use.backend,
                    "pulls": pair.use.pulls,
                    "failures": pair.use.failures,
                    "nbytes": pair.use.nbytes,
                    "seconds": pair.use.seconds,
                    "age_s": round(now - pair.at, 1),
                }
                for pair in activity.agents.pairs(MAX_SHOWN)
            ),
            "num_pairs": activity.agents.num_pairs,
            "pull_failures": activity.agents.failures(),
            "totals": activity.agents.totals(),
        }
    )
    return Page(body=body)


def _events(view: FleetView, model: str = "") -> dict[str, Iterator[dict[str, Any]]]:
    """Return the agents that were lost, and what has happened to all, latest first.

    With `model`, only to those of that model, and what has happened to no agent.
    """
    log, present = view.events(), {node.info.location for node in view.snapshot.nodes}

    def first(events: Iterable[FleetEvent], most: int) -> Iterator[dict[str, Any]]:
        wanted = (event for event in events if not model or event.model in (model, ""))
        return _aged(islice(wanted, most), view.now)

    return {"lost": first(log.lost(present), MAX_LOST), "events": first(log.latest(), MAX_SHOWN)}


def _aged(events: Iterable[FleetEvent], now: float) -> Iterator[dict[str, Any]]:
    return (
        {**{name: getattr(event, name) for name in _EVENT_FIELDS}, "age_s": round(now - event.at, 1)}
        for event in events
    )


def models_page(snapshot: Snapshot) -> dict[str, Any]:
    """Return OpenAI's list of the models that ready agents serve, with the longest context among these."""
    lengths: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.state is NodeState.READY and node.info.dialect in DIALECTS:
            model = node.info.model
            lengths[model] = max(lengths.get(model, 0), node.info.max_model_len)
    data = [
        {"id": model, "object": "model", "created": 0, "owned_by": "kvferry", "max_model_len": length}
        for model, length in sorted(lengths.items())
    ]
    return {"object": "list", "data": data}


async def readiness(view: FleetView) -> dict[str, Any]:
    """Return whether any model can be served, and for each model that cannot be served, why."""
    named = {node.info.model for node in view.snapshot.nodes if node.info.dialect in DIALECTS}
    models = sorted(named - {""})  # some engines' pings name none, and it takes a moment to ask for it
    reasons: dict[str, NoPair | None] = {}
    async for part in _slices(models):
        reasons |= {model: view.not_served(view.snapshot, model) for model in part}
    waiting = {model: reason.value for model, reason in reasons.items() if reason is not None}
    return {"ready": len(waiting) < len(models), "waiting": waiting if models else {"": "no agent is known"}}


def nodes_page(view: FleetView) -> dict[str, Any]:
    """Return every known agent, incompatible pairs and rejected agents with the reason, and what happened."""
    return {
        "nodes": _nodes(view, range(len(view.snapshot.nodes))),
        "refused_pairings": _refused_pairings(view, MAX_PAIRINGS),
        "num_refused_pairings": count_incompatible(view.snapshot).total(),
        "rejected_agents": _rejected_agents(view),
        "down": view.down,
        **_events(view),
    }


def scrape_targets(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield the agents for Prometheus' HTTP service discovery, labelled with their role, model and name.

    A server's ranks have one `/metrics`.
    """
    return (
        {
            "targets": [urlsplit(node.info.address).netloc],
            "labels": {
                "__scheme__": urlsplit(node.info.address).scheme,
                "role": node.info.role,
                MODEL: node.info.model,
                "name": node.info.name or urlsplit(node.info.address).netloc,
            },
        }
        for node in snapshot.nodes
        if not node.info.dp_rank
    )


def _nodes(view: FleetView, positions: Iterable[int]) -> Iterator[dict[str, Any]]:
    unpaired = UnpairedReasons(view.snapshot)
    return (_node(position, view, unpaired) for position in positions)


def _refused_pairings(view: FleetView, most: int) -> Iterator[dict[str, str]]:
    return (
        {"prefill": pair.prefill.location, "decode": pair.decode.location, "reason": pair.text}
        for pair in islice(incompatible_pairs(view.snapshot), most)
    )


def _node(position: int, view: FleetView, unpaired: UnpairedReasons) -> dict[str, Any]:
    node = view.snapshot.nodes[position]
    info = node.info
    return {
        "name": info.name,
        "address": info.location,
        "role": info.role,
        "role_pinned": node.role_pinned,
        "state": node.state.value,
        "breaker": node.breaker.value,
        "dialect": info.dialect,
        "model": info.model,
        "incarnation": info.incarnation,
        "control": info.control,
        "tp_size": info.tp_size,
        "dp_size": info.dp_size,
        "dp_rank": info.dp_rank,
        "transfer_mode": info.transfer_mode,
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
        "prefill_chunk": info.prefill_chunk,
        "work": {
            **node.speed._asdict(),
            "prefill_share": round(node.prefill_share, 3),
            "decode_share": round(node.decode_share, 3),
        },
        "pulls": sum(info.work.pulls) if info.work else 0,
        "failed_pulls": dict(info.work.failures) if info.work else {},
        "in_flight": view.in_flight(node.incarnation),
        "last_ping_s": round(view.now - node.heard_at, 3),
        "not_paired": unpaired.not_paired(position),
    }


def _no_agent(agent: Incarnation) -> Page:
    error = NotFound(404, f"no agent has the incarnation {agent!r}")
    return Page(status=error.status, body=error.body())


def _rejected_agents(view: FleetView) -> list[dict[str, Any]]:
    return [
        {
            "address": agent.address,
            "control": agent.control,
            "role": agent.role,
            "reason": agent.reason.value,
            "count": agent.count,
            "last_ping_s": round(view.now - agent.at, 3),
        }
        for agent in view.rejected
    ]


async def _written(members: Mapping[str, Any]) -> bytes:
    """Return a JSON object; members that are iterators become lists."""
    parts = [
        msgspec.json.encode(name)
        + b":"
        + (await _written_list(value) if isinstance(value, Iterator) else msgspec.json.encode(value))
        for name, value in members.items()
    ]
    return b"{" + b",".join(parts) + b"}"


async def _written_list(items: Iterable[Any]) -> bytes:
    return b"[" + b",".join([msgspec.json.encode(part)[1:-1] async for part in _slices(items)]) + b"]"


async def _slices(items: Iterable[_T]) -> AsyncIterator[list[_T]]:
    """Yield the items in lists, none of which took much longer than `SLICE_S`; requests go on in between."""
    part: list[_T] = []
    until = time.perf_counter() + SLICE_S
    for item in items:
        part.append(item)
        if time.perf_counter() >= until:
            yield part
            part = []
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S
    if part:
        yield part


def _json(value: Any, status: int = 200) -> Page:
    return Page(status=status, body=msgspec.json.encode(value))
