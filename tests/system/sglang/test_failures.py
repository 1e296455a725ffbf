# SPDX-License-Identifier: Apache-2.0
"""SGLang's own injection of failures, at two ranks on both sides: at random, one rank's poll of a request
says that it has failed, while the other rank goes on (`make test-sglang`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.helpers.client import session
from tests.system.sglang.servers import MARKS, sglang_server
from tests.system.sglang.test_kvferry import bodies_of, started, to_both
from tests.system.vllm.test_kvferry import answers

REQUESTS = 100
CONCURRENCY = 4
SETTINGS = {"KVFERRY_LEASE_S": "2", "SGLANG_TEST_DISAGG_FAILURE_PROB": "0.02"}
ANYWAY = "releasing anyway"
"""SGLang's log says so when it frees pages although they may still be written to."""
HANGS_S = 600.0

pytestmark = MARKS


async def test_ranks_that_disagree_leave_nothing_in_use_and_answer_nothing_wrong(tmp_path: Path) -> None:
    """No proxy is between, whose circuit breakers would keep most requests away."""
    asked = bodies_of(REQUESTS, chat=False)
    async with sglang_server("plain", None, tmp_path) as plain, session() as http:
        wanted = await answers(http, plain.url, asked)
    async with started(tmp_path, ranks=(2, 2), settings=SETTINGS) as stack:
        gate = asyncio.Semaphore(CONCURRENCY)
        found: Counter[str] = Counter()

        async def one(number: int) -> None:
            async with gate:
                answer = await to_both(stack, asked[number])
            if answer is not None:
                answer.assert_equal(wanted[number])
            found["right" if answer is not None else "failed"] += 1

        async with asyncio.timeout(HANGS_S):
            await asyncio.gather(*map(one, range(REQUESTS)))
        await stack.settled()
        for server in (stack.prefill, stack.decode):
            log = server.log.read_text(errors="replace")
            print(f"{server.log.stem}: {log.count('transfer failed')} failures at its ranks", flush=True)
            assert ANYWAY not in log and len(server.schedulers) == 2
        print(f"{REQUESTS} requests, failures injected at two ranks: {dict(found)}", flush=True)
        assert found["right"] and found["failed"]
