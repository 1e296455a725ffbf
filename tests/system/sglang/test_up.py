# SPDX-License-Identifier: Apache-2.0
"""`kvferry up --engine sglang` serves by real SGLang servers, and restarts one that dies
(`make test-sglang`).
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from unittest.mock import patch

import aiohttp

from tests.system.sglang.servers import ENVIRONMENT, MARKS, PYTHON, START_TIMEOUT_S, WORDS
from tests.system.test_up import feed
from tests.system.vllm.test_up import REQUESTS, check_up

OWN = ("OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE")
"""What `kvferry up` sets itself, as it does the first two of the flags."""

pytestmark = MARKS


async def test_it_serves_by_sglang_and_restarts_a_server_that_dies(tmp_path: Path) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in OWN}
    options = ["--engine", "sglang", "--engine-python", str(PYTHON), "--agent.lease-s", "5"]
    options += [re.sub("^--", "--sglang.", word) for word in WORDS[2:]]
    with patch.dict(os.environ, environment):
        await check_up(tmp_path, options, pulls, START_TIMEOUT_S)


async def pulls(http: aiohttp.ClientSession, proxy: str, decode: str) -> int:
    """How many were proven right, once the servers have reported them."""
    async with asyncio.timeout(30):
        while (found := sum((await feed(http, proxy))["totals"]["pulls"])) < REQUESTS:
            await asyncio.sleep(0.2)
    return found
