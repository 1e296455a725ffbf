# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.standins.faults.agent`: `kvferry agent` with the flags of `faults`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvferry.agent.__main__ import main as run_agent
from tests.standins import faults
from tests.standins.faults.control import parse_control_fault
from tests.standins.faults.tcp import parse_fault


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--kv-fault")
    parser.add_argument("--tcp-fault")
    parser.add_argument("--control-fault")
    options, rest = parser.parse_known_args(argv)
    if options.kv_fault is not None:
        os.environ[faults.KV_FAULT] = options.kv_fault
    if options.tcp_fault is not None:
        parse_fault(options.tcp_fault)
        os.environ[faults.TCP_FAULT] = options.tcp_fault
    if options.control_fault is not None:
        parse_control_fault(options.control_fault)
        os.environ[faults.CONTROL_FAULT] = options.control_fault
    return run_agent(rest, engine_module=faults.ENGINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
