# SPDX-License-Identifier: Apache-2.0
"""Which pair of agents takes the next request: a question put to a snapshot, without any I/O."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.pairing import SUPPORTED_DIALECTS, mismatch
from proxy.registry import Node, Snapshot
from proxy.wire import Incarnation

NOBODY: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """The agents of one attempt. `alone`: one agent serves the whole request, and no KV moves."""

    prefill: Node
    decode: Node

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


class RoundRobin:
    """Prefill agents in turn, and for each of them the decode agents in turn.

    Both turns come from one count per model, yet the pairs do not correlate (X8): prefill takes
    `count % P`, decode takes `count % D` shifted by one whenever the two have run in step for their common
    period. Over P * D requests each pair is used exactly once, and within each role loads differ by one.
    """

    def __init__(self) -> None:
        self._pair_counts: dict[str, int] = {}
        self._alone_counts: dict[str, int] = {}

    def choose(
        self,
        snapshot: Snapshot,
        model: str,
        avoid: frozenset[Incarnation] = NOBODY,
        *,
        apart: bool = False,
    ) -> Pair | NoPair:
        """The pair for the next request of `model`.

        Agents in `avoid` (they just failed this request) are taken only if nobody else is left. With `apart`,
        no agent is paired with itself.
        """
        count = _next(self._pair_counts, model, snapshot)
        found = _pair(_without(snapshot, avoid), model, count, apart) if avoid else NoPair.NO_PREFILL
        return found if isinstance(found, Pair) else _pair(snapshot, model, count, apart)

    def choose_alone(
        self, snapshot: Snapshot, model: str, avoid: frozenset[Incarnation] = NOBODY
    ) -> Pair | NoPair:
        """One prefill agent for a request of a single token: its answer is the whole answer."""
        count = _next(self._alone_counts, model, snapshot)
        prefills = _serving_prefill(_without(snapshot, avoid), model) or _serving_prefill(snapshot, model)
        if not prefills:
            return _unknown(snapshot, model) or NoPair.NO_PREFILL
        node = prefills[count % len(prefills)]
        return Pair(node, node)


def can_serve(snapshot: Snapshot, model: str) -> NoPair | None:
    """None if a request of `model` could be taken now, else why not. Takes nobody's turn."""
    found = _pair(snapshot, model, 0, apart=False)
    return found if isinstance(found, NoPair) else None


def _pair(snapshot: Snapshot, model: str, count: int, apart: bool) -> Pair | NoPair:
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
    # A prefill agent that fits nobody must not cost its neighbour two turns, so it is left out first.
    fitting = [(node, fits) for node in prefills if (fits := _fitting(node, decodes, apart))]
    if not fitting:
        return NoPair.INCOMPATIBLE
    prefill, partners = fitting[count % len(fitting)]
    return Pair(prefill, partners[_skewed(count, len(fitting), len(partners))])


def _unknown(snapshot: Snapshot, model: str) -> NoPair | None:
    if model in snapshot.models:
        return None
    # While nobody has announced any model, nobody can say that this one is wrong.
    return NoPair.UNKNOWN_MODEL if snapshot.models else NoPair.NO_AGENT


def _skewed(count: int, prefills: int, decodes: int) -> int:
    return (count + count // math.lcm(prefills, decodes)) % decodes


def _fitting(prefill: Node, decodes: Sequence[Node], apart: bool) -> list[Node]:
    return [
        node
        for node in decodes
        if mismatch(prefill.info, node.info) is None and not (apart and node is prefill)
    ]


def _serving_prefill(snapshot: Snapshot, model: str) -> list[Node]:
    return [
        node
        for node in snapshot.nodes
        if node.info.model == model and node.serves("prefill") and node.info.dialect in SUPPORTED_DIALECTS
    ]


def _without(snapshot: Snapshot, avoid: frozenset[Incarnation]) -> Snapshot:
    if not avoid:
        return snapshot
    kept = tuple(node for node in snapshot.nodes if node.incarnation not in avoid)
    return Snapshot(kept, snapshot.models)


def _next(counts: dict[str, int], model: str, snapshot: Snapshot) -> int:
    """Take a turn. Only models that agents serve are counted, so clients cannot grow the table."""
    for gone in [name for name in counts if name not in snapshot.models]:
        del counts[gone]
    if model not in snapshot.models:
        return 0
    count = counts.get(model, 0)
    counts[model] = count + 1
    return count
