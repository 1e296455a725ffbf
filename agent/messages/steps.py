# SPDX-License-Identifier: Apache-2.0
"""Messages between the engine process and its rank processes (TP ranks, one step at a time).

The engine sends every rank the same `Step`; each rank replies `StepDone` once its device has completed it,
and `StepWritten` before, where a reader may wait for the KV. A rank that cannot go on exits, which the engine
sees. msgspec's msgpack over `transfer.ranks.channel`, typed unions, no pickle.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.requests import PromptLogprob, SamplingParams, TokenLogprob


def uses_earlier_ids(sampling: SamplingParams) -> bool:
    """Whether sampling depends on the tokens before."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or any(len(word) > 1 for word in sampling.bad_words)
    )


class SamplingSetup(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the tokens of one request are sampled: sent once, before its first row, which names it by `key`.

    The prompt's ids are sent only where a penalty depends on them.
    """

    key: int
    sampling: SamplingParams
    prompt_ids: tuple[int, ...] = ()


class SamplingRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sample one token from the logits of a chunk's last row.

    `position` is the token's output index. `output_ids` are the choice's tokens since its last row, sent only
    where sampling depends on them.
    """

    key: int
    choice: int
    position: int
    output_ids: tuple[int, ...] = ()


class PromptScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Report the log probability of each of a chunk's tokens' successors, with the `num_top` likeliest.

    The last token's successor is left out where it is not part of the prompt.
    """

    successors: tuple[int, ...]
    num_top: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive tokens of one sequence: compute their KV, and sample from the last one's logits.

    `blocks` is the block table up to and including the last token's block. Where the answer has a grammar,
    `mask` says which tokens may be sampled: a bit each, the lowest first.
    """

    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: tuple[SamplingRow, ...] = ()
    scores: PromptScores | None = None
    mask: bytes = b""

    @property
    def logit_rows(self) -> range:
        """The chunk's rows whose logits are needed."""
        last = len(self.token_ids)
        if self.scores is not None:
            return range(last if self.samples else len(self.scores.successors))
        return range(last - 1, last) if self.samples else range(0)


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One forward pass. Block copies (source, destination) are done first, in order.

    With `report_written` each rank sends `StepWritten`. `setups` are those of requests whose first rows are
    in this step; of the requests in `ended` there will be no more rows.
    """

    number: int
    copies: tuple[tuple[int, int], ...]
    chunks: tuple[Chunk, ...]
    setups: tuple[SamplingSetup, ...] = ()
    ended: tuple[int, ...] = ()
    report_written: bool = False


class StopRank(msgspec.Struct, frozen=True, tag="stop"):
    """End the rank process in good order."""


ToRank = Step | StopRank


class SampleOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A sampled token; where none could be, `failure` says why, and `token_id` means nothing."""

    token_id: int
    logprob: TokenLogprob | None = None
    failure: str = ""


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a step's logits gave, a tuple for each of its chunks."""

    sampled: tuple[tuple[SampleOutput, ...], ...]
    prompt_logprobs: tuple[tuple[PromptLogprob, ...], ...] = ()
    """Empty where no chunk's prompt is scored."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank has loaded its weights and allocated its pool. Every rank reports the same values.

    `geometry` is a kvferry.transfer.layout.KVGeometry as built-in types. `device`: "cpu", or the GPU's name.
    """

    rank: int
    device: str
    geometry: dict[str, str | int | bool]
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    weights: str


class StepWritten(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """This rank's device has written a step's KV. What is left is to sample."""

    rank: int
    number: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """This rank's device has completed a step. Rank 0 adds what its logits gave."""

    rank: int
    number: int
    outputs: StepOutputs | None = None


FromRank = RankReady | StepWritten | StepDone


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine and rank processes read from their standard input at start, as JSON.

    `curve_secret` is the key of the engine's control channel; ranks do not get it.
    """

    config: AgentConfig
    incarnation: str
    curve_secret: str | None = None


def step_address(run_dir: Path) -> Path:
    """The Unix socket on which the engine sends steps."""
    return run_dir / "steps"


def transfer_address(run_dir: Path, rank: int) -> Path:
    """The Unix socket on which a rank takes commands about transfers, apart from steps."""
    return run_dir / f"transfer-{rank}"
