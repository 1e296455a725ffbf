# SPDX-License-Identifier: Apache-2.0
"""Which agents can serve a request together, and why others cannot.

`mismatch` is the rule for two agents. `Groups` holds agents that are alike in all that it looks at: whether
two fit is decided once for their groups, not for every two of them at every request. Agents are numbered by
their position in a snapshot.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvferry.proxy.dialects.names import SERVING_ALONE, SUPPORTED
from kvferry.proxy.fleet.registry import Leg, NodeState, Snapshot
from kvferry.proxy.wire.registration import NATIVE_DIALECT, Register, Versions, common_version

ONE_HOST_TRANSFERS = frozenset({"cuda_ipc"})
MAX_PAIRINGS = 1000
"""Refused pairings that are listed, beside their number."""


class Mismatch(enum.StrEnum):
    """What keeps two agents apart. The sentences are shown to operators; metrics have the names as labels."""

    DIALECT = "no dialect in common"
    ALONE = "it takes no request without a partner"
    MODEL = "different models"
    WEIGHTS = "different weights"
    TOKENIZER = "different tokenizers"
    LAYOUT = "different KV layouts"
    MODE = "different transfer modes"
    VERSION = "no version of the control channel in common"
    HANDSHAKE = "rejected by the decode agent in their handshake"
    TRANSFER = "no transfer in common that works between them"


def mismatch(prefill: Register, decode: Register) -> Mismatch | None:
    """Return the first reason why the two cannot serve a request together. An agent pairs with itself."""
    if prefill.dialect != decode.dialect or prefill.dialect not in SUPPORTED:
        return Mismatch.DIALECT
    if prefill.model != decode.model:
        return Mismatch.MODEL
    if prefill.incarnation == decode.incarnation:
        return None if prefill.dialect in SERVING_ALONE["decode"] else Mismatch.ALONE
    if prefill.weights != decode.weights:
        return Mismatch.WEIGHTS
    if prefill.tokenizer != decode.tokenizer:
        return Mismatch.TOKENIZER
    if prefill.layout != decode.layout:
        return Mismatch.LAYOUT
    if prefill.transfer_mode != decode.transfer_mode:
        return Mismatch.MODE
    if common_version(prefill.control_versions, decode.control_versions) is None:
        return Mismatch.VERSION
    if prefill.incarnation in decode.refusals:
        return Mismatch.HANDSHAKE
    # Other engines do not report by which backend they move KV: their operator has to match them.
    if prefill.dialect == NATIVE_DIALECT and not common_transfers(prefill, decode):
        return Mismatch.TRANSFER
    return None


def reason(prefill: Register, decode: Register, why: Mismatch) -> str:
    """Return the text for operators: `why`, as `mismatch` found it, with the values of both where known."""
    details = _details(prefill, decode, why)
    return f"{why.value}: {details}" if details else why.value


def _details(prefill: Register, decode: Register, why: Mismatch) -> str:
    if why is Mismatch.HANDSHAKE:
        return decode.refusals[prefill.incarnation]
    if why is Mismatch.VERSION:
        return ", ".join(
            f"{info.control_versions[0]} to {info.control_versions[1]} at the {leg} agent ({info.version})"
            for leg, info in (("prefill", prefill), ("decode", decode))
        )
    if why is Mismatch.LAYOUT:
        theirs = decode.geometry
        differing = {name: value for name, value in prefill.geometry.items() if theirs.get(name) != value}
        return ", ".join(
            f"{name} {value} at the prefill agent, {theirs.get(name, 'unknown')} at the decode agent"
            for name, value in differing.items()
        )
    return ""


def common_transfers(prefill: Register, decode: Register) -> frozenset[str]:
    """Return the transfer backends that both list and that work between their hosts."""
    both = frozenset(prefill.transfers) & frozenset(decode.transfers)
    return both if prefill.host_id == decode.host_id else both - ONE_HOST_TRANSFERS


_REASONS = (Mismatch.DIALECT, Mismatch.WEIGHTS, Mismatch.TOKENIZER, Mismatch.LAYOUT, Mismatch.MODE)
"""In the order in which `mismatch` finds them, between agents of one model."""
_NOBODY: tuple[int, ...] = ()
_NO_REFUSALS: frozenset[int] = frozenset()


class _Kind(NamedTuple):
    """`routes`: the transfers that an agent lists; those that work within one host only, with the host."""

    dialect: str
    model: str
    weights: str
    tokenizer: str
    layout: str
    transfer_mode: str
    control_versions: Versions
    routes: frozenset[str | tuple[str, str]]


class _Side:
    """The agents that can serve one leg, by model and by group."""

    def __init__(self) -> None:
        self.by_model: dict[str, list[int]] = {}
        self.by_group: dict[int, list[int]] = {}
        self.partners: dict[int, tuple[int, ...]] = {}
        """By group of this side: the agents of the other side that fit it, in order."""

    def add(self, model: str, group: int, agent: int) -> None:
        self.by_model.setdefault(model, []).append(agent)
        self.by_group.setdefault(group, []).append(agent)


class Groups:
    """The groups of the agents of a snapshot.

    Args:
        infos: The latest registrations, in the snapshot's order.
    """

    def __init__(self, infos: Sequence[Register]) -> None:
        self._infos = infos
        self.group_of: list[int] = []
        self._examples: list[Register] = []
        self._kinds: dict[_Kind, int] = {}
        self._sides: dict[Leg, _Side] = {"prefill": _Side(), "decode": _Side()}
        self._reasons: dict[tuple[int, int], Mismatch | None] = {}
        self._refused_by: dict[int, frozenset[int]] = {}
        """By prefill agent: the decode agents that rejected it in their handshake."""
        self._refuses: dict[int, frozenset[int]] = {}
        """By decode agent: the prefill agents that it rejected in their handshake."""
        for agent, info in enumerate(infos):
            group = self._group(info)
            self.group_of.append(group)
            for leg, side in self._sides.items():
                if info.role in (leg, "both"):
                    side.add(info.model, group, agent)
        self._note_refusals()
        self._match("prefill", "decode")
        self._match("decode", "prefill")

    def serving(self, model: str, leg: Leg) -> Sequence[int]:
        """Return the agents of the model that have the leg's role, in order, whatever their state."""
        return self._sides[leg].by_model.get(model, _NOBODY)

    def partners(self, agent: int, leg: Leg) -> Sequence[int]:
        """Return the agents that fit the group of `agent`, which serves `leg`: one object for many groups."""
        return self._sides[leg].partners[self.group_of[agent]]

    def rejections(self, agent: int, leg: Leg) -> frozenset[int]:
        """Return the agents of the other leg that are apart from `agent` since their handshake."""
        return (self._refused_by if leg == "prefill" else self._refuses).get(agent, _NO_REFUSALS)

    def serves_alone(self, agent: int) -> bool:
        """Return whether the agent can serve both legs of a request."""
        info = self._infos[agent]
        return info.role == "both" and info.dialect in SERVING_ALONE["decode"]

    def why(self, prefill: int, decode: int) -> Mismatch | None:
        """Return what `mismatch` returns of the two."""
        if prefill == decode:
            return mismatch(self._infos[prefill], self._infos[decode])
        why = self._why(self.group_of[prefill], self.group_of[decode])
        if why in (None, Mismatch.TRANSFER) and decode in self.rejections(prefill, "prefill"):
            return Mismatch.HANDSHAKE
        return why

    def misfits(self, prefills: Iterable[int], decodes: Iterable[int]) -> Iterator[tuple[int, int, Mismatch]]:
        """Yield every two of these of one model that cannot serve together, by prefill agent."""
        listed = set(decodes)
        others: dict[tuple[str, int], list[int]] = {}
        for prefill in prefills:
            model, partners = self._infos[prefill].model, self.partners(prefill, "prefill")
            key = (model, id(partners))
            if key not in others:
                fitting = set(partners)
                others[key] = [
                    each for each in self.serving(model, "decode") if each in listed and each not in fitting
                ]
            apart: Iterable[int] = others[key]
            extra = (self.rejections(prefill, "prefill") | {prefill}) & listed
            if extra:
                same = (each for each in extra if self._infos[each].model == model)
                apart = sorted({*apart, *same})
            for decode in apart:
                why = self.why(prefill, decode)
                if why is not None:
                    yield prefill, decode, why

    def count_misfits(self, prefills: Collection[int], decodes: Collection[int]) -> Counter[Mismatch]:
        """Count the pairs that `misfits` yields by reason, without going through them."""
        counts: Counter[Mismatch | None] = Counter()
        listed = set(decodes)
        alike = self._pairs_alike(prefills, decodes, 1)
        for size, why in enumerate(_REASONS, 2):
            before, alike = alike, self._pairs_alike(prefills, decodes, size)
            counts[why] += before - alike
        unspoken = self._pairs_without_version(prefills, decodes)
        counts[Mismatch.VERSION] += unspoken
        counts[Mismatch.TRANSFER] += alike - unspoken
        open_: dict[int, int] = {}
        for prefill in prefills:
            partners = self.partners(prefill, "prefill")
            if id(partners) not in open_:
                open_[id(partners)] = len(listed.intersection(partners))
            counts[Mismatch.TRANSFER] -= open_[id(partners)]
            extra = self.rejections(prefill, "prefill") | {prefill}
            for decode in extra & listed:
                if self._infos[decode].model == self._infos[prefill].model:
                    counts[self._why(self.group_of[prefill], self.group_of[decode])] -= 1
                    counts[self.why(prefill, decode)] += 1
        return Counter({why: count for why, count in counts.items() if why is not None and count})

    def _pairs_alike(self, prefills: Iterable[int], decodes: Iterable[int], size: int) -> int:
        """Return how many pairs have the first `size` in common of what `mismatch` compares, in its order."""

        there = Counter(self._terms(agent, size) for agent in decodes)
        del there[None]
        here = Counter(self._terms(agent, size) for agent in prefills)
        return sum(there[each] * count for each, count in here.items())

    def _pairs_without_version(self, prefills: Iterable[int], decodes: Iterable[int]) -> int:
        """Return how many pairs are alike in all terms, and have no version in common."""
        size, infos = len(_REASONS) + 1, self._infos
        there: dict[object, Counter[Versions]] = {}
        for agent in decodes:
            there.setdefault(self._terms(agent, size), Counter())[infos[agent].control_versions] += 1
        there.pop(None, None)
        here = Counter((self._terms(agent, size), infos[agent].control_versions) for agent in prefills)
        return sum(
            count * others
            for (terms, ours), count in here.items()
            for theirs, others in there.get(terms, Counter[Versions]()).items()
            if common_version(ours, theirs) is None
        )

    def _terms(self, agent: int, size: int) -> tuple[str, ...] | None:
        """Return the first `size` terms that must be equal; None: it is paired with none."""
        info = self._infos[agent]
        if size > 1 and info.dialect not in SUPPORTED:
            return None
        return (
            info.model, info.dialect, info.weights, info.tokenizer, info.layout, info.transfer_mode
        )[:size]  # fmt: skip

    def _group(self, info: Register) -> int:
        routes: frozenset[str | tuple[str, str]] = frozenset()
        if info.dialect == NATIVE_DIALECT:
            routes = frozenset(
                (name, info.host_id) if name in ONE_HOST_TRANSFERS else name for name in info.transfers
            )
        kind = _Kind(
            info.dialect, info.model, info.weights, info.tokenizer, info.layout, info.transfer_mode,
            info.control_versions, routes,
        )  # fmt: skip
        group = self._kinds.get(kind)
        if group is None:
            group = self._kinds[kind] = len(self._kinds)
            self._examples.append(msgspec.structs.replace(info, refusals={}))
        return group

    def _note_refusals(self) -> None:
        if not any(info.refusals for info in self._infos):
            return
        known: dict[str, int] = {info.incarnation: agent for agent, info in enumerate(self._infos)}
        refused_by: dict[int, set[int]] = {}
        for decode, info in enumerate(self._infos):
            refused = {known[each] for each in info.refusals if each in known} - {decode}
            if refused:
                self._refuses[decode] = frozenset(refused)
            for prefill in refused:
                refused_by.setdefault(prefill, set()).add(decode)
        self._refused_by = {agent: frozenset(decodes) for agent, decodes in refused_by.items()}

    def _match(self, leg: Leg, other: Leg) -> None:
        """Find the partners of each group, by what they have in common and not by comparing all groups."""
        kinds = list(self._kinds)
        by_route: dict[object, list[int]] = {}
        for group, agents in self._sides[other].by_group.items():
            for key in _keys(kinds[group]):
                by_route.setdefault(key, []).extend(agents)
        shared: dict[frozenset[int], tuple[int, ...]] = {}
        side = self._sides[leg]
        for group in side.by_group:
            fitting = frozenset().union(*(by_route.get(key, _NOBODY) for key in _keys(kinds[group])))
            if fitting not in shared:
                shared[fitting] = tuple(sorted(fitting))
            side.partners[group] = shared[fitting]

    def _why(self, prefill: int, decode: int) -> Mismatch | None:
        """Return what keeps agents of two groups apart, if there are two agents."""
        key = (prefill, decode)
        if key not in self._reasons:
            examples = self._examples
            one = msgspec.structs.replace(examples[prefill], incarnation="one")
            another = msgspec.structs.replace(examples[decode], incarnation="another")
            self._reasons[key] = mismatch(one, another)
        return self._reasons[key]


def groups_of(snapshot: Snapshot) -> Groups:
    """Return the groups of the snapshot's agents, by their positions in `nodes`."""
    memo = snapshot.memo
    if not isinstance(memo.groups, Groups):
        memo.groups = Groups([node.info for node in snapshot.nodes])
    return memo.groups


class Matching:
    """Which of the agents that serve `leg` have partners among those `open` for the other leg.

    With `apart`, no agent is its own partner.
    """

    def __init__(self, groups: Groups, leg: Leg, open_: Iterable[int], *, apart: bool = False) -> None:
        self._groups = groups
        self._leg = leg
        self._open = set(open_)
        self._apart = apart
        self._shared: dict[int, list[int]] = {}

    def has_partner(self, agent: int) -> bool:
        """Return whether `partners` would return any."""
        shared, rejections = self._among_open(agent), self._groups.rejections(agent, self._leg)
        if agent in self._open:
            if not self._apart and self._groups.serves_alone(agent):
                return True
        elif not rejections:
            return bool(shared)
        return any(each != agent and each not in rejections for each in shared)

    def partners(self, agent: int) -> list[int]:
        """Return the open agents with which `agent` can serve a request, in order."""
        rejections = self._groups.rejections(agent, self._leg)
        alone = agent in self._open and not self._apart and self._groups.serves_alone(agent)
        others = [each for each in self._among_open(agent) if each != agent and each not in rejections]
        return sorted([*others, agent]) if alone else others

    def _among_open(self, agent: int) -> list[int]:
        partners = self._groups.partners(agent, self._leg)
        shared = self._shared.get(id(partners))
        if shared is None:
            shared = self._shared[id(partners)] = [each for each in partners if each in self._open]
        return shared


class UnpairedReasons:
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
    for prefill, decode, why in groups_of(snapshot).misfits(snapshot.up("prefill"), snapshot.up("decode")):
        yield IncompatiblePair(nodes[prefill].info, nodes[decode].info, why)


def count_incompatible(snapshot: Snapshot) -> Counter[Mismatch]:
    """Count the pairs that `incompatible_pairs` yields, by reason."""
    return groups_of(snapshot).count_misfits(snapshot.up("prefill"), snapshot.up("decode"))


def _keys(kind: _Kind) -> Iterator[object]:
    """Yield keys of which two kinds share one exactly if their agents can serve together."""
    lowest, highest = kind.control_versions
    routes = kind.routes if kind.dialect == NATIVE_DIALECT else (None,) if kind.dialect in SUPPORTED else ()
    for route in routes:
        for version in range(lowest, highest + 1):
            yield (*kind[:-2], version, route)
