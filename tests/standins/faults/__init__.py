# SPDX-License-Identifier: Apache-2.0
"""An agent with faults of its own: wrong KV, damage over tcp, control messages lost and repeated.

`AGENT` is run in place of `kvferry.agent` and takes three more flags, `--kv-fault`, `--tcp-fault` and
`--control-fault`; it passes them to its engine process and its ranks, `ENGINE` and `RANK`, through the
environment.
"""

from __future__ import annotations

AGENT = "tests.standins.faults.agent"
ENGINE = "tests.standins.faults.engine"
RANK = "tests.standins.faults.rank"
RANK_MODULE = "KVFERRY_TESTS_RANK"
"""Environment variable: a module that is run in place of `RANK`."""
TCP_FAULT = "KVFERRY_TESTS_TCP_FAULT"
KV_FAULT = "KVFERRY_TESTS_KV_FAULT"
CONTROL_FAULT = "KVFERRY_TESTS_CONTROL_FAULT"
