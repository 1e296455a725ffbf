# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's scheduler as a connector's scheduler side meets it (vLLM 0.32.0, read and tried).

It keeps requests and blocks, calls the hooks in vLLM's order, and acts on each step's metadata as vLLM does
with rank 0's report. What would end vLLM's engine, leak a block or free one twice is an AssertionError here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.agent.vllm.connector_scheduler import ConnectorMetadata, KvferryConnectorScheduler


class Status(enum.Enum):
    """vLLM's names."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting for remote KV"
    RUNNING = "running"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_STOPPED = "stop"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(eq=False)
class VllmRequest:
    """What a connector reads of vLLM's request, and what the scheduler keeps of it."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cached: int = 0
    """Tokens in the local prefix cache, in whole blocks."""
    prompt_embeds: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    abort_immediately: bool = False
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    """Of the first KV-cache group, by position; 0 for what is not kept."""
    others: list[list[int]] = field(default_factory=list)
    """Of the other groups."""
    max_tokens: int = 1
    num_prompt_tokens: int = 0
    skips_cache: bool = False
    params: dict[str, Any] | None = None
    """What the connector gave for the response."""
    is_delayed: bool = False
    """Its blocks stay until the connector reports it."""
    ended_in_transfer: bool = False
    loaded: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids or ())
        self._all_token_ids = list(self.prompt_token_ids or ())

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skips_cache

    @property
    def all_token_ids(self) -> list[int]:
        return list(self._all_token_ids)

    @property
    def groups(self) -> list[list[int]]:
        return [self.blocks, *self.others]

    @property
    def held(self) -> list[int]:
        """The blocks of all groups."""
        return [block for group in self.groups for block in group if block]


class VllmScheduler:
    """Call `step` until nothing changes. `specs` are of the KV-cache groups (`tests.standins.vllm_specs`);
    `fails`: the policy for loads that failed is "fail".
    """

    def __init__(
        self,
        scheduler: KvferryConnectorScheduler,
        num_blocks: int,
        *specs: Any,
        fails: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self.while_it_runs: Callable[[], object] = lambda: None
        """What happens elsewhere between a step's scheduling and its report."""
        self._specs = specs
        self._fails = fails
        self.free: list[int] = list(range(1, num_blocks))
        self._num_blocks = num_blocks
        self.requests: dict[str, VllmRequest] = {}
        self._waiting: deque[VllmRequest] = deque()
        self._received: set[str] = set()
        self.computed: dict[str, int] = {}
        """By request: from which token on its prompt was computed here."""

    def add(self, request: VllmRequest) -> VllmRequest:
        self.requests[request.request_id] = request
        self._scheduler.on_new_request(request)
        self._waiting.append(request)
        if request.abort_immediately:
            self.finish(request, Status.FINISHED_ABORTED)
        return request

    def reject(self, name: str, params: dict[str, Any]) -> VllmRequest:
        """What the API server has vLLM add for a request that it rejects, or whose client has left."""
        return self.add(VllmRequest(name, [0], params, abort_immediately=True))

    def step(self) -> ConnectorMetadata:
        """Schedule what can be, run it, and act on the report."""
        for request in list(self._waiting):
            self._schedule(request)
        tokens = self._tokens()
        self._scheduler.scheduled(tokens)
        metadata = self._scheduler.build_metadata(len(tokens))
        for request_id, count in tokens.items():
            self.requests[request_id].num_computed_tokens += count
            self._skip(self.requests[request_id])
        self.while_it_runs()
        report = replace(metadata, received=set(metadata.received))
        if (
            tokens or metadata != ConnectorMetadata()
        ):  # else the report is empty: the connector does not see it
            report.received = self._scheduler.add_proven(report.received or None) or set()
        self._act(report)
        self._scheduler.outputs_taken()
        return metadata

    def finish(self, request: VllmRequest, status: Status = Status.FINISHED_LENGTH_CAPPED) -> None:
        """End a request, by itself or from outside."""
        assert not request.status.is_finished
        if request in self._waiting:
            self._waiting.remove(request)
        delayed = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            delayed = request.request_id not in self._received
            request.ended_in_transfer = delayed
            self._received.discard(request.request_id)
        request.status = status
        must_stay, request.params = self._scheduler.request_finished(request, request.groups)
        request.is_delayed = must_stay or delayed
        if not request.is_delayed:
            self._free(request)

    def check_integrity(self) -> None:
        """Every block is free or some request's, once; nothing is left of requests that have ended."""
        used = [block for request in self.requests.values() for block in request.held]
        assert sorted([*used, *self.free]) == list(range(1, self._num_blocks)), "0 is vLLM's null block"

    # What vLLM does.

    def _tokens(self) -> dict[str, int]:
        """How many tokens of each running request are in the step: all of a prompt's at once, then one."""
        running = [each for each in self.requests.values() if each.status is Status.RUNNING]
        return {
            each.request_id: max(1, each.num_prompt_tokens - each.num_computed_tokens) for each in running
        }

    def _schedule(self, request: VllmRequest) -> None:
        assert request.prompt_token_ids is not None
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self._received:
                return
            self._promote(request)
            if request.status.is_finished:
                return
        external, loads = 0, False
        if request.num_computed_tokens == 0:
            external_or_later, loads = self._scheduler.get_num_new_matched_tokens(request, request.cached)
            if external_or_later is None:
                return
            external = external_or_later
            assert loads == (external > 0), "tokens that are fetched come later, and only those do"
            assert request.cached + external <= len(request.prompt_token_ids)
        if not request.blocks:
            # Of what is loaded, only what is kept has a block.
            held = request.cached + external
            firsts = [spec.first_kept(held) if external else 0 for spec in self._specs]
            ends = [-(-len(request.prompt_token_ids) // spec.block_size) for spec in self._specs]
            if sum(end - first for first, end in zip(firsts, ends, strict=True)) > len(self.free):
                return
            request.blocks, *request.others = [
                [0] * first + [self.free.pop() for _ in range(first, end)]
                for first, end in zip(firsts, ends, strict=True)
            ]
        missing = [
            [
                block if block and at >= request.cached // spec.block_size else 0
                for at, block in enumerate(group)
            ]
            for group, spec in zip(request.groups, self._specs, strict=True)
        ]
        self._scheduler.update_state_after_alloc(request, missing, external)
        if loads:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = request.cached + external
            return
        self._waiting.remove(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = request.num_computed_tokens or request.cached
        self.computed[request.request_id] = request.num_computed_tokens

    def _promote(self, request: VllmRequest) -> None:
        """The load is over, well or not."""
        self._received.discard(request.request_id)
        request.status = Status.WAITING
        if request.failed:
            request.failed = False
            request.num_computed_tokens = 0
            self._give_back(request)
        else:
            assert request.prompt_token_ids is not None
            request.loaded = True
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.prompt_token_ids) - 1)

    def _act(self, metadata: ConnectorMetadata) -> None:
        assert metadata.failed <= metadata.received, "a failed request is received too"
        failed = [self.requests[request_id] for request_id in metadata.failed]
        theirs = {block for request in failed for block in request.held}
        assert metadata.failed_blocks <= theirs, "another request's blocks"
        for request in failed:
            request.failed = request.status is Status.WAITING_FOR_REMOTE_KVS
        for request_id in metadata.received:
            assert request_id in self.requests, "vLLM's engine ends"
            request = self.requests[request_id]
            assert request_id not in self._received, "reported twice"
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
                if request.failed and self._fails:
                    self.finish(request, Status.FINISHED_ERROR)
            else:
                assert request.ended_in_transfer, "it does not wait for a load"
                self._free(request)
        for request_id in metadata.sent:
            assert request_id in self.requests, "vLLM's engine ends"
            request = self.requests[request_id]
            assert request.is_delayed and not request.ended_in_transfer, "its blocks are not the connector's"
            self._free(request)

    def _give_back(self, request: VllmRequest) -> None:
        self.free += request.held
        request.blocks, request.others = [], []

    def _skip(self, request: VllmRequest) -> None:
        """Give back what a group does not keep of the tokens that are computed."""
        for spec, group in zip(self._specs, request.groups, strict=True):
            for position in range(min(spec.first_kept(request.num_computed_tokens), len(group))):
                if group[position]:
                    self.free.append(group[position])
                    group[position] = 0

    def _free(self, request: VllmRequest) -> None:
        assert request.status.is_finished
        self._give_back(request)
        del self.requests[request.request_id]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def ids_of(requests: Sequence[VllmRequest]) -> set[str]:
    return {request.request_id for request in requests}
