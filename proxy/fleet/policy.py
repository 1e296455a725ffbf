# SPDX-License-Identifier: Apache-2.0
"""Which of several agents, any of which could take a leg, is to take it.

A policy answers from what it is given: it does no I/O and reads no clock. What it may keep is what it was
told by `note`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from kvferry.proxy.fleet.registry import Node
from kvferry.proxy.fleet.routing_request import RoutingRequest

PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware", "session"]
LoadOf = Callable[[Node], int]


class Policy(ABC):
    """One role's way of choosing."""

    @abstractmethod
    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        """The agent for this request.

        Args:
            nodes: Those that could take it: at least one, always in the same order.
            ask: What is known of the request.
            turn: How many requests went before; ties go to `nodes` in turn.
            load: An agent's sequences, running and waiting, as far as this proxy knows.
        """

    def note(self, node: Node, ask: RoutingRequest) -> None:
        """The request goes to `node` indeed."""
        return

    def cached_tokens(self, node: Node, ask: RoutingRequest) -> int:
        """How many tokens of the prompt's beginning the agent has seen before, for all this policy knows."""
        return 0


class RoundRobin(Policy):
    """All in turn."""

    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return nodes[turn % len(nodes)]


class LeastLoaded(Policy):
    """The one with the fewest sequences; equals in turn, so that an idle fleet is used evenly."""

    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return least_loaded(nodes, turn, load)


class PowerOfTwo(Policy):
    """The less loaded of two that were drawn at random.

    Almost as even as the least loaded of all, and several proxies that see the same pings do not all run to
    the same agent (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        return min(self._rng.sample(nodes, min(2, len(nodes))), key=load)


class Session(Policy):
    """All requests of a session to one agent, by rendezvous hashing; those without one to the least loaded.

    An agent that comes or goes moves only the sessions that it gains or loses. The hash is of addresses, so
    that a session comes back to an agent that was restarted.
    """

    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        session = ask.session
        if session is None:
            return least_loaded(nodes, turn, load)
        return max(nodes, key=lambda node: _draw(session, node.info.address))


def least_loaded(nodes: Sequence[Node], turn: int, load: LoadOf) -> Node:
    """The first of the least loaded, counting from whose turn it is."""
    start = turn % len(nodes)
    return min([*nodes[start:], *nodes[:start]], key=load)


def _draw(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{address}".encode(errors="surrogatepass"), digest_size=8).digest()
