# SPDX-License-Identifier: Apache-2.0
"""SGLang's own transfers where ours have their late reader (`test_kvferry.py`): what becomes of prompts whose
decode server is stopped while their KV is moved. Figures, for comparison (`make test-sglang`).
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.client import session
from tests.system.sglang.servers import MARKS, NOWHERE, PYTHON, sglang_server
from tests.system.sglang.test_kvferry import (
    BATCH,
    FILLERS,
    LATE,
    LATE_POOL,
    Stack,
    late_bodies,
    to_both,
)

STOPPED_S = 4.0
"""As long as two of the leases in our test."""
LATEST_STOP_S = 0.3
"""The decode server is stopped so long, at most, after it got the requests."""
HANGS_S = 60.0

pytestmark = MARKS


@pytest.fixture(params=["nixl", "mooncake_tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    module = {"nixl": "nixl._api", "mooncake_tcp": "mooncake.engine"}[name]
    if subprocess.run([str(PYTHON), "-c", f"import {module}"]).returncode:
        pytest.skip(f"{module} cannot be loaded: Mooncake needs libibverbs1, librdmacm1 and libnuma1")
    return name


async def test_a_decode_server_that_is_stopped_meanwhile(backend: str, tmp_path: Path) -> None:
    words = ("--max-total-tokens", str(LATE_POOL), "--disable-radix-cache")
    bodies = late_bodies()
    found: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(sglang_server(role, role, tmp_path, backend=backend, words=words))
            for role in ("prefill", "decode")
        ]
        prefill, decode = await asyncio.gather(*starting)
        http = await stack.enter_async_context(session())
        pair = Stack(prefill, decode, "", http)
        wanted = [await to_both(pair, each) for each in bodies]
        assert None not in wanted, "nothing has been stopped yet"
        random.seed(7)
        for first in range(0, LATE, BATCH):
            asking = [asyncio.create_task(to_both(pair, each)) for each in bodies[first : first + BATCH]]
            await asyncio.sleep(random.uniform(0, LATEST_STOP_S))
            with decode.schedulers_stopped():
                await asyncio.gather(asyncio.sleep(STOPPED_S), overwrite(pair))
            _, hanging = await asyncio.wait(asking, timeout=HANGS_S)
            for each, right in zip(asking, wanted[first : first + BATCH], strict=True):
                if each in hanging:
                    found["not answered within a minute"] += 1
                    each.cancel()
                elif (answer := each.result()) is None:
                    found["failed"] += 1
                else:
                    found["right" if right is not None and answer.texts == right.texts else "wrong"] += 1
            print(backend, dict(found), flush=True)
            await asyncio.gather(*asking, return_exceptions=True)
        print(f"{LATE} prompts over SGLang's {backend}: {dict(found)}", flush=True)
    assert found.total() == LATE


async def overwrite(pair: Stack) -> None:
    """Have the prefill server compute prompts that take all its pages, if it has any free."""

    async def one(asked: dict[str, Any]) -> None:
        nowhere = {"bootstrap_host": NOWHERE, "bootstrap_room": 0}
        async with pair.http.post(f"{pair.prefill.url}/generate", json=asked | nowhere) as response:
            await response.read()

    with suppress(TimeoutError):
        async with asyncio.timeout(STOPPED_S):
            await asyncio.gather(*map(one, FILLERS))
