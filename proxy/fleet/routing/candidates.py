# SPDX-License-Identifier: Apache-2.0
"""Who could take a leg: the agents in rotation that have room for it and, of a pair, a partner with room.

How busy agents are now is judged from their last pings and from what this proxy has given them since
(`Loads`, `Slots`). `CandidateIndex` keeps the candidates from one request to the next and looks only at
agents that have changed meanwhile, so that a request costs the same in a large fleet as in a small one. It
finds the agents that a look at all of them would find, in the order of their positions in the snapshot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, count
from operator import is_not
from typing import TypeVar

from kvferry.proxy.fleet.pairing import Leg, Matching, Pairing
from kvferry.proxy.fleet.snapshot import Node, NodeState, NoPair, Prediction, Snapshot
from kvferry.proxy.wire.dialects import serves_alone
from kvferry.proxy.wire.registration import Incarnation

_K = TypeVar("_K")
_V = TypeVar("_V")

MAX_SIZES = 4
"""Numbers of choices for which candidates are kept at once; those of another request are made for it."""


class Slots:
    """Every attempt acquires slots at its agents when it is routed, and releases them as its legs end.

    A prefill leg is one sequence, however many choices it samples; any other leg is one for each choice.
    """

    def __init__(self) -> None:
        self.taken: dict[Incarnation, int] = {}
        """By agent; to be read only. Those with none are not in it."""
        self.prefills: dict[Incarnation, int] = {}
        """Those of them that are prefill legs of pairs; likewise."""
        self.predicted: dict[Incarnation, Prediction] = {}
        """Of the last prompt that was sent to an agent."""
        self._changed: set[Incarnation] = set()

    def acquire(self, agent: Incarnation, count: int, *, is_prefill: bool = False) -> None:
        """Count sequences that go to the agent. `is_prefill`: they are the prefill leg of a pair."""
        self.taken[agent] = self.taken.get(agent, 0) + count
        if is_prefill:
            self.prefills[agent] = self.prefills.get(agent, 0) + count
        self._changed.add(agent)

    def release(self, agent: Incarnation, count: int, *, is_prefill: bool = False) -> None:
        """Uncount sequences that have ended; exactly once, and as they were acquired."""
        self._changed.add(agent)
        left = self.taken[agent] - count
        assert left >= 0, "a slot was released twice"
        if is_prefill:
            self.prefills[agent] -= count
        if left:
            self.taken[agent] = left
        else:
            del self.taken[agent]
            self.prefills.pop(agent, None)
            self.predicted.pop(agent, None)

    def in_flight(self, agent: Incarnation) -> int:
        """Return how many sequences are now at this agent, or on their way to it."""
        return self.taken.get(agent, 0)

    def take_changed(self) -> set[Incarnation]:
        """Return the agents whose slots have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight anywhere."""
        return not self.taken


class Loads:
    """Pure arithmetic on a `Node` and the slots.

    A ping reports how many sequences an agent has from all proxies, as of up to a second ago. What this proxy
    had in flight at that moment is replaced by what it has in flight now.

    Args:
        limits: Most sequences at one agent, by leg; None goes by what each agent reports.
    """

    def __init__(self, slots: Slots, limits: Mapping[Leg, int | None]) -> None:
        self.slots = slots
        self._limits = limits

    def at(self, node: Node) -> int:
        """Return the number of sequences at the agent, running and waiting."""
        reported = node.info.load.running + node.info.load.waiting
        return max(0, reported - node.ours_at_ping) + self.slots.taken.get(node.info.incarnation, 0)

    def with_room(self, node: Node, leg: Leg, count: int) -> int | None:
        """Return the number of sequences at the agent if it could start `count` more at once, instead of
        letting them wait; else None.

        An agent that has nothing to do always has room: it alone knows what it can never serve.
        """
        now = self.at(node)
        if not now:
            return now
        limit = self._limits[leg] or node.info.load.max_running
        has_room = (limit is None or now + count <= limit) and self._has_blocks(node)
        return now if has_room else None

    def has_room(self, node: Node, leg: Leg, count: int) -> bool:
        """Return whether the agent could start `count` more sequences at once (see `with_room`)."""
        return self.with_room(node, leg, count) is not None

    def _has_blocks(self, node: Node) -> bool:
        """Return whether blocks are left for one more, if those sent since its ping take the usual share."""
        load = node.info.load
        if not load.kv_blocks_total:
            return True  # not reported
        used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_leased
        share = max(1.0, used / max(1, load.running))
        since = self.slots.taken.get(node.info.incarnation, 0) - node.ours_at_ping
        return load.kv_blocks_free - since * share >= share


class Candidates(ABC):
    """Agents of which a policy picks one, always in the same order."""

    pool: Sequence[int] | None = None
    """The same object for as long as the same agents may become candidates; None if not known."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Node: ...

    @abstractmethod
    def load(self, node: Node) -> int:
        """Return an agent's sequences, running and waiting, as far as this proxy knows."""

    @abstractmethod
    def least_loaded(self, turn: int) -> Node:
        """Return the first of the least loaded, counting from the one whose turn it is."""

    @abstractmethod
    def find(self, agents: Iterable[Incarnation]) -> list[Node]:
        """Return those of `agents` that are candidates, in order."""

    def in_pool(self) -> Iterable[Node]:
        """Return all agents of the pool."""
        return self

    def __iter__(self) -> Iterator[Node]:
        return (self[index] for index in range(len(self)))


class Listed(Candidates):
    """Candidates that were looked up for one request."""

    def __init__(self, nodes: Sequence[Node], load: Callable[[Node], int]) -> None:
        self._nodes = nodes
        self._load = load

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, index: int, /) -> Node:
        return self._nodes[index]

    def load(self, node: Node) -> int:
        return self._load(node)

    def least_loaded(self, turn: int) -> Node:
        start = turn % len(self._nodes)
        return min([*self._nodes[start:], *self._nodes[:start]], key=self._load)

    def find(self, agents: Iterable[Incarnation]) -> list[Node]:
        wanted = frozenset(agents)
        return [node for node in self._nodes if node.incarnation in wanted] if wanted else []


class Ranked(Candidates):
    """Candidates in order and by load, by position; a change costs O(log n), but for moving pointers."""

    def __init__(self, fleet: CandidateIndex, pool: Sequence[int]) -> None:
        self.pool: Sequence[int] = pool
        self.positions: list[int] = []
        self._fleet = fleet
        self._load_of: dict[int, int] = {}
        self._by_load: dict[int, list[int]] = {}
        self._loads: list[int] = []

    def __len__(self) -> int:
        return len(self.positions)

    def __contains__(self, position: int) -> bool:
        return position in self._load_of

    def __getitem__(self, index: int, /) -> Node:
        return self._fleet.nodes[self.positions[index]]

    def load(self, node: Node) -> int:
        return self._load_of[self._fleet.position_of[node.incarnation]]

    def least_loaded(self, turn: int) -> Node:
        first = self.positions[turn % len(self.positions)]
        equals = self._by_load[self._loads[0]]
        index = bisect_left(equals, first)
        return self._fleet.nodes[equals[index if index < len(equals) else 0]]

    def find(self, agents: Iterable[Incarnation]) -> list[Node]:
        known = (self._fleet.position_of.get(agent) for agent in agents)
        found = {position for position in known if position is not None and position in self._load_of}
        return [self._fleet.nodes[position] for position in sorted(found)]

    def in_pool(self) -> Iterable[Node]:
        return [self._fleet.nodes[position] for position in self.pool]

    def put(self, position: int, load: int) -> bool:
        """Add an agent, or note its load. Returns whether it was added."""
        before = self._load_of.get(position)
        if before == load:
            return False
        if before is None:
            insort(self.positions, position)
        else:
            self._unrank(position, before)
        self._load_of[position] = load
        equals = self._by_load.get(load)
        if equals is None:
            self._by_load[load] = [position]
            insort(self._loads, load)
        else:
            insort(equals, position)
        return before is None

    def update(self, position: int, load: int | None) -> bool:
        """`put`, or `discard` without a load. Returns whether the agent came or went."""
        return self.discard(position) if load is None else self.put(position, load)

    def discard(self, position: int) -> bool:
        """Remove an agent. Returns whether it was there."""
        load = self._load_of.pop(position, None)
        if load is None:
            return False
        del self.positions[bisect_left(self.positions, position)]
        self._unrank(position, load)
        return True

    def _unrank(self, position: int, load: int) -> None:
        equals = self._by_load[load]
        del equals[bisect_left(equals, position)]
        if not equals:
            del self._by_load[load]
            del self._loads[bisect_left(self._loads, load)]


class PairingTerms:
    """What follows from a `Pairing` alone, by position. Partners come in sets that many agents share."""

    def __init__(self, pairing: Pairing, nodes: Sequence[Node]) -> None:
        self.pairing = pairing
        self.sets: list[Sequence[int]] = []
        """Sets of decode agents."""
        self.set_of: dict[int, int] = {}
        """By prefill agent: the set of its partners."""
        self.users: list[list[int]] = []
        """By set: the prefill agents whose partners it holds."""
        self.with_non_partners: set[int] = set()
        """Sets that hold a user of theirs which is no partner of its own."""
        self.sets_with: dict[int, list[int]] = {}
        """By decode agent: the sets that it is in."""
        self.models: dict[str, Sequence[int]] = {}
        """By model: its prefill agents."""
        known: dict[int, int] = {}
        for position, node in enumerate(nodes):
            if node.info.role != "decode":
                self.models.setdefault(node.info.model, pairing.serving(node.info.model, "prefill"))
                partners = pairing.partners(position, "prefill")
                at = self.set_of[position] = known.setdefault(id(partners), len(self.sets))
                if at == len(self.sets):
                    self.sets.append(partners)
                    self.users.append([])
                self.users[at].append(position)
                if node.info.role == "both" and not pairing.serves_alone(position):
                    self.with_non_partners.add(at)
        for at, partners in enumerate(self.sets):
            for position in partners:
                self.sets_with.setdefault(position, []).append(at)


class _Pairs:
    """Who could take a leg of a request of `n` choices.

    `decodes`: with room, by set of partners. `prefills`: with room and a partner, by model.
    """

    def __init__(self, n: int, index: CandidateIndex, terms: PairingTerms) -> None:
        self.n = n
        self.decodes = [Ranked(index, each) for each in terms.sets]
        self.prefills = {model: Ranked(index, pool) for model, pool in terms.models.items()}


class CandidateIndex:
    """The candidates of a fleet, kept from one request to the next.

    `follow` brings them up to date; what the other methods return holds until then. `apart`: no agent is its
    own partner.
    """

    def __init__(self, loads: Loads) -> None:
        self.nodes: Sequence[Node] = ()
        self.position_of: dict[Incarnation, int] = {}
        self._loads = loads
        self._snapshot: Snapshot | None = None
        self._terms: PairingTerms
        self._pairs: OrderedDict[int, _Pairs] = OrderedDict()
        self._lone: OrderedDict[tuple[Leg, int], dict[str, Ranked]] = OrderedDict()
        self._reasons: dict[tuple[str, bool], NoPair | None] = {}
        """What `reason` returned, until an agent comes, goes, or enters or leaves the rotation."""

    def follow(self, snapshot: Snapshot) -> None:
        """Look at the agents that have changed, or whose slots have, since the last snapshot."""
        last, self._snapshot = self._snapshot, snapshot
        before, self.nodes = self.nodes, snapshot.nodes
        changed_slots = self._loads.slots.take_changed()
        if last is None or snapshot.pairing is not last.pairing:
            self._terms = PairingTerms(snapshot.pairing, snapshot.nodes)
            self.position_of = {node.incarnation: at for at, node in enumerate(snapshot.nodes)}
            self._pairs.clear()
            self._lone.clear()
            self._reasons.clear()
            return
        changed = {self.position_of[agent] for agent in changed_slots if agent in self.position_of}
        other: Iterable[int] = ()
        if snapshot is not last:
            is_next = last.number and snapshot.number == last.number + 1
            other = snapshot.changed if is_next else compress(count(), map(is_not, self.nodes, before))
        for position in other:
            changed.add(position)
            if before[position].state is not self.nodes[position].state:
                self._reasons.clear()
        for position in changed:
            for pairs in self._pairs.values():
                self._update_pairs(pairs, position)
            for (leg, n), lone in self._lone.items():
                self._update_lone(lone, leg, n, position)

    def prefills(self, model: str, n: int, *, apart: bool = False) -> Candidates:
        """Return the prefill agents that have room, and a partner with room for `n` choices."""
        pairs = self._pairs_for(n)
        found = pairs.prefills.get(model) or Ranked(self, ())
        if not apart:
            return found
        able = [each for each in found.positions if self._has_partner(pairs, each, apart=True)]
        return self._listed(able)

    def partners(self, prefill: Node, n: int, *, apart: bool = False) -> Candidates:
        """Return the partners with room of one of the last `prefills`."""
        position = self.position_of[prefill.info.incarnation]
        decodes = self._pairs_for(n).decodes[self._terms.set_of[position]]
        if position not in decodes or self._pairs_itself(position, apart):
            return decodes
        return self._listed(each for each in decodes.positions if each != position)

    def lone(self, model: str, leg: Leg, n: int) -> Candidates:
        """Return the agents of the leg's role with room for `n` choices whose dialect can serve all alone."""
        key = (leg, n)
        lone = self._lone.get(key)
        if lone is None:
            lone = {}
            for position in range(len(self.nodes)):
                self._update_lone(lone, leg, n, position)
            _keep(self._lone, key, lone)
        self._lone.move_to_end(key)
        return lone.get(model) or Ranked(self, ())

    def reason(self, model: str, *, apart: bool = False) -> NoPair | None:
        """Return why no two agents in rotation fit, whether they have room or not; None if two do."""
        assert self._snapshot is not None, "nothing was followed"
        key = (model, apart)
        if key not in self._reasons:
            self._reasons[key] = no_pair(self._snapshot, model, apart=apart)
        return self._reasons[key]

    def _listed(self, positions: Iterable[int]) -> Candidates:
        return Listed([self.nodes[each] for each in positions], self._loads.at)

    def _pairs_for(self, n: int) -> _Pairs:
        pairs = self._pairs.get(n)
        if pairs is None:
            pairs = _Pairs(n, self, self._terms)
            for position in range(len(self.nodes)):
                self._update_pairs(pairs, position)
            _keep(self._pairs, n, pairs)
        self._pairs.move_to_end(n)
        return pairs

    def _update_pairs(self, pairs: _Pairs, position: int) -> None:
        node = self.nodes[position]
        sets = self._terms.sets_with.get(position)
        if sets:
            load = self._loads.with_room(node, "decode", pairs.n) if node.state is NodeState.READY else None
            for at in sets:
                decodes = pairs.decodes[at]
                if decodes.update(position, load):
                    # Only the first partner that comes and the last that goes make a difference; to one that
                    # is in the set, but no partner of its own, the second.
                    decisive = 0 if load is None else 1
                    most = decisive + (at in self._terms.with_non_partners)
                    if decisive <= len(decodes.positions) <= most:
                        for user in self._terms.users[at]:
                            self._update_prefill(pairs, user)
        if position in self._terms.set_of:
            self._update_prefill(pairs, position)

    def _update_prefill(self, pairs: _Pairs, position: int) -> None:
        node, load = self.nodes[position], None
        if node.state is NodeState.READY and self._has_partner(pairs, position):
            load = self._loads.with_room(node, "prefill", 1)
        pairs.prefills[node.info.model].update(position, load)

    def _has_partner(self, pairs: _Pairs, position: int, *, apart: bool = False) -> bool:
        decodes = pairs.decodes[self._terms.set_of[position]]
        is_alone = position in decodes and not self._pairs_itself(position, apart)
        return len(decodes.positions) > is_alone

    def _pairs_itself(self, position: int, apart: bool) -> bool:
        return not apart and self._terms.pairing.serves_alone(position)

    def _update_lone(self, lone: dict[str, Ranked], leg: Leg, n: int, position: int) -> None:
        node = self.nodes[position]
        if node.info.role not in (leg, "both") or not serves_alone(node.info.dialect, leg):
            return
        model = node.info.model
        ranked = lone.get(model)
        if ranked is None:
            ranked = lone[model] = Ranked(self, self._terms.pairing.serving(model, leg))
        load = self._loads.with_room(node, leg, n) if node.state is NodeState.READY else None
        ranked.update(position, load)


def no_pair(snapshot: Snapshot, model: str, *, apart: bool = False) -> NoPair | None:
    """Return None if any two agents in rotation fit, whether they have room or not; else why none do."""
    if (unknown := unknown_model(snapshot, model)) is not None:
        return unknown
    prefills, decodes = in_rotation(snapshot, model, "prefill"), in_rotation(snapshot, model, "decode")
    if not prefills:
        return NoPair.NO_PREFILL
    if not decodes:
        return NoPair.NO_DECODE
    fitting = Matching(snapshot.pairing, "prefill", decodes, apart=apart)
    return None if any(map(fitting.has_partner, prefills)) else NoPair.INCOMPATIBLE


def not_served(snapshot: Snapshot, model: str, *, decode_only: bool, split_min_tokens: int) -> NoPair | None:
    """Return None if a request for the model can be served, by a pair or by a decode agent alone; else why
    none can. See `FleetSettings`.
    """
    reason = no_pair(snapshot, model)
    may_be_alone = split_min_tokens > 0 or (decode_only and is_decode_only(snapshot, model, reason))
    return None if may_be_alone and any_serves_alone(snapshot, model, "decode") else reason


def is_decode_only(snapshot: Snapshot, model: str, reason: object) -> bool:
    """Return whether decode agents should serve alone where, for this `reason` (`NoPair`), there is no pair:
    no prefill agent is ready, or the canary has taken out pairs.
    """
    if reason is NoPair.NO_PREFILL:
        return not in_rotation(snapshot, model, "prefill")
    return reason is NoPair.INCOMPATIBLE and bool(snapshot.pairing.pairs_out)


def any_serves_alone(snapshot: Snapshot, model: str, leg: Leg) -> bool:
    """Return whether an agent in rotation that has the leg's role can serve all of a request."""
    nodes = (snapshot.nodes[each] for each in in_rotation(snapshot, model, leg))
    return any(serves_alone(node.info.dialect, leg) for node in nodes)


def unknown_model(snapshot: Snapshot, model: str) -> NoPair | None:
    """Return why the model is not known; None if it is served, or was lately."""
    if model in snapshot.models:
        return None
    # Before any agent has registered, no model can be called unknown.
    return NoPair.UNKNOWN_MODEL if snapshot.models else NoPair.NO_AGENT


def in_rotation(snapshot: Snapshot, model: str, leg: Leg) -> list[int]:
    """Return the positions of the model's agents for the leg that are ready."""
    nodes, ready = snapshot.nodes, NodeState.READY
    return [each for each in snapshot.pairing.serving(model, leg) if nodes[each].state is ready]


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    kept[key] = value
    if len(kept) > MAX_SIZES:
        kept.popitem(last=False)
