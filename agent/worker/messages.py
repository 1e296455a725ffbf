# SPDX-License-Identifier: Apache-2.0
"""What the engine process and its rank processes say to each other (TP ranks, one step at a time).

The engine sends every rank the same `Step`; each rank answers once its device has completed it, and before
that says when the KV is written, where a reader may wait for it. A rank that cannot go on exits, which the
engine sees. msgspec's msgpack over `transfer.ranks.channel`, typed unions, no pickle.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry.agent.config import AgentConfig
from kvferry.agent.engine.messages import SamplingParams, TokenLogprob


def uses_earlier_ids(sampling: SamplingParams) -> bool:
    """Whether a draw depends on the tokens before it."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Draw one token from the logits of a chunk's last row.

    `position` is the output index of the token drawn. The ids are sent only where a penalty looks at them.
    """

    choice: int
    position: int
    sampling: SamplingParams
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive tokens of one sequence: compute their KV, and draw `samples` from the last one's logits.

    `blocks` is the block table up to and including the last token's block.
    """

    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: tuple[Sample, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One forward pass. Block copies (source, destination) are done first, in order.

    `tells_written`: `StepWritten` is wanted.
    """

    number: int
    copies: tuple[tuple[int, int], ...]
    chunks: tuple[Chunk, ...]
    tells_written: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the rank process in good order."""


ToRank = Step | Stop


class Drawn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One token drawn by the sampler."""

    token_id: int
    logprob: TokenLogprob | None = None


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank holds its weights and its pool. Every rank reports the same values.

    `geometry` is a kvferry.transfer.layout.KVGeometry as built-in types.
    """

    rank: int
    geometry: dict[str, str | int | bool]
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    weights: str


class StepWritten(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """This rank's device has written a step's KV. What is left is to draw the tokens."""

    rank: int
    number: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """This rank's device has completed a step. Rank 0 adds the drawn tokens: one tuple per chunk."""

    rank: int
    number: int
    drawn: tuple[tuple[Drawn, ...], ...] | None = None


FromRank = RankReady | StepWritten | StepDone


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine and rank processes read from their standard input at start, as JSON.

    `curve_secret` locks the engine's control channel; ranks are not told it.
    """

    config: AgentConfig
    incarnation: str
    curve_secret: str | None = None


def step_address(run_dir: Path) -> Path:
    """The Unix socket on which the engine hands out steps."""
    return run_dir / "steps"


def transfer_address(run_dir: Path) -> Path:
    """The Unix socket on which ranks report transfers, apart from steps."""
    return run_dir / "transfer"
