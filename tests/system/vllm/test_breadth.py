# SPDX-License-Identifier: Apache-2.0
"""Every way in which vLLM keeps a model's KV, at lengths where a block, a window or a chunk begins or ends.

What a server fetched, from itself or from another, goes on to the answer that it gives by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from tests.servers import free_port
from tests.system.client import session
from tests.system.vllm.servers import MARKS, MODEL, PYTHON, ROOT, VllmServer, vllm_server
from tests.system.vllm.test_kvferry import FAILED, RECOMPUTED, TRANSFERS

pytestmark = MARKS

BLOCK = 32
ANSWER = 12
LENGTHS = (2, 5, 31, 32, 33, 63, 64, 65, 95, 96, 97, 100, 127, 128, 129, 159, 160, 200, 256, 321, 640)
"""Among them multiples of a block and of a chunk, and k blocks + W − 1, where a window loses a block."""
WHOLE_PROMPTS = "vllm:kvferry_whole_prompts_total"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is served here.

    Attributes:
        words: Flags of vLLM.
        rounds: The type of its KV, or the kernels of this CPU, let a token have other digits in a batch of
            one than in a prompt: only answers that go on after the prefill's token can be compared.
        hybrid: Not all layers keep all tokens' KV: a prompt of one token is computed where it is decoded.
    """

    words: tuple[str, ...] = ()
    rounds: bool = False
    hybrid: bool = True


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "llama": Case(hybrid=False),
        "llama fp8": Case(("--kv-cache-dtype", "fp8"), hybrid=False),
        "llama ngram": Case(
            ("--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'),
            hybrid=False,
        ),
        "mistral": Case(),
        "gemma3": Case(),
        "gpt_oss": Case(),
        "llama4": Case(),
        "deepseek_v3": Case(("--block-size", "16", "--no-enable-prefix-caching"), rounds=True, hybrid=False),
        "nemotron_h": Case(("--no-enable-prefix-caching",)),
        "qwen3_next": Case(("--dtype", "bfloat16", "--no-enable-prefix-caching"), rounds=True),
    }
)
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each kind, made once."""
    directory = Path(os.environ.get("VLLM_MODELS") or tmp_path_factory.mktemp("models"))
    kinds = sorted({name.split()[0] for name in CASES})
    words = [str(PYTHON), "-m", "tests.system.vllm.models", str(directory), *kinds]
    subprocess.run(words, cwd=ROOT, check=True, timeout=600)
    return directory


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer's tokens and their logprobs."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def assert_equal(self, other: Drawn, what: str, tolerance: float) -> None:
        assert self.ids == other.ids, what
        assert self.logprobs == pytest.approx(other.logprobs, abs=tolerance), what


def prompt_ids(length: int) -> list[int]:
    return [random.Random(length).randrange(3, 930) for _ in range(length)]


async def draw(
    http: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    max_tokens: int = ANSWER,
    params: Mapping[str, Any] | None = None,
) -> tuple[Drawn, Any]:
    """A greedy answer, and the params that come with it."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(8),
    }
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    async with http.post(f"{url}/v1/completions", json=body) as response:
        told = await response.json()
    (choice,) = told["choices"]
    drawn = Drawn(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
    return drawn, told.get("kv_transfer_params")


def hand_over(**params: Any) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": secrets.token_hex(8),
        **params,
    }


async def settled(http: aiohttp.ClientSession, server: VllmServer, transfers: int) -> None:
    """Figures are reported with a step."""
    async with asyncio.timeout(30):
        while await server.sample(http, TRANSFERS) < transfers:
            await draw(http, server.url, [5, 6, 7], 1)


@cases
async def test_a_server_goes_on_from_what_it_fetched_from_itself(
    name: str, models: Path, tmp_path: Path
) -> None:
    case, tolerance = CASES[name], 1e-3
    nobody = f"127.0.0.1:{free_port()}"
    async with (
        vllm_server(
            "both", "kv_both", tmp_path, proxy=nobody, model=models / name.split()[0], words=case.words
        ) as server,
        session() as http,
    ):
        for length in LENGTHS:
            ids = prompt_ids(length)
            wanted, _ = await draw(http, server.url, ids)
            _, params = await draw(http, server.url, ids, 1, hand_over())
            found, _ = await draw(http, server.url, ids, params=params)
            if not case.rounds:
                found.assert_equal(wanted, f"{length} tokens", tolerance)
            first, params = await draw(http, server.url, ids, 1, hand_over(first_token=True))
            rest, _ = await draw(http, server.url, [*ids, *first.ids], ANSWER - 1, params)
            whole = Drawn(first.ids + rest.ids, first.logprobs + rest.logprobs)
            whole.assert_equal(wanted, f"{length} tokens and the first", tolerance)
        await settled(http, server, 2 * len(LENGTHS))
        assert await server.sample(http, TRANSFERS) == 2 * len(LENGTHS)
        for metric in (RECOMPUTED, FAILED, WHOLE_PROMPTS):
            assert await server.sample(http, metric) == 0
        _, params = await draw(http, server.url, [7], 1, hand_over())
        await draw(http, server.url, [7], params=params)
        if case.hybrid:
            assert await server.sample(http, WHOLE_PROMPTS) == 1
