# SPDX-License-Identifier: Apache-2.0
"""Run in place of `kvferry.agent.worker.process`: its KV, or what its tcp backend sends, suffers a fault."""

from __future__ import annotations

import os
import sys

from kvferry.agent.worker.process import main
from tests.standins import faults
from tests.standins.faults import kv, tcp

if __name__ == "__main__":
    number = int(sys.argv[sys.argv.index("--rank") + 1]) if "--rank" in sys.argv else 0
    with tcp.injected(os.environ.get(faults.TCP_FAULT)), kv.injected(os.environ.get(faults.KV_FAULT), number):
        sys.exit(main())
