# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.worker.process`: one tensor-parallel rank, started by the engine process."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import sys
from pathlib import Path

import msgspec

from kvferry.agent.config import configure_logging
from kvferry.agent.messages.steps import Boot
from kvferry.agent.process.children import die_with_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_FROM_THE_HEAP = 32 << 20  # glibc's maximum
_MOST_KEPT = 256 << 20


def _keep_freed_memory() -> None:
    """Let malloc keep what a step frees: the next one allocates as much again.

    Returned to the kernel and zeroed anew, it can cost a tenth of a step (a thousand page faults). No-op
    without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_FROM_THE_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


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
    _keep_freed_memory()
    # Not at the top: torch takes seconds to import, and reads the environment when it is. Starting makes a
    # million objects and no garbage; collecting, then or at any later time, takes a second.
    gc.disable()
    from kvferry.agent.worker.rank import Rank

    with Rank(boot, options.run_dir, options.rank) as rank:
        gc.freeze()
        gc.enable()
        logging.getLogger(__name__).info("ready")
        rank.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
