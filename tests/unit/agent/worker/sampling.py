# SPDX-License-Identifier: Apache-2.0
"""One token to sample, as a rank sees it after a request's setup and a row."""

from __future__ import annotations

from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import SamplingRow, SamplingSetup
from kvferry.agent.worker.sampler import RequestSampling, TokenSample


def make_token_sample(
    sampling: SamplingParams,
    *,
    vocab_size: int,
    eos_ids: tuple[int, ...] = (),
    choice: int = 0,
    position: int = 0,
    prompt_ids: tuple[int, ...] = (),
    output_ids: tuple[int, ...] = (),
) -> TokenSample:
    setup = SamplingSetup(key=1, sampling=sampling, prompt_ids=prompt_ids)
    row = SamplingRow(key=1, choice=choice, position=position, output_ids=output_ids)
    return RequestSampling(setup, eos_ids, vocab_size).resolve(row)
