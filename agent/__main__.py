# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent`, also `kvferry agent`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

ENGINE_MODULE = "kvferry.agent.engine.process"


def main(argv: Sequence[str], *, engine_module: str = ENGINE_MODULE) -> int:
    """Run one agent; returns its exit status. A wrong command line exits with status 2 and a message.

    `engine_module` is run as the engine process: tests put a stand-in there.
    """
    # Imports make a hundred thousand objects and no garbage: collecting takes a third of the time to start,
    # and later collections need not visit them again.
    gc.disable()
    from kvferry.agent.cli import run

    gc.freeze()
    gc.enable()
    return run(argv, engine_module)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
