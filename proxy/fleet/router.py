# SPDX-License-Identifier: Apache-2.0
"""Which pair of agents takes the next request: a question put to a snapshot, without any I/O."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvferry.proxy.dialects.catalogue import SERVING_ALONE
from kvferry.proxy.fleet.compatibility import mismatch
from kvferry.proxy.fleet.load import Loads
from kvferry.proxy.fleet.policy import (
    LeastLoaded,
    Policy,
    PolicyName,
    PowerOfTwo,
    PrefixAware,
    PrefixIndex,
    RoundRobin,
    Session,
)
from kvferry.proxy.fleet.registry import Leg, Node, NodeState, Snapshot
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.wire.messages import Incarnation

NOBODY: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """The agents of one attempt. `alone`: one agent serves the whole request, and no KV moves.

    `streamed`: the prompt is long enough for its KV to move while it is computed, and there is room for it.
    """

    prefill: Node
    decode: Node
    streamed: bool = False

    @property
    def alone(self) -> bool:
        return self.prefill.incarnation == self.decode.incarnation

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The agents taking part, each once."""
        return (self.prefill,) if self.alone else (self.prefill, self.decode)


class NoPair(enum.StrEnum):
    """Why nobody can take the request; the words are shown to clients."""

    UNKNOWN_MODEL = "no agent serves this model"
    NO_AGENT = "no agent has announced itself"
    NO_PREFILL = "no prefill agent is ready for this model"
    NO_DECODE = "no decode agent is ready for this model"
    INCOMPATIBLE = "no prefill agent fits a decode agent of this model"
    FULL = "all agents of this model are busy"
    """The only one that passes by itself. An agent on trial after failures is busy with its probe."""


class Router:
    """One policy per role, over the agents that fit each other and have room.

    With `round_robin` for both, prefill agents come in turn, and for each of them the decode agents in turn.
    Both turns come from one count per model, yet the pairs do not correlate (X8): prefill takes `count % P`,
    decode takes `count % D` shifted by one whenever the two have run in step for their common period. Over
    P * D requests each pair is used exactly once, and within each role loads differ by one.

    Args:
        split_min_tokens: A prompt of which fewer tokens than this must be computed, as far as one can tell,
            is not worth moving: a decode agent serves the request alone.
        stream_pull_min_tokens: A prompt of which at least this many tokens must be computed is pulled
            meanwhile; None takes those of more than one of the prefill agent's chunks, 0 takes none.
    """

    def __init__(
        self,
        prefill: Policy,
        decode: Policy,
        loads: Loads,
        split_min_tokens: int = 0,
        stream_pull_min_tokens: int | None = 0,
    ) -> None:
        self._policies: dict[Leg, Policy] = {"prefill": prefill, "decode": decode}
        self._loads = loads
        self._split_min_tokens = split_min_tokens
        self._stream_pull_min_tokens = stream_pull_min_tokens
        self._pair_turns: dict[str, int] = {}
        self._alone_turns: dict[str, int] = {}

    def choose(
        self,
        snapshot: Snapshot,
        ask: RoutingRequest,
        exclude: frozenset[Incarnation] = NOBODY,
        *,
        apart: bool = False,
    ) -> Pair | NoPair:
        """The pair for the next request, which takes its turn.

        Agents in `exclude` (they just failed this request) are taken only if nobody else is left. With
        `apart`, no agent is paired with itself.
        """
        for agents in (_without(snapshot, exclude), snapshot) if exclude else (snapshot,):
            answer = self._choose(agents, ask, apart)
            if isinstance(answer, Pair) or answer is NoPair.FULL:
                return answer
        later = _fitting(_after_trials(snapshot), ask.model, apart)
        return answer if isinstance(later, NoPair) else NoPair.FULL

    def _choose(self, snapshot: Snapshot, ask: RoutingRequest, apart: bool) -> Pair | NoPair:
        if (ask.one_token or ask.undivided) and not apart:
            # Of one token, the prefill agent's answer is the whole answer.
            node = self._lone(snapshot, ask, "prefill" if ask.one_token else "decode")
            if isinstance(node, Node):
                return self._alone(node, snapshot, ask)
            if node is NoPair.FULL:
                return node
        if self._split_min_tokens and not apart:
            node = self._lone(snapshot, ask, "decode")
            if isinstance(node, Node) and self._is_short(ask, node):
                return self._alone(node, snapshot, ask)
        return self._pair(snapshot, ask, apart)

    def _pair(self, snapshot: Snapshot, ask: RoutingRequest, apart: bool) -> Pair | NoPair:
        fitting = _fitting(snapshot, ask.model, apart)
        if isinstance(fitting, NoPair):
            return fitting
        decodes = {node.incarnation: node for _, partners in fitting for node in partners}
        able = {key for key, node in decodes.items() if self._loads.has_room(node, "decode", ask.n)}
        # A prefill agent without a partner must not cost its neighbour two turns, so it is left out first.
        open_pairs = {
            prefill.incarnation: (prefill, with_room)
            for prefill, partners in fitting
            if self._loads.has_room(prefill, "prefill", 1)
            and (with_room := [node for node in partners if node.incarnation in able])
        }
        if not open_pairs:
            return NoPair.FULL
        prefills = [prefill for prefill, _ in open_pairs.values()]
        count = _turn(self._pair_turns, ask.model, snapshot)
        prefill = self._pick("prefill", prefills, ask, count)
        _, partners = open_pairs[prefill.incarnation]
        decode = self._pick("decode", partners, ask, _skewed(count, len(prefills), len(partners)))
        streamed = _has_spare_room(decode) and self._is_long(ask, prefill)
        return self._noted(Pair(prefill, decode, streamed), ask)

    def _lone(self, snapshot: Snapshot, ask: RoutingRequest, leg: Leg) -> Node | NoPair:
        """The agent of the leg's role that would serve all of the request, if its dialect lets it."""
        nodes = _serving(snapshot, ask.model, leg)
        if not nodes:
            return _unknown(snapshot, ask.model) or NoPair.NO_PREFILL
        able = [node for node in nodes if self._loads.has_room(node, leg, ask.n)]
        return self._pick(leg, able, ask, self._alone_turns.get(ask.model, 0)) if able else NoPair.FULL

    def _alone(self, node: Node, snapshot: Snapshot, ask: RoutingRequest) -> Pair:
        _turn(self._alone_turns, ask.model, snapshot)
        return self._noted(Pair(node, node), ask)

    def _is_short(self, ask: RoutingRequest, node: Node) -> bool:
        return ask.tokens - self._policies["decode"].cached_tokens(node, ask) < self._split_min_tokens

    def _is_long(self, ask: RoutingRequest, prefill: Node) -> bool:
        """Whether the prefill takes so long that KV should move meanwhile."""
        least = self._stream_pull_min_tokens
        if least is None:
            chunk = prefill.info.prefill_chunk
            least = 0 if chunk is None else chunk + 1
        return least > 0 and ask.tokens - self._policies["prefill"].cached_tokens(prefill, ask) >= least

    def _pick(self, leg: Leg, nodes: Sequence[Node], ask: RoutingRequest, turn: int) -> Node:
        return self._policies[leg].pick(nodes, ask, turn, self._loads.at)

    def _noted(self, pair: Pair, ask: RoutingRequest) -> Pair:
        self._policies["prefill"].note(pair.prefill, ask)
        self._policies["decode"].note(pair.decode, ask)
        return pair


def make_policy(name: PolicyName, rng: Random) -> Policy:
    """The policy of that name."""
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
    """None if a request of `model` could be taken, if need be after a wait; else why not."""
    fitting = _fitting(snapshot, model, apart=False)
    return fitting if isinstance(fitting, NoPair) else None


def _fitting(snapshot: Snapshot, model: str, apart: bool) -> list[tuple[Node, list[Node]]] | NoPair:
    """The prefill agents that have partners, and whom."""
    unknown = _unknown(snapshot, model)
    if unknown is not None:
        return unknown
    nodes = [node for node in snapshot.nodes if node.info.model == model]
    prefills = [node for node in nodes if node.serves("prefill")]
    decodes = [node for node in nodes if node.serves("decode")]
    if not prefills:
        return NoPair.NO_PREFILL
    if not decodes:
        return NoPair.NO_DECODE
    fitting = [(node, fits) for node in prefills if (fits := _partners(node, decodes, apart))]
    return fitting or NoPair.INCOMPATIBLE


def _partners(prefill: Node, decodes: Sequence[Node], apart: bool) -> list[Node]:
    return [
        node
        for node in decodes
        if mismatch(prefill.info, node.info) is None and not (apart and node is prefill)
    ]


def _serving(snapshot: Snapshot, model: str, leg: Leg) -> list[Node]:
    return [
        node
        for node in snapshot.nodes
        if node.info.model == model and node.serves(leg) and node.info.dialect in SERVING_ALONE
    ]


def _has_spare_room(decode: Node) -> bool:
    """Whether the agent can set blocks aside for KV that is yet to be computed.

    In one that is more than half full they would be missing for prompts whose prefill is over; in the worst
    case those hold up, by the blocks that they pin, the very prefills that are waited for.
    """
    load = decode.info.load
    return 2 * load.kv_blocks_free >= load.kv_blocks_total > 0


def _unknown(snapshot: Snapshot, model: str) -> NoPair | None:
    if model in snapshot.models:
        return None
    # While nobody has announced any model, nobody can say that this one is wrong.
    return NoPair.UNKNOWN_MODEL if snapshot.models else NoPair.NO_AGENT


def _without(snapshot: Snapshot, exclude: frozenset[Incarnation]) -> Snapshot:
    kept = tuple(node for node in snapshot.nodes if node.incarnation not in exclude)
    return Snapshot(kept, snapshot.models)


def _after_trials(snapshot: Snapshot) -> Snapshot:
    """As if every agent that is being tried had passed."""
    nodes = tuple(replace(node, state=NodeState.READY) if node.on_trial else node for node in snapshot.nodes)
    return Snapshot(nodes, snapshot.models)


def _skewed(count: int, prefills: int, decodes: int) -> int:
    return count + count // math.lcm(prefills, decodes)


def _turn(turns: dict[str, int], model: str, snapshot: Snapshot) -> int:
    """Take a turn. Only models that agents serve get here, and those that are gone are forgotten."""
    for gone in [name for name in turns if name not in snapshot.models]:
        del turns[gone]
    count = turns.get(model, 0)
    turns[model] = count + 1
    return count
