# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.api.grammar.process DIRECTORY`: tries grammars, started by `GrammarChecker`.

Reads a grammar a line, as a JSON string, and answers each with a line: a JSON string that says why it cannot
be used, or "". The first line is about the tokenizer.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from kvferry.common.child_process import die_with_parent

NICENESS = 10
"""The model comes first."""
MAX_MEMORY_BYTES = 4 << 30


def main() -> int:
    die_with_parent(os.getppid())
    os.nice(NICENESS)
    # A grammar that takes more ends this process, which counts as too costly.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
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
