# SPDX-License-Identifier: Apache-2.0
"""Which agents can serve a request together, and why others cannot.

The rule is `difference`, of two kinds of agents. `Pairing` holds agents by kind: whether two fit is decided
once for their kinds, not for every two of them at every request. Agents are numbered by their position in a
snapshot.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Literal, NamedTuple

from kvferry.proxy.wire.dialects import DIALECTS, NATIVE_DIALECT, serves_alone
from kvferry.proxy.wire.registration import Incarnation, Register, Versions, common_version

Leg = Literal["prefill", "decode"]

ONE_HOST_TRANSFERS = frozenset({"cuda_ipc"})


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
    CANARY = "their answers differ from those of the decode agent alone"
    """Found by the canary (`proxy.canary`)."""


class Terms(NamedTuple):
    """What must be equal, in the order in which it is compared. `dialect`: None if it is not supported."""

    model: str
    dialect: str | None
    weights: str
    tokenizer: str
    layout: str
    transfer_mode: str


_UNEQUAL = (
    Mismatch.MODEL,
    Mismatch.DIALECT,
    Mismatch.WEIGHTS,
    Mismatch.TOKENIZER,
    Mismatch.LAYOUT,
    Mismatch.MODE,
)
"""By term: the reason where it differs."""
_ANY_ROUTE = frozenset({""})
"""Other engines do not report by which backend they move KV: their operator has to match them."""
_NOBODY: tuple[int, ...] = ()
_NONE: frozenset[int] = frozenset()


class Kind(NamedTuple):
    """All that decides with whom an agent fits, but for what two agents found in their handshake.

    `routes`: the transfers that it lists, as all with our transfer plane do; those that work within one host
    only, with the host.
    """

    terms: Terms
    control_versions: Versions
    routes: frozenset[str | tuple[str, str]]

    @classmethod
    def of(cls, info: Register) -> Kind:
        routes: frozenset[str | tuple[str, str]] = _ANY_ROUTE
        if info.dialect == NATIVE_DIALECT or info.transfers:
            routes = frozenset(
                (name, info.host_id) if name in ONE_HOST_TRANSFERS else name for name in info.transfers
            )
        dialect = info.dialect if info.dialect in DIALECTS else None
        terms = Terms(info.model, dialect, info.weights, info.tokenizer, info.layout, info.transfer_mode)
        return cls(terms, info.control_versions, routes)

    def keys(self) -> Iterator[object]:
        """Yield keys of which two kinds share one exactly if there is no `difference` between them."""
        if self.terms.dialect is not None:
            lowest, highest = self.control_versions
            for route in self.routes:
                for version in range(lowest, highest + 1):
                    yield self.terms, version, route


def difference(prefill: Kind, decode: Kind) -> Mismatch | None:
    """Return the first reason why agents of these kinds cannot serve a request together."""
    for why, ours, theirs in zip(_UNEQUAL, prefill.terms, decode.terms, strict=True):
        if ours != theirs or ours is None:
            return why
    if common_version(prefill.control_versions, decode.control_versions) is None:
        return Mismatch.VERSION
    return Mismatch.TRANSFER if prefill.routes.isdisjoint(decode.routes) else None


def mismatch(prefill: Register, decode: Register) -> Mismatch | None:
    """Return the first reason why the two cannot serve a request together. An agent pairs with itself."""
    return _mismatch(prefill, decode, difference(Kind.of(prefill), Kind.of(decode)))


def _mismatch(prefill: Register, decode: Register, difference_: Mismatch | None) -> Mismatch | None:
    """`mismatch`, where the `difference` of the two is known."""
    if prefill.incarnation == decode.incarnation and difference_ is not Mismatch.DIALECT:
        return None if serves_alone(prefill.dialect, "decode") else Mismatch.ALONE
    if difference_ in (None, Mismatch.TRANSFER) and prefill.incarnation in decode.refusals:
        return Mismatch.HANDSHAKE
    return difference_


pairing_terms: Callable[[Register], tuple[object, ...]] = attrgetter(
    "role",
    "dialect",
    "model",
    "weights",
    "tokenizer",
    "layout",
    "transfer_mode",
    "transfers",
    "host_id",
    "control_versions",
    "refusals",
)
"""Returns all that decides with whom an agent can serve; a `Pairing` holds while it stays the same."""


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


class _Side:
    """The agents that can serve one leg, by model and by kind."""

    def __init__(self) -> None:
        self.by_model: dict[str, list[int]] = {}
        self.by_kind: dict[int, list[int]] = {}
        self.fitting: dict[int, tuple[int, ...]] = {}
        """By agent: those of the other side between whose kind and its own there is no `difference`."""
        self.partners: dict[int, tuple[int, ...]] = {}
        self.rejections: dict[int, frozenset[int]] = {}
        """By agent: those of the other side that their handshake, or the canary, keeps apart from it."""


class Pairing:
    """Who fits whom, of the agents of a snapshot. It does not change.

    Args:
        infos: The latest registrations, in the snapshot's order.
        pairs_out: Prefill and decode agents that fit each other, and are kept apart by the canary.
    """

    def __init__(
        self, infos: Sequence[Register], pairs_out: Set[tuple[Incarnation, Incarnation]] = frozenset()
    ) -> None:
        self._infos = infos
        self.pairs_out = pairs_out
        """To be read only."""
        numbers: dict[Kind, int] = {}
        kind_of = [numbers.setdefault(kind, len(numbers)) for kind in map(Kind.of, infos)]
        kinds = list(numbers)
        self._kinds = [kinds[number] for number in kind_of]
        self._sides: dict[Leg, _Side] = {"prefill": _Side(), "decode": _Side()}
        for agent, (info, kind) in enumerate(zip(infos, kind_of, strict=True)):
            for leg, side in self._sides.items():
                if info.role in (leg, "both"):
                    side.by_model.setdefault(info.model, []).append(agent)
                    side.by_kind.setdefault(kind, []).append(agent)
        self._note_rejections()
        self._match("prefill", "decode", kinds)
        self._match("decode", "prefill", kinds)

    def serving(self, model: str, leg: Leg) -> Sequence[int]:
        """Return the agents of the model that have the leg's role, in order, whatever their state."""
        return self._sides[leg].by_model.get(model, _NOBODY)

    def partners(self, agent: int, leg: Leg) -> Sequence[int]:
        """Return the agents that fit `agent`, which serves `leg`, in order: one object for many agents.

        It may be among them itself, also where it does not `serve_alone`: then it is no partner of its own.
        """
        return self._sides[leg].partners[agent]

    def fitting(self, agent: int, leg: Leg) -> Sequence[int]:
        """Return the agents whose kind fits that of `agent`, which serves `leg`; `why` knows of each."""
        return self._sides[leg].fitting[agent]

    def serves_alone(self, agent: int) -> bool:
        """Return whether the agent can serve both legs of a request."""
        info = self._infos[agent]
        return info.role == "both" and serves_alone(info.dialect, "decode")

    def why(self, prefill: int, decode: int) -> Mismatch | None:
        """Return what `mismatch` returns of the two, or that the canary keeps them apart."""
        ours, theirs = self._infos[prefill], self._infos[decode]
        why = _mismatch(ours, theirs, self._difference(prefill, decode))
        is_out = (ours.incarnation, theirs.incarnation) in self.pairs_out
        return Mismatch.CANARY if why is None and is_out else why

    def misfits(self, prefills: Iterable[int], decodes: Iterable[int]) -> Iterator[tuple[int, int, Mismatch]]:
        """Yield every two of these of one model that cannot serve together, by prefill agent."""
        listed = set(decodes)
        others: dict[tuple[str, int], list[int]] = {}
        for prefill in prefills:
            model, fitting = self._infos[prefill].model, self._sides["prefill"].fitting[prefill]
            key = (model, id(fitting))
            if key not in others:
                fits = set(fitting)
                others[key] = [
                    each for each in self.serving(model, "decode") if each in listed and each not in fits
                ]
            extra = self._special(prefill, listed)
            for decode in sorted({*others[key], *extra}) if extra else others[key]:
                why = self.why(prefill, decode)
                if why is not None:
                    yield prefill, decode, why

    def count_misfits(self, prefills: Collection[int], decodes: Collection[int]) -> Counter[Mismatch]:
        """Count the pairs that `misfits` yields by reason, without going through them."""
        counts: Counter[Mismatch | None] = Counter()
        listed = set(decodes)
        alike = self._pairs_alike(prefills, decodes, 1)
        for size, why in enumerate(_UNEQUAL[1:], 2):
            before, alike = alike, self._pairs_alike(prefills, decodes, size)
            counts[why] += before - alike
        unspoken = self._pairs_without_version(prefills, decodes)
        counts[Mismatch.VERSION] += unspoken
        counts[Mismatch.TRANSFER] += alike - unspoken
        open_: dict[int, int] = {}
        for prefill in prefills:
            fitting = self._sides["prefill"].fitting[prefill]
            if id(fitting) not in open_:
                open_[id(fitting)] = len(listed.intersection(fitting))
            counts[Mismatch.TRANSFER] -= open_[id(fitting)]
            for decode in self._special(prefill, listed):
                counts[self._difference(prefill, decode)] -= 1
                counts[self.why(prefill, decode)] += 1
        return Counter({why: count for why, count in counts.items() if why is not None and count})

    def _difference(self, prefill: int, decode: int) -> Mismatch | None:
        return difference(self._kinds[prefill], self._kinds[decode])

    def _special(self, prefill: int, listed: set[int]) -> list[int]:
        """Return the agents of its model with which it may fit otherwise than their kinds do."""
        model = self._infos[prefill].model
        rejections = self._sides["prefill"].rejections.get(prefill, _NONE)
        return [each for each in (rejections | {prefill}) & listed if self._infos[each].model == model]

    def _pairs_alike(self, prefills: Iterable[int], decodes: Iterable[int], size: int) -> int:
        """Return how many pairs have the first `size` terms in common."""
        there = Counter(self._kinds[agent].terms[:size] for agent in decodes)
        here = Counter(self._kinds[agent].terms[:size] for agent in prefills)
        return sum(there[each] * count for each, count in here.items() if None not in each)

    def _pairs_without_version(self, prefills: Iterable[int], decodes: Iterable[int]) -> int:
        """Return how many pairs are alike in all terms, and have no version in common."""
        there: dict[Terms, Counter[Versions]] = {}
        for agent in decodes:
            terms, versions, _ = self._kinds[agent]
            there.setdefault(terms, Counter())[versions] += 1
        here = Counter(self._kinds[agent][:2] for agent in prefills)
        return sum(
            count * others
            for (terms, ours), count in here.items()
            if terms.dialect is not None
            for theirs, others in there.get(terms, Counter[Versions]()).items()
            if common_version(ours, theirs) is None
        )

    def _note_rejections(self) -> None:
        if not self.pairs_out and not any(info.refusals for info in self._infos):
            return
        known: dict[str, int] = {info.incarnation: agent for agent, info in enumerate(self._infos)}
        rejections: dict[Leg, dict[int, set[int]]] = {"prefill": {}, "decode": {}}
        handshakes = ((prefill, info.incarnation) for info in self._infos for prefill in info.refusals)
        for ours, theirs in (*handshakes, *self.pairs_out):
            if ours in known and theirs in known:
                rejections["prefill"].setdefault(known[ours], set()).add(known[theirs])
                rejections["decode"].setdefault(known[theirs], set()).add(known[ours])
        for leg, by_agent in rejections.items():
            self._sides[leg].rejections = {agent: frozenset(each) for agent, each in by_agent.items()}

    def _match(self, leg: Leg, other: Leg, kinds: Sequence[Kind]) -> None:
        """Find the partners of all agents, by what their kinds have in common and not by comparing them."""
        side, by_key = self._sides[leg], dict[object, list[int]]()
        for kind, agents in self._sides[other].by_kind.items():
            for key in kinds[kind].keys():  # noqa: SIM118 (it is no mapping)
                by_key.setdefault(key, []).extend(agents)
        shared: dict[frozenset[int], tuple[int, ...]] = {}

        def share(agents: frozenset[int]) -> tuple[int, ...]:
            if agents not in shared:
                shared[agents] = tuple(sorted(agents))
            return shared[agents]

        for kind, agents in side.by_kind.items():
            fitting = frozenset().union(*(by_key.get(key, _NOBODY) for key in kinds[kind].keys()))  # noqa: SIM118
            alike = share(fitting)
            for agent in agents:
                side.fitting[agent] = side.partners[agent] = alike
                rejections = side.rejections.get(agent, _NONE)
                itself = {agent} if self.serves_alone(agent) else _NONE
                if rejections or not itself <= fitting:
                    side.partners[agent] = share(fitting - rejections | itself)


class Matching:
    """Which of the agents that serve `leg` have partners among those `open` for the other leg.

    With `apart`, no agent is its own partner.
    """

    def __init__(self, pairing: Pairing, leg: Leg, open_: Iterable[int], *, apart: bool = False) -> None:
        self._pairing = pairing
        self._leg = leg
        self._open = set(open_)
        self._apart = apart
        self._among_open: dict[int, list[int]] = {}

    def has_partner(self, agent: int) -> bool:
        """Return whether `partners` would return any."""
        partners = self._open_partners(agent)
        return bool(partners) and (len(partners) > 1 or partners[0] != agent or self._pairs_itself(agent))

    def partners(self, agent: int) -> list[int]:
        """Return the open agents with which `agent` can serve a request, in order."""
        itself = agent if self._pairs_itself(agent) else None
        return [each for each in self._open_partners(agent) if each != agent or each == itself]

    def _pairs_itself(self, agent: int) -> bool:
        return not self._apart and self._pairing.serves_alone(agent)

    def _open_partners(self, agent: int) -> list[int]:
        partners = self._pairing.partners(agent, self._leg)
        known = self._among_open.get(id(partners))
        if known is None:
            known = self._among_open[id(partners)] = [each for each in partners if each in self._open]
        return known
