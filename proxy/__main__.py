# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.proxy`, also `kvferry proxy`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvferry.proxy.cli import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT. Returns the exit status; 2 for a wrong command line."""
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
