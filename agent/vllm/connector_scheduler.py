# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's scheduler process: which prompts are lent, which are fetched, and what vLLM learns.

vLLM calls it from its scheduler's loop (`KVConnectorBase_V1`, scheduler side). It says what to load and what
may be freed in each step's `ConnectorMetadata`, which travels with the step to rank 0 and comes back as its
report; what has been proven by the time that any report comes back is added to it. So vLLM computes on a
prompt's KV only after the producer's proof (I1), and writes a failed pull's blocks only when nothing else can
(I3).
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvferry.agent.announce.work_counts import WorkCounts
from kvferry.agent.lender import Lender, find_lender
from kvferry.agent.plugin.kept_prompts import KeptEnded
from kvferry.agent.plugin.plane_thread import Event, LeaseRefused
from kvferry.agent.vllm.identity import has_ids, has_plain_ids, prefix_hashes, prompt_hash
from kvferry.agent.vllm.kept_turns import Keeper, KeptTurns
from kvferry.agent.vllm.kv_groups import KvGroup, runs_of
from kvferry.agent.vllm.params import (
    BadParams,
    DropPrompt,
    FetchPrompt,
    LendPrompt,
    PromptTask,
    lent_params,
    read_params,
)
from kvferry.agent.vllm.step_meter import StepMeter
from kvferry.common.state_machine import transition, transitions
from kvferry.proxy.wire.registration import Capacity, WorkReport
from kvferry.transfer.events import (
    NO_FAULT,
    WITHDRAWN,
    LeaseEnded,
    PrefixLent,
    PullDone,
    PullFailed,
    PullQuiescent,
)
from kvferry.transfer.ids import new_transfer_id
from kvferry.transfer.plane import (
    MAX_LOAN_BLOCKS,
    MAX_LOAN_S,
    BlockRun,
    RemotePrompt,
    all_blocks,
    one_group,
)

_COMPUTED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""vLLM's names of how a request ends whose prompt was computed."""

log = logging.getLogger(__name__)


class Plane(Keeper, Protocol):
    """The transfer plane, as `PlaneThread` has it."""

    control_port: int

    def register_lease(
        self, transfer_id: str, runs: Sequence[BlockRun], num_tokens: int, ids_hash: str, limit_s: float
    ) -> None: ...

    def drop(self, transfer_id: str) -> None: ...

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None: ...

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str,
    ) -> None: ...

    def cancel(self, transfer_id: str) -> None: ...

    def ask_prefix(
        self, transfer_id: str, remote: RemotePrompt, hashes: Sequence[bytes], timeout_s: float
    ) -> None: ...

    def take_events(self) -> list[Event]: ...


@dataclass(slots=True)
class ConnectorMetadata:
    """What rank 0 reports to vLLM's scheduler with one step, by vLLM's request ids.

    `received`: nothing writes to the request's blocks any more, and their KV is proven unless the request is
    among `failed` too. `failed_blocks`: where the failed ones' KV should be, for vLLM before 0.30.
    `sent`: no one reads the request's blocks any more.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)


class FetchState(enum.Enum):
    ASKING = "asking"
    """Another server says how much of the prompt's beginning it has."""
    HELD = "held"
    """The lease is renewed; vLLM has no room for the prompt yet."""
    PULLING = "pulling"
    """The plane may write to the request's blocks."""
    REPORTED = "reported"
    """Nothing writes any more; vLLM learns how it ended."""
    OVER = "over"


FETCH_TRANSITIONS = transitions(
    {
        FetchState.ASKING: {FetchState.HELD, FetchState.OVER},
        FetchState.HELD: {FetchState.PULLING, FetchState.OVER},
        FetchState.PULLING: {FetchState.REPORTED},
        FetchState.REPORTED: {FetchState.OVER},
    }
)


@dataclass(eq=False, slots=True)
class _Fetch:
    """One prompt's transfer, or its beginning's. With n > 1 vLLM makes n requests of it: the first is the
    owner, and the others wait until its prompt is in the prefix cache.
    """

    transfer_id: str
    source: RemotePrompt
    owner: str
    members: set[str]
    """Requests that have not ended."""
    state: FetchState = FetchState.HELD
    blocks: tuple[int, ...] = ()
    """Those that are pulled into."""
    failure: str = ""
    is_abandoned: bool = False
    """The owner ended during the pull."""
    hashes: tuple[bytes, ...] = ()
    """Of a prompt's beginning: those of the blocks that are asked for, and once some are lent, of these."""
    first_block: int = 0
    """The position of the first of them."""
    lender: Lender = field(default_factory=Lender)
    pull_by: float = math.inf
    """By the scheduler's clock: what is lent later than that may not be read in time."""

    def transition(self, to: FetchState) -> None:
        self.state = transition(f"fetch {self.transfer_id}", FETCH_TRANSITIONS, self.state, to)


@dataclass(frozen=True, slots=True)
class _Lent:
    request: str
    blocks: tuple[int, ...]
    params: dict[str, Any]


class KvferryConnectorScheduler:
    """The connector in the scheduler's process. Called by one thread; nothing waits.

    Args:
        incarnation: This engine's.
        host: At which other engines reach the plane's control channel.
        groups: vLLM's KV-cache groups.
        lends, fetches: Whether the server's role has it lend prompts, or fetch them.
        continuable: Whether answers to prompts of text can go on from token ids alone.
        shares_beginnings: Whether the KV of a prompt's beginning is the same whatever follows.
        lease_limit_s: When a lease ends however often it is renewed.
        pull_timeout_s: Deadline of a pull, from when there is room for it.
        hold_timeout_s: How long a lease is renewed for a request that waits for room.
        max_running: Most sequences that vLLM runs at once; `num_blocks`: its KV blocks.
        free_blocks: How many of these are free.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        plane: Plane,
        *,
        incarnation: str,
        host: str,
        tp_size: int,
        dp_rank: int = 0,
        groups: Sequence[KvGroup],
        lends: bool,
        fetches: bool,
        continuable: bool,
        shares_beginnings: bool = True,
        lease_limit_s: float,
        pull_timeout_s: float,
        hold_timeout_s: float,
        max_running: int,
        num_blocks: int,
        free_blocks: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._incarnation = incarnation
        self._host = host
        self._tp_size = tp_size
        self._dp_rank = dp_rank
        self._groups = tuple(groups)
        self._keeps_all = all(group.keeps_all for group in groups)
        self._lends = lends
        self._fetches_prompts = fetches
        self._continuable = continuable
        self._lease_limit_s = lease_limit_s
        self._pull_timeout_s = pull_timeout_s
        self._hold_timeout_s = hold_timeout_s
        shares = shares_beginnings and len(self._groups) == 1 and self._keeps_all
        self._block_size = groups[0].block_size if shares else None
        """Of the only group, where beginnings of prompts can be lent and pulled; else None."""
        self._clock = clock
        self._kept = KeptTurns(plane, self._block_size, num_blocks, free_blocks)
        self._beginnings: dict[str, _Fetch] = {}
        """By request: what it pulls before it computes the rest, from when another server is asked."""
        self._lenders: dict[str, Lender] = {}
        """By incarnation, those of late."""
        self._tasks: dict[str, PromptTask] = {}
        """By request, from `on_new_request` until it ends."""
        self._fetches: dict[str, _Fetch] = {}
        """By transfer id, until its requests have ended and nothing writes any more."""
        self._lent: dict[str, _Lent] = {}
        """By transfer id, until the lease has ended."""
        self._metadata = ConnectorMetadata()
        self.requests = 0
        """Requests that vLLM has and that have not ended."""
        self.running = 0
        """Of these, how many had blocks in the last step: they were scheduled, or are being fetched."""
        self.steps = 0
        self._leases_of: Counter[int] = Counter()
        """Per leased block: prompts that begin alike share blocks."""
        self._figures: dict[str, float] = defaultdict(float)
        self._counts = WorkCounts()
        self._leases_expired = 0
        self.work: WorkReport = self._counts.work(0)
        """What has been done until the last step; any thread may read it."""
        self._meter = StepMeter(
            max_running,
            num_blocks,
            lambda: max(0, num_blocks - free_blocks() - self.leased_blocks - self._kept.num_blocks),
            clock,
            self._counts.prompt,
        )

    @property
    def leased_blocks(self) -> int:
        """Any thread may ask."""
        return len(self._leases_of)

    @property
    def capacity(self) -> Capacity:
        """What vLLM's work takes, as measured; any thread may ask."""
        return self._meter.capacity

    # Requests come.

    def on_new_request(self, request: Any) -> None:
        """Read what the request asks for, and keep the lease of a prompt that it fetches."""
        self.requests += 1
        task = self._task_of(request)
        if not isinstance(task, DropPrompt) and not _is_aborted(request):
            self._meter.begun(request, fetches=isinstance(task, FetchPrompt))
        if task is None:
            return
        match task:
            case DropPrompt():
                self._plane.drop(task.transfer_id)
            case LendPrompt():
                self._tasks[request.request_id] = task
                if not (self._keeps_all or (task.first_token and self._is_continuable(request))):
                    leave_last_token(request)
            case FetchPrompt():
                self._tasks[request.request_id] = task
                self._join(request.request_id, task)

    def _task_of(self, request: Any) -> PromptTask | None:
        """None where nothing is to be done, or nothing can be: then the prompt is computed here."""
        try:
            task = read_params(request.kv_transfer_params)
        except BadParams as error:
            self._figures["bad_params"] += 1
            log.warning("request %s: invalid kv_transfer_params: %s", request.request_id, error)
            return None
        if isinstance(task, FetchPrompt) and _is_aborted(request):
            # Its prompt is not the one whose KV is lent; the lease is ended with the request.
            self._figures["aborted_before_admission"] += 1
            return task if self._fetches_prompts else None
        if isinstance(task, FetchPrompt):
            usable = self._fetches_prompts and has_ids(request)
            if not usable or task.remote_num_tokens > len(request.prompt_token_ids):
                self._figures["bad_params"] += 1
                log.warning("request %s cannot use KV of another server here", request.request_id)
                return None
        elif isinstance(task, LendPrompt) and not (self._lends and has_ids(request)):
            self._figures["bad_params"] += 1
            log.warning("request %s cannot lend its KV", request.request_id)
            return None
        return task

    def _join(self, request_id: str, task: FetchPrompt) -> None:
        fetch = self._fetches.get(task.transfer_id)
        if fetch is not None:
            fetch.members.add(request_id)
            return
        self._fetches[task.transfer_id] = _Fetch(task.transfer_id, task.source, request_id, {request_id})
        self._plane.hold(task.transfer_id, task.source, self._hold_timeout_s)

    # Requests are scheduled.

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens of the prompt, beyond those computed here, are to be fetched.

        None: ask again later; the request waits for the first of its siblings.
        """
        fetch = self._fetch_of(request.request_id) or self._ask(request, num_computed)
        if fetch is None or fetch.is_abandoned:
            return 0, False
        if fetch.state is FetchState.ASKING:
            return None, False
        if fetch.owner != request.request_id:
            return (0, False) if fetch.state is FetchState.OVER else (None, False)
        if fetch.state is FetchState.REPORTED:  # the pull failed: the prompt is computed here
            fetch.transition(FetchState.OVER)
        if fetch.state is not FetchState.HELD:
            return 0, False
        if fetch.hashes and self._block_size:
            # vLLM may have found or lost blocks in its prefix cache since it was asked.
            is_next = fetch.first_block * self._block_size == num_computed
            missing = fetch.source.num_tokens if is_next and self._clock() < fetch.pull_by else 0
        else:
            missing = fetch.source.num_tokens - num_computed
        if missing > 0 and self._is_loadable(request, fetch):
            return missing, True
        if missing > 0:
            self._figures["whole_prompts"] += 1
            self._counts.recompute()
        elif not fetch.hashes:
            self._figures["cached"] += 1
        self._plane.cancel(fetch.transfer_id)
        fetch.transition(FetchState.OVER)
        return 0, False

    def _ask(self, request: Any, num_computed: int) -> _Fetch | None:
        """Ask for the beginning of a prompt that is to be computed here, if that is worth it."""
        task = self._tasks.get(request.request_id)
        source = task.prefix_source if isinstance(task, LendPrompt) else None
        if source is None or self._block_size is None or not has_plain_ids(request):
            return None
        first = num_computed // self._block_size
        # Its last token is computed here, to sample from it.
        missing = (len(request.prompt_token_ids) - 1) // self._block_size - first
        lender = find_lender(self._lenders, source.remote_engine_id)
        enough = missing * self._block_size >= max(source.min_tokens, self._block_size)
        if not enough or not lender.may_be_asked(self._clock()) or request.get_skip_reading_prefix_cache():
            return None
        ids = request.prompt_token_ids[: (first + missing) * self._block_size]
        hashes = prefix_hashes(request, ids, self._block_size)[first:][:MAX_LOAN_BLOCKS]
        name, owner = new_transfer_id(), request.request_id
        fetch = _Fetch(name, source.prompt(0), owner, {owner}, FetchState.ASKING)
        fetch.hashes, fetch.first_block, fetch.lender = tuple(hashes), first, lender
        fetch.pull_by = self._clock() + MAX_LOAN_S / 2
        self._fetches[name] = self._beginnings[owner] = fetch
        lender.num_asking += 1
        self._plane.ask_prefix(name, source.prompt(len(hashes) * self._block_size), hashes, MAX_LOAN_S)
        return fetch

    def _is_loadable(self, request: Any, fetch: _Fetch) -> bool:
        """vLLM computes a prompt's last token again to sample the next. What a window or a state has kept is
        for the token after the last that was loaded, so this must be the prompt's last one.
        """
        return self._keeps_all or fetch.source.num_tokens < len(request.prompt_token_ids)

    def update_state_after_alloc(
        self, request: Any, blocks: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Blocks were allocated: begin the pull, or note that the request runs.

        Args:
            blocks: All of the request's by group; 0 for those that hold what others may read, or nothing.
        """
        fetch = self._fetch_of(request.request_id)
        if fetch is None or fetch.owner != request.request_id:
            return
        if not num_external:
            if fetch.state is FetchState.HELD:  # vLLM computes all of it, say for the prompt's logprobs
                self._plane.cancel(fetch.transfer_id)
            if fetch.state in (FetchState.HELD, FetchState.REPORTED):
                fetch.transition(FetchState.OVER)
            return
        if fetch.state is not FetchState.HELD:
            raise RuntimeError(f"{request.request_id}: blocks for a fetch that is {fetch.state.value}")
        fetch.transition(FetchState.PULLING)
        if fetch.hashes:
            self._pull_beginning(fetch, blocks[0])
            return
        num_tokens = fetch.source.num_tokens
        runs = runs_of(self._groups, blocks, num_tokens)
        if runs is None:
            self._plane.cancel(fetch.transfer_id)
            self._fail_pull(fetch, "mismatch")
            return
        fetch.blocks = all_blocks(runs)
        ids_hash = prompt_hash(request, num_tokens)
        self._plane.pull(fetch.transfer_id, fetch.source, runs, self._pull_timeout_s, ids_hash)

    def _pull_beginning(self, fetch: _Fetch, blocks: Sequence[int]) -> None:
        wanted = blocks[fetch.first_block : fetch.first_block + len(fetch.hashes)]
        fetch.blocks = tuple(wanted)
        timeout_s = min(MAX_LOAN_S, self._pull_timeout_s)
        ids_hash = fetch.hashes[-1].hex()
        self._plane.pull(fetch.transfer_id, fetch.source, one_group(wanted), timeout_s, ids_hash)

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """Take the step that has just been scheduled: how many tokens of each request are in it."""
        self._meter.scheduled(tokens)

    def outputs_taken(self) -> None:
        """Note that vLLM has taken the outputs of the oldest step that it has scheduled."""
        self._meter.outputs_taken()

    def add_proven(self, received: set[str] | None) -> set[str] | None:
        """What a step's report says has been received, and what has been proven since it was made: vLLM may
        compute on it in the next step, or free its blocks if the request has ended.

        By `build_metadata` that would be a step later, or two if vLLM schedules a step before it has read the
        last one's report.
        """
        self._handle_events()
        proven = self._metadata.received - self._metadata.failed
        self._metadata.received -= proven
        return (received or set()) | proven or None

    def build_metadata(self, running: int) -> ConnectorMetadata:
        """What rank 0 is to report with the step that has just been scheduled, of so many requests."""
        self.steps += 1
        fetching = (FetchState.PULLING, FetchState.REPORTED)
        self.running = running + sum(fetch.state in fetching for fetch in self._fetches.values())
        self._handle_events()
        self._kept.make_room()
        self.work = self._counts.work(self._leases_expired)
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    # Requests end.

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks, which are given by group, must stay, and the params of the response."""
        self.requests -= 1
        self._meter.ended(request.request_id)
        task = self._tasks.pop(request.request_id, None)
        if isinstance(task, FetchPrompt):
            self._leave(request.request_id, self._fetches[task.transfer_id])
            if request.status.name in _COMPUTED and len(block_ids) == 1:
                return self._kept.keep(request, block_ids[0], task), None
        beginning = self._beginnings.pop(request.request_id, None)
        if beginning is not None:
            self._leave(request.request_id, beginning)
        if isinstance(task, LendPrompt) and request.status.name in _COMPUTED:
            return self._lend(request, task, block_ids)
        return False, None

    def take_figures(self) -> dict[str, float]:
        """What has been counted since the last call, by name: `figure`, or `figure:reason`."""
        figures, self._figures = self._figures, defaultdict(float)
        return dict(figures)

    def reset(self) -> None:
        """The weights may have changed: what is lent must not be proven right."""
        for transfer_id in self._lent:
            self._plane.drop(transfer_id)
        self._kept.drop()

    def _lend(
        self, request: Any, task: LendPrompt, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lease the prompt's blocks; of several requests with one transfer id, those of the first to end.

        Not where what is left is not for the token after the prompt.
        """
        lent = self._lent.get(task.transfer_id)
        if lent is not None:
            return False, lent.params
        num_tokens = len(request.prompt_token_ids)
        runs = runs_of(self._groups, block_ids, num_tokens)
        if runs is None or not (self._keeps_all or request.num_computed_tokens == num_tokens):
            self._figures["not_lent"] += 1
            return False, None
        params = lent_params(
            transfer_id=task.transfer_id,
            engine_id=self._incarnation,
            host=self._host,
            port=self._plane.control_port,
            num_tokens=num_tokens,
            tp_size=self._tp_size,
            dp_rank=self._dp_rank,
            continuable=self._is_continuable(request),
        )
        blocks = all_blocks(runs)
        self._lent[task.transfer_id] = _Lent(request.request_id, blocks, params)
        self._leases_of.update(blocks)
        ids_hash = prompt_hash(request, num_tokens)
        self._plane.register_lease(task.transfer_id, runs, num_tokens, ids_hash, self._lease_limit_s)
        return True, params

    def _is_continuable(self, request: Any) -> bool:
        """Whether a decode server can go on after our token, by its id."""
        # The ids of an image's place say nothing of the image.
        return self._continuable and not getattr(request, "mm_features", None)

    def _leave(self, request_id: str, fetch: _Fetch) -> None:
        fetch.members.discard(request_id)
        if fetch.owner == request_id:
            if fetch.state is FetchState.PULLING:
                fetch.is_abandoned = True
                self._plane.cancel(fetch.transfer_id)
            elif fetch.state in (FetchState.ASKING, FetchState.HELD):
                if fetch.state is FetchState.ASKING:
                    fetch.lender.num_asking -= 1
                self._plane.cancel(fetch.transfer_id)
                fetch.transition(FetchState.OVER)
            elif fetch.state is FetchState.REPORTED:
                fetch.transition(FetchState.OVER)
        self._forget_if_over(fetch)

    def _forget_if_over(self, fetch: _Fetch) -> None:
        if not fetch.members and fetch.state is FetchState.OVER:
            del self._fetches[fetch.transfer_id]

    # Events of the plane.

    def _handle_events(self) -> None:
        for event in self._plane.take_events():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case LeaseEnded() | LeaseRefused():
                self._lease_ended(event)
            case KeptEnded():
                self._kept.ended(event.key)
                self._metadata.sent.add(event.key)
            case PrefixLent():
                self._prefix_lent(event)
            case PullDone():
                self._count_transfer(event)
                self._pull_over(event.transfer_id)
            case PullFailed():
                self._pull_failed(event)
            case PullQuiescent():
                self._pull_over(event.transfer_id)

    def _count_transfer(self, event: PullDone) -> None:
        fetch = self._fetches.get(event.transfer_id)
        if fetch is not None and fetch.hashes:
            self._figures["prefix_pulls"] += 1
            self._figures["prefix_pull_bytes"] += event.nbytes
            return
        self._figures["transfers"] += 1
        self._figures["transfer_bytes"] += event.nbytes
        self._figures["transfer_seconds"] += event.wait_s + event.pull_s
        if fetch is not None:
            self._counts.pull_done(fetch.source.engine_id, event)

    def _lease_ended(self, event: LeaseEnded | LeaseRefused) -> None:
        cause = event.cause if isinstance(event, LeaseEnded) else "refused"
        self._figures[f"leases_ended:{cause}"] += 1
        self._leases_expired += cause == "expired"
        lent = self._lent.pop(event.transfer_id)
        for block in lent.blocks:
            self._leases_of[block] -= 1
            if not self._leases_of[block]:
                del self._leases_of[block]
        self._metadata.sent.add(lent.request)

    def _prefix_lent(self, event: PrefixLent) -> None:
        fetch = self._fetches.get(event.transfer_id)
        if fetch is None or self._block_size is None:
            return
        fetch.lender.num_asking -= 1
        fetch.lender.answered()
        if not event.num_blocks:
            fetch.transition(FetchState.OVER)
            return
        fetch.hashes = fetch.hashes[: event.num_blocks]
        fetch.source = msgspec.structs.replace(fetch.source, num_tokens=event.num_blocks * self._block_size)
        fetch.transition(FetchState.HELD)

    def _pull_failed(self, event: PullFailed) -> None:
        fetch = self._fetches.get(event.transfer_id)
        if fetch is not None and fetch.hashes:
            self._beginning_failed(fetch, event)
            return
        if fetch is None or fetch.state is not FetchState.PULLING:
            return
        if event.reason not in NO_FAULT:
            self._counts.pull_failed(fetch.source.engine_id, event)
        self._fail_pull(fetch, event.reason, quiescent=event.quiescent)

    def _beginning_failed(self, fetch: _Fetch, event: PullFailed) -> None:
        """The prompt is computed from its beginning, and the server is not asked again for a while."""
        if event.reason not in NO_FAULT:
            self._figures[f"failed_prefix_pulls:{event.reason}"] += 1
            fetch.lender.failed(self._clock())
        if fetch.state is FetchState.ASKING:
            fetch.lender.num_asking -= 1
            fetch.transition(FetchState.OVER)
        elif fetch.state is FetchState.PULLING:
            fetch.failure = event.reason
            if event.quiescent:
                self._pull_over(fetch.transfer_id)

    def _fail_pull(self, fetch: _Fetch, reason: str, *, quiescent: bool = True) -> None:
        fetch.failure = reason
        if reason not in NO_FAULT:
            self._figures[f"failed_transfers:{reason}"] += 1
        if not fetch.is_abandoned and reason != WITHDRAWN:
            self._figures["recomputed"] += 1
            self._counts.recompute()
            log.info("request %s: its KV cannot be used: %s", fetch.owner, reason)
        if quiescent:
            self._pull_over(fetch.transfer_id)

    def _pull_over(self, transfer_id: str) -> None:
        """Nothing writes to the blocks any more."""
        fetch = self._fetches.get(transfer_id)
        if fetch is None or fetch.state is not FetchState.PULLING:
            return
        fetch.transition(FetchState.REPORTED)
        self._metadata.received.add(fetch.owner)
        if fetch.is_abandoned:
            # The blocks of a request that has ended may be another's by the time the report is read.
            fetch.transition(FetchState.OVER)
            self._forget_if_over(fetch)
        elif fetch.failure:
            self._metadata.failed.add(fetch.owner)
            self._metadata.failed_blocks.update(fetch.blocks)

    def _fetch_of(self, request_id: str) -> _Fetch | None:
        task = self._tasks.get(request_id)
        if isinstance(task, FetchPrompt):
            return self._fetches.get(task.transfer_id)
        return self._beginnings.get(request_id)


def leave_last_token(request: Any) -> None:
    """Have vLLM compute a prompt but for its last token, which the decode server computes: with a window or a
    state, nothing else can be gone on from (docs/engines/vllm.md#one-request).

    Not where that cannot be: such a prompt is computed by the decode server.
    """
    last = request.num_prompt_tokens - 1
    features = getattr(request, "mm_features", None) or ()
    if (
        last < 1
        or request.get_skip_reading_prefix_cache()  # say for the prompt's logprobs
        or any(each.mm_position.offset + each.mm_position.length > last for each in features)
    ):
        return
    del request.prompt_token_ids[last:]
    del request._all_token_ids[last:]
    request.num_prompt_tokens = last
    request.max_tokens = 1  # what follows would be another prompt's


def _is_aborted(request: Any) -> bool:
    """Whether vLLM only says that a request of such params never came to the engine: its client left before,
    or the API server rejected it.
    """
    return bool(getattr(request, "abort_immediately", False))
