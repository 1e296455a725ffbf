# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz api|discovery`: for long, what `tests/unit/proxy/test_fuzz.py` does for a moment."""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.fuzz import api, discovery


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Throw random input at a proxy.")
    parser.add_argument("what", choices=["api", "discovery"])
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "api":
        return asyncio.run(api.fuzz(options.cases or api.CASES, options.seed))
    print(asyncio.run(discovery.fuzz(options.cases or discovery.FRAMES, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
