# SPDX-License-Identifier: Apache-2.0
"""What was learned of other engines' prefill servers: where the KV of each of their ranks is fetched."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.proxy.dialects.base import Endpoints, Peer
from kvferry.proxy.wire.messages import Incarnation

MAX_PEERS = 4096


class PeerCache:
    """A bounded memory by server and rank. Whoever fails is forgotten: it may have come back as another."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[Peer, float]] = OrderedDict()

    def find(self, ends: Endpoints, *, since: float = float("-inf")) -> Peer | None:
        """The peer behind a part's prefill leg, if it was learned at `since` or later."""
        peer, learned_at = self._known.get(_key(ends), (None, 0.0))
        return peer if learned_at >= since else None

    def learn(self, ends: Endpoints, peer: Peer, now: float) -> None:
        """Remember it, and forget the one learned longest ago past `MAX_PEERS`."""
        self._known[_key(ends)] = (peer, now)
        self._known.move_to_end(_key(ends))
        if len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def forget(self, server: Incarnation) -> None:
        """Forget all ranks of a server."""
        for key in [key for key in self._known if key[0] == server]:
            del self._known[key]


def _key(ends: Endpoints) -> tuple[str, int]:
    return ends.prefill.incarnation, ends.prefill_rank or 0
