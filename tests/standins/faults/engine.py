# SPDX-License-Identifier: Apache-2.0
"""Run in place of `kvferry.agent.engine.process`: what it sends on the control channel suffers a fault."""

from __future__ import annotations

import os
import sys

from kvferry.agent.engine.process import main
from tests.standins import faults
from tests.standins.faults import control

if __name__ == "__main__":
    with control.injected(os.environ.get(faults.CONTROL_FAULT)):
        sys.exit(main(rank_module=os.environ.get(faults.RANK_MODULE, faults.RANK)))
