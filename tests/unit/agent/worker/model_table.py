# SPDX-License-Identifier: Apache-2.0
"""The tables in `docs/models.md`: which models the embedded engine serves, made of what the tests try.

`python -m tests.unit.agent.worker.model_table --write` puts them into the page; `test_model_table.py` fails
when the page says something else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import PretrainedConfig

from kvferry.agent.architectures import REFUSED, TESTED
from tests.unit.agent.worker.tiny_models import CONFIGS

PAGE = Path(__file__).parents[4] / "docs/models.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

_FEATURES = {
    "sliding_window": "sliding windows",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "attn_logit_softcapping": "capped scores",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
}


def rendered() -> str:
    """Both tables."""
    lines = ["| architecture | special features | `--tp` |", "|---|---|---|"]
    for name in sorted(TESTED, key=str.lower):
        ranks = "1, 2 and more" if TESTED[name] else "1"
        lines.append(f"| `{name}` | {', '.join(_features(CONFIGS[name]))} | {ranks} |")
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| `{name}` | {REFUSED[name]} |" for name in sorted(REFUSED, key=str.lower)]
    return "\n".join(lines) + "\n"


def _features(config: PretrainedConfig) -> list[str]:
    return sorted({text for name, text in _FEATURES.items() if getattr(config, name, None)})


def with_tables(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + rendered() + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PAGE.write_text(with_tables(PAGE.read_text()))
