# SPDX-License-Identifier: Apache-2.0
"""Decides what runs next, and records what came of it.

A step is three calls: `schedule` picks sequences and reserves their blocks, the ranks run, `commit` records
the tokens they sampled; nothing else records results. All calls are synchronous, take the clock as an
argument and are made between steps, never while the ranks run one: a freed block can therefore be reused only
after every write to it is over. The exception is `written`, which only notifies readers. What must be sent
collects in an outbox.

Order of a step: sequences that decode come first, oldest first; then prompts under way; then the waiting
queue, first come first served. A chunk of a prompt is computed whole or not at all, so that its bits do not
depend on the batch (I4).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from kvferry.agent.announce.capacity import CapacityMeter
from kvferry.agent.announce.work_counts import WorkCounts
from kvferry.agent.engine.admission import Limits, check_request, duplicate_transfer, failed
from kvferry.agent.engine.blocks import BlockAllocator, OutOfBlocks
from kvferry.agent.engine.kv_cache import KVCacheManager
from kvferry.agent.engine.masks import MaskResult, MaskSource
from kvferry.agent.engine.prefix_lenders import KnownLenders
from kvferry.agent.engine.sequence import Clock, Request, Sequence, SequenceState
from kvferry.agent.engine.transfers import PullOutcome, TransferLedger
from kvferry.agent.messages.requests import Output, RequestFailed, Submit, Token
from kvferry.agent.messages.steps import Chunk, SampleOutput, SamplingSetup, Step, StepOutputs
from kvferry.proxy.wire.registration import Capacity
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import WITHDRAWN, LeaseEnded, LoanRequested, PlaneEvent, PullDone, PullFailed
from kvferry.transfer.ids import DuplicateTransfer


class StepOrderError(RuntimeError):
    """`schedule`, `written` and `commit` were not called in turn: a defect of the caller."""


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since start."""

    steps: int = 0
    preemptions: int = 0
    recomputes: int = 0
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """By where their KV came from: computed here (again after a preemption), cached here, pulled from the
    request's prefill agent, or as a prefix from another agent's cache (`pulled_prefix`)."""


@dataclass(eq=False, slots=True)
class _Plan:
    """The step under way: who computes up to where, and block copies, whose sources are held until commit.

    `began`: when the step before had ended, or else when this one was planned.
    """

    began: float
    parts: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    preempted: bool = False
    scores_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_decoding

    @property
    def num_decoding(self) -> int:
        return sum(1 for sequence, _ in self.parts if sequence.is_decoding)


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache, preemption and KV transfer."""

    def __init__(
        self,
        limits: Limits,
        allocator: BlockAllocator,
        connector: SchedulerConnector,
        masks: MaskSource,
    ) -> None:
        self.counters = SchedulerCounters()
        self._limits = limits
        self._allocator = allocator
        self._kv_cache = KVCacheManager(limits, allocator)
        self.work = WorkCounts()
        self._meter = CapacityMeter(limits.max_num_seqs, allocator.num_blocks)
        self._transfers = TransferLedger(limits, allocator, connector, self.work)
        self._lenders = KnownLenders(limits)
        self._masks = masks
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._plan: _Plan | None = None
        self._stepped_at: float | None = None
        """When the last step ended, if nothing has kept the next one from beginning since."""
        self._outbox: list[Output | RequestFailed] = []
        self._keys = itertools.count(1)
        self._ended_keys: list[int] = []
        """Requests that the ranks know and may forget."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._transfers.pulling())

    @property
    def is_idle(self) -> bool:
        """Whether no request is left (leases and quarantines may be)."""
        return not self._requests

    def capacity(self) -> Capacity:
        """Return what the work takes, as measured."""
        to_compute = [
            *(seq for seq in self._waiting if seq.request.forked or not seq.request.pulls),
            *self._running,
        ]
        return self._meter.report(
            sum(max(0, seq.request.prompt_len - seq.num_computed) for seq in to_compute)
        )

    def next_deadline(self) -> float | None:
        """When `expire` should be called if nothing happens before."""
        return min((self._deadline(request) for request in self._requests.values()), default=None)

    def take_messages(self) -> list[Output | RequestFailed]:
        """Return everything to be sent since the last call."""
        messages, self._outbox = self._outbox, []
        return messages

    def check_integrity(self) -> None:
        """Recount all blocks against their holders. Raises `IntegrityError`."""
        sequences = [seq for request in self._requests.values() for seq in request.sequences.values()]
        held = [seq.blocks for seq in sequences]
        copied = [[source for source, _ in self._plan.copies]] if self._plan else []
        self._allocator.check_integrity([*held, *copied, *self._transfers.holders()])

    # Requests.

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or fail it at once."""
        refusal = self._refusal(submit)
        if refusal is not None:
            self._outbox.append(refusal)
            return
        request = Request(submit, now + submit.timeout_s, Clock(arrived=now), key=next(self._keys))
        choices = request.unfinished_choices()
        if submit.remote is not None:
            try:
                self._transfers.hold(request)
            except DuplicateTransfer:
                self._outbox.append(duplicate_transfer(submit))
                return
        if not choices:
            if submit.remote is not None:
                self._transfers.abandon_pull(request)
            self._outbox.append(Output(request_id=submit.request_id, tokens=(), done=True))
            return
        index, outputs = next(iter(choices.items()))
        trunk = Sequence(request, index, [*submit.prompt_ids, *outputs])
        request.sequences[index] = trunk
        self._requests[submit.request_id] = request
        self._waiting.append(trunk)
        self._want_mask(trunk)  # its grammar is compiled while it waits

    def _refusal(self, submit: Submit) -> RequestFailed | None:
        if submit.request_id in self._requests:
            return failed(submit, 409, "duplicate_request", "A request with this id is being served.")
        transfer_id = submit.remote.transfer_id if submit.remote else submit.produce
        if transfer_id is not None and self._transfers.is_known(transfer_id):
            return duplicate_transfer(submit)
        refusal = check_request(submit, self._limits)
        if refusal is None and len(self._waiting) >= self._limits.max_waiting:
            refusal = failed(submit, 429, "queue_full", "Too many requests are waiting.")
        return refusal

    def abort(self, request_id: str) -> None:
        """End a request and send nothing. An unknown id is one that has ended by itself."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop_request(request)

    def stop_choice(self, request_id: str, index: int) -> None:
        """End one choice; the last one closes the request. A choice without tokens cannot be stopped."""
        request = self._requests.get(request_id)
        if request is None or not request.forked or index not in request.sequences:
            return
        sequence = request.sequences[index]
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence)
        if request.all_finished:
            self._close(request, tokens=[])

    def drop_transfer(self, transfer_id: str) -> None:
        """Unpin a lease's blocks; the plane's event frees them and ends a request that still fills them."""
        self._transfers.drop(transfer_id)

    def expire(self, now: float) -> None:
        """Fail requests that are past their deadline."""
        for request in [req for req in self._requests.values() if self._deadline(req) <= now]:
            if now >= request.deadline:
                self._fail(request, 504, "timeout", "The request was not finished within its deadline.")
            else:
                self._fail(request, 429, "no_kv_room", "No room for the prompt's KV within its deadline.")

    def handle_event(self, event: PlaneEvent, now: float) -> None:
        """Act on what the transfer plane reports."""
        if isinstance(event, LeaseEnded):
            request = self._transfers.lease_ended(event)
            if request is not None:
                self._fail(request, 409, "transfer_dropped", f"The KV transfer was {event.cause}.")
        elif isinstance(event, LoanRequested):
            self._transfers.grant_prefix(event, reserve=self._num_growing())
        elif isinstance(event, PullDone):
            self._pull_ended(self._transfers.pull_done(event), now)
        elif isinstance(event, PullFailed):
            self._pull_ended(self._transfers.pull_failed(event, now), now)
        else:
            self._transfers.pull_quiescent(event.transfer_id)

    def handle_mask(self, result: MaskResult) -> None:
        """Let a sequence go on with its mask, or fail its request, unless that is over."""
        sequence, request = result.sequence, result.sequence.request
        if self._requests.get(request.request_id) is not request:
            return
        if result.failure is not None:
            self._fail(request, *result.failure)
        else:
            sequence.known_mask = result.position, result.bits

    def _prefix_ended(self, outcome: PullOutcome, now: float) -> None:
        """Compute the prompt from the end of its proven prefix on; after a failure begin anew."""
        sequence, request = outcome.sequence, outcome.sequence.request
        request.note_prefix_pull(now, outcome.failure)
        if outcome.failure is not None:
            self._requeue(sequence)
            return
        self._kv_cache.remember(sequence)
        request.cached_tokens = sequence.num_computed
        self.counters.prompt_tokens["pulled_prefix"] += outcome.num_tokens
        self._meter.cached(outcome.num_tokens)
        if self._open_lease(sequence, now):
            sequence.transition(SequenceState.RUNNING)
            self._running.append(sequence)

    def _pull_ended(self, outcome: PullOutcome | None, now: float) -> None:
        """Decode from the pulled KV; else compute the prompt here, or fail the request."""
        if outcome is None:
            return
        if outcome.is_prefix:
            self._prefix_ended(outcome, now)
            return
        sequence, request = outcome.sequence, outcome.sequence.request
        if outcome.failure is None:
            sequence.transition(SequenceState.RUNNING)
            self._running.append(sequence)
            self._kv_cache.remember(sequence)
            self.counters.prompt_tokens["pulled"] += outcome.num_tokens
            self._prompt_done(sequence, now)
            return
        if outcome.failure == WITHDRAWN:
            message = "The prefill ended without leaving anything to decode."
            self._fail(request, 409, "transfer_withdrawn", message)
            return
        request.note_failed_pull(outcome.failure, outcome.backend, outcome.began_at, now)
        if self._limits.recompute_on_pull_failure:
            self.counters.recomputes += 1
            self.work.recompute()
            request.recomputed = True
            self._requeue(sequence)
        else:
            message = f"The prompt's KV could not be pulled: {outcome.failure}."
            self._fail(request, 502, "pull_failed", message)

    def _deadline(self, request: Request) -> float:
        """A pull under way keeps its own deadline; the plane reports its end."""
        if request.submit.remote is not None and request.clock.admitted is None:
            return self._transfers.pull_deadline(request)
        return request.deadline

    # The step.

    def schedule(self, now: float) -> Step | None:
        """Choose the next step and reserve its blocks; None when there is nothing to compute."""
        if self._plan is not None:
            raise StepOrderError("the last step was not committed")
        plan = self._plan = _Plan(began=now if self._stepped_at is None else self._stepped_at)
        self._plan_decodes(plan, [sequence for sequence in self._running if sequence.is_decoding])
        for sequence in self._running:
            if sequence.is_decoding or not self._can_sample(sequence):
                continue
            if not self._plan_chunk(plan, sequence):
                break
        self._admit(plan, now)
        if not plan.parts:
            self._plan = self._stepped_at = None
            return None
        for sequence, _ in plan.parts:
            if sequence.is_decoding and sequence.request.clock.first_step is None:
                sequence.request.clock.first_step = now
        self.counters.steps += 1
        chunks = tuple(sequence.chunk(end, self._limits.block_size) for sequence, end in plan.parts)
        ended, self._ended_keys = tuple(self._ended_keys), []
        return Step(
            number=self.counters.steps,
            copies=tuple(plan.copies),
            chunks=chunks,
            setups=tuple(_setups(plan, chunks)),
            ended=ended,
            report_written=any(_ends_produced_prompt(sequence, end) for sequence, end in plan.parts),
        )

    def written(self) -> None:
        """Let readers have the last blocks of prompts that end with the step under way.

        To be called when every rank has written the step's KV and begins to sample, if the step asks for it.
        """
        if self._plan is None:
            raise StepOrderError("no step is under way")
        for sequence, end in self._plan.parts:
            if _ends_produced_prompt(sequence, end):
                self._transfers.advance(sequence.request, self._kv_cache.num_blocks(end))

    def commit(self, outputs: StepOutputs, now: float) -> None:
        """Record a step that every rank has completed."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise StepOrderError("no step to commit")
        self._allocator.release(source for source, _ in plan.copies)
        self._fail_stuck(plan, outputs)
        self._measure(plan, now)
        tokens: defaultdict[str, list[Token]] = defaultdict(list)
        requests: dict[str, Request] = {}
        for position, ((sequence, end), sampled) in enumerate(zip(plan.parts, outputs.sampled, strict=True)):
            request = sequence.request
            if request.request_id not in self._requests:
                continue
            if request.scores_prompt:
                # Computed again after a preemption, they are the same.
                scored = outputs.prompt_logprobs[position] if outputs.prompt_logprobs else ()
                request.prompt_logprobs[sequence.num_computed :] = scored
            requests[request.request_id] = request
            self._record(sequence, end, sampled, tokens[request.request_id], now)
        for request_id, new_tokens in tokens.items():
            request = requests[request_id]
            if request.all_finished:
                self._close(request, new_tokens)
            elif new_tokens:
                self._outbox.append(request.output(new_tokens))

    def _measure(self, plan: _Plan, now: float) -> None:
        """Say what a step took, before its sequences go on."""
        self._stepped_at = now
        self._meter.step(
            now - plan.began,
            prompt_tokens=plan.num_prompt_tokens,
            decoded=plan.num_decoding,
            blocks_used=self._allocator.counts().used,
            holders=len(self._running) + len(self._transfers.pulling()),
        )

    # Planning.

    def _can_sample(self, sequence: Sequence) -> bool:
        """Whether nothing is missing for the token that a sequence's next part samples, if it samples one."""
        end = sequence.next_chunk_end(self._limits.prefill_chunk)
        if sequence.mask is not None or not sequence.samples_at(end):
            return True
        return not self._want_mask(sequence)

    def _want_mask(self, sequence: Sequence) -> bool:
        """Have the mask of a sequence's next token computed; returns whether it needs one."""
        sampling = sequence.request.submit.sampling
        needs_one = bool(sampling.grammar) and sampling.max_tokens > 0
        if needs_one:
            self._masks.want(sequence)
        return needs_one

    def _plan_decodes(self, plan: _Plan, sequences: Seq[Sequence]) -> None:
        """Plan one token of each sequence. Some may be preempted to make room for the KV of those before.

        `sequences` are in the order of `_running`, of which they are the end or all that decode; a victim is
        then never one that is planned already.
        """
        for sequence in filter(self._can_sample, sequences):
            while sequence.state is SequenceState.RUNNING:
                try:
                    self._kv_cache.ensure_writable(sequence, plan.copies)
                except OutOfBlocks:
                    self._preempt_newest(plan)
                else:
                    plan.parts.append((sequence, sequence.next_chunk_end(self._limits.prefill_chunk)))
                    break

    def _plan_chunk(self, plan: _Plan, sequence: Sequence) -> bool:
        """Plan a sequence's next chunk if the step still has room; the first chunk always has."""
        end = sequence.next_chunk_end(self._limits.prefill_chunk)
        size, scores = end - sequence.num_computed, sequence.request.scores_prompt
        # One chunk's logits of every row at a time: each takes as much memory as the vocabulary has tokens.
        if not self._fits(plan, size) or (scores and plan.scores_prompt):
            return False
        plan.num_prompt_tokens += size
        plan.scores_prompt = plan.scores_prompt or scores
        plan.parts.append((sequence, end))
        return True

    def _fits(self, plan: _Plan, size: int) -> bool:
        """Whether a chunk fits the step. One always does, or decoding could starve prompts."""
        return not plan.num_prompt_tokens or plan.num_tokens + size <= self._limits.max_batch_tokens

    def _admit(self, plan: _Plan, now: float) -> None:
        """Start sequences of the queue, the first one first; one that cannot start holds up the others.

        None is admitted after a preemption: the victim would take its blocks straight back.
        """
        while self._waiting and not plan.preempted and self._fits(plan, self._limits.prefill_chunk):
            sequence = self._waiting[0]
            slots = sum(seq.num_slots for seq in [*self._running, *self._transfers.pulling()])
            if slots + sequence.num_slots > self._limits.max_num_seqs:
                return
            if not self._kv_cache.allocate(sequence, reserve=self._num_growing()):
                return
            request = sequence.request
            borrowed = self._lenders.wanted(sequence, now)
            if request.produces and not borrowed and not self._open_lease(sequence, now):
                continue
            self._waiting.popleft()
            self._note_admission(sequence, now)
            if borrowed and request.prefix_source is not None:
                sequence.transition(SequenceState.WAITING_FOR_REMOTE_KV)
                lender = self._lenders.find(request.prefix_source)
                self._transfers.start_prefix_pull(sequence, lender, borrowed, now)
            else:
                self._start(plan, sequence, now)

    def _num_growing(self) -> int:
        """How many running sequences may need another block."""
        return sum(1 for seq in self._running if not seq.request.produces)

    def _open_lease(self, sequence: Sequence, now: float) -> bool:
        """Lease a produced prompt's blocks, in which its KV is going to be. False: the request has failed."""
        try:
            self._transfers.open_lease(sequence, now)
        except DuplicateTransfer:
            message = "This transfer id was used before."
            self._fail(sequence.request, 409, "duplicate_transfer", message)
            return False
        return True

    def _note_admission(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.clock.admitted is None:
            request.clock.admitted = now
            request.cached_tokens = min(sequence.num_computed, request.prompt_len)
            if not request.pulls:
                self.work.prompt(request.prompt_len, request.cached_tokens)
                self._meter.cached(request.cached_tokens)
            self.counters.prompt_tokens["cached"] += request.cached_tokens

    def _start(self, plan: _Plan, sequence: Sequence, now: float) -> None:
        """Set an admitted sequence to work: pull, compute, or go straight to decoding."""
        request = sequence.request
        if request.pulls and not request.forked:
            if sequence.num_computed < request.prompt_len:
                sequence.transition(SequenceState.WAITING_FOR_REMOTE_KV)
                self._transfers.start_pull(sequence, now)
                return
            self._transfers.abandon_pull(request)
        sequence.transition(SequenceState.RUNNING)
        self._running.append(sequence)
        if sequence.is_decoding:
            self._plan_decodes(plan, self._prompt_done(sequence, now))
        elif self._can_sample(sequence):
            self._plan_chunk(plan, sequence)

    def _preempt_newest(self, plan: _Plan) -> None:
        """Free a running sequence's blocks; its tokens stay, and their KV is computed again later.

        A produced prompt is spared: it has all its blocks and is soon over.
        """
        sequence = next(seq for seq in reversed(self._running) if not seq.request.produces)
        plan.preempted = True
        self.counters.preemptions += 1
        sequence.request.preempted = True
        self._running.remove(sequence)
        self._kv_cache.free(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Put a sequence that holds no blocks at the head of the queue."""
        sequence.num_computed = sequence.num_remembered = 0
        sequence.transition(SequenceState.WAITING)
        self._waiting.appendleft(sequence)

    # Committing.

    def _record(
        self, sequence: Sequence, end: int, sampled: Seq[SampleOutput], tokens: list[Token], now: float
    ) -> None:
        """Record one part: its KV is complete, and `sampled` are its choices' next tokens."""
        request = sequence.request
        if sequence.is_decoding:
            sequence.num_decoded += 1
            if request.clock.first_decoded is None:
                request.clock.first_decoded = now
        in_prompt = min(end, request.prompt_len) - sequence.num_computed
        self.counters.prompt_tokens["computed"] += max(in_prompt, 0)
        sequence.num_computed = end
        self._kv_cache.remember(sequence)
        if not request.forked:
            if request.produces and end < request.prompt_len:
                self._transfers.advance(request, end // self._limits.block_size)
            if end == request.prompt_len:
                if request.begins_anew:
                    self._meter.prompt_done()
                self._prompt_done(sequence, now)
                if not request.submit.sampling.max_tokens:
                    for choice in request.sequences.values():
                        self._finish(choice)
        if not sampled:
            return
        siblings = list(request.sequences.values()) if len(sampled) > 1 else [sequence]
        for sibling, token in zip(siblings, sampled, strict=True):
            tokens.append(sibling.append(token, self._limits.eos_ids))
            if tokens[-1].finish is not None:
                self._finish(sibling)
            elif not request.produces:
                self._want_mask(sibling)
        if request.produces:
            self._end_produce(request, tokens)

    def _fail_stuck(self, plan: _Plan, outputs: StepOutputs) -> None:
        """Fail the requests of which no token could be sampled."""
        for (sequence, _), sampled in zip(plan.parts, outputs.sampled, strict=True):
            failure = next((each.failure for each in sampled if each.failure), None)
            if failure is not None and sequence.request.request_id in self._requests:
                self._fail(sequence.request, 400, "nothing_allowed", failure)

    def _prompt_done(self, trunk: Sequence, now: float) -> list[Sequence]:
        """Fork the other unfinished choices from the trunk: the prompt's KV is in the pool.

        Returns everything that can decode now: the trunk and its siblings, or a sequence that is back from a
        preemption alone.
        """
        request = trunk.request
        if request.forked:
            return [trunk]
        request.clock.prompt_done = now
        for sibling in request.fork():
            self._allocator.share(sibling.blocks)
            self._running.append(sibling)
        if request.pending_output:
            self._outbox.append(request.output(request.take_pending_output()))
        return list(request.sequences.values())

    def _end_produce(self, request: Request, tokens: Seq[Token]) -> None:
        """Hand a produced prompt, which has its first tokens now, to the reader, or free its blocks."""
        unfinished = [seq for seq in request.sequences.values() if seq.state is not SequenceState.FINISHED]
        if not unfinished:
            self._transfers.withdraw(request)
            return
        self._transfers.complete_lease(request, tokens)
        for sequence in unfinished:
            self._finish(sequence)

    # Ends.

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence in any state, and free its blocks (a pull's come by event)."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        self._kv_cache.free(sequence)
        sequence.transition(SequenceState.FINISHED)
        if sequence.num_decoded:
            self._meter.answer_done(sequence.num_decoded)

    def _drop_request(self, request: Request) -> None:
        """Forget a request: its lease is withdrawn and its pull abandoned before its blocks are freed."""
        self._forget(request)
        if request.produces:
            self._transfers.abandon_pull(request)
            self._transfers.withdraw(request)
        if request.pulls and not request.forked:
            self._transfers.abandon_pull(request)
        for sequence in request.sequences.values():
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence)

    def _fail(self, request: Request, status: int, code: str, message: str) -> None:
        self._drop_request(request)
        failure = failed(request.submit, status, code, message)
        self._outbox.append(msgspec.structs.replace(failure, failed_pull=request.timing.failed_pull))

    def _close(self, request: Request, tokens: list[Token]) -> None:
        """Send a request's last message."""
        self._forget(request)
        self._outbox.append(request.output(tokens, done=True))

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.described:
            self._ended_keys.append(request.key)
        if request.submit.sampling.grammar:
            self._masks.forget(request)


def _setups(plan: _Plan, chunks: Seq[Chunk]) -> Iterator[SamplingSetup]:
    """Yield the setups of requests whose first rows are in these chunks."""
    for (sequence, _), chunk in zip(plan.parts, chunks, strict=True):
        if chunk.samples and not sequence.request.described:
            yield sequence.request.describe()


def _ends_produced_prompt(sequence: Sequence, end: int) -> bool:
    return sequence.request.produces and end == sequence.request.prompt_len
