# SPDX-License-Identifier: Apache-2.0
"""The fleet as clients and operators see it: `/v1/models`, `/ready`, `/nodes`, `/metrics`, the dashboard.

Pages are made from snapshots, in slices between which requests are served, and those of a large fleet are
shown again for a second (`PageCache`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypedDict, TypeVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.dialects.names import SUPPORTED
from kvferry.proxy.errors import CannotEnd, NotFound
from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.fleet.groups import (
    Matching,
    Mismatch,
    count_incompatible,
    groups_of,
    incompatible_pairs,
    reason,
)
from kvferry.proxy.fleet.registry import ROLES, NodeState, Snapshot
from kvferry.proxy.fleet.router import NoPair, can_serve
from kvferry.proxy.telemetry.event_log import EventLog, FleetEvent
from kvferry.proxy.telemetry.history import FailureCount, FailureLog, History
from kvferry.proxy.telemetry.metrics import CONTENT_TYPE, Metrics
from kvferry.proxy.telemetry.timelines import Timelines
from kvferry.proxy.telemetry.transfer_totals import TransferTotals
from kvferry.proxy.wire.registration import Incarnation

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

JSON = "application/json"
MAX_SHOWN = 200
"""Entries of each list in the feed of the operator's page, and of events in `/nodes`."""

MAX_LOST = 50
"""Agents that were lost, in both."""
_EVENT_FIELDS = ("kind", "agent", "name", "address", "role", "model", "detail", "count")

MAX_PAIRINGS = 1000
"""Refused pairings that `/nodes` lists, beside their number."""
MAX_LABELLED_AGENTS = 128
"""Agents with series of their own on the metrics page."""
SLICE_S = 0.002
"""How long a page is worked on before requests are served again."""
LARGE_FLEET = 64
"""Agents from which on a page is shown again."""
PAGE_AGE_S = 1.0
"""How old such a page may be."""

PageName = Literal["models", "ready", "nodes", "targets", "metrics", "dashboard"]


class DownServer(TypedDict):
    """A server named by flags or a file that is down."""

    address: str
    role: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A response about the fleet."""

    body: bytes
    status: int = 200
    content_type: str = JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The fleet at one moment.

    `in_flight`: sequences of this proxy at an agent. `lost`: agents that went without a word, by role.
    `events`: puts together what has happened to agents.
    """

    snapshot: Snapshot
    in_flight: Callable[[Incarnation], int]
    down: Sequence[DownServer]
    lost: Mapping[str, int]
    events: Callable[[], EventLog]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What goes on, beside the fleet itself, as the operator's page shows it.

    `in_flight`: requests now in each phase.
    """

    in_flight: Mapping[str, int]
    history: History
    failures: Sequence[FailureCount]
    transfers: TransferTotals


class PageCache:
    """The last version of each page, for who asks while it is made or, with a large fleet, soon after.

    Args:
        clock: The event loop's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._locks: dict[str, asyncio.Lock] = {}
        self._pages: dict[str, tuple[Page, float]] = {}
        """With the time at which it was begun."""

    async def get(self, name: str, make: Callable[[], Awaitable[Page]], *, is_large: bool) -> Page:
        """Return the page that `make` makes, or has made lately. Raises what it raises."""
        oldest = self._clock() - (PAGE_AGE_S if is_large else 0.0)
        async with self._locks.setdefault(name, asyncio.Lock()):
            last = self._pages.get(name)
            if last is not None and last[1] >= oldest:
                return last[0]
            begun = self._clock()
            page = await make()
            self._pages[name] = (page, begun)
            return page

    def clear(self) -> None:
        """Show no page again that shows the fleet as it was."""
        self._pages.clear()


class OperatorViews:
    """The pages of a proxy of one process, and the operator's commands to it."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        history: History,
        failures: FailureLog,
        timelines: Timelines,
        transfers: TransferTotals,
        down: Callable[[], Sequence[DownServer]],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._history = history
        self._failures = failures
        self._timelines = timelines
        self._transfers = transfers
        self._down = down
        self._pages = PageCache(fleet.clock)

    async def page(self, name: PageName) -> Page:
        """Return one page. Raises `ProxyError` when it cannot be put together."""
        is_large = self._fleet.registry.num_agents > LARGE_FLEET
        return await self._pages.get(name, lambda: self._make(name), is_large=is_large)

    async def _make(self, name: PageName) -> Page:
        view = self.view()
        if name == "metrics":
            return Page(body=self._metrics.exposition(), content_type=CONTENT_TYPE)
        if name == "dashboard":
            activity = Activity(
                in_flight=self._metrics.requests_in_flight(),
                history=self._history,
                failures=self._failures.latest(),
                transfers=self._transfers,
            )
            return await dashboard_page(view, activity)
        return await fleet_page(name, view)

    async def timeline(self, request_id: str) -> Page:
        """Return the way of one of the latest requests, or a 404. Raises `ProxyError`."""
        return timeline_page(request_id, self.own_timeline(request_id))

    def own_timeline(self, request_id: str) -> dict[str, Any] | None:
        """Return the way of a request that this process has served lately."""
        timeline = self._timelines.find(request_id)
        return None if timeline is None else timeline.page()

    async def drain(self, agent: Incarnation, drained: bool) -> Page:
        """Take an agent out of rotation, or put it back; the page is its entry in `/nodes`, or a 404.

        Raises `ProxyError` when that cannot be done.
        """
        self._fleet.drain(agent, drained)
        self._pages.clear()
        return node_page(self.view(), agent)

    async def end(self, agent: Incarnation) -> Page:
        """Let an agent drain and end.

        The page is its entry in `/nodes`, a 404, or a 409 if it cannot be asked.

        Raises `ProxyError` when that cannot be done.
        """
        asked = self._fleet.end(agent)
        self._pages.clear()
        return end_page(asked, self.view(), agent)

    def view(self) -> FleetView:
        """Return the fleet as it is now."""
        fleet, now = self._fleet, self._fleet.clock()
        return FleetView(
            snapshot=fleet.registry.snapshot(now),
            in_flight=fleet.slots.in_flight,
            down=self._down(),
            lost=fleet.registry.lost,
            events=lambda: fleet.registry.events,
            now=now,
        )


class FleetCollector(Collector):
    """Gauges of the fleet, counted when asked for: they change by the passing of time too.

    The labels are words; the log has the sentence that belongs to a refused pairing, when it is first seen.
    """

    def __init__(self, view: Callable[[], FleetView]) -> None:
        self._view = view
        self._logged: set[Mismatch] = set()

    def collect(self) -> Iterable[Metric]:
        view = self._view()
        nodes = GaugeMetricFamily(
            "kvferry_proxy_nodes", "Agents by role and state.", labels=["role", "state"]
        )
        by_state = Counter((node.info.role, node.state) for node in view.snapshot.nodes)
        for role in ROLES:
            for state in NodeState:
                nodes.add_metric([role, state], by_state[role, state])
        yield nodes
        refused = GaugeMetricFamily(
            "kvferry_proxy_refused_pairings", "Pairs of agents that cannot serve together.", labels=["reason"]
        )
        by_reason = count_incompatible(view.snapshot)
        for why in Mismatch:
            refused.add_metric([why.name.lower()], by_reason[why])
        self._log_refused(view.snapshot, {why for why in Mismatch if by_reason[why]})
        yield refused
        lost = CounterMetricFamily(
            "kvferry_proxy_agents_lost",
            "Agents that went without a word of it, killed or cut off, by role.",
            labels=["role"],
        )
        for role in ROLES:
            lost.add_metric([role], view.lost[role])
        yield lost
        yield GaugeMetricFamily(
            "kvferry_proxy_named_servers_down",
            "Servers named by flags or a file that are down.",
            len(view.down),
        )

    def _log_refused(self, snapshot: Snapshot, reasons: set[Mismatch]) -> None:
        """Log an example of each reason that was not there when last asked."""
        new, self._logged = reasons - self._logged, reasons
        if not new:
            return
        for prefill, decode, why in islice(incompatible_pairs(snapshot), MAX_PAIRINGS):
            if why in new:
                new.remove(why)
                logger.warning(
                    "agents %s and %s cannot serve together: %s",
                    prefill.address,
                    decode.address,
                    reason(prefill, decode, why),
                )


class AgentCollector(Collector):
    """What this process has at each agent; beyond `MAX_LABELLED_AGENTS` together, as `other`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        in_flight: Counter[str] = Counter()
        legs: Counter[tuple[str, str]] = Counter()
        for position, (info, counts) in enumerate(self._fleet.registry.legs()):
            agent = urlsplit(info.address).netloc if position < MAX_LABELLED_AGENTS else "other"
            in_flight[agent] += self._fleet.slots.in_flight(info.incarnation)
            legs[agent, "succeeded"] += counts.succeeded
            legs[agent, "failed"] += counts.failed
        held = GaugeMetricFamily(
            "kvferry_proxy_agent_in_flight", "Sequences of this proxy at each agent.", labels=["agent"]
        )
        for agent, count in in_flight.items():
            held.add_metric([agent], count)
        yield held
        ended = CounterMetricFamily(
            "kvferry_proxy_agent_legs",
            "Legs at each agent by how they ended: succeeded as they should, failed by the agent's fault.",
            labels=["agent", "outcome"],
        )
        for labels, count in legs.items():
            ended.add_metric(labels, count)
        yield ended


class ScalingCollector(Collector):
    """This process's part of the signals to scale by (`proxy.fleet.scaling`), where they are known."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        backlog = GaugeMetricFamily(
            "kvferry_proxy_prefill_backlog_seconds",
            "Seconds of one prefill agent's work in this proxy's prompts that are not computed yet, waiting "
            "or sent. Absent until agents have measured what a prompt takes.",
            labels=["model"],
        )
        pressure = GaugeMetricFamily(
            "kvferry_proxy_decode_pressure",
            "This proxy's sequences, waiting or sent, over the slots of all decode agents in rotation. "
            "Absent while an agent does not say how many it has.",
            labels=["model"],
        )
        wanted = GaugeMetricFamily(
            "kvferry_proxy_wanted_agents",
            "Agents that the requests which arrive at this proxy would keep busy all the time, by role. "
            "Absent until agents have measured what a request takes.",
            labels=["model", "role"],
        )
        for model, signals in self._fleet.scaling_signals().items():
            if signals.prefill_backlog_s is not None:
                backlog.add_metric([model], signals.prefill_backlog_s)
            if signals.decode_pressure is not None:
                pressure.add_metric([model], signals.decode_pressure)
            for role, number in signals.wanted.items():
                wanted.add_metric([model, role], number)
        return backlog, pressure, wanted


async def fleet_page(name: Literal["models", "ready", "nodes", "targets"], view: FleetView) -> Page:
    """Return a page that shows the fleet alone."""
    match name:
        case "models":
            return _json(models_page(view.snapshot))
        case "ready":
            report = await readiness(view.snapshot)
            return _json(report, 200 if report["ready"] else 503)
        case "nodes":
            return Page(body=await _written(nodes_page(view)))
        case "targets":
            return Page(body=await _written_list(scrape_targets(view.snapshot)))


def node_page(view: FleetView, agent: Incarnation) -> Page:
    """Return an agent's entry in `/nodes`, or a 404."""
    for position, node in enumerate(view.snapshot.nodes):
        if node.incarnation == agent:
            return _json(_node(position, view, _Apart(view.snapshot)))
    error = NotFound(404, f"no agent has the incarnation {agent!r}")
    return Page(status=error.status, body=error.body())


def end_page(asked: bool | None, view: FleetView, agent: Incarnation) -> Page:
    """Return what an operator sees who has asked an agent to end: `asked`, as `Registry.end` returns it."""
    if asked is False:
        error = CannotEnd("it is not announced by an agent that can be asked: end it where it was started")
        return Page(status=error.status, body=error.body())
    page = node_page(view, agent)
    return page if page.status != 200 else replace(page, status=202)


def timeline_page(request_id: str, timeline: dict[str, Any] | None) -> Page:
    """Return the way of a request, or a 404."""
    if timeline is None:
        error = NotFound(404, f"no request {request_id!r} is among the latest that are remembered")
        return Page(status=error.status, body=error.body())
    return _json(timeline)


async def dashboard_page(view: FleetView, activity: Activity) -> Page:
    """Return one snapshot for the operator's page: of each list its first entries, and their number."""
    snapshot, now = view.snapshot, view.now
    body = await _written(
        {
            "time": time.time(),
            "readiness": await readiness(snapshot),
            "nodes": _nodes(view, MAX_SHOWN),
            "num_nodes": len(snapshot.nodes),
            **_events(view),
            "refused_pairings": _refused_pairings(view, MAX_SHOWN),
            "num_refused_pairings": count_incompatible(snapshot).total(),
            "refused_agents": _rejected_agents(snapshot, now),
            "in_flight": activity.in_flight,
            "charts": activity.history.charts(),
            "hour": activity.history.hour(),
            "failures": [
                {**msgspec.to_builtins(each.last), "count": each.count, "age_s": round(now - each.at, 1)}
                for each in activity.failures
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
                for pair in activity.transfers.pairs(MAX_SHOWN)
            ),
            "num_pairs": activity.transfers.num_pairs,
            "pull_failures": activity.transfers.failures(),
            "totals": activity.transfers.totals(),
        }
    )
    return Page(body=body)


def _events(view: FleetView) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the agents that were lost, and what has happened to all, latest first."""
    log, present = view.events(), {node.info.address for node in view.snapshot.nodes}
    return {
        "lost": _aged(islice(log.lost(present), MAX_LOST), view.now),
        "events": _aged(islice(log.latest(), MAX_SHOWN), view.now),
    }


def _aged(events: Iterable[FleetEvent], now: float) -> Iterator[dict[str, Any]]:
    return (
        {**{name: getattr(event, name) for name in _EVENT_FIELDS}, "age_s": round(now - event.at, 1)}
        for event in events
    )


def models_page(snapshot: Snapshot) -> dict[str, Any]:
    """Return OpenAI's list of the models that ready agents serve, with the longest context among these."""
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


async def readiness(snapshot: Snapshot) -> dict[str, Any]:
    """Return whether a pair can serve any model, and for each model that cannot be served, why."""
    named = {node.info.model for node in snapshot.nodes if node.info.dialect in SUPPORTED}
    models = sorted(named - {""})  # some engines' pings name none, and it takes a moment to ask for it
    reasons: dict[str, NoPair | None] = {}
    async for part in _slices(models):
        reasons |= {model: can_serve(snapshot, model) for model in part}
    waiting = {model: reason.value for model, reason in reasons.items() if reason is not None}
    return {"ready": len(waiting) < len(models), "waiting": waiting if models else {"": "no agent is known"}}


def nodes_page(view: FleetView) -> dict[str, Any]:
    """Return every known agent, incompatible pairs and rejected agents with the reason, and what happened."""
    return {
        "nodes": _nodes(view),
        "refused_pairings": _refused_pairings(view, MAX_PAIRINGS),
        "num_refused_pairings": count_incompatible(view.snapshot).total(),
        "refused_agents": _rejected_agents(view.snapshot, view.now),
        "down": view.down,
        **_events(view),
    }


def scrape_targets(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield the agents for Prometheus' HTTP service discovery, labelled with their role and model."""
    return (
        {
            "targets": [urlsplit(node.info.address).netloc],
            "labels": {
                "__scheme__": urlsplit(node.info.address).scheme,
                "role": node.info.role,
                "model": node.info.model,
            },
        }
        for node in snapshot.nodes
    )


def _nodes(view: FleetView, most: int | None = None) -> Iterator[dict[str, Any]]:
    apart = _Apart(view.snapshot)
    return (_node(position, view, apart) for position in range(len(view.snapshot.nodes))[:most])


def _refused_pairings(view: FleetView, most: int) -> Iterator[dict[str, str]]:
    return (
        {"prefill": pair.prefill.address, "decode": pair.decode.address, "reason": pair.text}
        for pair in islice(incompatible_pairs(view.snapshot), most)
    )


def _node(position: int, view: FleetView, apart: _Apart) -> dict[str, Any]:
    node = view.snapshot.nodes[position]
    info = node.info
    return {
        "name": info.name,
        "address": info.address,
        "role": info.role,
        "state": node.state.value,
        "drained": node.drained,
        "ending": node.is_ending,
        "breaker": node.breaker.value,
        "dialect": info.dialect,
        "model": info.model,
        "incarnation": info.incarnation,
        "control": info.control,
        "tp_size": info.tp_size,
        "dp_size": info.dp_size,
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
        "in_flight": view.in_flight(node.incarnation),
        "last_ping_s": round(view.now - node.heard_at, 3),
        "not_paired": apart.not_paired(position),
    }


def _rejected_agents(snapshot: Snapshot, now: float) -> list[dict[str, Any]]:
    return [
        {
            "address": agent.address,
            "control": agent.control,
            "role": agent.role,
            "reason": agent.reason.value,
            "count": agent.count,
            "last_ping_s": round(now - agent.at, 3),
        }
        for agent in snapshot.rejected
    ]


class _Apart:
    """Why agents of one snapshot have no partner."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._prefills, self._decodes = snapshot.up("prefill"), snapshot.up("decode")
        self._of_prefills = Matching(groups_of(snapshot), "prefill", self._decodes)
        self._of_decodes = Matching(groups_of(snapshot), "decode", self._prefills)

    def not_paired(self, position: int) -> str | None:
        """Return why no request is routed to this agent, or None if one could be."""
        node = self._snapshot.nodes[position]
        if node.info.dialect not in SUPPORTED:
            return Mismatch.DIALECT.value
        if node.state is not NodeState.READY:
            return f"its state is {node.state.value}"
        prefills, decodes = node.serves("prefill"), node.serves("decode")
        if prefills and self._of_prefills.has_partner(position):
            return None
        if decodes and self._of_decodes.has_partner(position):
            return None
        if prefills and self._decodes:
            return self._reason(position, self._decodes[0])
        if decodes and self._prefills:
            return self._reason(self._prefills[0], position)
        return f"no {'decode' if node.info.role == 'prefill' else 'prefill'} agent is ready"

    def _reason(self, prefill: int, decode: int) -> str:
        nodes, why = self._snapshot.nodes, groups_of(self._snapshot).why(prefill, decode)
        assert why is not None, "they fit"
        return reason(nodes[prefill].info, nodes[decode].info, why)


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
