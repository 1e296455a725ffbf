# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.prompts`: writes the held-out prompts that the tests ask."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tools.train.tasks import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train.prompts", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/data/heldout.jsonl"))
    arguments = parser.parse_args()
    lines = [json.dumps(asdict(prompt)) + "\n" for prompt in held_out_prompts()]
    arguments.out.write_text("".join(lines))
    print(f"{len(lines)} prompts in {arguments.out}")


if __name__ == "__main__":
    main()
