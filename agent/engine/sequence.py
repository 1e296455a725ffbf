# SPDX-License-Identifier: Apache-2.0
"""A request in the engine, and its choices as sequences of tokens."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from kvferry.agent.block_hashes import BlockHash, hash_blocks
from kvferry.agent.messages.requests import (
    FailedPull,
    FinishReason,
    Output,
    PrefixSource,
    PromptLogprob,
    ResumedChoice,
    Submit,
    Timing,
    Token,
)
from kvferry.agent.messages.steps import (
    Chunk,
    PromptScores,
    SampleOutput,
    SamplingRow,
    SamplingSetup,
    uses_earlier_ids,
)
from kvferry.common.state_machine import transition, transitions

log = logging.getLogger(__name__)


class SequenceState(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    FINISHED = "finished"


SEQUENCE_TRANSITIONS = transitions(
    {
        SequenceState.WAITING: {
            SequenceState.WAITING_FOR_REMOTE_KV,
            SequenceState.RUNNING,
            SequenceState.FINISHED,
        },
        # Back to waiting: the pull failed and the prompt is computed here.
        SequenceState.WAITING_FOR_REMOTE_KV: {
            SequenceState.WAITING,
            SequenceState.RUNNING,
            SequenceState.FINISHED,
        },
        # Back to waiting: preempted.
        SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED},
    }
)


class Sequence:
    """One choice: its tokens, how many of them have their KV computed, and the blocks that hold it.

    `blocks` is the block table; block i holds positions [i * block_size, (i + 1) * block_size). It covers at
    least `num_computed` tokens, and the first `num_remembered` blocks were offered to the prefix cache. The
    last token's KV is computed by the step that samples its successor. Of its output tokens the ranks know
    the first `num_described` as far as penalties need them. `num_decoded` steps decoded a token of it. With a
    grammar, the mask of the output position `mask_wanted_at` is wanted, and that of `known_mask` is known.
    """

    def __init__(self, request: Request, index: int, tokens: list[int]) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.num_computed = 0
        self.num_remembered = 0
        self.num_described = 0
        self.num_decoded = 0
        self.known_mask: tuple[int, bytes] | None = None
        self.mask_wanted_at: int | None = None
        self.blocks: list[int] = []
        self.hashes: list[BlockHash] = []
        self.state = SequenceState.WAITING

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id}/{self.index} {self.state.value} "
            f"{self.num_computed}/{len(self.tokens)} tokens, {len(self.blocks)} blocks>"
        )

    def transition(self, to: SequenceState) -> None:
        """Move to another state. Raises `IllegalTransition`."""
        origin, self.state = self.state, transition(self, SEQUENCE_TRANSITIONS, self.state, to)
        log.debug("%s/%d %s -> %s", self.request.request_id, self.index, origin.value, to.value)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def mask(self) -> bytes | None:
        """Which tokens may come next, a bit each; None if it is not known, or there is no grammar."""
        if self.known_mask is None or self.known_mask[0] != self.num_outputs:
            return None
        return self.known_mask[1]

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.request.prompt_len

    @property
    def num_slots(self) -> int:
        """How many sequences this one will be once it has forked."""
        request = self.request
        return 1 if request.forked or request.produces else len(request.unfinished_choices())

    @property
    def knows_first_token(self) -> bool:
        """Whether this is the trunk of a request that arrived with tokens: the prompt's logits are unused."""
        return self.num_outputs > 0 and not self.request.forked

    def sampling_row(self, choice: int) -> SamplingRow:
        """Describe a choice's next token; the row must be sent.

        Before the fork all choices sample from the trunk's logits, and none has output tokens.
        """
        new: tuple[int, ...] = ()
        if uses_earlier_ids(self.request.submit.sampling):
            new = tuple(self.tokens[self.request.prompt_len + self.num_described :])
            self.num_described = self.num_outputs
        return SamplingRow(key=self.request.key, choice=choice, position=self.num_outputs, output_ids=new)

    def next_chunk_end(self, prefill_chunk: int) -> int:
        """Where the next chunk ends.

        A prompt's chunks end at absolute multiples of `prefill_chunk`, and output tokens go one by one (after
        a preemption too): a position is then always computed in the same company, hence to the same bits.
        """
        if self.num_computed >= self.request.prompt_len:
            return self.num_computed + 1
        return min((self.num_computed // prefill_chunk + 1) * prefill_chunk, self.request.prompt_len)

    def full_block_hashes(self, block_size: int, num_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens` tokens."""
        if len(self.hashes) < num_tokens // block_size:
            salt = self.request.submit.cache_salt
            self.hashes = hash_blocks(self.tokens[:num_tokens], block_size, self.hashes, salt)
        return self.hashes[: num_tokens // block_size]

    def chunk(self, end: int, block_size: int) -> Chunk:
        """The tokens up to `end` that are not computed yet, and what to sample from the last one's logits.

        The chunk must be sent: its rows count as known to the ranks.
        """
        choices: Iterable[int] = ()
        if self.samples_at(end):
            choices = (self.index,) if self.request.forked else self.request.unfinished_choices()
        return Chunk(
            token_ids=tuple(self.tokens[self.num_computed : end]),
            start=self.num_computed,
            blocks=tuple(self.blocks[: -(-end // block_size)]),
            samples=tuple(self.sampling_row(choice) for choice in choices),
            scores=self._scores(end),
            mask=(self.mask or b"") if choices else b"",
        )

    def samples_at(self, end: int) -> bool:
        """Whether a chunk up to `end` gives the next token."""
        return end == len(self.tokens) and self.request.submit.sampling.max_tokens > 0

    def _scores(self, end: int) -> PromptScores | None:
        if not self.request.scores_prompt:
            return None
        successors = tuple(self.tokens[self.num_computed + 1 : end + 1])
        return PromptScores(successors=successors, num_top=self.request.submit.sampling.prompt_logprobs or 0)

    def append(self, sampled: SampleOutput, eos_ids: Collection[int]) -> Token:
        """Record the next token; `finish` says why the choice ends with it, if it does."""
        self.tokens.append(sampled.token_id)
        finish = self._finish_reason(sampled.token_id, eos_ids)
        return Token(index=self.index, token_id=sampled.token_id, logprob=sampled.logprob, finish=finish)

    def _finish_reason(self, token_id: int, eos_ids: Collection[int]) -> FinishReason | None:
        sampling = self.request.submit.sampling
        if token_id in self.request.stop_ids or (token_id in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if self.num_outputs >= sampling.max_tokens else None

    def fork(self, index: int, tokens: list[int]) -> Sequence:
        """Return a running sibling with the same KV in the same blocks, whose references it does not add."""
        sibling = Sequence(self.request, index, tokens)
        sibling.num_computed = self.num_computed
        sibling.num_remembered = self.num_remembered
        sibling.blocks = list(self.blocks)
        sibling.transition(SequenceState.RUNNING)
        return sibling


@dataclass(slots=True)
class Clock:
    """When the stages of one request began, in the scheduler's seconds; None: not yet."""

    arrived: float
    admitted: float | None = None
    prompt_done: float | None = None
    first_step: float | None = None
    first_decoded: float | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One `Submit`: its sequences, deadline, and timing.

    Until its prompt is in the pool it has one sequence, the trunk; then the unfinished choices fork from it.
    `resumed` is what the choices had on arrival; `pending_output` are tokens that another engine sampled, to
    be sent to the API process once the prompt is here, and `prompt_logprobs` with the first tokens.
    `prefix_source` is whom to ask for the prompt's beginning, None once that is over; `prefix_pull` is the
    transfer by which it comes. Ranks know the request by `key`, once it is `described` to them.
    """

    submit: Submit
    deadline: float
    clock: Clock
    key: int = 0
    described: bool = False
    sequences: dict[int, Sequence] = field(default_factory=dict)
    forked: bool = False
    recomputed: bool = False
    preempted: bool = False
    cached_tokens: int | None = None
    prefix_source: PrefixSource | None = field(init=False)
    prefix_pull: str | None = None
    prefix_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    stop_ids: frozenset[int] = field(init=False)
    resumed: tuple[ResumedChoice, ...] = field(init=False)
    pending_output: tuple[Token, ...] = ()
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.resumed = self.submit.resumed
        self.prefix_source = self.submit.prefix_source if self.produces else None
        self.stop_ids = frozenset(self.submit.sampling.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def produces(self) -> bool:
        """Whether the prompt's KV is to be leased to a reader after one token."""
        return self.submit.produce is not None

    @property
    def begins_anew(self) -> bool:
        """Whether no agent has computed its prompt before."""
        return not self.recomputed and not self.submit.resumed

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt's tokens are still wanted: each must be computed here."""
        return self.submit.sampling.prompt_logprobs is not None and not self.forked

    @property
    def all_finished(self) -> bool:
        """Whether no choice wants more tokens. Before the fork the trunk stands for all of them."""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences.values())

    @property
    def pulls(self) -> bool:
        """Whether the prompt's KV is still to come from elsewhere."""
        return self.submit.remote is not None and not self.recomputed

    @property
    def awaits_first_tokens(self) -> bool:
        """Whether token 1 of its choices is to come with the KV."""
        return self.submit.remote is not None and self.submit.remote.streamed and not self.resumed

    def adopt(self, tokens: tuple[Token, ...]) -> None:
        """Continue from token 1 of every choice, which the prefill's engine sampled.

        Some choice must continue after it.
        """
        self.pending_output = tokens
        self.resumed = tuple(
            ResumedChoice(index=token.index, token_ids=(token.token_id,), finished=token.finish is not None)
            for token in tokens
        )
        (trunk,) = self.sequences.values()
        trunk.index, outputs = next(iter(self.unfinished_choices().items()))
        trunk.tokens = [*self.submit.prompt_ids, *outputs]
        self.sequences = {trunk.index: trunk}

    def note_prefix_pull(self, now: float, failure: str | None) -> None:
        """Its prefix is here, or does not come; it was asked for on admission."""
        spent = _between(self.clock.admitted, now)
        self.timing = msgspec.structs.replace(self.timing, prefix_pull_s=spent, prefix_failure=failure)

    def note_failed_pull(self, reason: str, backend: str, began_at: float, now: float) -> None:
        """The pull of its prompt's KV came to nothing."""
        failed = FailedPull(reason=reason, backend=backend, began_at=began_at, ended_at=now)
        self.timing = msgspec.structs.replace(self.timing, failed_pull=failed)

    def describe(self) -> SamplingSetup:
        """Return what the ranks must know before the request's first row; it must be sent."""
        self.described = True
        sampling = self.submit.sampling
        prompt_ids = self.submit.prompt_ids if sampling.repetition_penalty != 1.0 else ()
        return SamplingSetup(key=self.key, sampling=sampling, prompt_ids=prompt_ids)

    def take_pending_output(self) -> list[Token]:
        """Return the tokens to be sent now."""
        tokens, self.pending_output = self.pending_output, ()
        return list(tokens)

    def fork(self) -> list[Sequence]:
        """Make every other unfinished choice a sibling of the trunk. Returns the siblings.

        They are in the trunk's blocks, for which the caller counts the references.
        """
        (trunk,) = self.sequences.values()
        self.forked = True
        siblings = [
            trunk.fork(index, [*self.submit.prompt_ids, *outputs])
            for index, outputs in self.unfinished_choices().items()
            if index != trunk.index
        ]
        self.sequences |= {sibling.index: sibling for sibling in siblings}
        return siblings

    def unfinished_choices(self) -> dict[int, tuple[int, ...]]:
        """Return the choices that want tokens, with the output tokens that they had on arrival."""
        if not self.resumed:
            return dict.fromkeys(range(self.submit.sampling.n), ())
        limit = self.submit.sampling.max_tokens
        return {
            choice.index: choice.token_ids
            for choice in self.resumed
            if not choice.finished and len(choice.token_ids) < limit
        }

    def output(self, tokens: list[Token], *, done: bool = False) -> Output:
        """Make the message to the API process about new tokens; it must be sent."""
        scored, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return Output(
            request_id=self.request_id,
            tokens=tuple(tokens),
            done=done,
            leased=done and self.produces and any(token.finish is None for token in tokens),
            cached_tokens=self.cached_tokens or 0,
            timing=self._measured() if done else None,
            prompt_logprobs=scored,
        )

    def _measured(self) -> Timing:
        """Return where the time went; a stage that did not happen took none."""
        clock = self.clock
        pulled = self.submit.remote is not None and not self.recomputed
        prefill_s = _between(clock.admitted, clock.prompt_done) - self.timing.prefix_pull_s
        return msgspec.structs.replace(
            self.timing,
            queue_s=_between(clock.arrived, clock.admitted),
            prefill_s=0.0 if pulled else prefill_s,
            decode_queue_s=_between(clock.prompt_done, clock.first_step),
            first_step_s=_between(clock.first_step, clock.first_decoded),
            arrived_at=clock.arrived,
            prompt_done_at=clock.prompt_done,
            first_step_at=clock.first_step,
            recomputed=self.recomputed,
        )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start
