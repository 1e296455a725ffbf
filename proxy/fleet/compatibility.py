# SPDX-License-Identifier: Apache-2.0
"""Whether a prefill agent's KV can be read by a decode agent, and if not, why."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.proxy.dialects.catalogue import SERVING_ALONE, SUPPORTED
from kvferry.proxy.fleet.registry import Snapshot
from kvferry.proxy.wire.messages import NATIVE_DIALECT, Register

ONE_HOST_TRANSFERS = frozenset({"cuda_ipc"})


class Mismatch(enum.StrEnum):
    """What keeps two agents apart; the words are shown to operators."""

    DIALECT = "no dialect in common"
    ALONE = "it takes no request without a partner"
    MODEL = "different models"
    WEIGHTS = "different weights"
    TOKENIZER = "different tokenizers"
    LAYOUT = "different KV layouts"
    MODE = "different transfer modes"
    HANDSHAKE = "rejected in their handshake"
    TRANSFER = "no transfer in common that works between them"


class IncompatiblePair(NamedTuple):
    prefill: Register
    decode: Register
    why: Mismatch

    @property
    def text(self) -> str:
        """For operators; with the values that differ where the agents named them."""
        return reason(self.prefill, self.decode, self.why)


def mismatch(prefill: Register, decode: Register) -> Mismatch | None:
    """Return the first reason why the two cannot serve a request together. An agent pairs with itself."""
    if prefill.dialect != decode.dialect or prefill.dialect not in SUPPORTED:
        return Mismatch.DIALECT
    if prefill.model != decode.model:
        return Mismatch.MODEL
    if prefill.incarnation == decode.incarnation:
        return None if prefill.dialect in SERVING_ALONE else Mismatch.ALONE
    if prefill.weights != decode.weights:
        return Mismatch.WEIGHTS
    if prefill.tokenizer != decode.tokenizer:
        return Mismatch.TOKENIZER
    if prefill.layout != decode.layout:
        return Mismatch.LAYOUT
    if prefill.transfer_mode != decode.transfer_mode:
        return Mismatch.MODE
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
    if why is Mismatch.LAYOUT:
        theirs = decode.geometry
        differing = {name: value for name, value in prefill.geometry.items() if theirs.get(name) != value}
        return ", ".join(
            f"{name} {value} at the prefill agent, {theirs.get(name, 'unknown')} at the decode agent"
            for name, value in differing.items()
        )
    return ""


def alike(snapshot: Snapshot, agent: Register) -> Snapshot:
    """Keep only the agents that sample the same tokens as `agent`: they may continue what it has begun."""
    kind = (agent.weights, agent.tokenizer, agent.layout)
    nodes = tuple(
        node for node in snapshot.nodes if (node.info.weights, node.info.tokenizer, node.info.layout) == kind
    )
    return Snapshot(nodes, snapshot.models)


def common_transfers(prefill: Register, decode: Register) -> frozenset[str]:
    """Return the transfer backends that both list and that work between their hosts."""
    both = frozenset(prefill.transfers) & frozenset(decode.transfers)
    return both if prefill.host_id == decode.host_id else both - ONE_HOST_TRANSFERS


def incompatible_pairs(snapshot: Snapshot) -> Iterator[IncompatiblePair]:
    """Yield every two agents of one model that are up but cannot be paired. Quadratic: not for routing.

    Agents of different models are no pair that anybody would miss.
    """
    for prefill in snapshot.nodes:
        for decode in snapshot.nodes:
            of_one_model = prefill.info.model == decode.info.model
            if of_one_model and prefill.serves("prefill") and decode.serves("decode"):
                why = mismatch(prefill.info, decode.info)
                if why is not None:
                    yield IncompatiblePair(prefill.info, decode.info, why)
