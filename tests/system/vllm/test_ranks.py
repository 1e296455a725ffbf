# SPDX-License-Identifier: Apache-2.0
"""Servers of several ranks and pipeline stages go on from each other's prompts, whichever has more
(`make test-vllm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.helpers.client import session
from tests.helpers.servers import free_port
from tests.system.vllm.servers import MARKS, together, vllm_server
from tests.system.vllm.test_breadth import (
    CASES,
    TRANSFERS,
    draw,
    handed_over,
    models,
    prompt_ids,
    settled,
)
from tests.system.vllm.test_kvferry import FAILED, RECOMPUTED

__all__ = ["models"]
pytestmark = MARKS

LENGTHS = (33, 64, 95, 128, 200, 321)
SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "one rank": (),
        "two ranks": ("--tensor-parallel-size", "2"),
        # Without compilation a second stage gets no tensors from the first on CPUs.
        "two stages": ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
    }
)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", "two ranks"),
        ("llama", "two stages"),
        ("gemma3", "two ranks"),
        ("gemma3", "two stages"),
        ("deepseek_v3", "two ranks"),
    ],
)
async def test_servers_of_any_ranks_and_stages_go_on_from_each_others_prompts(
    name: str, size: str, models: Path, tmp_path: Path
) -> None:
    sizes = ("one rank", size)
    case, nobody = CASES[name], f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack, session() as http:
        start: dict[str, Any] = {"log_dir": tmp_path, "proxy": nobody, "model": models / name}
        starting = [
            vllm_server(each.replace(" ", "-"), "kv_both", words=(*case.words, *SIZES[each]), **start)
            for each in sizes
        ]
        servers = dict(zip(sizes, await together(stack, *starting), strict=True))
        for length in LENGTHS:
            ids = prompt_ids(length)
            # Ranks add up in another order than one does: each server goes on as it would by itself.
            alone = {each: (await draw(http, servers[each].url, ids))[0] for each in sizes}
            for lender in sizes:
                for fetcher in sizes:
                    ways = await handed_over(http, servers[lender], servers[fetcher], ids, case)
                    for way, found in ways.items():
                        what = f"{length} tokens, {way}, from {lender} to {fetcher}"
                        found.assert_equal(alone[fetcher], what, 1e-3)
        transfers = 2 * len(sizes) * len(LENGTHS)
        for server in servers.values():
            await settled(http, server, transfers)
            assert await server.sample(http, TRANSFERS) == transfers
            assert await server.sample(http, RECOMPUTED) == await server.sample(http, FAILED) == 0
