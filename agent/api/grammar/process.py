# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.api.grammar.process DIRECTORY`: tries grammars, started by `GrammarChecker`.

Reads a grammar a line, as a JSON string, and answers each with a line: a JSON string that says why it cannot
be used, or "". The first line is about the tokenizer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from kvferry.agent.grammar.process_limits import limit_this_process
from kvferry.common.child_process import die_with_parent


def main() -> int:
    die_with_parent(os.getppid())
    limit_this_process()
    from kvferry.agent.grammar.compiler import GrammarCompiler
    from kvferry.agent.grammar.trial import trial

    try:
        compiler = GrammarCompiler(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        _answer(f"constrained output is not supported with this model's tokenizer: {error}")
        return 1
    _answer("")
    for line in sys.stdin.buffer:
        _answer(trial(compiler, msgspec.json.decode(line, type=str)))
    return 0


def _answer(text: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
