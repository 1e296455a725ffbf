# SPDX-License-Identifier: Apache-2.0
"""The process that computes masks, with limits of a test's: `LIMITS` in its environment, as JSON."""

from __future__ import annotations

import json
import os
import sys

from kvferry.agent.grammar import process

LIMITS = "KVFERRY_TEST_MASK_LIMITS"

if __name__ == "__main__":
    for name, value in json.loads(os.environ[LIMITS]).items():
        assert hasattr(process, name), name
        setattr(process, name, value)
    sys.exit(process.main())
