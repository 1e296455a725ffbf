# SPDX-License-Identifier: Apache-2.0
"""Design I4 on CPU: a request gets the same bits alone, in a crowd, preempted, and behind a transfer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.agent.messages.requests import Output, ResumedChoice, Submit, Token
from kvferry.agent.worker.model import ModelShard
from kvferry.agent.worker.runner import StepRunner
from tests.unit.agent.local_engine import LocalEngine, remote, request
from tests.unit.agent.worker.tiny_models import BLOCK_SIZE, VOCAB_SIZE, load_model, save_checkpoint

NUM_BLOCKS = 160
LIMITS = {
    "block_size": BLOCK_SIZE,
    "prefill_chunk": 32,
    "max_batch_tokens": 96,
    "max_num_seqs": 24,
    "max_model_len": 400,
    "vocab_size": VOCAB_SIZE,
    "max_waiting": 64,
    "prefix_cache": False,
    "eos_ids": frozenset({VOCAB_SIZE - 1}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelShard:
    return load_model(save_checkpoint("Qwen2ForCausalLM", tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread where a test does not choose: threads that wait for each other are slow on a busy host."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(
    model: ModelShard, num_blocks: int = NUM_BLOCKS, **changes: Any
) -> tuple[LocalEngine, torch.Tensor]:
    pool = torch.full(model.geometry(BLOCK_SIZE).pool_shape(num_blocks, 2), torch.nan)
    runner = StepRunner(model, pool, (VOCAB_SIZE - 1,), is_sampler=True)
    return LocalEngine(runner, num_blocks, **{**LIMITS, **changes}), pool


def make_requests() -> list[Submit]:
    """Prompts around every chunk and block boundary; greedy and sampled; one, two and three choices."""
    rng = random.Random(3)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128, 150]
    return [
        request(
            f"r{length}",
            [rng.randrange(VOCAB_SIZE - 1) for _ in range(length)],
            max_tokens=20,
            ignore_eos=True,
            seed=length,
            temperature=(0.0, 1.0, 2.0)[index % 3],
            n=1 + index % 3,
            logprobs=2,
        )
        for index, length in enumerate(lengths)
    ]


def all_tokens(engine: LocalEngine, request_id: str) -> list[Token]:
    """Tokens with logprobs, whose floats show the bits of the logits, ordered by choice."""
    outputs = [message for message in engine.messages[request_id] if isinstance(message, Output)]
    return sorted((token for output in outputs for token in output.tokens), key=lambda token: token.index)


def alone(model: ModelShard, submit: Submit) -> list[Token]:
    engine, _ = make_engine(model)
    engine.submit(submit)
    engine.run()
    return all_tokens(engine, submit.request_id)


@pytest.mark.timeout(180)  # under a second alone; on a busy host two threads spin while they wait
@pytest.mark.parametrize(("num_threads", "every"), [(1, 1), (2, 4)])
def test_a_request_in_a_crowd_gets_the_bits_that_it_gets_alone(
    model: ModelShard, num_threads: int, every: int
) -> None:
    torch.set_num_threads(num_threads)
    submits = make_requests()[::every]
    engine, _ = make_engine(model)
    for submit in submits:
        engine.submit(submit)
        engine.step()  # they arrive in the middle of each other
    engine.run()
    assert engine.scheduler.counters.preemptions == 0
    for submit in submits:
        assert all_tokens(engine, submit.request_id) == alone(model, submit)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_request_gets_the_bits_of_one_that_was_not(model: ModelShard, prefix_cache: bool) -> None:
    submits = make_requests()
    engine, _ = make_engine(model, num_blocks=26, max_model_len=400, prefix_cache=prefix_cache)
    for submit in submits:
        engine.submit(submit)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    for submit in submits:
        assert all_tokens(engine, submit.request_id) == alone(model, submit)


def test_a_request_split_over_two_engines_gets_the_bits_of_one(model: ModelShard) -> None:
    for submit in make_requests():
        producer, source = make_engine(model)
        consumer, destination = make_engine(model)
        consumer.submit(request("noise", [5] * 70, max_tokens=90, ignore_eos=True))
        consumer.step()
        producer.submit(
            Submit(
                request_id="p",
                prompt_ids=submit.prompt_ids,
                sampling=submit.sampling,
                timeout_s=60,
                produce="t",
            )
        )
        producer.run()
        first = all_tokens(producer, "p")
        consumer.submit(
            Submit(
                request_id="d",
                prompt_ids=submit.prompt_ids,
                sampling=submit.sampling,
                timeout_s=60,
                remote=remote("t", submit.prompt_ids),
                resumed=tuple(
                    ResumedChoice(index=token.index, token_ids=(token.token_id,), finished=False)
                    for token in first
                ),
            )
        )
        consumer.step()
        blocks = torch.tensor(consumer.connector.pulls["t"].block_ids)
        destination[blocks] = source[torch.tensor(producer.connector.lease_blocks["t"])]
        consumer.connector.finish_pull("t")
        consumer.run()
        split = sorted([*first, *all_tokens(consumer, "d")], key=lambda token: token.index)
        assert split == alone(model, submit)
