# SPDX-License-Identifier: Apache-2.0
"""All agents at one moment: who serves what, who has no partner, and why."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvferry.proxy.fleet.bias import Bias
from kvferry.proxy.fleet.circuit_breaker import BreakerState
from kvferry.proxy.fleet.pairing import Leg, Matching, Mismatch, Pairing, reason
from kvferry.proxy.wire.dialects import DIALECTS
from kvferry.proxy.wire.registration import Incarnation, Register

MAX_PAIRINGS = 1000
"""Refused pairings that are listed, beside their number."""


class NodeState(enum.StrEnum):
    """Why a known agent is, or is not, in rotation."""

    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    """It finishes what it has, and stops: it has said so, or an operator has asked this proxy for that."""
    CORDONED = "cordoned"
    """An operator of this proxy took it out of rotation; the agent does not know."""
    REFUSING = "refusing"
    """A connection to it was refused after its last believable ping."""
    TRIPPED = "tripped"
    """It failed too often in a row; a probe is not due yet (`proxy.fleet.circuit_breaker`)."""
    STALLED = "stalled"
    """It pings, but makes no progress: for 30 s its engine has not stepped with something to run, or its HTTP
    loop has not run."""


class NoPair(enum.StrEnum):
    """Why there is no pair for the request; the words are shown to clients."""

    UNKNOWN_MODEL = "no agent serves this model"
    NO_AGENT = "no agent has announced itself"
    NO_PREFILL = "no prefill agent is ready for this model"
    NO_DECODE = "no decode agent is ready for this model"
    INCOMPATIBLE = "no prefill agent fits a decode agent of this model"
    FULL = "all agents of this model are busy"
    """The only one worth waiting for. An agent on trial after failures is busy with its probe."""


class Speed(NamedTuple):
    """What work takes at an agent; None: no agent of its model has measured it (`Capacity`).

    `answer_tokens`: of an answer, on average. `pull_s`: of one pull after its prefill has ended, likewise.
    """

    token_s: float | None = None
    step_s: float | None = None
    sequence_s: float | None = None
    answer_tokens: float = 0.0
    pull_s: float = 0.0
    prompt_step_s: float | None = None
    prompt_token_s: float | None = None


class Prediction(NamedTuple):
    """When a prompt's first token will come, as was predicted `at` some time, both on the router's clock.

    `share`: of the agent's time, the part that this prompt takes and those sent before it do. `token_s`:
    seconds per token of the answer; None if that is not known.
    """

    at: float
    first_token_at: float
    share: float
    token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One agent at one moment.

    `ours_at_ping`: sequences that this proxy had in flight there when the agent reported its load.
    `speed`: what it has measured, and of the rest what another agent of its model has. `prefill_share` and
    `decode_share`: the parts of its time lately that went into prompts and into decoding. `bias`: of what is
    predicted of it. `role_pinned`: it registered as `both`, and an operator chose the role that `info` has.
    """

    info: Register
    state: NodeState
    heard_at: float
    ours_at_ping: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    speed: Speed = Speed()  # noqa: RUF009 (it does not change)
    prefill_share: float = 0.0
    decode_share: float = 0.0
    bias: Bias = Bias()  # noqa: RUF009
    role_pinned: bool = False

    @property
    def incarnation(self) -> Incarnation:
        return self.info.incarnation

    @property
    def on_trial(self) -> bool:
        """Whether a probe of its circuit breaker is under way, which soon shows whether it works again."""
        return self.state is NodeState.TRIPPED and self.breaker is BreakerState.HALF_OPEN

    def serves(self, leg: Leg) -> bool:
        """Return whether a request's `leg` may be sent to this agent now."""
        return self.state is NodeState.READY and self.info.role in (leg, "both")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All agents at one moment, ordered by address so that a rotation over them is stable.

    `pairing` is that of `nodes`, whatever their states. `models` also holds the names that were served
    lately: their absence is an outage, not a wrong name. `number`: of the registry's snapshots; 0: it is none
    of them. `changed`: the positions of nodes that are others than in the registry's snapshot before, if its
    `pairing` is the same.
    """

    nodes: tuple[Node, ...]
    pairing: Pairing = field(compare=False, repr=False)
    models: frozenset[str]
    number: int = field(default=0, compare=False, repr=False)
    changed: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def of(cls, nodes: Iterable[Node], models: Iterable[str]) -> Snapshot:
        """Return a snapshot of these nodes, with a pairing made for it."""
        kept = tuple(nodes)
        return cls(kept, Pairing([node.info for node in kept]), frozenset(models))

    def served(self) -> set[str]:
        """Return the names of the models that ready agents serve."""
        return {
            node.info.model
            for node in self.nodes
            if node.state is NodeState.READY and node.info.dialect in DIALECTS
        }

    def up(self, leg: Leg) -> list[int]:
        """Return the positions in `nodes` of the agents that serve the leg now."""
        return [position for position, node in enumerate(self.nodes) if node.serves(leg)]

    def only(self, keep: Callable[[Node], bool]) -> Snapshot:
        """Return the snapshot with all other agents out of rotation."""
        return self.altered(
            node if keep(node) else replace(node, state=NodeState.DRAINING) for node in self.nodes
        )

    def altered(self, nodes: Iterable[Node]) -> Snapshot:
        """Return the snapshot with other nodes of the same agents."""
        return replace(self, nodes=tuple(nodes), number=0, changed=frozenset())


class UnpairedReasons:
    """Why agents of one snapshot have no partner."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._prefills, self._decodes = snapshot.up("prefill"), snapshot.up("decode")
        self._of_prefills = Matching(snapshot.pairing, "prefill", self._decodes)
        self._of_decodes = Matching(snapshot.pairing, "decode", self._prefills)

    def not_paired(self, position: int) -> str | None:
        """Return why the agent serves in no pair, or None if it could."""
        node = self._snapshot.nodes[position]
        if node.info.dialect not in DIALECTS:
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
        nodes, why = self._snapshot.nodes, self._snapshot.pairing.why(prefill, decode)
        assert why is not None, "they fit"
        return reason(nodes[prefill].info, nodes[decode].info, why)


class IncompatiblePair(NamedTuple):
    prefill: Register
    decode: Register
    why: Mismatch

    @property
    def text(self) -> str:
        """For operators; with the values that differ where the agents named them."""
        return reason(self.prefill, self.decode, self.why)


def alike(snapshot: Snapshot, agent: Register) -> Snapshot:
    """Keep only those in rotation that sample the same tokens as `agent`: they may continue what it began."""
    kind = (agent.weights, agent.tokenizer, agent.layout)
    return snapshot.only(lambda node: (node.info.weights, node.info.tokenizer, node.info.layout) == kind)


def incompatible_pairs(snapshot: Snapshot) -> Iterator[IncompatiblePair]:
    """Yield every two agents of one model that are up but cannot be paired.

    Agents of different models are no pair that anybody would miss.
    """
    nodes = snapshot.nodes
    for prefill, decode, why in snapshot.pairing.misfits(snapshot.up("prefill"), snapshot.up("decode")):
        yield IncompatiblePair(nodes[prefill].info, nodes[decode].info, why)


def count_incompatible(snapshot: Snapshot) -> Counter[Mismatch]:
    """Count the pairs that `incompatible_pairs` yields, by reason."""
    return snapshot.pairing.count_misfits(snapshot.up("prefill"), snapshot.up("decode"))
