# SPDX-License-Identifier: Apache-2.0
"""Run in place of `kvferry.agent.worker.process`: what its tcp backend sends suffers a fault."""

from __future__ import annotations

import os
import sys

from kvferry.agent.worker.process import main
from tests.standins import faults
from tests.standins.faults import tcp

if __name__ == "__main__":
    with tcp.injected(os.environ.get(faults.TCP_FAULT)):
        sys.exit(main())
