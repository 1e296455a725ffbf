# SPDX-License-Identifier: Apache-2.0
"""What one hand-over is made of: from the prefill server's answer to the decode server's first token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pd.load import LONG, Seen, quantiles

STAGES = {
    "arrived": "proxy, HTTP, vLLM's API process, until its scheduler has the request",
    "allocated": "until the scheduler has allocated blocks",
    "read_began": "control: lease, plan, until the first read",
    "read_ended": "read",
    "proven": "the producer's proof, and the verdict",
    "told": "until a step's report, which tells vLLM",
    "scheduled": "until the request is in a step",
    "computed": "that step, behind the one before it",
    "token": "the token's way to the client: vLLM's API process, HTTP, proxy",
}
"""The moment that ends each stage, in order, and what the stage is."""


def timeline(path: Path, seen: Sequence[Seen], logged: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of each stage, p50 and p99, of long prompts and of short ones (`stages`), of so many
    `requests`. Left out, and counted, are those that failed, had no transfer, or of which the first event
    was not the prefill's token (`no_early_token`): a token without text is not sent.

    Args:
        path: What `timed_connector` wrote.
        seen: What their clients saw: the first event is the prefill's, the second the decode's.
        logged: The proxy's lines of them.
    """
    by_transfer = {each["transfer_id"]: each for each in map(json.loads, path.read_text().splitlines())}
    transfers = {each["request_id"]: each["transfer_ids"] for each in logged}
    counts = dict.fromkeys(("failed", "no_transfer", "no_early_token"), 0)
    stages: dict[str, list[list[float]]] = {"long": [], "short": []}
    for one in seen:
        ids = transfers.get(one.request_id, [])
        marks = by_transfer.get(ids[-1]) if ids else None
        if one.error:
            counts["failed"] += 1
        elif marks is None or not marks.keys() >= STAGES.keys() - {"token"}:
            counts["no_transfer"] += 1
        elif one.times[0] > marks["scheduled"]:
            counts["no_early_token"] += 1
        else:
            moments = [one.times[0], *(marks[name] for name in STAGES if name != "token"), one.times[1]]
            stages["long" if one.prompt_tokens == LONG else "short"].append(list(np.diff(moments) * 1e3))
    return {
        "requests": len(seen),
        **counts,
        "stages": {
            length: {
                **{name: quantiles(column) for name, column in zip(STAGES, np.array(rows).T, strict=True)},
                "all": quantiles(np.array(rows).sum(axis=1)),
            }
            for length, rows in stages.items()
            if rows
        },
    }
