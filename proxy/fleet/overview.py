# SPDX-License-Identifier: Apache-2.0
"""Everything on the operator's page at one moment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.proxy.fleet.registry import Snapshot
from kvferry.proxy.fleet.slots import Slots
from kvferry.proxy.fleet.views import nodes_page, readiness
from kvferry.proxy.telemetry.history import History

MAX_SHOWN = 200


def overview(
    snapshot: Snapshot, slots: Slots, in_flight: Mapping[str, int], history: History, now: float
) -> dict[str, Any]:
    """Of each list the first `MAX_SHOWN` entries, beside their full number.

    `in_flight`: requests now in each phase. `now`: on the clock that the history was told.
    """
    fleet = nodes_page(snapshot, slots, now)
    nodes, refused = fleet["nodes"], fleet["refused_pairings"]
    failures = [
        {**msgspec.to_builtins(failure.last), "count": failure.count, "age_s": round(now - failure.at, 1)}
        for failure in history.failures()
    ]
    return {
        "time": time.time(),
        "readiness": readiness(snapshot),
        "nodes": nodes[:MAX_SHOWN],
        "num_nodes": len(nodes),
        "refused_pairings": refused[:MAX_SHOWN],
        "num_refused_pairings": len(refused),
        "refused_agents": fleet["refused_agents"],
        "in_flight": in_flight,
        "charts": history.charts(now),
        "failures": failures,
    }
