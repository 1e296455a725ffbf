# SPDX-License-Identifier: Apache-2.0
"""The tables in `docs/fields.md`: what becomes of each field of a body at kvferry's own agents.

`python -m tests.unit.agent.api.field_table --write` puts them into the page; `test_fields.py` fails when the
page says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvferry.agent.api.fields import HARMLESS, REFUSED
from kvferry.agent.api.openai_schema import HONOURED, ChatBody, CompletionBody

PAGE = Path(__file__).parents[4] / "docs/fields.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_OURS = frozenset({"kv_transfer_params", "resume", "kvferry_token_lines", "kvferry_first_choice"})
"""What only a proxy sends to its agents."""


def rendered() -> str:
    completion, chat = HONOURED[CompletionBody] - _OURS, HONOURED[ChatBody] - _OURS
    lines = ["Supported:", ""]
    lines.append(f"- by both endpoints: {_names(completion & chat)}")
    lines.append(f"- by `/v1/completions` alone: {_names(completion - chat)}")
    lines.append(f"- by `/v1/chat/completions` alone: {_names(chat - completion)}")
    lines += ["", "| accepted, without effect | because |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(HARMLESS.items())]
    lines += ["", "| refused | because | except for |", "|---|---|---|"]
    for name, (why, neutral) in sorted(REFUSED.items()):
        values = ", ".join(dict.fromkeys(f"`{json.dumps(each)}`" for each in neutral))
        lines.append(f"| `{name}` | {why} | {values} |")
    return "\n".join(lines) + "\n"


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def with_tables(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + rendered() + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PAGE.write_text(with_tables(PAGE.read_text()))
