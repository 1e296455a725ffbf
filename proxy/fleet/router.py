# SPDX-License-Identifier: Apache-2.0
"""Chooses the pair of agents for a request from a snapshot of the fleet, without any I/O."""

from __future__ import annotations

import enum
import math
from dataclasses import replace
from random import Random

import msgspec

from kvferry.proxy.dialects.names import SERVING_ALONE
from kvferry.proxy.fleet.candidates import Openings, Search
from kvferry.proxy.fleet.groups import Matching, groups_of
from kvferry.proxy.fleet.load import Candidates, Loads
from kvferry.proxy.fleet.policy import (
    LeastLoaded,
    Policy,
    PolicyName,
    PowerOfTwo,
    PrefixAware,
    PrefixIndex,
    PrefixLender,
    PrefixLenders,
    RoundRobin,
    Session,
)
from kvferry.proxy.fleet.registry import Leg, Node, NodeState, Snapshot
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.wire.registration import Incarnation

NO_AGENTS: frozenset[Incarnation] = frozenset()


class Pair(msgspec.Struct, frozen=True):
    """The agents of one attempt. `alone`: one agent serves the whole request, and no KV moves.

    `streamed`: the prompt is long enough for its KV to move while it is computed, and there is room for it.
    `prefix_lender`: an agent that may lend the prefill agent the KV of the prompt's beginning.
    """

    prefill: Node
    decode: Node
    streamed: bool = False
    prefix_lender: PrefixLender | None = None

    @property
    def alone(self) -> bool:
        return self.prefill.info.incarnation == self.decode.info.incarnation

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The agents of the pair, each once."""
        return (self.prefill,) if self.alone else (self.prefill, self.decode)


class NoPair(enum.StrEnum):
    """Why there is no pair for the request; the words are shown to clients."""

    UNKNOWN_MODEL = "no agent serves this model"
    NO_AGENT = "no agent has announced itself"
    NO_PREFILL = "no prefill agent is ready for this model"
    NO_DECODE = "no decode agent is ready for this model"
    INCOMPATIBLE = "no prefill agent fits a decode agent of this model"
    FULL = "all agents of this model are busy"
    """The only one worth waiting for. An agent on trial after failures is busy with its probe."""


class Router:
    """One policy per role, over the agents that fit each other and have room.

    With `round_robin` for both, prefill agents come in turn, and for each of them the decode agents in turn.
    Both turns come from one count per model, yet the pairs do not correlate (X8): prefill takes `count % P`,
    decode takes `count % D` shifted by one whenever the two have run in step for their common period. Over
    P * D requests each pair is used exactly once, and within each role loads differ by one.

    Args:
        split_min_tokens: A prompt of which fewer tokens than this must be computed (an estimate) is not
            worth moving: a decode agent serves the request alone.
        stream_pull_min_tokens: A prompt of which at least this many tokens must be computed is pulled
            meanwhile; None takes those of more than one of the prefill agent's chunks, 0 takes none.
        prefix_pull_min_tokens: From how many tokens on a prompt's beginning is worth pulling; 0: never.
    """

    def __init__(
        self,
        prefill: Policy,
        decode: Policy,
        loads: Loads,
        split_min_tokens: int = 0,
        stream_pull_min_tokens: int | None = 0,
        prefix_pull_min_tokens: int = 0,
    ) -> None:
        self._policies: dict[Leg, Policy] = {"prefill": prefill, "decode": decode}
        self._loads = loads
        self._split_min_tokens = split_min_tokens
        self._stream_pull_min_tokens = stream_pull_min_tokens
        self._prefix_lenders = PrefixLenders(prefix_pull_min_tokens)
        self._openings = Openings(loads)
        self._reasons: dict[str, NoPair | None] = {}
        """By model: what `can_serve` returned last, for as long as no agent enters or leaves the rotation."""
        self._reasons_epoch = 0
        self._pair_turns: dict[str, int] = {}
        self._alone_turns: dict[str, int] = {}

    def choose(
        self,
        snapshot: Snapshot,
        request: RoutingRequest,
        exclude: frozenset[Incarnation] = NO_AGENTS,
        *,
        apart: bool = False,
    ) -> Pair | NoPair:
        """Choose the pair for the next request, and count its turn.

        Agents in `exclude` (they just failed this request) are chosen only if no others are left. With
        `apart`, no agent is paired with itself.
        """
        for agents in (_without(snapshot, exclude), snapshot) if exclude else (snapshot,):
            chosen = self._choose(agents, request, apart)
            if isinstance(chosen, Pair) or chosen is NoPair.FULL:
                return chosen
        if not any(node.on_trial for node in snapshot.nodes):
            return chosen
        later = _no_pair(_after_trials(snapshot), request.model, apart)
        return NoPair.FULL if later is None else chosen

    def _choose(self, snapshot: Snapshot, request: RoutingRequest, apart: bool) -> Pair | NoPair:
        unknown = _unknown(snapshot, request.model)
        if unknown is not None:
            return unknown
        search = self._search(snapshot, apart)
        if (request.one_token or request.undivided) and not apart:
            # The prefill agent's response to a request for one token is complete.
            leg: Leg = "prefill" if request.one_token else "decode"
            node = self._lone(search, request, leg)
            if node is not None:
                return self._alone(node, snapshot, request)
            if _serving_alone(snapshot, request.model, leg):
                return NoPair.FULL
        if self._split_min_tokens and not apart:
            node = self._lone(search, request, "decode")
            if node is not None and self._is_short(request, node):
                return self._alone(node, snapshot, request)
        return self._pair(snapshot, search, request, apart)

    def _search(self, snapshot: Snapshot, apart: bool) -> Search | Openings:
        """Return where to look for candidates. Both would find the same ones."""
        if apart or snapshot.is_altered:
            return Search(snapshot, self._loads, apart=apart)
        self._openings.follow(snapshot)
        return self._openings

    def _pair(
        self, snapshot: Snapshot, search: Search | Openings, request: RoutingRequest, apart: bool
    ) -> Pair | NoPair:
        prefills = search.prefills(request.model, request.n)
        if not prefills:
            return self._reason(snapshot, search, request.model, apart) or NoPair.FULL
        count = _turn(self._pair_turns, request.model, snapshot)
        num_prefills = len(prefills)
        prefill = self._pick("prefill", prefills, request, count)
        partners = search.partners(prefill, request.n)
        decode = self._pick("decode", partners, request, _skewed(count, num_prefills, len(partners)))
        streamed = _has_spare_room(decode) and self._is_long(request, prefill)
        lenders = partners.find(self._prefix_lenders.known(request))
        lender = self._prefix_lenders.best(lenders, prefill, request)
        return self._noted(Pair(prefill, decode, streamed, lender), request)

    def _reason(
        self, snapshot: Snapshot, search: Search | Openings, model: str, apart: bool
    ) -> NoPair | None:
        """Return why no two agents in rotation fit, whether they have room or not; None if two do."""
        if isinstance(search, Search):
            return _no_pair(snapshot, model, apart)
        if search.states_epoch != self._reasons_epoch:
            self._reasons_epoch = search.states_epoch
            self._reasons.clear()
        if model not in self._reasons:
            self._reasons[model] = _no_pair(snapshot, model, apart)
        return self._reasons[model]

    def _lone(self, search: Search | Openings, request: RoutingRequest, leg: Leg) -> Node | None:
        """Choose an agent of the leg's role that could serve all of the request, if any has room."""
        able = search.lone(request.model, leg, request.n)
        return self._pick(leg, able, request, self._alone_turns.get(request.model, 0)) if able else None

    def _alone(self, node: Node, snapshot: Snapshot, request: RoutingRequest) -> Pair:
        _turn(self._alone_turns, request.model, snapshot)
        return self._noted(Pair(node, node), request)

    def _is_short(self, request: RoutingRequest, node: Node) -> bool:
        cached = self._policies["decode"].cached_tokens(node, request)
        return request.tokens_per_prompt - cached < self._split_min_tokens

    def _is_long(self, request: RoutingRequest, prefill: Node) -> bool:
        """Return whether the prefill takes so long that KV should move meanwhile."""
        least = self._stream_pull_min_tokens
        if least is None:
            chunk = prefill.info.prefill_chunk
            least = 0 if chunk is None else chunk + 1
        cached = self._policies["prefill"].cached_tokens(prefill, request)
        return least > 0 and request.tokens_per_prompt - cached >= least

    def _pick(self, leg: Leg, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        return self._policies[leg].pick(candidates, request, turn)

    def _noted(self, pair: Pair, request: RoutingRequest) -> Pair:
        self._policies["prefill"].note(pair.prefill, request)
        self._policies["decode"].note(pair.decode, request)
        self._prefix_lenders.note(pair.decode, request)
        return pair


def make_policy(name: PolicyName, rng: Random) -> Policy:
    """Return the policy of that name."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "power_of_two":
            return PowerOfTwo(rng)
        case "prefix_aware":
            return PrefixAware(PrefixIndex())
        case "session":
            return Session()


def can_serve(snapshot: Snapshot, model: str) -> NoPair | None:
    """Return None if a request of `model` could be served, if need be after a wait; else why not."""
    return _no_pair(snapshot, model, apart=False)


def _no_pair(snapshot: Snapshot, model: str, apart: bool) -> NoPair | None:
    """Return None if any two agents in rotation fit, whether they have room or not; else why none do."""
    ready = _ready(snapshot, model)
    if isinstance(ready, NoPair):
        return ready
    prefills, decodes = ready
    fitting = Matching(groups_of(snapshot), "prefill", decodes, apart=apart)
    return None if any(map(fitting.has_partner, prefills)) else NoPair.INCOMPATIBLE


def _ready(snapshot: Snapshot, model: str) -> tuple[list[int], list[int]] | NoPair:
    """Return the positions of the prefill and the decode agents of the model that are in rotation."""
    unknown = _unknown(snapshot, model)
    if unknown is not None:
        return unknown
    prefills, decodes = (_in_rotation(snapshot, model, leg) for leg in ("prefill", "decode"))
    if not prefills:
        return NoPair.NO_PREFILL
    return (prefills, decodes) if decodes else NoPair.NO_DECODE


def _in_rotation(snapshot: Snapshot, model: str, leg: Leg) -> list[int]:
    nodes, ready = snapshot.nodes, NodeState.READY
    return [each for each in groups_of(snapshot).serving(model, leg) if nodes[each].state is ready]


def _serving_alone(snapshot: Snapshot, model: str, leg: Leg) -> list[Node]:
    nodes = [snapshot.nodes[each] for each in _in_rotation(snapshot, model, leg)]
    return [node for node in nodes if node.info.dialect in SERVING_ALONE[leg]]


def _has_spare_room(decode: Node) -> bool:
    """Return whether the agent can set blocks aside for KV that is yet to be computed.

    If it is more than half full, they would be missing for prompts whose prefill is over; in the worst case
    the blocks that those pin delay the very prefills that are waited for.
    """
    load = decode.info.load
    return 2 * load.kv_blocks_free >= load.kv_blocks_total > 0


def _unknown(snapshot: Snapshot, model: str) -> NoPair | None:
    if model in snapshot.models:
        return None
    # Before any agent has registered, no model can be called unknown.
    return NoPair.UNKNOWN_MODEL if snapshot.models else NoPair.NO_AGENT


def _without(snapshot: Snapshot, exclude: frozenset[Incarnation]) -> Snapshot:
    return snapshot.only(lambda node: node.incarnation not in exclude)


def _after_trials(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as if the probe of every agent on trial had succeeded."""
    return snapshot.altered(
        replace(node, state=NodeState.READY) if node.on_trial else node for node in snapshot.nodes
    )


def _skewed(count: int, prefills: int, decodes: int) -> int:
    return count + count // math.lcm(prefills, decodes)


def _turn(turns: dict[str, int], model: str, snapshot: Snapshot) -> int:
    """Count a turn and return its number. Drops the counts of models that are not served any more."""
    count = turns.get(model, 0)
    turns[model] = count + 1
    if len(turns) > len(snapshot.models):
        for gone in [name for name in turns if name not in snapshot.models]:
            del turns[gone]
    return count
