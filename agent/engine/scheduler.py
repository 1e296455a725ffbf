# SPDX-License-Identifier: Apache-2.0
"""Decides what runs next, and keeps every request's books.

A step is three calls: `schedule` picks sequences and reserves their blocks, the ranks run, `commit` records
what they drew; nothing else records results. All calls are synchronous, take the clock as an argument and are
made between steps, never while the ranks run one: a freed block can therefore be given away only after every
write to it is over. The exception is `written`, which only tells readers. What must be sent collects in an
outbox.

Order of a step: sequences that decode come first, oldest first; then prompts under way; then the waiting
queue, first come first served. A chunk of a prompt is computed whole or not at all, so that its bits do not
depend on the company (design I4).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from kvferry.agent.engine.blocks import BlockAllocator, OutOfBlocks
from kvferry.agent.engine.messages import Failed, FinishReason, Output, Submit, Token
from kvferry.agent.engine.sequence import Clock, Request, Sequence, SequenceState
from kvferry.agent.engine.transfers import Connector, TransferLedger, from_wire, to_wire
from kvferry.agent.worker.messages import Chunk, Drawn, Step
from kvferry.transfer.events import LeaseEnded, PlaneEvent, PullDone, PullFailed
from kvferry.transfer.first_tokens import FirstTokens
from kvferry.transfer.producer.lease import DuplicateTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's settings; see `AgentConfig` for the words."""

    block_size: int
    prefill_chunk: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    max_waiting: int
    prefix_cache: bool
    recompute_on_pull_failure: bool
    pull_timeout_s: float
    eos_ids: frozenset[int]


@dataclass(slots=True)
class Counters:
    """What the scheduler counted; they only grow."""

    steps: int = 0
    preemptions: int = 0
    recomputes: int = 0


@dataclass(eq=False, slots=True)
class _Plan:
    """The step under way: who computes up to where, and the copied blocks' sources, held until it is over."""

    parts: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    preempted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + sum(1 for seq, _ in self.parts if _is_decoding(seq))


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache, preemption and KV transfer."""

    def __init__(self, limits: Limits, allocator: BlockAllocator, connector: Connector) -> None:
        self.counters = Counters()
        self._limits = limits
        self._allocator = allocator
        self._connector = connector
        self._ledger = TransferLedger(allocator, connector)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Sequence] = deque()
        self._pulling: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._plan: _Plan | None = None
        self._outbox: list[Output | Failed] = []

    # What the engine may ask.

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._pulling)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left (leases and quarantines may be)."""
        return not self._requests

    def next_deadline(self) -> float | None:
        """When `expire` should be called if nothing happens before."""
        return min((self._deadline(request) for request in self._requests.values()), default=None)

    def take_messages(self) -> list[Output | Failed]:
        """Everything to be sent since the last call."""
        messages, self._outbox = self._outbox, []
        return messages

    def check_integrity(self) -> None:
        """Recount all blocks against everyone who holds one. Raises `IntegrityError`."""
        sequences = [seq for request in self._requests.values() for seq in request.sequences.values()]
        held = [seq.blocks for seq in sequences]
        copied = [[source for source, _ in self._plan.copies]] if self._plan else []
        self._allocator.check_integrity([*held, *copied, *self._ledger.holders()])

    # Requests come and go.

    def submit(self, submit: Submit, now: float) -> None:
        """Take a request in, or answer at once why not."""
        refusal = self._refusal(submit)
        if refusal is not None:
            self._refuse(submit, *refusal)
            return
        request = Request(submit, now + submit.timeout_s, Clock(arrived=now))
        choices = request.unfinished_choices()
        if submit.remote is not None:
            try:
                self._ledger.hold(request, min(submit.timeout_s, self._limits.pull_timeout_s))
            except DuplicateTransfer:
                self._refuse(submit, 409, "duplicate_transfer", "This transfer id is in use.")
                return
        if not choices:
            if submit.remote is not None:
                self._ledger.abandon_pull(request)
            self._outbox.append(Output(request_id=submit.request_id, tokens=(), done=True))
            return
        index, outputs = next(iter(choices.items()))
        trunk = Sequence(request, index, [*submit.prompt_ids, *outputs])
        request.sequences[index] = trunk
        self._requests[submit.request_id] = request
        self._waiting.append(trunk)

    def abort(self, request_id: str) -> None:
        """End a request without a word. An unknown id is one that has ended by itself."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop_request(request)

    def stop_choice(self, request_id: str, index: int) -> None:
        """End one choice; the last one's end is answered. A choice without tokens cannot be stopped."""
        request = self._requests.get(request_id)
        if request is None or not request.forked or index not in request.sequences:
            return
        sequence = request.sequences[index]
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence)
        if self._all_finished(request):
            self._close(request, tokens=[])

    def drop_transfer(self, transfer_id: str) -> None:
        """Unpin a lease's blocks; the plane's event frees them and ends a request that still fills them."""
        self._connector.drop(transfer_id)

    def expire(self, now: float) -> None:
        """End requests whose time is over."""
        for request in [req for req in self._requests.values() if self._deadline(req) <= now]:
            if now >= request.deadline:
                self._fail(request, 504, "timeout", "The request's time was over before its answer.")
            else:
                self._fail(request, 429, "no_kv_room", "No room for the prompt's KV within its deadline.")

    def handle_event(self, event: PlaneEvent, now: float) -> None:
        """Act on what the transfer plane reports."""
        if isinstance(event, LeaseEnded):
            request = self._ledger.lease_ended(event.transfer_id)
            # A reader that releases early has given its pull up, but waits for the first tokens.
            if request is not None and event.cause != "released":
                self._fail(request, 409, "transfer_dropped", f"The KV transfer was {event.cause}.")
        elif isinstance(event, PullDone):
            self._pull_done(event, now)
        elif isinstance(event, PullFailed):
            self._pull_failed(event)
        else:
            self._ledger.pull_quiescent(event.transfer_id)

    # The step.

    def schedule(self, now: float) -> Step | None:
        """Choose the next step and reserve its blocks; None when there is nothing to compute."""
        assert self._plan is None, "the last step was not committed"
        plan = self._plan = _Plan()
        self._plan_decodes(plan, [sequence for sequence in self._running if _is_decoding(sequence)])
        for sequence in self._running:
            if not _is_decoding(sequence) and not self._plan_chunk(plan, sequence):
                break
        self._admit(plan, now)
        if not plan.parts:
            self._plan = None
            return None
        for sequence, _ in plan.parts:
            if _is_decoding(sequence) and sequence.request.clock.first_step is None:
                sequence.request.clock.first_step = now
        self.counters.steps += 1
        return Step(
            number=self.counters.steps,
            copies=tuple(plan.copies),
            chunks=tuple(self._chunk(sequence, end) for sequence, end in plan.parts),
            tells_written=any(_ends_produced_prompt(sequence, end) for sequence, end in plan.parts),
        )

    def written(self) -> None:
        """Every rank has written the KV of the step under way, which `tells_written`, and now draws: readers
        may have the last blocks of prompts that end with it.
        """
        assert self._plan is not None, "no step is under way"
        for sequence, end in self._plan.parts:
            if _ends_produced_prompt(sequence, end):
                self._ledger.advance(sequence.request, self._blocks_for(end))

    def commit(self, drawn: Seq[Seq[Drawn]], now: float) -> None:
        """Record a step that every rank has completed: one tuple of tokens per chunk, as drawn."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step to commit"
        self._allocator.release(source for source, _ in plan.copies)
        tokens: defaultdict[str, list[Token]] = defaultdict(list)
        requests: dict[str, Request] = {}
        for (sequence, end), chunk_drawn in zip(plan.parts, drawn, strict=True):
            request = sequence.request
            requests[request.request_id] = request
            self._record(sequence, end, chunk_drawn, tokens[request.request_id], now)
        for request_id, new_tokens in tokens.items():
            request = requests[request_id]
            if self._all_finished(request):
                self._close(request, new_tokens)
            elif new_tokens:
                self._outbox.append(self._output(request, new_tokens))

    # Planning.

    def _plan_decodes(self, plan: _Plan, sequences: Seq[Sequence]) -> None:
        """Plan one token of each sequence. Some may be preempted to make room for the KV of those before.

        `sequences` are in the order of `_running`, of which they are the end or all that decode; a victim is
        then never one that is planned already.
        """
        for sequence in sequences:
            while sequence.state is SequenceState.RUNNING:
                try:
                    self._ensure_writable(plan, sequence)
                except OutOfBlocks:
                    self._preempt_newest(plan)
                else:
                    plan.parts.append((sequence, sequence.next_chunk_end(self._limits.prefill_chunk)))
                    break

    def _ensure_writable(self, plan: _Plan, sequence: Sequence) -> None:
        """Give the sequence a block of its own to write to. Raises `OutOfBlocks`, changing nothing."""
        index = sequence.num_computed // self._limits.block_size
        if index == len(sequence.blocks):
            sequence.blocks += self._allocator.allocate(1)
            return
        block = sequence.blocks[index]
        # A copy's source keeps its reference until commit: it must not be given away before it was read.
        # Its last holder may write to it all the same, since ranks copy before they compute.
        copied = sum(1 for source, _ in plan.copies if source == block)
        if self._allocator.num_references(block) - copied > 1:
            (copy,) = self._allocator.allocate(1)
            plan.copies.append((block, copy))
            sequence.blocks[index] = copy

    def _plan_chunk(self, plan: _Plan, sequence: Sequence) -> bool:
        """Plan a sequence's next chunk if the step still has room; the first chunk always has."""
        end = sequence.next_chunk_end(self._limits.prefill_chunk)
        size = end - sequence.num_computed
        if not self._fits(plan, size):
            return False
        plan.num_prompt_tokens += size
        plan.parts.append((sequence, end))
        return True

    def _fits(self, plan: _Plan, size: int) -> bool:
        """Whether a chunk fits the step. One always does, or decoding could starve prompts for ever."""
        return not plan.num_prompt_tokens or plan.num_tokens + size <= self._limits.max_batch_tokens

    def _admit(self, plan: _Plan, now: float) -> None:
        """Take sequences from the queue, the first one first; one that cannot start holds up the others.

        After a preemption nobody is admitted: the victim would take its blocks straight back.
        """
        while self._waiting and not plan.preempted and self._fits(plan, self._limits.prefill_chunk):
            sequence = self._waiting[0]
            if self._slots_taken() + _slots(sequence) > self._limits.max_num_seqs:
                return
            shared = self._usable_prefix(sequence)
            if not self._take_blocks(sequence, shared):
                return
            if sequence.request.submit.produce is not None and not self._open_lease(sequence, now):
                continue
            self._waiting.popleft()
            self._start(plan, sequence, len(shared), now)

    def _start(self, plan: _Plan, sequence: Sequence, num_shared: int, now: float) -> None:
        """Set an admitted sequence to work: pull, compute, or go straight to decoding."""
        request = sequence.request
        if request.clock.admitted is None:
            request.clock.admitted = now
            request.cached_tokens = min(sequence.num_computed, request.prompt_len)
        if request.pulls and not request.forked:
            if sequence.num_computed < request.prompt_len:
                sequence.transition(SequenceState.WAITING_FOR_REMOTE_KV)
                self._pulling[request.request_id] = sequence
                self._start_pull(sequence, num_shared, now)
                return
            self._ledger.abandon_pull(request)
        sequence.transition(SequenceState.RUNNING)
        self._running.append(sequence)
        if _is_decoding(sequence):
            self._plan_decodes(plan, self._prompt_done(sequence, now))
        else:
            self._plan_chunk(plan, sequence)

    def _open_lease(self, sequence: Sequence, now: float) -> bool:
        request = sequence.request
        try:
            self._ledger.open_lease(sequence, request.deadline - now)
        except DuplicateTransfer:
            self._fail(request, 409, "duplicate_transfer", "This transfer id was used before.")
            return False
        if sequence.num_computed:
            self._ledger.advance(request, sequence.num_computed // self._limits.block_size)
        return True

    def _usable_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks from which the sequence may start."""
        limits, request = self._limits, sequence.request
        if not limits.prefix_cache:
            return []
        # The last token's logits are wanted, so it must be computed; unless the prompt's are not.
        tokens = request.prompt_len if sequence.knows_first_token else len(sequence.tokens) - 1
        hashes = sequence.full_block_hashes(limits.block_size, tokens)
        found = self._allocator.find_prefix(hashes)
        if request.preempted and len(found) * limits.block_size < request.prompt_len:
            # Recompute in the chunks of the first time, so that the tokens given out stay the right ones.
            per_chunk = limits.prefill_chunk // limits.block_size
            found = found[: len(found) // per_chunk * per_chunk]
        return found

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def _tokens_to_cover(self, sequence: Sequence) -> int:
        """How many tokens need a block on admission: siblings to come share the prompt's only."""
        return len(sequence.tokens) if sequence.request.forked else sequence.request.prompt_len

    def _take_blocks(self, sequence: Sequence, shared: list[int]) -> bool:
        """Give the sequence blocks for all its known tokens, unless running ones may soon need them."""
        total = self._blocks_for(self._tokens_to_cover(sequence))
        growing = sum(1 for seq in self._running if seq.request.submit.produce is None)
        available = self._allocator.num_free - self._allocator.num_cached(shared)
        if total - len(shared) + growing > available:
            return False
        self._allocator.share(shared)
        sequence.blocks = [*shared, *self._allocator.allocate(total - len(shared))]
        sequence.num_computed = len(shared) * self._limits.block_size
        sequence.num_remembered = len(shared)
        return True

    def _slots_taken(self) -> int:
        return sum(_slots(seq) for seq in [*self._running, *self._pulling.values()])

    def _chunk(self, sequence: Sequence, end: int) -> Chunk:
        """What the ranks are told about one planned part."""
        num_blocks = self._blocks_for(end)
        return Chunk(
            token_ids=tuple(sequence.tokens[sequence.num_computed : end]),
            start=sequence.num_computed,
            blocks=tuple(sequence.blocks[:num_blocks]),
            samples=tuple(sequence.sample(index) for index in self._choices_to_draw(sequence, end)),
        )

    def _choices_to_draw(self, sequence: Sequence, end: int) -> Iterable[int]:
        """The choices whose next token comes from the logits of the part's last row."""
        if end < len(sequence.tokens):
            return ()
        return (sequence.index,) if sequence.request.forked else sequence.request.unfinished_choices()

    # Committing.

    def _record(
        self, sequence: Sequence, end: int, drawn: Seq[Drawn], tokens: list[Token], now: float
    ) -> None:
        """Record one part: its KV is there, and `drawn` are its choices' next tokens."""
        request = sequence.request
        if _is_decoding(sequence) and request.clock.first_decoded is None:
            request.clock.first_decoded = now
        sequence.num_computed = end
        self._remember_blocks(sequence)
        if not request.forked:
            if request.submit.produce is not None and end < request.prompt_len:
                self._ledger.advance(request, end // self._limits.block_size)
            if end == request.prompt_len:
                self._prompt_done(sequence, now)
        if not drawn:
            return
        siblings = list(request.sequences.values()) if len(drawn) > 1 else [sequence]
        for sibling, token in zip(siblings, drawn, strict=True):
            tokens.append(self._append(sibling, token))
        if request.submit.produce is not None:
            self._end_produce(request, tokens)

    def _append(self, sequence: Sequence, drawn: Drawn) -> Token:
        sequence.tokens.append(drawn.token_id)
        finish = self._finish_reason(sequence, drawn.token_id)
        if finish is not None:
            self._finish(sequence)
        return Token(index=sequence.index, token_id=drawn.token_id, logprob=drawn.logprob, finish=finish)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.submit.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self._limits.eos_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if sequence.num_outputs >= sampling.max_tokens else None

    def _prompt_done(self, trunk: Sequence, now: float) -> list[Sequence]:
        """The prompt's KV is in the pool: the other unfinished choices fork from the trunk.

        Returns everything that can decode now: the trunk and its siblings, or a sequence that is back from a
        preemption alone.
        """
        request = trunk.request
        if request.forked:
            return [trunk]
        request.forked = True
        request.clock.prompt_done = now
        for index, outputs in request.unfinished_choices().items():
            if index != trunk.index:
                sibling = trunk.fork(index, [*request.submit.prompt_ids, *outputs])
                self._allocator.share(sibling.blocks)
                request.sequences[index] = sibling
                self._running.append(sibling)
        if request.unsaid:
            self._outbox.append(self._output(request, request.take_unsaid()))
        return list(request.sequences.values())

    def _end_produce(self, request: Request, tokens: Seq[Token]) -> None:
        """A produced prompt has its first tokens: hand its blocks to the reader, or free them."""
        going_on = [seq for seq in request.sequences.values() if seq.state is not SequenceState.FINISHED]
        if not going_on:
            self._ledger.withdraw(request)
            return
        self._ledger.hand_over(request, to_wire(tokens, request.cached_tokens or 0))
        for sequence in going_on:
            self._finish(sequence)

    def _remember_blocks(self, sequence: Sequence) -> None:
        """Offer the full blocks computed so far to others that begin alike."""
        if not self._limits.prefix_cache:
            return
        size = self._limits.block_size
        full = sequence.num_computed // size
        if full > sequence.num_remembered:
            hashes = sequence.full_block_hashes(size, full * size)
            for index in range(sequence.num_remembered, full):
                self._allocator.remember(sequence.blocks[index], hashes[index])
            sequence.num_remembered = full

    # Transfers.

    def _start_pull(self, sequence: Sequence, num_shared: int, now: float) -> None:
        """Pull a prompt that was computed elsewhere; or that is being computed, which takes its own time."""
        request = sequence.request
        timeout_s = self._pull_deadline(request) - now
        fill_s = 0.0
        if request.awaits_first_tokens:
            timeout_s = min(self._limits.pull_timeout_s, request.deadline - now)
            fill_s = request.deadline - now - timeout_s
        self._ledger.start_pull(sequence, num_shared, timeout_s, fill_s)

    def _pull_done(self, event: PullDone, now: float) -> None:
        sequence = self._ledger.pull_done(event.transfer_id)
        if sequence is None:
            return
        request = sequence.request
        if request.awaits_first_tokens and not self._adopt(request, event.first_tokens):
            self._free_blocks(sequence)
            self._pull_is_lost(sequence, "it came without the first tokens")
            return
        del self._pulling[request.request_id]
        request.timing = msgspec.structs.replace(
            request.timing,
            pull_wait_s=event.wait_s,
            pull_s=event.pull_s,
            pull_tail_s=event.tail_s,
            pull_early_blocks=event.early_blocks,
            pull_bytes=event.nbytes,
            pull_descriptors=event.descriptors,
            backend=event.backend,
        )
        sequence.num_computed = request.prompt_len
        sequence.transition(SequenceState.RUNNING)
        self._running.append(sequence)
        self._remember_blocks(sequence)
        self._prompt_done(sequence, now)

    def _pull_failed(self, event: PullFailed) -> None:
        sequence = self._ledger.pull_failed(event.transfer_id, quiescent=event.quiescent)
        if sequence is None:
            return
        if sequence.request.awaits_first_tokens:
            self._adopt(sequence.request, event.first_tokens)
        self._pull_is_lost(sequence, event.reason)

    def _adopt(self, request: Request, first: FirstTokens | None) -> bool:
        """Take over what the prefill's engine drew. False if it told nothing, or of another request."""
        if first is None:
            return False
        tokens = from_wire(first, request.submit.sampling, self._limits.vocab_size)
        if tokens is None:
            return False
        request.cached_tokens = first.cached_tokens
        request.adopt(tokens)
        return True

    def _pull_is_lost(self, sequence: Sequence, reason: str) -> None:
        """Compute the prompt here, or give the request up."""
        request = sequence.request
        del self._pulling[request.request_id]
        if not self._limits.recompute_on_pull_failure:
            self._fail(request, 502, "pull_failed", f"The prompt's KV could not be pulled: {reason}.")
            return
        self.counters.recomputes += 1
        request.recomputed = True
        sequence.num_computed = sequence.num_remembered = 0
        sequence.transition(SequenceState.WAITING)
        self._waiting.appendleft(sequence)

    # Ends.

    def _preempt_newest(self, plan: _Plan) -> None:
        """Take a running sequence's blocks; its tokens stay, and their KV is computed again later.

        A produced prompt is spared: it has all its blocks and is soon over.
        """
        sequence = next(seq for seq in reversed(self._running) if seq.request.submit.produce is None)
        plan.preempted = True
        self.counters.preemptions += 1
        sequence.request.preempted = True
        self._running.remove(sequence)
        self._free_blocks(sequence)
        sequence.transition(SequenceState.WAITING)
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever it is in, and free its blocks (a pull's come by event)."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.WAITING_FOR_REMOTE_KV:
            self._pulling.pop(sequence.request.request_id, None)
        self._free_blocks(sequence)
        sequence.transition(SequenceState.FINISHED)

    def _free_blocks(self, sequence: Sequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_computed = 0
        sequence.num_remembered = 0
        # Last block first: the cache evicts in this order, and no prefix is found without its beginning.
        self._allocator.release(reversed(blocks))

    def _drop_request(self, request: Request) -> None:
        """Forget a request: its lease is withdrawn and its pull abandoned before its blocks are freed."""
        del self._requests[request.request_id]
        if request.submit.produce is not None:
            self._ledger.withdraw(request)
        if request.pulls and not request.forked:
            self._ledger.abandon_pull(request)
        for sequence in request.sequences.values():
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence)

    def _fail(self, request: Request, status: int, code: str, message: str) -> None:
        self._drop_request(request)
        self._outbox.append(Failed(request_id=request.request_id, status=status, code=code, message=message))

    def _all_finished(self, request: Request) -> bool:
        """Whether no choice wants more tokens. Before the fork the trunk stands for all of them."""
        return all(seq.state is SequenceState.FINISHED for seq in request.sequences.values())

    def _close(self, request: Request, tokens: list[Token]) -> None:
        """Send a request's last message."""
        del self._requests[request.request_id]
        self._outbox.append(self._output(request, tokens, done=True))

    def _output(self, request: Request, tokens: list[Token], *, done: bool = False) -> Output:
        leased = done and request.submit.produce is not None and any(t.finish is None for t in tokens)
        return Output(
            request_id=request.request_id,
            tokens=tuple(tokens),
            done=done,
            leased=leased,
            cached_tokens=request.cached_tokens or 0,
            timing=request.measured() if done else None,
        )

    # Deadlines and refusals.

    def _pull_deadline(self, request: Request) -> float:
        return min(request.deadline, request.clock.arrived + self._limits.pull_timeout_s)

    def _deadline(self, request: Request) -> float:
        """A pull under way keeps its own deadline; the plane reports its end."""
        trunk_waits = not request.forked and request.request_id not in self._pulling
        if request.submit.remote is not None and trunk_waits and request.clock.admitted is None:
            return self._pull_deadline(request)
        return request.deadline

    def _refuse(self, submit: Submit, status: int, code: str, message: str) -> None:
        self._outbox.append(Failed(request_id=submit.request_id, status=status, code=code, message=message))

    def _refusal(self, submit: Submit) -> tuple[int, str, str] | None:
        """Why a request cannot be taken (status, code, message), or None."""
        limits, sampling = self._limits, submit.sampling
        transfer_id = submit.remote.transfer_id if submit.remote else submit.produce
        if submit.request_id in self._requests:
            return 409, "duplicate_request", "A request with this id is being served."
        if transfer_id is not None and self._ledger.is_known(transfer_id):
            return 409, "duplicate_transfer", "This transfer id is in use."
        if submit.produce is not None and (submit.remote is not None or submit.prior):
            return 400, "bad_transfer", "A prompt is either produced or taken over, not both."
        if submit.remote is not None and not _can_go_on(submit):
            return 400, "bad_transfer", "The transfer's tokens do not match the request."
        if not submit.prompt_ids:
            return 400, "empty_prompt", "The prompt has no tokens."
        known = (*submit.prompt_ids, *(token for prior in submit.prior for token in prior.token_ids))
        if not 0 <= min(known) <= max(known) < limits.vocab_size:
            return 400, "bad_token", f"Token ids go from 0 to {limits.vocab_size - 1}."
        if len(submit.prompt_ids) + sampling.max_tokens > limits.max_model_len:
            return 400, "context_length_exceeded", f"The context holds {limits.max_model_len} tokens."
        if submit.produce is None and sampling.n > limits.max_num_seqs:
            return 400, "too_many_choices", f"At most {limits.max_num_seqs} choices run at once."
        if len(self._waiting) >= limits.max_waiting:
            return 429, "queue_full", "Too many requests are waiting."
        return None


def _ends_produced_prompt(sequence: Sequence, end: int) -> bool:
    request = sequence.request
    return request.submit.produce is not None and end == request.prompt_len


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.num_computed >= sequence.request.prompt_len


def _slots(sequence: Sequence) -> int:
    """How many sequences this one will be once it has forked."""
    request = sequence.request
    if request.forked or request.submit.produce is not None:
        return 1
    return len(request.unfinished_choices())


def _can_go_on(submit: Submit) -> bool:
    """Whether a taken-over request brings what decoding starts from: the whole prompt and first tokens.

    One whose prefill still runs brings no tokens: they come with the KV.
    """
    assert submit.remote is not None
    return (
        submit.remote.source.num_tokens == len(submit.prompt_ids)
        and all(prior.finished or prior.token_ids for prior in submit.prior)
        and bool(submit.prior) != submit.remote.streamed
    )
