# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the ranks: its "KV" of a token is the token itself, so that a wrong block shows as a wrong
token, and the token it draws is a pure function of the whole context."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from kvferry.agent.messages.requests import PromptLogprob, SamplingParams
from kvferry.agent.messages.steps import (
    Chunk,
    SampleOutput,
    SamplingRow,
    SamplingSetup,
    Step,
    StepOutputs,
    uses_earlier_ids,
)

VOCAB_SIZE = 50
EOS_ID = 0
_GARBAGE = -1


def next_token(context: Sequence[int], choice: int) -> int:
    """What the stand-in model says after a context."""
    digest = hashlib.blake2b(repr((tuple(context), choice)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_answer(prompt: Sequence[int], choice: int, sampling: SamplingParams) -> list[int]:
    """The whole answer that a request must get, however it is scheduled."""
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        answer.append(next_token([*prompt, *answer], choice))
        if answer[-1] == EOS_ID and not sampling.ignore_eos:
            break
    return answer


class StandInRunner:
    """Runs steps over a pool of tokens, and checks every context that a chunk would attend to."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._pool = [[_GARBAGE] * block_size for _ in range(num_blocks)]
        self._requests: dict[int, SamplingSetup] = {}
        self._told: dict[tuple[int, int], list[int]] = {}
        self.chunk_log: list[tuple[int, int]] = []
        """(start, end) of every chunk run."""

    def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs:
        for source, destination in step.copies:
            self._pool[destination] = list(self._pool[source])
        for chunk in step.chunks:
            self.write(chunk.blocks, chunk.start, chunk.token_ids)
        if step.report_written:
            on_written()
        for key in step.ended:
            del self._requests[key]
        for setup in step.setups:
            assert setup.key not in self._requests, "settings are sent once"
            self._requests[setup.key] = setup
        return StepOutputs(
            sampled=tuple(tuple(self._draw(chunk)) for chunk in step.chunks),
            prompt_logprobs=tuple(self._score(chunk) for chunk in step.chunks),
        )

    def write(self, blocks: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            self._pool[blocks[position // self._block_size]][position % self._block_size] = token

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        tokens = [token for block in blocks for token in self._pool[block]]
        return tokens[:count]

    def scribble(self, blocks: Sequence[int]) -> None:
        """What a transfer does that is under way, or that was cancelled and is not quiescent."""
        for block in blocks:
            self._pool[block] = [_GARBAGE] * self._block_size

    def _draw(self, chunk: Chunk) -> list[SampleOutput]:
        end = chunk.start + len(chunk.token_ids)
        self.chunk_log.append((chunk.start, end))
        context = self.read(chunk.blocks, end)
        assert _GARBAGE not in context, f"a chunk at {chunk.start} attends to what was never computed"
        assert context[chunk.start :] == list(chunk.token_ids), "two chunks wrote to one place"
        for sample in chunk.samples:
            self._check_row(sample, context)
        return [SampleOutput(token_id=next_token(context, sample.choice)) for sample in chunk.samples]

    def _score(self, chunk: Chunk) -> tuple[PromptLogprob, ...]:
        """The "log probability" of a token is its successor's id."""
        if chunk.scores is None:
            return ()
        return tuple(PromptLogprob(logprob=-float(token), rank=1) for token in chunk.scores.successors)

    def _check_row(self, row: SamplingRow, context: Sequence[int]) -> None:
        """What a rank knows of a choice's output, all rows together, must be all of it."""
        setup = self._requests[row.key]
        told = self._told.setdefault((row.key, row.choice), [])
        told += row.output_ids
        if uses_earlier_ids(setup.sampling):
            assert told == context[len(context) - row.position :]
        else:
            assert not row.output_ids
