# SPDX-License-Identifier: Apache-2.0
"""Chooses the pair of agents for a request from a snapshot of the fleet, without any I/O."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import msgspec

from kvferry.proxy.fleet.pairing import Leg
from kvferry.proxy.fleet.routing.candidates import (
    CandidateIndex,
    Loads,
    any_serves_alone,
    is_decode_only,
    no_pair,
    unknown_model,
)
from kvferry.proxy.fleet.routing.costs import RouteCosts
from kvferry.proxy.fleet.routing.policy import (
    LeastWork,
    Policy,
    PolicyName,
    PrefixAware,
    PrefixIndex,
    PrefixLenders,
    RoundRobin,
    Session,
)
from kvferry.proxy.fleet.routing.routing_request import NO_AGENTS, Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import Node, NodeState, NoPair, Snapshot
from kvferry.proxy.objectives import DEFAULT, ModelObjectives
from kvferry.proxy.wire.dialects import NATIVE_DIALECT, VLLM_KVFERRY
from kvferry.proxy.wire.registration import Incarnation


class Decision(msgspec.Struct, frozen=True):
    """The pair for a request.

    `is_lone`: one agent was chosen to serve all of it, in the turn of such. `is_decode_only`: because no
    prefill agent is ready.
    """

    pair: Pair
    is_lone: bool = False
    is_decode_only: bool = False


class Turns:
    """How many requests for each model were routed before: to pairs, and to one agent alone."""

    def __init__(self) -> None:
        self._pairs: dict[str, int] = {}
        self._lone: dict[str, int] = {}

    def of(self, model: str, *, lone: bool = False) -> int:
        """Return how many went before."""
        return (self._lone if lone else self._pairs).get(model, 0)

    def count(self, model: str, served: Collection[str], *, lone: bool = False) -> None:
        """Count one. Drops the counts of models that are not among those `served`."""
        turns = self._lone if lone else self._pairs
        turns[model] = turns.get(model, 0) + 1
        if len(turns) > len(served):
            for gone in [name for name in turns if name not in served]:
                del turns[gone]


class Router:
    """One policy per role, over the agents that fit each other and have room.

    With `round_robin` for both, prefill agents come in turn, and for each of them the decode agents in turn.
    Both turns come from one count per model, yet the pairs do not correlate (X8): prefill takes `count % P`,
    decode takes `count % D` shifted by one whenever the two have run in step for their common period. Over
    P * D requests each pair is used exactly once, and within each role loads differ by one.

    With `least_work` for both, the pair whose legs cost least competes with the agents of role `both` that
    could serve the request alone (`RouteCosts`).

    Args:
        split_min_tokens: A prompt of which fewer tokens than this must be computed (an estimate) is not
            worth moving: a decode agent serves the request alone. None goes by what it costs.
        stream_pull_min_tokens: A prompt of which at least this many tokens must be computed is pulled
            meanwhile; None takes those of more than one of the prefill agent's chunks, 0 takes none.
        prefix_pull_min_tokens: From how many tokens on a prompt's beginning is worth pulling; None goes by
            what it costs, 0: never.
        keeps_turns: vLLM servers keep what they have decoded for a while, and lend it.
        objectives: As `RouteCosts` takes them.
    """

    def __init__(
        self,
        prefill: PolicyName,
        decode: PolicyName,
        loads: Loads,
        split_min_tokens: int | None = 0,
        stream_pull_min_tokens: int | None = 0,
        prefix_pull_min_tokens: int | None = 0,
        keeps_turns: bool = False,
        objectives: ModelObjectives = DEFAULT,
    ) -> None:
        slots = loads.slots
        self._costs = RouteCosts(loads.at, slots.prefills, slots.predicted, objectives)
        self._policies: dict[Leg, Policy] = {
            "prefill": _policy(prefill, self._costs, "prefill"),
            "decode": _policy(decode, self._costs, "decode"),
        }
        self._may_be_alone = split_min_tokens is None and prefill == decode == "least_work"
        self._split_min_tokens = split_min_tokens or 0
        self._stream_pull_min_tokens = stream_pull_min_tokens
        lend = (NATIVE_DIALECT, VLLM_KVFERRY) if keeps_turns else (NATIVE_DIALECT,)
        self._prefix_lenders = (
            None if prefix_pull_min_tokens == 0 else PrefixLenders(prefix_pull_min_tokens, lend)
        )
        self._index = CandidateIndex(loads)

    def choose(
        self,
        snapshot: Snapshot,
        request: RoutingRequest,
        turns: Turns,
        exclude: frozenset[Incarnation] = NO_AGENTS,
        *,
        apart: bool = False,
        decode_only: bool = False,
        now: float = 0.0,
    ) -> Decision | NoPair:
        """Choose the pair for a request. Counts nothing: `apply` does, if the decision is acted on.

        `now`: on the snapshot's clock. Agents in `exclude` (they just failed this request) are chosen only if
        no others are left. With `apart`, no agent is paired with itself. With `decode_only`, a decode agent
        serves alone where no prefill agent is ready, or the canary has taken out all pairs.
        """
        self._costs.at(now, snapshot.nodes, request)
        for agents in (_without(snapshot, exclude), snapshot) if exclude else (snapshot,):
            chosen = self._choose(agents, request, turns, apart)
            if decode_only and not apart and is_decode_only(snapshot, request.model, chosen):
                chosen = self._choose_decode_only(agents, request, turns)
            if isinstance(chosen, Decision) or chosen is NoPair.FULL:
                return chosen
        if not any(node.on_trial for node in snapshot.nodes):
            return chosen
        later = no_pair(_after_trials(snapshot), request.model, apart=apart)
        return NoPair.FULL if later is None else chosen

    def apply(
        self, decision: Decision, request: RoutingRequest, turns: Turns, served: Collection[str]
    ) -> None:
        """Count the turn of a request that goes to the pair chosen for it, and have the policies know of it.

        `served`: the names of all models, as in the snapshot.
        """
        pair = decision.pair
        turns.count(request.model, served, lone=decision.is_lone)
        self._policies["prefill"].note(pair.prefill, request)
        self._policies["decode"].note(pair.decode, request)
        if self._prefix_lenders is not None:
            self._prefix_lenders.note(pair, request)

    def streams(self, prefill: Node, decode: Node, request: RoutingRequest) -> bool:
        """Return whether the pair should move the prompt's KV while it is computed."""
        return _has_spare_room(decode) and self._is_long(request, prefill)

    def _choose(
        self, snapshot: Snapshot, request: RoutingRequest, turns: Turns, apart: bool
    ) -> Decision | NoPair:
        unknown = unknown_model(snapshot, request.model)
        if unknown is not None:
            return unknown
        self._index.follow(snapshot)
        if (request.one_token or request.undivided) and not apart:
            # The prefill agent's response to a request for one token is complete.
            leg: Leg = "prefill" if request.one_token else "decode"
            node = self._lone(request, leg, turns)
            if node is not None:
                return Decision(self._lone_pair(node), is_lone=True)
            if any_serves_alone(snapshot, request.model, leg):
                return NoPair.FULL
        if self._split_min_tokens and not apart:
            node = self._lone(request, "decode", turns)
            if node is not None and self._is_short(request, node):
                return Decision(self._lone_pair(node), is_lone=True)
        return self._pair(request, turns, apart)

    def _choose_decode_only(
        self, snapshot: Snapshot, request: RoutingRequest, turns: Turns
    ) -> Decision | NoPair:
        """Choose a decode agent of the snapshot that was followed last."""
        node = self._lone(request, "decode", turns)
        if node is not None:
            return Decision(self._lone_pair(node), is_lone=True, is_decode_only=True)
        able = any_serves_alone(snapshot, request.model, "decode")
        return NoPair.FULL if able else NoPair.NO_PREFILL

    def _pair(self, request: RoutingRequest, turns: Turns, apart: bool) -> Decision | NoPair:
        index, turn = self._index, turns.of(request.model)
        prefills = index.prefills(request.model, request.n, apart=apart)
        if not prefills:
            return index.reason(request.model, apart=apart) or NoPair.FULL
        prefill = self._policies["prefill"].pick(prefills, request, turn)
        partners = index.partners(prefill, request.n, apart=apart)
        num_partners = len(partners)
        skewed = _skewed(turn, len(prefills), num_partners)
        policy, least = self._policies["decode"], None
        if self._may_be_alone and not apart and num_partners > 1 and isinstance(policy, LeastWork):
            least = policy.pair(prefill, partners, skewed)
        prefill, decode = least or (prefill, policy.pick(partners, request, skewed))
        streamed = self.streams(prefill, decode, request)
        lenders = self._prefix_lenders
        lender = None if lenders is None else lenders.best(partners, prefill, request)
        return Decision(Pair(prefill, decode, streamed, lender, self._costs.predict(prefill, decode)))

    def _lone(self, request: RoutingRequest, leg: Leg, turns: Turns) -> Node | None:
        """Choose an agent of the leg's role that could serve all of the request, if any has room."""
        able = self._index.lone(request.model, leg, request.n)
        turn = turns.of(request.model, lone=True)
        return self._policies[leg].pick_alone(able, request, turn) if able else None

    def _lone_pair(self, node: Node) -> Pair:
        return Pair(node, node, prediction=self._costs.predict(node, node))

    def _is_short(self, request: RoutingRequest, node: Node) -> bool:
        cached = self._policies["decode"].cached_tokens(node, request)
        return request.tokens_per_prompt - cached < self._split_min_tokens

    def _is_long(self, request: RoutingRequest, prefill: Node) -> bool:
        """Return whether the prefill takes so long that KV should move meanwhile."""
        least = self._stream_pull_min_tokens
        if least is None:
            chunk = prefill.info.prefill_chunk
            least = 0 if chunk is None else chunk + 1
        if least <= 0:
            return False
        return request.tokens_per_prompt - self._policies["prefill"].cached_tokens(prefill, request) >= least


def _policy(name: PolicyName, costs: RouteCosts, leg: Leg) -> Policy:
    match name:
        case "least_work":
            return LeastWork(costs, leg)
        case "round_robin":
            return RoundRobin()
        case "prefix_aware":
            return PrefixAware(PrefixIndex())
        case "session":
            return Session()


def _has_spare_room(decode: Node) -> bool:
    """Return whether the agent can set blocks aside for KV that is yet to be computed.

    If it is more than half full, they would be missing for prompts whose prefill is over; in the worst case
    the blocks that those pin delay the very prefills that are waited for.
    """
    load = decode.info.load
    return 2 * load.kv_blocks_free >= load.kv_blocks_total > 0


def _without(snapshot: Snapshot, exclude: frozenset[Incarnation]) -> Snapshot:
    return snapshot.only(lambda node: node.incarnation not in exclude)


def _after_trials(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as if the probe of every agent on trial had succeeded."""
    return snapshot.altered(
        replace(node, state=NodeState.READY) if node.on_trial else node for node in snapshot.nodes
    )


def _skewed(count: int, prefills: int, decodes: int) -> int:
    return count + count // math.lcm(prefills, decodes)
