# SPDX-License-Identifier: Apache-2.0
"""The fleet: which agents there are, which pair takes a request, and when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from kvferry.proxy.errors import RETRY_AFTER_S, NoAgent
from kvferry.proxy.fleet.address_rules import AddressRules
from kvferry.proxy.fleet.admission import Admission, Reservation
from kvferry.proxy.fleet.circuit_breaker import BreakerSettings
from kvferry.proxy.fleet.pairing import Leg
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.routing.candidates import Loads, Slots, not_served
from kvferry.proxy.fleet.routing.policy import PolicyName
from kvferry.proxy.fleet.routing.router import Decision, Router, Turns
from kvferry.proxy.fleet.routing.routing_request import NO_AGENTS, Pair, PinnedPair, RoutingRequest
from kvferry.proxy.fleet.scaling import AgentLoad, ScalingSignals, Signals
from kvferry.proxy.fleet.snapshot import NodeState, NoPair, Snapshot, alike
from kvferry.proxy.objectives import DEFAULT, ModelObjectives
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Bye, Incarnation, Register, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How pairs are chosen and requests admitted.

    Limits are of sequences in flight at one agent; None goes by what the agent reports.
    `decode_only_fallback`: whether decode agents serve alone while no prefill agent is ready. `queue_limit`:
    most requests that wait for an agent. See `Router` for the token counts.
    """

    rules: AddressRules = AddressRules()  # noqa: RUF009 (it does not change)
    breakers: BreakerSettings = BreakerSettings()  # noqa: RUF009
    prefill_policy: PolicyName = "least_work"
    decode_policy: PolicyName = "least_work"
    prefill_limit: int | None = None
    decode_limit: int | None = None
    split_min_tokens: int | None = None
    stream_pull_min_tokens: int | None = None
    prefix_pull_min_tokens: int | None = 0
    keeps_turns: bool = False
    decode_only_fallback: bool = True
    queue_limit: int = 1024
    objectives: ModelObjectives = DEFAULT

    def not_served(self, snapshot: Snapshot, model: str) -> NoPair | None:
        """Return why no request for the model can be served; None if one can."""
        return not_served(
            snapshot,
            model,
            decode_only=self.decode_only_fallback,
            split_min_tokens=self.split_min_tokens or 0,
        )


MEASURE_S = 60.0
_MISSING: Mapping[NoPair, Leg] = MappingProxyType({NoPair.NO_PREFILL: "prefill", NoPair.NO_DECODE: "decode"})
"""The leg that no agent serves."""


class AcquireRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the pair of agents of one attempt.

    Args:
        by: Deadline of the wait, on the event loop's clock.
        exclude: Agents that have just failed this request; not empty for a retry, which goes before others.
        must_match: An agent from which the client has tokens: the pair must sample the same ones.
        pinned: The agents that are to serve it: policies, limits and the canary's findings do not count.
        reject_at: It is rejected once it has waited until then, or if its first token is predicted to come
            later, on that clock.
    """

    routing_request: RoutingRequest
    by: float
    exclude: frozenset[Incarnation] = NO_AGENTS
    must_match: Register | None = None
    pinned: PinnedPair | None = None
    reject_at: float = math.inf


class Fleet:
    """Registry, router and admission of one proxy process.

    Args:
        clock: Monotonic seconds: the event loop's clock.
        settled_at: By when every agent that lives has announced itself. Until then a request for which there
            is no pair waits for one.
    """

    def __init__(
        self,
        settings: FleetSettings,
        metrics: Metrics,
        clock: Callable[[], float],
        settled_at: float = float("-inf"),
    ) -> None:
        self.settings = settings
        self._metrics = metrics
        self._settled_at = settled_at
        self._announced = asyncio.Event()
        self.slots = Slots()
        self.admission = Admission(self.slots, metrics, settings.queue_limit, settings.objectives)
        self.registry = Registry(
            clock,
            self.slots.in_flight,
            settings.breakers,
            settings.rules,
            decode_only_fallback=settings.decode_only_fallback,
        )
        self.registry.subscribe(partial(note_model, metrics))
        self._scaling = ScalingSignals(clock, settings.decode_limit)
        self.registry.subscribe(self._scaling.note)
        self.registry.subscribe(self._agent_changed)
        self._pumped_at = -1
        self._turns = Turns()
        self.router = make_router(settings, self.slots)
        self.clock = clock
        self._measured_at = clock()

    def acquire(self, request: AcquireRequest) -> Coroutine[Any, Any, Reservation | NoPair]:
        """Wait for a pair with room and reserve its slots, or return why there is none to wait for.

        Raises `Overloaded` when too many wait, it waited too long, or its first token would come after
        `reject_at`.
        """
        if not request.exclude and request.must_match is None and request.pinned is None:
            asked = request.routing_request
            self._scaling.arrived(asked.model, asked.prompts, asked.decoded_sequences)
        return self._acquire(request) if self.clock() >= self._settled_at else self._acquire_early(request)

    def max_model_len(self, model: str) -> int | None:
        """Return the longest context of an agent that serves the model; None if none has said."""
        nodes = self.registry.snapshot().nodes
        return max((node.info.max_model_len for node in nodes if node.info.model == model), default=0) or None

    def no_agent(self, reason: NoPair, model: str) -> NoAgent:
        """Return the error for a request that no agents can serve now."""
        message, leg = f"{reason.value}: {model!r}", _MISSING.get(reason)
        tripped = self.registry.tripped(model, leg) if leg is not None else []
        if not tripped:
            return NoAgent(message)
        first, due_s = tripped[0]
        name = first.name or first.location
        others = f" (and {len(tripped) - 1} more)" if len(tripped) > 1 else ""
        return NoAgent(
            f"{message}; after failures in a row the circuit breaker of {name}{others} is open: "
            f"it is tried again in {due_s:.1f} s",
            retry_after_s=max(RETRY_AFTER_S, math.ceil(due_s)),
        )

    def cordon(self, agent: Incarnation, cordoned: bool) -> None:
        """Take an agent out of rotation, or put it back; one that is not known is ignored."""
        self.registry.cordon(agent, cordoned)
        self.admission.pump()

    def pin_role(self, agent: Incarnation, role: Role) -> bool | None:
        """Use an agent for one role, or for both, as `Registry.pin_role` says."""
        pinned = self.registry.pin_role(agent, role)
        self.admission.pump()
        return pinned

    def drain(self, agent: Incarnation) -> bool | None:
        """Ask an agent to drain, as `Registry.drain` says."""
        asked = self.registry.drain(agent)
        self.admission.pump()
        return asked

    def record_outcome(
        self, request: RoutingRequest, pair: Pair, first_token_at: float | None, token_s: float | None
    ) -> None:
        """Compare what was predicted of a request with what came, as `Registry.record_outcome` does."""
        prediction = pair.prediction
        if prediction is None:
            return
        errors = self.registry.record_outcome(pair.prefill, pair.decode, prediction, first_token_at, token_s)
        for counts, error in zip(
            self._metrics.of_model(request.model).prediction_errors, errors, strict=True
        ):
            if error is not None:
                counts.observe(error)

    def scaling_signals(self) -> dict[str, Signals]:
        """Return this process's part of the signals to scale by, for each model."""
        agents = [
            AgentLoad(
                info=node.info,
                in_flight=self.slots.in_flight(node.incarnation),
                ours_at_ping=node.ours_at_ping,
                decodes=node.serves("decode"),
            )
            for node in self.registry.snapshot().nodes
        ]
        return self._scaling.of_models(agents, self._waiting)

    def _waiting(self, model: str) -> tuple[int, int]:
        """Return how many prompts and sequences for a model wait for an agent with room."""
        requests = list(self.admission.waiting_for(model))
        return sum(each.prompts for each in requests), sum(each.decoded_sequences for each in requests)

    def _acquire(self, request: AcquireRequest) -> Coroutine[Any, Any, Reservation | NoPair]:
        return self.admission.acquire(
            request.routing_request,
            partial(self._route, request),
            by=request.by,
            first=bool(request.exclude),
            reject_at=request.reject_at,
        )

    async def _acquire_early(self, request: AcquireRequest) -> Reservation | NoPair:
        """Acquire while agents are still announcing themselves, one after the other."""
        while True:
            self._announced.clear()
            granted = await self._acquire(request)
            left = min(self._settled_at, request.by) - self.clock()
            if isinstance(granted, Reservation) or left <= 0:
                return granted
            with suppress(TimeoutError):
                await asyncio.wait_for(self._announced.wait(), left)

    def _agent_changed(self, _: Register | Bye) -> None:
        """Admit what waits, if an agent has changed in anything that routing goes by."""
        self._announced.set()
        if self.admission.waiting:
            revision = self.registry.revision()
            if revision != self._pumped_at:
                self._pumped_at = revision
                self.admission.pump()

    def _route(self, request: AcquireRequest) -> Pair | NoPair:
        """Choose a pair. Raises `Overloaded`, and counts it, if the first token would come too late."""
        snapshot = self.registry.snapshot()
        if request.pinned is not None:
            return self._pinned(snapshot, request.routing_request, request.pinned)
        if request.must_match is not None:
            snapshot = alike(snapshot, request.must_match)
        # An agent alone would begin again with token 1, which the client may have by now.
        asked, is_migration = request.routing_request, request.must_match is not None
        # While agents announce themselves one after the other, the prefill agents may be about to.
        decode_only = self.settings.decode_only_fallback and self.clock() >= self._settled_at
        chosen = self.router.choose(
            snapshot,
            asked,
            self._turns,
            request.exclude,
            apart=is_migration,
            decode_only=decode_only,
            now=self.clock(),
        )
        if not isinstance(chosen, Decision):
            return chosen
        if request.reject_at < math.inf:
            late_s = self._first_token_at(chosen.pair) - request.reject_at
            has_waited = self.clock() > request.reject_at
            if late_s > 0.0 and (has_waited or not self._is_to_be_measured(chosen.pair)):
                raise self.admission.too_late(late_s)
        if chosen.is_decode_only:
            self._metrics.decode_only.inc()
        self.router.apply(chosen, asked, self._turns, snapshot.models)
        pair = chosen.pair
        self.registry.attempt_started({pair.prefill.info.incarnation, pair.decode.info.incarnation})
        return pair

    def _first_token_at(self, pair: Pair) -> float:
        """Return when the first token is predicted to come; now, unless agents were chosen by that."""
        if pair.prediction is None or self.settings.prefill_policy != "least_work":
            return self.clock()
        return max(self.clock(), pair.prediction.first_token_at)

    def _is_to_be_measured(self, pair: Pair) -> bool:
        """Whether a request goes to an idle prefill agent although it is predicted to be late there: one per
        `MEASURE_S`, since an agent that is taken for slower than it is would otherwise stay so.
        """
        if (
            self.slots.in_flight(pair.prefill.info.incarnation)
            or self.clock() < self._measured_at + MEASURE_S
        ):
            return False
        self._measured_at = self.clock()
        return True

    def _pinned(self, snapshot: Snapshot, request: RoutingRequest, pinned: PinnedPair) -> Pair | NoPair:
        ready = {node.incarnation: node for node in snapshot.nodes if node.state is NodeState.READY}
        prefill, decode = ready.get(pinned.prefill), ready.get(pinned.decode)
        if prefill is None:
            return NoPair.NO_PREFILL
        if decode is None:
            return NoPair.NO_DECODE
        self.registry.attempt_started({pinned.prefill, pinned.decode})
        return Pair(prefill, decode, prefill is not decode and self.router.streams(prefill, decode, request))


def note_model(metrics: Metrics, update: Register | Bye) -> None:
    """Show the series of a model from the first ping on of an agent that serves it."""
    if isinstance(update, Register) and update.model not in metrics.models:
        metrics.serves(update.model)


def make_router(settings: FleetSettings, slots: Slots) -> Router:
    """Return the router of a fleet with these settings."""
    return Router(
        settings.prefill_policy,
        settings.decode_policy,
        Loads(slots, {"prefill": settings.prefill_limit, "decode": settings.decode_limit}),
        settings.split_min_tokens,
        settings.stream_pull_min_tokens,
        settings.prefix_pull_min_tokens,
        settings.keeps_turns,
        settings.objectives,
    )
