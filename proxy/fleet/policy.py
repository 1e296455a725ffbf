# SPDX-License-Identifier: Apache-2.0
"""Policies: which of several agents, any of which could serve a leg, is to serve it.

A policy does no I/O and reads no clock. It may remember what `note` passes to it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from kvferry.proxy.fleet.registry import Node
from kvferry.proxy.fleet.routing_request import CHUNK_TOKENS, RoutingRequest
from kvferry.proxy.wire.messages import Incarnation

PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware", "session"]
LoadOf = Callable[[Node], int]

MAX_CHUNKS_KNOWN = 65536
"""About 25 MB, and the beginnings of four million tokens."""
MAX_HOLDERS = 8
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8


class Policy(ABC):
    """How to choose among the agents of one role."""

    @abstractmethod
    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        """Return the agent for this request.

        Args:
            nodes: Those that could take it: at least one, always in the same order.
            request: What routing knows of the request.
            turn: How many requests went before; ties go to `nodes` in turn.
            load: Returns an agent's sequences, running and waiting, as far as this proxy knows.
        """

    def note(self, node: Node, request: RoutingRequest) -> None:
        """Record that the request goes to `node`."""
        return

    def cached_tokens(self, node: Node, request: RoutingRequest) -> int:
        """Estimate how many tokens of the prompt's beginning the agent has computed before."""
        return 0


class RoundRobin(Policy):
    """All in turn."""

    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return nodes[turn % len(nodes)]


class LeastLoaded(Policy):
    """The one with the fewest sequences; equals in turn, so that an idle fleet is used evenly."""

    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return least_loaded(nodes, turn, load)


class PowerOfTwo(Policy):
    """The less loaded of two that are chosen at random.

    Almost as even as the least loaded of all, and several proxies that see the same pings do not all run to
    the same agent (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return min(self._rng.sample(nodes, min(2, len(nodes))), key=load)


class Session(Policy):
    """All requests of a session to one agent, by rendezvous hashing; those without one to the least loaded.

    An agent that comes or goes moves only the sessions that it gains or loses. The hash is of addresses, so
    that a session comes back to an agent that was restarted.
    """

    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        session = request.session
        if session is None:
            return least_loaded(nodes, turn, load)
        return max(nodes, key=lambda node: _rank(session, node.info.address))


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

    def pick(self, nodes: Sequence[Node], request: RoutingRequest, turn: int, load: LoadOf) -> Node:
        relaxed = least_loaded(nodes, turn, load)
        matches = {node.incarnation: self._index.matched(request.chunks, node.incarnation) for node in nodes}
        longest = max(matches.values())
        if not longest:
            return relaxed
        holder = least_loaded([node for node in nodes if matches[node.incarnation] == longest], turn, load)
        overloaded = load(holder) > OVERLOAD_FACTOR * load(relaxed) + OVERLOAD_SLACK
        return relaxed if overloaded else holder

    def note(self, node: Node, request: RoutingRequest) -> None:
        self._index.remember(request.chunks, node.incarnation)

    def cached_tokens(self, node: Node, request: RoutingRequest) -> int:
        return self._index.matched(request.chunks, node.incarnation) * CHUNK_TOKENS


def least_loaded(nodes: Sequence[Node], turn: int, load: LoadOf) -> Node:
    """Return the first of the least loaded, counting from the one whose turn it is."""
    start = turn % len(nodes)
    return min([*nodes[start:], *nodes[:start]], key=load)


def _rank(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{address}".encode(errors="surrogatepass"), digest_size=8).digest()
