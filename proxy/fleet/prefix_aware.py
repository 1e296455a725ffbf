# SPDX-License-Identifier: Apache-2.0
"""The policy that sends a prompt to where its beginning was computed before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.proxy.fleet.policy import LoadOf, Policy, least_loaded
from kvferry.proxy.fleet.registry import Node
from kvferry.proxy.fleet.routing_request import CHUNK_TOKENS, RoutingRequest
from kvferry.proxy.wire.messages import Incarnation

MAX_CHUNKS_KNOWN = 65536
"""About 25 MB, and the beginnings of four million tokens."""
MAX_HOLDERS = 8
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8


class PrefixIndex:
    """Which agents have seen which beginnings: chunks of prompts, the least lately used forgotten first."""

    def __init__(self, capacity: int = MAX_CHUNKS_KNOWN) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[Incarnation, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, chunks: Sequence[bytes], agent: Incarnation) -> None:
        """The agent computes a prompt that begins with `chunks`."""
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
        """How many of the leading chunks the agent has seen, without a gap."""
        for count, chunk in enumerate(chunks):
            if agent not in self._holders.get(chunk, ()):
                return count
        return len(chunks)


class PrefixAware(Policy):
    """The agent that has seen the longest beginning of the prompt, unless it is overloaded.

    Overloaded means: `OVERLOAD_SLACK` sequences beyond `OVERLOAD_FACTOR` times the least loaded agent's.
    Then, and when nobody has seen the prompt, it goes to the least loaded, who has seen it from then on.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def pick(self, nodes: Sequence[Node], ask: RoutingRequest, turn: int, load: LoadOf) -> Node:
        relaxed = least_loaded(nodes, turn, load)
        matches = {node.incarnation: self._index.matched(ask.chunks, node.incarnation) for node in nodes}
        longest = max(matches.values())
        if not longest:
            return relaxed
        holder = least_loaded([node for node in nodes if matches[node.incarnation] == longest], turn, load)
        overloaded = load(holder) > OVERLOAD_FACTOR * load(relaxed) + OVERLOAD_SLACK
        return relaxed if overloaded else holder

    def note(self, node: Node, ask: RoutingRequest) -> None:
        self._index.remember(ask.chunks, node.incarnation)

    def cached_tokens(self, node: Node, ask: RoutingRequest) -> int:
        return self._index.matched(ask.chunks, node.incarnation) * CHUNK_TOKENS
