# SPDX-License-Identifier: Apache-2.0
"""Where the KV of each rank of other engines' prefill servers is fetched, as they last said."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.proxy.dialects.base import Endpoints, KvEndpoint
from kvferry.proxy.wire.registration import Incarnation

MAX_ENTRIES = 4096


class KvEndpointCache:
    """Bounded, by server and rank. A server that fails is forgotten: it may have restarted."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[KvEndpoint, float]] = OrderedDict()

    def find(self, endpoints: Endpoints, *, since: float = float("-inf")) -> KvEndpoint | None:
        """Return where a sub-request's KV is fetched, if that was learned at `since` or later."""
        kv_endpoint, learned_at = self._known.get(_key(endpoints), (None, 0.0))
        return kv_endpoint if learned_at >= since else None

    def learn(self, endpoints: Endpoints, kv_endpoint: KvEndpoint, now: float) -> None:
        """Remember it, and forget the one learned longest ago past `MAX_ENTRIES`."""
        self._known[_key(endpoints)] = (kv_endpoint, now)
        self._known.move_to_end(_key(endpoints))
        if len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)

    def forget(self, server: Incarnation) -> None:
        """Forget all ranks of a server."""
        for key in [key for key in self._known if key[0] == server]:
            del self._known[key]


def _key(endpoints: Endpoints) -> tuple[str, int]:
    return endpoints.prefill.incarnation, endpoints.prefill_rank or 0
