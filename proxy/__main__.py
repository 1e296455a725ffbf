# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.proxy`, also `kvferry proxy`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT. Returns the exit status; 2 for a wrong command line."""
    # Imports make a hundred thousand objects and no garbage: looking for some takes a third of the time to
    # start, and later collections need not look there again.
    gc.disable()
    from kvferry.proxy.cli import run

    gc.freeze()
    gc.enable()
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
