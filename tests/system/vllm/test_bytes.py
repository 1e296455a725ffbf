# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt's KV is moved where layers keep a window or a chunk, beside vLLM without its hybrid
manager, whose layers all keep all of it (`make test-vllm`; the table is in docs/engines/vllm.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from tests.helpers.client import session
from tests.helpers.servers import free_port
from tests.system.vllm.servers import MARKS, VllmServer, together, vllm_server
from tests.system.vllm.test_breadth import TRANSFERS, draw, hand_over, models, prompt_ids, settled
from tests.system.vllm.test_kv_lifetime import BYTES

__all__ = ["models"]
pytestmark = MARKS

LENGTHS = (129, 321, 961)
OF_FULL_ATTENTION: Mapping[str, Fraction] = MappingProxyType(
    {"mistral": Fraction(0), "gemma3": Fraction(1, 3), "gpt_oss": Fraction(1, 2), "llama4": Fraction(1, 4)}
)
"""Which part of a model's layers keeps all of a prompt."""


@pytest.mark.parametrize("name", OF_FULL_ATTENTION)
async def test_of_a_window_or_a_chunk_no_more_is_moved_than_is_kept(
    name: str, models: Path, tmp_path: Path
) -> None:
    managers: dict[str, tuple[str, ...]] = {"on": (), "off": ("--disable-hybrid-kv-cache-manager",)}
    async with AsyncExitStack() as stack, session() as http:
        start: dict[str, Any] = {
            "log_dir": tmp_path,
            "proxy": f"127.0.0.1:{free_port()}",
            "model": models / name,
        }
        servers = [vllm_server(key, "kv_both", words=words, **start) for key, words in managers.items()]
        moved = {
            manager: [await bytes_of(http, server, length) for length in LENGTHS]
            for manager, server in zip(managers, await together(stack, *servers), strict=True)
        }
        print(f"{name}: bytes moved for {LENGTHS} tokens: {moved}", flush=True)
        (_, shorter, longer), (_, all_of_shorter, all_of_longer) = moved["on"], moved["off"]
        of_all = int(all_of_longer - all_of_shorter)  # Mistral's grow in neither: all of its layers are alike
        assert longer - shorter == OF_FULL_ATTENTION[name] * of_all, (
            "what is kept of the others does not grow"
        )


async def bytes_of(http: aiohttp.ClientSession, server: VllmServer, length: int) -> float:
    """What a server moves to go on from a prompt of its own."""
    before = await server.sample(http, TRANSFERS), await server.sample(http, BYTES)
    _, params = await draw(http, server.url, prompt_ids(length), 1, hand_over())
    await draw(http, server.url, prompt_ids(length), params=params)
    await settled(http, server, int(before[0]) + 1)
    return await server.sample(http, BYTES) - before[1]
