# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang as a transfer backend meets it (0.5.23, read and tried): the base classes of its
managers, senders and receivers, and the order in which its two schedulers call them, over several ranks.

What would be a wrong token or a page freed too early at SGLang is an AssertionError here.
"""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from http import HTTPStatus
from typing import Any

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
PAGE_SIZE = 2
ANOTHER_RANK = "from another rank"


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class Destination(StrEnum):
    DEVICE = "device"
    HOST = "host"


class Mode(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class TransferError(Exception):
    """SGLang's `KVTransferError`."""


class CommonKVManager:
    supports_deferred_decode_kv_release = False

    def __init__(self, args: Any, mode: Mode, server_args: Any, is_mla_backend: bool | None = False) -> None:
        self.kv_args, self.disaggregation_mode, self.server_args = args, mode, server_args
        self.is_mla_backend = is_mla_backend
        self.enable_deferred_decode_kv_release = self.supports_deferred_decode_kv_release
        self.attn_tp_rank, self.attn_tp_size = server_args.rank, server_args.tp_size
        self.bootstrap_port = server_args.disaggregation_bootstrap_port
        self.local_ip, self.rank_port = "127.0.0.1", 1
        self.request_status: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.prefill_info_table: dict[str, Any] = {"prefill": server_args.prefill_info}
        self.bootstrap_table: list[dict[str, Any]] = server_args.bootstrap_table
        if mode is Mode.PREFILL:
            self.register_to_bootstrap()

    def register_to_bootstrap(self) -> None:
        self.bootstrap_table.append(
            {"rank_ip": self.local_ip, "rank_port": self.rank_port, "is_dummy": False}
        )

    def record_failure(self, room: int, reason: str) -> None:
        self.failure_records[room] = reason

    def update_status(self, room: int, status: int) -> None:
        current = self.request_status.get(room)
        if current is None:
            if status in (BOOTSTRAPPING, WAITING_FOR_INPUT):
                self.request_status[room] = status
        elif status == FAILED:
            self.request_status[room] = FAILED
        elif current != FAILED:
            self.request_status[room] = max(current, status)


class CommonKVSender:
    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, has_dp_rank: bool = False) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.conclude_state: int | None = None
        self._early_send_wait_event = None
        self.curr_idx = 0
        mgr.update_status(bootstrap_room, BOOTSTRAPPING)

    def init(self, num_kv_indices: int, aux_index: int) -> None:
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def _record_transfer_indices(self, kv_indices: Any, state_indices: Any) -> None:
        pass

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.request_status.get(self.bootstrap_room, FAILED)
        if status in (SUCCESS, FAILED):
            self.conclude_state = status
        return status

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def failure_exception(self) -> None:
        self.conclude_state = FAILED
        self.clear()
        raise TransferError(self.kv_mgr.failure_records.pop(self.bootstrap_room, ANOTHER_RANK))

    def abort(self) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
        self.kv_mgr.update_status(self.bootstrap_room, FAILED)
        self.conclude_state = FAILED


class CommonKVReceiver:
    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state: int | None = None
        self.init_time: float | None = None
        self.abort_notified = False
        mgr.update_status(bootstrap_room, BOOTSTRAPPING)

    def init(self, prefill_dp_rank: int) -> None:
        self.prefill_info = self.kv_mgr.prefill_info_table[self.bootstrap_addr]
        theirs, ours = self.prefill_info.attn_tp_size, self.kv_mgr.attn_tp_size
        rank, each = self.kv_mgr.attn_tp_rank, max(1, theirs // ours)
        first = rank // (ours // theirs) if ours > theirs else rank * each
        self.bootstrap_infos = [
            self.kv_mgr.bootstrap_table[target]
            | {"is_dummy": bool(self.kv_mgr.is_mla_backend) and target != first}
            for target in range(first, first + each)
        ]
        assert self._register_kv_args()
        self.kv_mgr.update_status(self.bootstrap_room, WAITING_FOR_INPUT)

    def _register_kv_args(self) -> bool:
        raise NotImplementedError

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        raise NotImplementedError

    def invalidate_cached_bootstrap_infos(self) -> None:
        self.bootstrap_infos = []

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status = int(self.kv_mgr.request_status[self.bootstrap_room])
        if status in (SUCCESS, FAILED):
            self.conclude_state = status
        return status

    def clear(self) -> None:
        if self.conclude_state is None:
            self.conclude_state = FAILED
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def failure_exception(self) -> None:
        self.conclude_state = FAILED
        self.clear()
        raise TransferError(self.kv_mgr.failure_records.pop(self.bootstrap_room, ANOTHER_RANK))

    def abort(self) -> None:
        if self.conclude_state != FAILED:
            self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
            self.kv_mgr.update_status(self.bootstrap_room, FAILED)
            self.conclude_state = FAILED
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if not self.abort_notified and getattr(self, "bootstrap_infos", None) is not None:
            self._send_abort_notification(force_arm=force_arm)
            self.abort_notified = True


class _Setting:
    def get(self) -> float:
        return 30.0


def modules() -> dict[str, types.ModuleType]:
    """What `agent.sglang.conn` imports of SGLang."""
    srt = "sglang.srt"
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        srt: {},
        f"{srt}.disaggregation": {},
        f"{srt}.disaggregation.base": {},
        f"{srt}.disaggregation.base.conn": {"KVPoll": KVPoll, "KVTransferDestination": Destination},
        f"{srt}.disaggregation.common": {},
        f"{srt}.disaggregation.common.conn": {
            each.__name__: each
            for each in (
                CommonKVManager, CommonKVSender, CommonKVReceiver, type("CommonKVBootstrapServer", (), {})
            )
        },
        f"{srt}.disaggregation.utils": {"DisaggregationMode": Mode, "prepare_abort": prepare_abort},
        f"{srt}.environ": {
            "envs": types.SimpleNamespace(
                SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT=_Setting(),
                SGLANG_DISAGGREGATION_WAITING_TIMEOUT=_Setting(),
            )
        },
    }  # fmt: skip
    made = {}
    for name, members in contents.items():
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(members)
    return made


class Indices(list[int]):
    """Page numbers, as SGLang has them in an array."""

    def tolist(self) -> list[int]:
        return list(self)


@dataclass(eq=False)
class Request:
    """What a backend reads of SGLang's request, and what the schedulers here keep of it."""

    room: int
    origin_input_ids: list[int]
    cached_tokens: int = 0
    ends: list[Any] = field(default_factory=list)
    """Its sender or receiver at each rank."""
    pages: list[int] = field(default_factory=list)
    """While they are allocated."""
    had_pages: list[int] = field(default_factory=list)
    aux_index: int = 0
    error: str | None = None
    finished_reason: None = None
    aborts: list[tuple[str, HTTPStatus]] = field(default_factory=list)
    """With what the prefill server fails it, by its ranks; the client gets the first rank's."""
    is_done: bool = False

    @property
    def num_pages(self) -> int:
        return -(-len(self.origin_input_ids) // PAGE_SIZE)

    def poll(self) -> int:
        """SGLang's MIN over ranks."""
        return min(end.poll() for end in self.ends)

    def fail(self) -> None:
        """Note the reason of the rank that has one."""
        for end in self.ends:
            try:
                end.failure_exception()
            except TransferError as error:
                if self.error in (None, ANOTHER_RANK):
                    self.error = str(error)


def prepare_abort(request: Request, message: str, status_code: HTTPStatus) -> None:
    request.aborts.append((message, status_code))


class _Scheduler:
    """`planes` are of the ranks: they say which pages are in use by a transfer, and so must not be freed."""

    def __init__(
        self, managers: Sequence[Any], planes: Sequence[Any], kinds: Any, num_pages: int = 8
    ) -> None:
        self.managers, self.planes, self._kinds = managers, planes, kinds
        self.num_pages = num_pages
        self.free = set(range(1, num_pages + 1))
        self._rows = 0

    def _allocate(self, request: Request) -> None:
        request.pages = request.had_pages = [self.free.pop() for _ in range(request.num_pages)]
        self._rows += 1
        request.aux_index = self._rows % 4

    def _release(self, request: Request) -> None:
        for plane in self.planes:
            assert not set(request.pages) & plane.pages_in_use, "freed under a transfer"
        assert not set(request.pages) & self.free, "freed twice"
        self.free |= set(request.pages)
        request.pages = []


class Prefill(_Scheduler):
    """Bootstrap queue, forward, inflight queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bootstrap: list[Request] = []
        self.inflight: list[Request] = []

    def add(self, room: int, ids: list[int]) -> Request:
        request = Request(room, ids)
        for manager in self.managers:
            sender = self._kinds["sender"](manager, "prefill", room)
            sender.bind_request(request)
            request.ends.append(sender)
        self.bootstrap.append(request)
        return request

    def step(self) -> None:
        for request in [each for each in self.bootstrap if len(self.free) >= each.num_pages]:
            self.bootstrap.remove(request)
            if request.poll() == FAILED:
                request.fail()
                continue
            self._allocate(request)
            self._forward(request)
            self.inflight.append(request)
        for request in list(self.inflight):
            poll = request.poll()
            if poll not in (FAILED, SUCCESS):
                continue
            self.inflight.remove(request)
            if poll == FAILED:
                request.fail()
                if not request.aborts:
                    prepare_abort(request, "transfer failed", HTTPStatus.INTERNAL_SERVER_ERROR)
            self._release(request)
            if poll == SUCCESS:
                for sender in request.ends:
                    sender.clear()
                request.is_done = True

    def _forward(self, request: Request) -> None:
        """Chunk by chunk; the metadata is there with the last."""
        for manager, sender in zip(self.managers, request.ends, strict=True):
            sender.init(request.num_pages, request.aux_index)
            manager.kv_args.set_row(request.aux_index, request.room, 100 + request.room)
            for at in range(0, request.num_pages, 2):
                sender.send(Indices(request.pages[at : at + 2]), None)

    def abort(self, request: Request) -> None:
        """As `Scheduler.abort_request` does: of a request in the inflight queue the next poll says so."""
        for sender in request.ends:
            sender.abort()

    def retire(self, request: Request) -> None:
        """As `_retire_aborted_prefill_result` does: the pages are free when it returns."""
        self.inflight.remove(request)
        self.abort(request)
        self._release(request)


class Decode(_Scheduler):
    """Preallocation queue, transfer queue, releases that are deferred."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prealloc: list[Request] = []
        self.transfer: list[Request] = []
        self.deferred: list[Request] = []

    def add(self, room: int, ids: list[int]) -> Request:
        request = Request(room, ids)
        for manager in self.managers:
            receiver = self._kinds["receiver"](manager, "prefill", room)
            receiver.bind_request(request)
            request.ends.append(receiver)
        for receiver in request.ends:
            receiver.init(0)
        self.prealloc.append(request)
        return request

    def step(self) -> None:
        for request in list(self.prealloc):
            self._preallocate(request)
        for request in list(self.transfer):
            self._transferred(request)
        for request in list(self.deferred):
            if all(manager.is_abort_release_safe(request.room, 1) for manager in self.managers):
                self.deferred.remove(request)
                self._end(request)

    def _preallocate(self, request: Request) -> None:
        poll = request.poll()
        if poll == FAILED:
            self.prealloc.remove(request)
            request.fail()
            for receiver in request.ends:
                receiver.clear()
        elif poll == WAITING_FOR_INPUT and len(self.free) >= request.num_pages:
            self.prealloc.remove(request)
            self._allocate(request)
            for manager, receiver in zip(self.managers, request.ends, strict=True):
                manager.kv_args.set_row(request.aux_index, 0, 0)
                receiver.send_metadata(Indices(request.pages), request.aux_index, None, decode_prefix_len=0)
            self.transfer.append(request)

    def _transferred(self, request: Request) -> None:
        poll = request.poll()
        rows = [manager.kv_args.row(request.aux_index) for manager in self.managers]
        if poll == SUCCESS:
            assert all(room == request.room for room, _ in rows), "metadata of another request, or none"
            assert all(token == 100 + request.room for _, token in rows)
            self.transfer.remove(request)
            request.is_done = True
            self._end(request)
        elif poll == FAILED:
            self.transfer.remove(request)
            request.fail()
            for receiver in request.ends:
                receiver.ensure_abort_notified(force_arm=True)
            if any(receiver.abort_notified for receiver in request.ends):
                self.deferred.append(request)
            else:
                self._end(request)

    def _end(self, request: Request) -> None:
        self._release(request)
        for receiver in request.ends:
            receiver.clear()

    def abort(self, request: Request) -> None:
        for receiver in request.ends:
            receiver.abort()


def until(condition: Any, *steps: Any, limit_s: float = 20.0) -> None:
    """Step until something holds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not condition():
        for step in steps:
            step()
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)
