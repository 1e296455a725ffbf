# SPDX-License-Identifier: Apache-2.0
"""Who could take a leg: the agents in rotation that have room for it and, of a pair, a partner with room.

`Openings` keeps them from one request to the next and looks only at agents that have changed meanwhile, so
that a request costs the same in a large fleet as in a small one. `Search` looks at all agents, for a request
that some of them are kept from. Both find the same agents, in the order of their positions in the snapshot.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvferry.proxy.dialects.names import SERVING_ALONE
from kvferry.proxy.fleet.groups import Groups, Matching, groups_of
from kvferry.proxy.fleet.load import Candidates, Listed, Loads
from kvferry.proxy.fleet.registry import Leg, Memo, Node, NodeState, Snapshot
from kvferry.proxy.wire.registration import Incarnation

_K = TypeVar("_K")
_V = TypeVar("_V")

MAX_SIZES = 4
"""Numbers of choices for which openings are kept at once; those of another request are made for it."""


class Ranked(Candidates):
    """Candidates in order and by load, by position; a change costs O(log n), but for moving pointers."""

    def __init__(self, fleet: Openings, pool: Sequence[int]) -> None:
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


class Search:
    """The candidates of one request, by a look at all agents of its model.

    With `apart`, no agent is its own partner.
    """

    def __init__(self, snapshot: Snapshot, loads: Loads, *, apart: bool = False) -> None:
        self._snapshot = snapshot
        self._groups = groups_of(snapshot)
        self._loads = loads
        self._apart = apart
        self._with_room: Matching
        self._prefills: dict[Incarnation, int]

    def prefills(self, model: str, n: int) -> Candidates:
        """Return the prefill agents that have room, and a partner with room for `n` choices."""
        nodes, has_room = self._snapshot.nodes, self._loads.has_room
        decodes = [each for each in self._serving(model, "decode") if has_room(nodes[each], "decode", n)]
        self._with_room = matching = Matching(self._groups, "prefill", decodes, apart=self._apart)
        # A prefill agent without a partner must not cost its neighbour two turns, so it is left out first.
        self._prefills = {
            nodes[each].incarnation: each
            for each in self._serving(model, "prefill")
            if matching.has_partner(each) and has_room(nodes[each], "prefill", 1)
        }
        return self._listed(self._prefills.values())

    def partners(self, prefill: Node, n: int) -> Candidates:
        """Return the partners with room of one of the last `prefills`."""
        return self._listed(self._with_room.partners(self._prefills[prefill.incarnation]))

    def lone(self, model: str, leg: Leg, n: int) -> Candidates:
        """Return the agents of the leg's role with room for `n` choices whose dialect can serve all alone."""
        nodes, has_room = self._snapshot.nodes, self._loads.has_room
        return self._listed(
            each
            for each in self._serving(model, leg)
            if nodes[each].info.dialect in SERVING_ALONE[leg] and has_room(nodes[each], leg, n)
        )

    def _serving(self, model: str, leg: Leg) -> list[int]:
        nodes, ready = self._snapshot.nodes, NodeState.READY
        return [each for each in self._groups.serving(model, leg) if nodes[each].state is ready]

    def _listed(self, positions: Iterable[int]) -> Candidates:
        nodes = self._snapshot.nodes
        return Listed([nodes[each] for each in positions], self._loads.at)


class _Pairs:
    """Who could take a leg of a request of `n` choices.

    `decodes`: with room, by set of partners (`_Terms`). `prefills`: with room and a partner, by model.
    """

    def __init__(self, n: int, fleet: Openings, terms: _Terms) -> None:
        self.n = n
        self.decodes = [Ranked(fleet, each) for each in terms.partners]
        self.prefills = {model: Ranked(fleet, pool) for model, pool in terms.prefills.items()}


class _Terms:
    """What follows from the registrations alone, by position. Partners come in sets that many share."""

    def __init__(self, groups: Groups, nodes: Sequence[Node]) -> None:
        self.groups = groups
        self.partners: list[Sequence[int]] = []
        """The decode agents of each set."""
        self.partners_of: dict[int, int] = {}
        """By prefill agent: its set."""
        self.sets_of: dict[int, list[int]] = {}
        """By decode agent: the sets that it is in."""
        self.users: list[list[int]] = []
        """By set: the prefill agents whose partners it holds."""
        self.careful: set[int] = set()
        """Prefill agents whose partners are not just those of their set that are open."""
        self.careful_users: list[list[int]] = []
        """By set: the careful ones that use it."""
        self.prefills: dict[str, Sequence[int]] = {}
        """By model: its prefill agents."""
        known: dict[int, int] = {}
        for position, node in enumerate(nodes):
            if node.info.role != "decode":
                model = node.info.model
                self.prefills.setdefault(model, groups.serving(model, "prefill"))
                self._add_user(position, node, groups.partners(position, "prefill"), known)
        for at, partners in enumerate(self.partners):
            for position in partners:
                self.sets_of.setdefault(position, []).append(at)

    def _add_user(self, position: int, node: Node, partners: Sequence[int], known: dict[int, int]) -> None:
        at = known.setdefault(id(partners), len(self.partners))
        if at == len(self.partners):
            self.partners.append(partners)
            self.users.append([])
            self.careful_users.append([])
        self.partners_of[position] = at
        self.users[at].append(position)
        may_pair_itself = node.info.role == "both"
        pairs_itself = may_pair_itself and self.groups.serves_alone(position)
        if (
            self.groups.rejections(position, "prefill")
            or (may_pair_itself and not pairs_itself)
            or (pairs_itself and not _holds(partners, position))
        ):
            self.careful.add(position)
            self.careful_users[at].append(position)


class Openings:
    """The candidates of a fleet, kept from one request to the next.

    `follow` brings them up to date; what the other methods return holds until then.
    """

    def __init__(self, loads: Loads) -> None:
        self.nodes: Sequence[Node] = ()
        self.position_of: dict[Incarnation, int] = {}
        self._loads = loads
        self.states_epoch = 0
        """Grows when an agent comes, goes, or enters or leaves the rotation."""
        self._memo: Memo | None = None
        self._terms: _Terms
        self._pairs: OrderedDict[int, _Pairs] = OrderedDict()
        self._lone: OrderedDict[tuple[Leg, int], dict[str, Ranked]] = OrderedDict()

    def follow(self, snapshot: Snapshot) -> None:
        """Look at the agents that have changed, or whose slots have, since the last snapshot."""
        before, self.nodes = self.nodes, snapshot.nodes
        changed_slots = self._loads.take_changed()
        if snapshot.memo is not self._memo:
            self._memo = snapshot.memo
            self._terms = _Terms(groups_of(snapshot), snapshot.nodes)
            self.position_of = {node.incarnation: at for at, node in enumerate(snapshot.nodes)}
            self._pairs.clear()
            self._lone.clear()
            snapshot.memo.changed.clear()
            self.states_epoch += 1
            return
        changed = {self.position_of[agent] for agent in changed_slots if agent in self.position_of}
        for position in snapshot.memo.changed:
            changed.add(position)
            self.states_epoch += before[position].state is not self.nodes[position].state
        snapshot.memo.changed.clear()
        for position in changed:
            for pairs in self._pairs.values():
                self._update_pairs(pairs, position)
            for (leg, n), lone in self._lone.items():
                self._update_lone(lone, leg, n, position)

    def prefills(self, model: str, n: int) -> Candidates:
        """See `Search`."""
        return self._pairs_for(n).prefills.get(model) or Ranked(self, ())

    def partners(self, prefill: Node, n: int) -> Candidates:
        """See `Search`."""
        position = self.position_of[prefill.incarnation]
        pairs, at = self._pairs_for(n), self._terms.partners_of[position]
        decodes = pairs.decodes[at]
        if position not in self._terms.careful:
            return decodes
        found = [self.nodes[each] for each in self._careful_partners(pairs, position)]
        return Listed(found, self._loads.at)

    def lone(self, model: str, leg: Leg, n: int) -> Candidates:
        """See `Search`."""
        key = (leg, n)
        lone = self._lone.get(key)
        if lone is None:
            lone = {}
            for position in range(len(self.nodes)):
                self._update_lone(lone, leg, n, position)
            _keep(self._lone, key, lone)
        self._lone.move_to_end(key)
        return lone.get(model) or Ranked(self, ())

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
        sets = self._terms.sets_of.get(position)
        if sets:
            load = self._loads.with_room(node, "decode", pairs.n) if node.state is NodeState.READY else None
            for at in sets:
                decodes = pairs.decodes[at]
                if decodes.update(position, load):
                    # To most, only the first partner that comes and the last that goes make a difference.
                    is_decisive = len(decodes) == (0 if load is None else 1)
                    users = self._terms.users if is_decisive else self._terms.careful_users
                    for user in users[at]:
                        self._update_prefill(pairs, user)
        if position in self._terms.partners_of:
            self._update_prefill(pairs, position)

    def _update_prefill(self, pairs: _Pairs, position: int) -> None:
        node, load = self.nodes[position], None
        if node.state is NodeState.READY and self._has_partner(pairs, position):
            load = self._loads.with_room(node, "prefill", 1)
        pairs.prefills[node.info.model].update(position, load)

    def _has_partner(self, pairs: _Pairs, position: int) -> bool:
        if position in self._terms.careful:
            return bool(self._careful_partners(pairs, position))
        return bool(pairs.decodes[self._terms.partners_of[position]].positions)

    def _careful_partners(self, pairs: _Pairs, position: int) -> list[int]:
        groups, node = self._terms.groups, self.nodes[position]
        rejections = groups.rejections(position, "prefill")
        open_ = pairs.decodes[self._terms.partners_of[position]].positions
        found = [each for each in open_ if each != position and each not in rejections]
        if (
            groups.serves_alone(position)
            and node.state is NodeState.READY
            and self._loads.has_room(node, "decode", pairs.n)
        ):
            insort(found, position)
        return found

    def _update_lone(self, lone: dict[str, Ranked], leg: Leg, n: int, position: int) -> None:
        node = self.nodes[position]
        if node.info.role not in (leg, "both") or node.info.dialect not in SERVING_ALONE[leg]:
            return
        model = node.info.model
        ranked = lone.get(model)
        if ranked is None:
            ranked = lone[model] = Ranked(self, self._terms.groups.serving(model, leg))
        load = self._loads.with_room(node, leg, n) if node.state is NodeState.READY else None
        ranked.update(position, load)


def _holds(ordered: Sequence[int], value: int) -> bool:
    index = bisect_left(ordered, value)
    return index < len(ordered) and ordered[index] == value


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    kept[key] = value
    if len(kept) > MAX_SIZES:
        kept.popitem(last=False)
