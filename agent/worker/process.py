# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.worker.process`: one tensor-parallel rank, started by the engine process.

With `--self-check` it only compares the model with transformers' own forward, for the API process before it
opens any port. Refuses a model with one line and `REFUSED_STATUS`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import sys
from pathlib import Path

import msgspec

from kvferry.agent.architectures import (
    REFUSED_STATUS,
    UnsupportedModel,
    architecture_of,
    read_config,
    refusal_line,
)
from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.steps import Boot
from kvferry.common.child_process import die_with_parent
from kvferry.common.telemetry.logs import configure_logging

log = logging.getLogger(__name__)

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
    parser = argparse.ArgumentParser(description="One tensor-parallel rank of an agent.")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--self-check", action="store_true")
    options = parser.parse_args()
    die_with_parent(parent)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    configure_logging(f"rank-{options.rank}", boot.config.log_level, boot.config.log_format)
    # Agents often share a host's cores; threads that spin while they wait would take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _keep_freed_memory()
    return _self_check(boot) if options.self_check else _serve(boot, options.run_dir, options.rank)


def _serve(boot: Boot, run_dir: Path, number: int) -> int:
    # Not at the top: torch takes seconds to import, and reads the environment when it is. Starting makes a
    # million objects and no garbage; collecting, then or at any later time, takes a second.
    gc.disable()
    from kvferry.agent.worker.rank import NoDevice, Rank

    try:
        made = Rank(boot, run_dir, number)
    except NoDevice as error:
        log.error("%s", error)
        return REFUSED_STATUS
    except ValueError as error:
        log.error("%s", _refusal(boot.config, error))
        return REFUSED_STATUS
    with made as rank:
        gc.freeze()
        gc.enable()
        log.info("ready")
        rank.serve()
    return 0


def _self_check(boot: Boot) -> int:
    """Compare; whatever goes wrong means that the model is not served. Prints why."""
    from kvferry.agent.worker.reference import check_model

    try:
        check_model(boot.config)
    except Exception as error:
        log.debug("the self-check failed", exc_info=True)
        print(_refusal(boot.config, error), flush=True)
        return REFUSED_STATUS
    return 0


def _refusal(config: AgentConfig, error: Exception) -> str:
    """Return the line that ends the start: another engine may serve what this one does not support."""
    name = architecture_of(read_config(Path(config.model)))
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, UnsupportedModel):
        return refusal_line(name, first_line)
    if isinstance(error, ValueError):
        return f"{name}: {first_line}"
    return refusal_line(name, f"{type(error).__name__}: {first_line}")


if __name__ == "__main__":
    sys.exit(main())
