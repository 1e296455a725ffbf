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
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from kvferry.agent.vllm.settings import HYBRIDS_SINCE, release_of
from tests.helpers.client import heldout, session
from tests.helpers.servers import free_port
from tests.system.vllm.servers import MARKS, MODEL, ON_GPU, PYTHON, ROOT, TRANSFER, VllmServer, vllm_server
from tests.system.vllm.test_kvferry import (
    CONCURRENCY,
    FAILED,
    RECOMPUTED,
    TRANSFERS,
    Stack,
    answers,
    assert_all_equal,
    body,
    salted,
    started,
)

pytestmark = MARKS

BLOCK = 32
ANSWER = 12
LEASE_S = 60
"""Longer than a busy machine stands still."""
LENGTHS = (2, 5, 31, 32, 33, 63, 64, 65, 95, 96, 97, 100, 127, 128, 129, 159, 160, 200, 256, 321, 640, 1008)
"""Among them multiples of a block and of a chunk, k blocks + W − 1, where a window loses a block, and what
leaves as much of the context as an answer may take.
"""
OTHERS = 9
TRIES = 20
"""Prompts from which one is taken."""
WHOLE_PROMPTS = "vllm:kvferry_whole_prompts_total"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is served here.

    Attributes:
        words: Flags of vLLM.
        rounds: The type of its KV, or the kernels of this CPU, let a token have other digits in a batch of
            one than in a prompt: only answers that go on after the prefill's token can be compared.
        continuable: Its answers depend on token ids alone, so that the prefill's token may be shown.
        seeded: A seed gives the same answer however the prompt came.
        hybrid: Not all layers keep all tokens' KV: a prompt of one token is computed where it is decoded.
        chats: vLLM writes its chats with tokens that the bundled model's vocabulary has.
    """

    words: tuple[str, ...] = ()
    rounds: bool = False
    continuable: bool = True
    seeded: bool = True
    hybrid: bool = True
    chats: bool = True
    transfer: str = TRANSFER


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "llama": Case(hybrid=False),
        "llama fp8": Case(("--kv-cache-dtype", "fp8"), hybrid=False),
        "llama ngram": Case(
            ("--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'),
            hybrid=False,
            seeded=False,
        ),
        # Without compilation a second stage gets no tensors from the first on CPUs.
        "llama pp": Case(("--pipeline-parallel-size", "2", "--no-enforce-eager"), hybrid=False),
        "mistral": Case(),
        "gemma3": Case(),
        "gemma3 nixl": Case(transfer="nixl"),
        "gpt_oss": Case(continuable=False, chats=False),
        "llama4": Case(),
        "deepseek_v3": Case(("--block-size", "16", "--no-enable-prefix-caching"), rounds=True, hybrid=False),
        "deepseek_mtp": Case(
            (
                *("--block-size", "16", "--no-enable-prefix-caching"),
                *("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'),
            ),
            rounds=True,
            seeded=False,
            hybrid=False,
        ),
        "nemotron_h": Case(("--no-enable-prefix-caching",)),
        "qwen3_next": Case(("--dtype", "bfloat16", "--no-enable-prefix-caching"), rounds=True),
    }
)
ON_GPUS = ("llama", "llama fp8", "llama ngram", "mistral", "gemma3", "llama4", "deepseek_v3")
"""What can be compared there, with one GPU and vLLM from 0.24 on."""
if ON_GPU:  # their kernels round as the batch is
    CASES = {name: replace(CASES[name], rounds=True) for name in ON_GPUS}
cases = pytest.mark.parametrize("name", CASES)
SEEDED = " seeded"
AS_SEEDED = pytest.mark.xfail(
    strict=True, reason="vLLM pads the first step after a transfer with drafts, and draws numbers for them"
)
seeded_cases = [
    pytest.param(name + SEEDED, marks=AS_SEEDED)
    for name, case in CASES.items()
    if not (case.seeded or case.rounds)
]
"""See `docs/sources.md`."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each kind, made once."""
    directory = Path(os.environ.get("VLLM_MODELS") or tmp_path_factory.mktemp("models"))
    kinds = sorted({name.split()[0] for name in CASES} | {"eagle"})
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


def prompt_ids(length: int, number: int = 0) -> list[int]:
    """One of several prompts of a length."""
    return [random.Random(length + 1000 * number).randrange(3, 930) for _ in range(length)]


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


async def handed_over(
    http: aiohttp.ClientSession, lender: VllmServer, fetcher: VllmServer, ids: list[int], case: Case
) -> dict[str, Drawn]:
    """Answers that go on from what one server fetched from another, by the way of those that can be compared:
    from all of the prompt but its last token, and after the lender's token.
    """
    _, params = await draw(http, lender.url, ids, 1, hand_over())
    found, _ = await draw(http, fetcher.url, ids, params=params)
    ways = {} if case.rounds else {"the prompt": found}
    if case.continuable:
        first, params = await draw(http, lender.url, ids, 1, hand_over(first_token=True))
        rest, _ = await draw(http, fetcher.url, [*ids, *first.ids], ANSWER - 1, params)
        ways["and the first token"] = Drawn(first.ids + rest.ids, first.logprobs + rest.logprobs)
    return ways


async def settled(http: aiohttp.ClientSession, server: VllmServer, transfers: int) -> None:
    """Figures are reported with a step."""
    async with asyncio.timeout(30):
        while await server.sample(http, TRANSFERS) < transfers:
            await draw(http, server.url, [5, 6, 7], 1)


@cases
async def test_a_server_goes_on_from_what_it_fetched_from_itself(
    name: str, models: Path, tmp_path: Path
) -> None:
    if ON_GPU:
        pytest.skip("cuda_ipc does not connect a process to itself")
    case, tolerance = CASES[name], 1e-3
    if "fp8" in name and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's FP8 KV needs AVX-512")
    nobody = f"127.0.0.1:{free_port()}"
    async with (
        vllm_server(
            "both",
            "kv_both",
            tmp_path,
            proxy=nobody,
            model=models / name.split()[0],
            words=case.words,
            transfer=case.transfer,
        ) as server,
        session() as http,
    ):
        for length in LENGTHS:
            ids = prompt_ids(length)
            wanted, _ = await draw(http, server.url, ids)
            for way, found in (await handed_over(http, server, server, ids, case)).items():
                found.assert_equal(wanted, f"{length} tokens, {way}", tolerance)
        transfers = (1 + case.continuable) * len(LENGTHS)
        await settled(http, server, transfers)
        assert await server.sample(http, TRANSFERS) == transfers
        for metric in (RECOMPUTED, FAILED, WHOLE_PROMPTS):
            assert await server.sample(http, metric) == 0
        _, params = await draw(http, server.url, [7], 1, hand_over())
        await draw(http, server.url, [7], params=params)
        async with http.get(f"{server.url}/version") as response:
            release = release_of((await response.json())["version"])
        # Before, it is told to keep all tokens of all layers.
        if case.hybrid and release >= HYBRIDS_SINCE:
            assert await server.sample(http, WHOLE_PROMPTS) == 1


@pytest.mark.parametrize("name", [*CASES, *seeded_cases])
async def test_a_pair_answers_as_one_server_does(name: str, models: Path, tmp_path: Path) -> None:
    """Through the proxy: a streamed answer begins with the prefill's token, another is computed from all but
    the last token of its prompt. Of several choices one fetches the prompt, where vLLM can share it.
    """
    case = CASES[name.removesuffix(SEEDED)]
    shares = "--no-enable-prefix-caching" not in case.words
    model = models / name.split()[0]
    settings: dict[str, Any] = {
        "model": model,
        "words": case.words,
        "transfer": case.transfer,
        "lease_s": LEASE_S,
    }
    async with started(tmp_path, **settings) as stack:
        samplings: list[dict[str, Any]] = [] if name.endswith(SEEDED) else [{"temperature": 0}]
        if not case.rounds and (case.seeded or name.endswith(SEEDED)):
            samplings.append({"temperature": 1, "seed": 11} | ({"n": 3} if shares else {}))
        prompts = await bodies(stack, case)
        for stream in (True, False):
            for sampling in samplings if stream or not case.rounds else ():
                # With logprobs a stream's first token comes from the decode server.
                asked = [
                    {key: value for key, value in each.items() if not stream or "logprobs" not in key}
                    | sampling
                    for each in prompts
                ]
                # What rounds gives other digits in a batch of another size.
                at_once = 1 if case.rounds else CONCURRENCY
                plain = [salted(each) for each in asked]
                wanted = await answers(stack.http, stack.prefill.url, plain, at_once)
                assert len({str(answer.texts) for answer in wanted}) > len(asked) // 2
                before = await moved(stack)
                found = [salted(each) | {"stream": stream} for each in asked]
                assert_all_equal(await answers(stack.http, stack.proxy_url, found, at_once), wanted)
                transfers, recomputed, whole = (
                    now - then for now, then in zip(await moved(stack), before, strict=True)
                )
                # A first token that is half a character is not shown, and so not gone on from.
                most = len(asked) // 3 if stream and case.hybrid and not case.rounds else 0
                print(f"{name}, {stream=}, {sampling}: {transfers:g} transfers, {whole:g} whole", flush=True)
                failed = await stack.decode.samples(stack.http, FAILED)
                assert (transfers + whole, recomputed) == (len(asked), 0), failed
                assert whole <= most
        assert await stack.decode.sample(stack.http, FAILED) == 0


async def moved(stack: Stack) -> tuple[float, float, float]:
    """Transfers so far, prompts that were computed again, and prompts that were computed as all was lent."""
    return *await stack.moved(), await stack.decode.sample(stack.http, WHOLE_PROMPTS)


async def bodies(stack: Stack, case: Case) -> list[dict[str, Any]]:
    """Prompts of each length, and others that are chats where there can be any.

    Where a prompt and an answer round differently, those whose first token is no whole character are left for
    others: a stream of such a prompt cannot go on from the prefill's token.
    """
    prompts = heldout(OTHERS * TRIES)
    tries = [
        [body("", chat=False) | {"prompt": prompt_ids(length, n)} for n in range(TRIES)] for length in LENGTHS
    ]
    tries += [
        [body(each.prompt, chat=case.chats) for each in prompts[first : first + TRIES]]
        for first in range(0, len(prompts), TRIES)
    ]
    # An answer that ends with its first token is not handed over.
    chosen = [await first_shown(stack, each) if case.rounds else each[0] for each in tries]
    return [each | {"ignore_eos": True} for each in chosen]


async def first_shown(stack: Stack, tries: list[dict[str, Any]]) -> dict[str, Any]:
    """The first of these requests whose answer begins with a whole character."""
    for each in tries:
        [answer] = await answers(
            stack.http,
            stack.prefill.url,
            [salted(each) | {"max_tokens": 1, "temperature": 0, "ignore_eos": True}],
        )
        if answer.texts[0] and not answer.texts[0].endswith("\ufffd"):
            return each
    pytest.fail(f"none of {len(tries)} answers begins with a whole character")
