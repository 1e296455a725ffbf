# SPDX-License-Identifier: Apache-2.0
"""`python -m agent.worker`: the process of one tensor-parallel rank. Started by the engine process only."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

import msgspec

from agent.logs import configure_logging
from agent.processes import die_with_parent
from agent.step import Boot


def main() -> int:
    parent = os.getppid()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(parent)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    configure_logging(f"rank-{options.rank}", boot.config.log_level)
    # Agents often share a host's cores; threads that spin while they wait would take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Not at the top: torch takes seconds to import, and reads the environment when it is. Starting makes a
    # million objects and no garbage; looking for some, then or at any later collection, takes a second.
    gc.disable()
    from agent.rank import Rank

    with Rank(boot, options.run_dir, options.rank) as rank:
        gc.freeze()
        gc.enable()
        logging.getLogger(__name__).info("ready")
        rank.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
