# SPDX-License-Identifier: Apache-2.0
"""Which agents of a snapshot cannot be paired, and why (the rule is in `proxy.fleet.groups`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.proxy.fleet.groups import Mismatch, groups_of, reason
from kvferry.proxy.fleet.registry import Snapshot
from kvferry.proxy.wire.messages import Register


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
