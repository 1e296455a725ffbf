# SPDX-License-Identifier: Apache-2.0
"""What ATOM's servers answered, as files for the unit tests: `make test-atom RECORD=1` writes them.

Without, what they answer is compared with the files.
What differs from run to run (ids, times, ports that the system chose) is replaced by fixed values.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "unit/proxy/dialects/exchanges/atom"
RECORD = bool(os.environ.get("RECORD"))

REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("whole", "completions", {"prompt": "to be recorded", "max_tokens": 4}),
    ("stream", "completions", {"prompt": "to be recorded", "max_tokens": 4, "stream": True}),
    ("ended", "completions", {"prompt": "this ends at once", "max_tokens": 4}),
    ("chat", "chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    (
        "chat_stream",
        "chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True},
    ),
)
FILES = frozenset(
    {(name, kind) for name in ("seed_ranks", "head_ranks") for kind in ("whole", "stream", "ended")}
    | {("head_ranks", "chat"), ("head_ranks", "chat_stream"), ("head_mooncake", "whole")}
)
_SOURCE = "ATOM's own code, run by `make test-atom`: {}"


def check(
    name: str, kind: str, path: str, client: dict[str, Any], prefill: list[Any], decode: list[Any]
) -> None:
    """Compare one request's legs with the file of that name, or write it."""
    told = {
        "source": _SOURCE.format(name),
        "endpoint": path,
        "client": client,
        "prefill_answer": _steady(prefill[0]["answer"]),
        "decode_answer": _steady(decode[0]["answer"]) if kind != "ended" else None,
    }
    file = FOLDER / f"{name}_{kind}.json"
    if RECORD:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told, indent=2) + "\n")
    kept = json.loads(file.read_text())
    assert _comparable(kept) == _comparable(told), f"{file.name} is not what ATOM answers"


def _comparable(told: dict[str, Any]) -> dict[str, Any]:
    """With a stream as its text and the events that say more: ATOM puts text that waits into one event."""
    if told["decode_answer"] is None or not told["decode_answer"].startswith("data: "):
        return told
    *events, done, end = told["decode_answer"].split("\n\n")
    text: str = ""
    others: list[Any] = [done, end]
    for event in events:
        parsed = json.loads(event.removeprefix("data: "))
        for choice in parsed.get("choices", []):
            holder = choice.get("delta", choice)
            text += holder.pop("text", "") + holder.pop("content", "")
        choices = parsed.get("choices")
        if not choices or choices[0]["finish_reason"] or choices[0].get("delta"):
            others.append(parsed)
    return told | {"decode_answer": (text, others)}


def _steady(text: str) -> str:
    """The answer without what differs from run to run."""
    text = re.sub(r'"id": ?"(chatcmpl|cmpl)-[0-9a-f]+"', r'"id":"\1-recorded"', text)
    text = re.sub(r'"created": ?\d+', '"created":1', text)
    text = re.sub(r'"(ttft_s|tpot_s|latency_s)": ?[0-9.e-]+', r'"\1":0.5', text)
    text = re.sub(r'"remote_port": ?\d+', '"remote_port":51234', text)
    text = re.sub(r'"transfer_id": ?\d+', '"transfer_id":17', text)
    text = re.sub(r'"dp_rank": ?\d+', '"dp_rank":1', text)
    return re.sub(r'"remote_block_ids": ?\[[^]]*\]', '"remote_block_ids":[4]', text)
