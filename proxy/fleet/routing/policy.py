# SPDX-License-Identifier: Apache-2.0
"""Policies: which of several agents, any of which could serve a leg, is to serve it.

A policy does no I/O and reads no clock. It may remember what `note` passes to it. `PrefixLenders` chooses
whose KV of a prompt's beginning may be used again: a hint, of texts or ids as clients send them. Agents
compare the ids of tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nlargest
from typing import Literal

from kvferry.common.hashing import Purpose, digest
from kvferry.proxy.fleet.pairing import Leg
from kvferry.proxy.fleet.routing.candidates import Candidates, Listed
from kvferry.proxy.fleet.routing.costs import UNKNOWN, Cost, RouteCosts, add
from kvferry.proxy.fleet.routing.routing_request import CHUNK_TOKENS, Pair, PrefixLender, RoutingRequest
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.wire.dialects import serves_alone
from kvferry.proxy.wire.registration import Incarnation, Register

PolicyName = Literal["least_work", "round_robin", "prefix_aware", "session"]

ALL_LOOKS, MAX_LOOKS = 8, 4
"""Candidates whose costs are compared: so many all, and of more than these some. Two would often be none of
the few that decode in a fleet where all have the role `both`.
"""
TIE = 0.1
"""Costs that differ by less than this part are equal: they are predictions."""
MAX_CHUNKS_KNOWN = 65536
"""About 25 MB, and the beginnings of four million tokens."""
MAX_HOLDERS = 8
MAX_SESSIONS_KNOWN = 16384
"""About 10 MB."""
SESSION_CHOICES = 4
"""Agents remembered for a session: while one of them has room, no others are looked at."""
LEAST_PULLED_TOKENS = 128
PREFIX_PULL_COST = 2.5
"""What pulling the beginning of a prompt takes, in pulls of whole prompts by decode agents: the lender is
asked first, and the prompt waits for a step after it (`benchmarks/results/2026-11-27-2-h200`).
"""
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8


class Policy(ABC):
    """How to choose among the agents of one role."""

    @abstractmethod
    def pick(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        """Return the agent for this request.

        Args:
            candidates: Those that could take it: at least one.
            request: What routing knows of the request.
            turn: How many requests went before; ties go to the candidates in turn.
        """

    def pick_alone(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        """Return the agent for all of this request."""
        return self.pick(candidates, request, turn)

    def note(self, node: Node, request: RoutingRequest) -> None:
        """Record that the request goes to `node`."""
        return

    def cached_tokens(self, node: Node, request: RoutingRequest) -> int:
        """Estimate how many tokens of the prompt's beginning the agent has computed before."""
        return 0


class RoundRobin(Policy):
    """All in turn."""

    def pick(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        return candidates[turn % len(candidates)]


class LeastWork(Policy):
    """The one where the leg costs least (`RouteCosts`) of those that are predicted to keep the objectives, if
    any is; while none has measured anything, the one with the fewest sequences. Costs that are about equal in
    turn, so that an idle fleet is used evenly.

    Of more than a few, it compares some, others at each turn: almost as even as the least of all, and several
    proxies that see the same pings do not all run to the same agent (Mitzenmacher, "The Power of Two Choices
    in Randomized Load Balancing", 2001).
    """

    def __init__(self, costs: RouteCosts, leg: Leg) -> None:
        self._costs = costs
        self._cost = costs.prefill if leg == "prefill" else costs.decode

    def pick(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        if len(candidates) == 1:
            return candidates[0]
        least = _least(_compared(candidates, turn), self._cost)
        return candidates.least_loaded(turn) if least is None else least[1]

    def pick_alone(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        least = _least(_compared(candidates, turn), self._costs.alone)
        return candidates.least_loaded(turn) if least is None else least[1]

    def pair(self, prefill: Node, partners: Candidates, turn: int) -> tuple[Node, Node] | None:
        """Return the prefill agent and the partner that costs least, or twice an agent of role `both` that
        costs less alone; None if no cost is known.
        """
        compared = _compared(partners, turn)
        decode = _least([node for node in compared if node is not prefill], self._costs.decode)
        if "both" in (prefill.info.role, decode and decode[1].info.role):
            by_itself = _least([node for node in compared if _may_be_alone(node)], self._costs.alone)
            if by_itself is not None:
                cost = self._costs.prefill(prefill)
                if decode is None or by_itself[0] <= add(cost, decode[0]):
                    return by_itself[1], by_itself[1]
        return decode and (prefill, decode[1])


class Session(Policy):
    """All requests of a session to one agent, by rendezvous hashing; those without one to the least loaded.

    An agent that comes or goes moves only the sessions that it gains or loses. The hash is of addresses, so
    that a session comes back to an agent that was restarted.

    The first request of a session looks at all agents; its first few are remembered for as long as no agent
    comes or goes.
    """

    def __init__(self) -> None:
        self._ranked: OrderedDict[str, tuple[Sequence[int], list[Incarnation]]] = OrderedDict()
        """By session: the pool, and those of it that rank first."""

    def pick(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        session, pool = request.session, candidates.pool
        if session is None:
            return candidates.least_loaded(turn)

        def rank(node: Node) -> bytes:
            return _rank(session, node.info.location)

        if pool is None:
            return max(candidates, key=rank)
        known = self._ranked.pop(session, None)
        if known is None or known[0] is not pool:
            first = nlargest(SESSION_CHOICES, candidates.in_pool(), key=rank)
            known = (pool, [node.incarnation for node in first])
        self._ranked[session] = known
        if len(self._ranked) > MAX_SESSIONS_KNOWN:
            self._ranked.popitem(last=False)
        return max(candidates.find(known[1]) or candidates, key=rank)


class PrefixIndex:
    """Which agents have computed which beginnings of prompts: an LRU map of chunks."""

    def __init__(self, capacity: int = MAX_CHUNKS_KNOWN) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[Incarnation, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, chunks: Sequence[bytes], agent: Incarnation) -> None:
        """Record that the agent computes a prompt that begins with `chunks`."""
        # From the end, so that of one prompt the beginning, which others share, is forgotten last.
        for chunk in reversed(chunks):
            holders = self._holders.setdefault(chunk, {})
            self._holders.move_to_end(chunk)
            holders.pop(agent, None)
            holders[agent] = None
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def holders(self, chunks: Sequence[bytes]) -> Iterable[Incarnation]:
        """Return the agents that have computed the first of the chunks: `MAX_HOLDERS` at most."""
        return self._holders.get(chunks[0], {}).keys() if chunks else ()

    def matched(self, chunks: Sequence[bytes], agent: Incarnation) -> int:
        """Return how many of the leading chunks the agent has computed, without a gap."""
        for count, chunk in enumerate(chunks):
            if agent not in self._holders.get(chunk, ()):
                return count
        return len(chunks)


class PrefixAware(Policy):
    """The agent that has computed the longest beginning of the prompt, unless it is overloaded.

    Overloaded means: `OVERLOAD_SLACK` sequences beyond `OVERLOAD_FACTOR` times the least loaded agent's.
    Then, and when no agent has computed any of it, the least loaded.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def pick(self, candidates: Candidates, request: RoutingRequest, turn: int) -> Node:
        load, relaxed = candidates.load, candidates.least_loaded(turn)
        holders = candidates.find(self._index.holders(request.chunks))
        if not holders:
            return relaxed
        matches = {
            node.incarnation: self._index.matched(request.chunks, node.incarnation) for node in holders
        }
        longest = max(matches.values())
        best = Listed([node for node in holders if matches[node.incarnation] == longest], load)
        holder = best.least_loaded(turn)
        overloaded = load(holder) > OVERLOAD_FACTOR * load(relaxed) + OVERLOAD_SLACK
        return relaxed if overloaded else holder

    def note(self, node: Node, request: RoutingRequest) -> None:
        self._index.remember(request.chunks, node.incarnation)

    def cached_tokens(self, node: Node, request: RoutingRequest) -> int:
        return self._index.matched(request.chunks, node.incarnation) * CHUNK_TOKENS


class PrefixLenders:
    """Remembers who decoded which prompts, whatever the policies are, as far as these are long enough.

    Args:
        min_tokens: Beginnings of fewer tokens (an estimate) are not worth it; 1 at least. None: nor is what
            the prefill agent lacks of them, if computing it takes less time than pulling it, or if it is less
            than `LEAST_PULLED_TOKENS`.
        dialects: Those whose agents lend.
    """

    def __init__(self, min_tokens: int | None, dialects: Collection[str]) -> None:
        self._by_cost = min_tokens is None
        self._min_tokens = LEAST_PULLED_TOKENS if min_tokens is None else min_tokens
        self._dialects = frozenset(dialects)
        self._index, self._computed = PrefixIndex(), PrefixIndex()

    def note(self, pair: Pair, request: RoutingRequest) -> None:
        """Record who computes the prompt and who decodes the answer."""
        if request.is_kept and self._is_long(request) and pair.decode.info.dialect in self._dialects:
            self._index.remember(request.chunks, pair.decode.incarnation)
            if self._by_cost:
                self._computed.remember(request.chunks, pair.prefill.incarnation)

    def best(self, partners: Candidates, prefill: Node, request: RoutingRequest) -> PrefixLender | None:
        """Return which of the prefill agent's partners has decoded most of the prompt's beginning."""
        if not self._is_long(request):
            return None
        matches = [
            (self._index.matched(request.chunks, node.incarnation) * CHUNK_TOKENS, node)
            for node in partners.find(self._index.holders(request.chunks))
            if _can_lend(node.info, prefill.info)
        ]
        longest, lender = max(matches, key=lambda match: match[0], default=(0, prefill))
        if longest < self._min_tokens:
            return None
        least = self._min_tokens
        # The time per token of prompts counts those in the prefix cache, of which conversations have many.
        token_s = prefill.speed.prompt_token_s or prefill.speed.token_s
        if self._by_cost and token_s:
            least = max(least, math.ceil(PREFIX_PULL_COST * lender.speed.pull_s / token_s))
            computed = self._computed.matched(request.chunks, prefill.incarnation) * CHUNK_TOKENS
            # Of the turn before, it has the prompt; the lender has an answer too.
            if longest - computed + lender.speed.answer_tokens < least:
                return None
        return PrefixLender(lender.info, least)

    def _is_long(self, request: RoutingRequest) -> bool:
        """Several prompts of one request are one text to routing, so nothing is known of each."""
        return self._min_tokens <= request.tokens and request.prompts == 1


def _can_lend(lender: Register, borrower: Register) -> bool:
    """Whether one that fits the other can lend to it."""
    return lender.incarnation not in borrower.refusals and lender.incarnation != borrower.incarnation


def _rank(session: str, address: str) -> bytes:
    return digest(Purpose.SESSION, session, address, size=8)


def _compared(candidates: Candidates, turn: int) -> list[Node]:
    """Return the agents whose costs are compared, counted from the one whose turn it is; none while none has
    measured anything.
    """
    count = len(candidates)
    first = candidates[turn % count]
    if first.speed.token_s is None:
        return []
    looks = count if count <= ALL_LOOKS else MAX_LOOKS
    return [first, *(candidates[(turn + at * (count // looks)) % count] for at in range(1, looks))]


def _least(nodes: Sequence[Node], cost: Callable[[Node], Cost]) -> tuple[Cost, Node] | None:
    """Return the least cost and its agent, of equals the first; None if no cost is known."""
    costs = list(map(cost, nodes))
    late, least_s = min(costs, default=UNKNOWN)
    if not least_s < math.inf:
        return None
    most = late, (1.0 + TIE) * least_s
    for each, node in zip(costs, nodes, strict=True):
        if each <= most:
            return each, node
    return None


def _may_be_alone(node: Node) -> bool:
    return node.info.role == "both" and serves_alone(node.info.dialect, "decode")
