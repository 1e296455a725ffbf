# SPDX-License-Identifier: Apache-2.0
"""The classes that SGLang makes of our backend, called in the order in which its schedulers call them."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.agent.plugin.plane_thread import Event, LeaseRefused
from kvferry.agent.sglang.rooms import Rooms
from kvferry.agent.sglang.server import HeadShare
from kvferry.proxy.wire.dialects import KV_UNREAD
from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import BlockRun, RemotePrompt
from kvferry.transfer.sampled_tokens import SampledTokens
from tests.standins.sglang_scheduler import PAGE_SIZE, Decode, Mode, Prefill, Request, modules, until

IDS = list(range(7))
NUM_PAGES = 8
ROWS = 4
HEADS = 4
HEAD = 8


class Memory:
    """SGLang's `KVArgs` over arrays: two layers' K and V, and two buffers of metadata."""

    def __init__(self, heads: int = HEADS) -> None:
        self.pages = np.zeros((4, NUM_PAGES + 1, PAGE_SIZE, heads, HEAD), dtype=np.uint8)
        self.tokens = np.zeros((ROWS, 16), dtype=np.int32)
        self.rooms = np.zeros((ROWS, 8), dtype=np.uint64)
        self.kv_data_ptrs = [each.ctypes.data for each in self.pages]
        self.kv_data_lens = [each.nbytes for each in self.pages]
        self.kv_item_lens = [self.pages[0, 0].nbytes] * 4
        self.kv_layer_ids = [0, 1, 0, 1]
        self.kv_cache_dtype_str, self.kv_layout, self.page_size, self.gpu_id = "auto", None, PAGE_SIZE, 0
        self.aux_data_ptrs = [self.tokens.ctypes.data, self.rooms.ctypes.data]
        self.aux_item_lens = [self.tokens[0].nbytes, self.rooms[0].nbytes]
        self.state_types: list[str] = []

    def set_row(self, index: int, room: int, token: int) -> None:
        self.tokens[index, 0], self.rooms[index, 0] = token, room

    def row(self, index: int) -> tuple[int, int]:
        return int(self.rooms[index, 0]), int(self.tokens[index, 0])


@dataclass
class Plane:
    """One that does what a test says. `leases` and `reads` are pages by transfer id."""

    leases: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, SampledTokens] = field(default_factory=dict)
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    remotes: dict[str, RemotePrompt] = field(default_factory=dict)
    proofs: Counter[str] = field(default_factory=Counter)
    """How many readers have had one, by lease."""
    held: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    @property
    def pages_in_use(self) -> set[int]:
        return {page for pages in (*self.leases.values(), *self.reads.values()) for page in pages}

    def register_lease(
        self,
        transfer_id: str,
        runs: Sequence[BlockRun],
        num_tokens: int,
        ids_hash: str,
        limit_s: float,
        first_tokens: SampledTokens | None = None,
    ) -> None:
        if transfer_id in self.used:
            self.events.append(LeaseRefused(transfer_id=transfer_id))
            return
        assert first_tokens is not None
        self.used.add(transfer_id)
        self.leases[transfer_id], self.rows[transfer_id] = runs[0].ids, first_tokens

    def withdraw(self, transfer_id: str) -> None:
        self.leases.pop(transfer_id, None)

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None:
        self.held.append(transfer_id)

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str,
        fill_s: float = 0.0,
    ) -> None:
        assert transfer_id not in self.reads
        self.reads[transfer_id], self.remotes[transfer_id] = runs[0].ids, remote

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def end_lease(self, room: int, cause: Any) -> None:
        transfer_id = of_room(self.leases, room)
        del self.leases[transfer_id]
        self.events.append(LeaseEnded(transfer_id=transfer_id, cause=cause))

    def prove(self, transfer_id: str, first_tokens: SampledTokens) -> None:
        del self.reads[transfer_id]
        done = PullDone(
            transfer_id=transfer_id,
            backend="tcp",
            nbytes=1,
            descriptors=1,
            wait_s=0,
            pull_s=0,
            first_tokens=first_tokens,
        )
        self.events.append(done)

    def release(self, transfer_id: str, num_readers: int) -> None:
        self.proofs[transfer_id] += 1
        if self.proofs[transfer_id] == num_readers:
            self.end_lease(int(transfer_id.partition(".")[0]), "released")

    def fail(self, room: int, reason: str, *, quiescent: bool = True) -> None:
        transfer_id = of_room(self.reads, room)
        if quiescent:
            del self.reads[transfer_id]
        self.events.append(PullFailed(transfer_id=transfer_id, reason=reason, quiescent=quiescent))

    def settle(self, room: int) -> None:
        transfer_id = of_room(self.reads, room)
        del self.reads[transfer_id]
        self.events.append(PullQuiescent(transfer_id=transfer_id))


def of_room(ids: Iterable[str], room: int) -> str:
    """The first of some transfer ids that is of a room."""
    return next(each for each in ids if each.startswith(f"{room}."))


@dataclass
class Pair:
    """Both schedulers, of so many ranks each, and their ranks' planes."""

    prefill: Prefill
    decode: Decode

    def send(self, room: int) -> tuple[Request, Request]:
        """A request that is computed, and that is being read."""
        requests = self.prefill.add(room, IDS), self.decode.add(room, IDS)
        self.prefill.step()
        self.decode.step()
        return requests

    def prove(self, room: int, *ranks: int) -> None:
        """Prove right one of the reads of each of these ranks of the decode server."""
        for rank in ranks:
            reader = self.decode.planes[rank]
            transfer_id = of_room(reader.reads, room)
            lender = self.prefill.planes[int(transfer_id.partition(".")[2])]
            reader.prove(transfer_id, lender.rows[transfer_id])
            lender.release(transfer_id, reader.remotes[transfer_id].num_readers)

    def step(self) -> None:
        self.prefill.step()
        self.decode.step()

    def assert_nothing_is_left(self) -> None:
        for scheduler in (self.prefill, self.decode):
            assert len(scheduler.free) == NUM_PAGES
            assert [manager.request_status for manager in scheduler.managers] == [{}] * len(
                scheduler.managers
            )
            assert [manager.load.transfers for manager in scheduler.managers] == [0] * len(scheduler.managers)


@pytest.fixture
def conn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvferry.agent.sglang.conn", raising=False)
    yield importlib.import_module("kvferry.agent.sglang.conn")
    sys.modules.pop("kvferry.agent.sglang.conn")


@pytest.fixture
def make_pair(conn: Any) -> Callable[..., Pair]:
    def scheduler(kind: Any, mode: Mode, tp_size: int, table: list[Any], is_mla: bool) -> Any:
        managers, planes = [], [Plane() for _ in range(tp_size)]
        for rank, plane in enumerate(planes):
            args = SimpleNamespace(
                rank=rank,
                tp_size=tp_size,
                disaggregation_bootstrap_port=1,
                bootstrap_table=table,
                prefill_info=SimpleNamespace(attn_tp_size=len(table)),
                model_path="m",
            )
            manager = conn.KvferryManager(Memory(HEADS // tp_size), mode, args, is_mla)
            manager.plane = plane
            manager.share = HeadShare.of(manager.kv_args, rank, tp_size, 1 if is_mla else HEADS)
            manager.rooms = Rooms(
                plane, rank=rank, lease_limit_s=9, pull_timeout_s=9, fill_s=9, hold_timeout_s=9
            )
            manager.load = SimpleNamespace(transfers=0)
            managers.append(manager)
        return kind(managers, planes, conn.CLASSES, NUM_PAGES)

    def make(prefill: int, decode: int = 0, *, is_mla: bool = False) -> Pair:
        """Of so many ranks on each side, or on both as many."""
        table = [{"rank_ip": f"127.0.0.1#{rank}", "rank_port": 1} for rank in range(prefill)]
        return Pair(
            scheduler(Prefill, Mode.PREFILL, prefill, table, is_mla),
            scheduler(Decode, Mode.DECODE, decode or prefill, table, is_mla),
        )

    return make


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prompt_is_lent_read_and_decoded_once_every_rank_has_proof(
    make_pair: Callable[..., Pair], tp_size: int
) -> None:
    pair = make_pair(tp_size)
    lent, fetched = pair.send(5)
    assert pair.decode.planes[0].held == ["5.0"]
    pair.prove(5, 0)
    pair.step()
    assert (lent.is_done, fetched.is_done) == (tp_size == 1, tp_size == 1)
    pair.prove(5, *range(1, tp_size))
    pair.step()
    assert (lent.is_done, fetched.is_done) == (True, True)
    pair.assert_nothing_is_left()


def test_two_decode_ranks_read_under_one_lease_which_ends_with_the_second(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(1, 2)
    lent, fetched = pair.send(5)
    remotes = [plane.remotes["5.0"] for plane in pair.decode.planes]
    assert [(each.heads, each.num_readers) for each in remotes] == [(None, 2), (None, 2)]
    pair.prove(5, 1)
    pair.step()
    assert (lent.is_done, fetched.is_done, lent.error) == (False, False, None)
    pair.prove(5, 0)
    pair.step()
    assert (lent.is_done, fetched.is_done) == (True, True)
    pair.assert_nothing_is_left()


def test_a_decode_rank_reads_its_heads_from_two_ranks_and_is_done_with_both_proofs(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(4, 2)
    lent, fetched = pair.send(5)
    sources = [
        [(transfer_id, remote.heads) for transfer_id, remote in plane.remotes.items()]
        for plane in pair.decode.planes
    ]
    assert sources == [[("5.0", (0, 0)), ("5.1", (1, 1))], [("5.2", (2, 2)), ("5.3", (3, 3))]]
    pair.prove(5, 0, 1, 1)
    pair.step()
    assert (lent.is_done, fetched.is_done) == (False, False)
    assert pair.decode.managers[0].kv_args.row(fetched.aux_index) == (0, 0), "not before the last proof"
    pair.prove(5, 0)
    pair.step()
    assert (lent.is_done, fetched.is_done) == (True, True)
    pair.assert_nothing_is_left()


def test_with_mla_one_rank_is_read_and_the_leases_of_both_end(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(2, 1, is_mla=True)
    lent, fetched = pair.send(5)
    assert [len(pages) for pages in pair.decode.planes[0].reads.values()] == [4, 0]
    pair.prove(5, 0, 0)
    pair.step()
    assert (lent.is_done, fetched.is_done) == (True, True)
    pair.assert_nothing_is_left()


def test_one_of_two_sources_fails_and_pages_are_free_once_neither_is_read(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(2, 1)
    _, fetched = pair.send(5)
    pair.decode.planes[0].fail(5, "lease_expired")
    pair.decode.step()
    assert pair.decode.planes[0].cancelled == ["5.0", "5.1"]
    assert fetched.error is None, "the other rank's may still be written"
    pair.decode.planes[0].fail(5, "cancelled", quiescent=False)
    pair.decode.step()
    assert fetched.error is None
    pair.decode.planes[0].settle(5)
    pair.decode.step()
    assert fetched.error == "lease_expired"
    assert len(pair.decode.free) == NUM_PAGES


def test_a_proof_of_one_source_is_of_no_use_without_the_other(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(2, 1)
    _, fetched = pair.send(5)
    pair.prove(5, 0)
    pair.decode.planes[0].fail(5, "invalid")
    pair.decode.step()
    assert (fetched.is_done, fetched.error) == (False, "invalid")
    assert len(pair.decode.free) == NUM_PAGES


def test_ranks_that_do_not_have_all_heads_are_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(4, 1)
    for manager in pair.decode.managers:
        manager.share = HeadShare(rank=0, num_ranks=3, total=12)
    _, fetched = pair.send(5)
    assert fetched.error == "its KV is not served: 4 ranks do not pair with 3: head 3 is missing"


def test_kv_in_too_many_pieces_is_refused(
    make_pair: Callable[..., Pair], conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conn, "MAX_PIECES", 31)
    assert make_pair(2).send(5)[1].error is None, "with equally many ranks pages are read whole"
    pair = make_pair(1, 2)
    _, fetched = pair.send(5)
    pair.decode.step()
    assert fetched.error == "its KV is in 32 pieces, and with other numbers of ranks 31 are served"
    assert [plane.cancelled for plane in pair.decode.planes] == [["5.0"], ["5.0"]]
    assert len(pair.decode.free) == NUM_PAGES


def test_a_lease_that_expired_fails_the_prefill_and_frees_its_pages(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(2)
    lent, _ = pair.send(5)
    pair.prefill.planes[1].end_lease(5, "expired")
    pair.step()
    assert lent.error == "the lease expired"
    assert len(pair.prefill.free) == NUM_PAGES
    assert pair.prefill.planes[0].leases == {}, "the other rank's lease is over before the pages are free"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cause", ["expired", "dropped"])
def test_a_prompt_that_is_not_read_is_no_failure_of_the_prefill_server(
    make_pair: Callable[..., Pair], rank: int, cause: str
) -> None:
    """SGLang answers with its first rank's error, whichever rank's share was not read."""
    pair = make_pair(2)
    lent, _ = pair.send(5)
    pair.prefill.planes[rank].end_lease(5, cause)
    pair.step()
    assert [status for _, status in lent.aborts] == [503, 503]
    assert all(message.startswith(KV_UNREAD) for message, _ in lent.aborts)


def test_an_abort_ends_the_lease_before_the_pages_are_free(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(1)
    lent, _ = pair.send(5)
    pair.prefill.retire(lent)
    assert len(pair.prefill.free) == NUM_PAGES
    lent, _ = pair.send(6)
    pair.prefill.abort(lent)
    pair.prefill.step()
    assert (lent.error, len(pair.prefill.free)) == ("Aborted by AbortReq.", NUM_PAGES)


def test_a_room_that_is_used_twice_fails_the_second_and_the_first_keeps_its_pages(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(1)
    first, _ = pair.send(5)
    second = pair.prefill.add(5, IDS)
    pair.prefill.step()
    pair.prefill.step()
    assert second.error is not None
    assert not second.is_done
    assert not first.is_done
    pair.prefill.step()
    assert len(pair.prefill.free) == NUM_PAGES


def test_a_room_that_was_used_before_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(1)
    pair.send(5)
    pair.prove(5, 0)
    pair.step()
    again = pair.prefill.add(5, IDS)
    pair.prefill.step()
    pair.prefill.step()
    assert again.error == "the room is in use, or was used before"
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("reason", ["lease_expired", "invalid"])
def test_pages_of_a_failed_read_are_free_once_nothing_writes_to_them(
    make_pair: Callable[..., Pair], reason: str
) -> None:
    pair = make_pair(2)
    _, fetched = pair.send(5)
    pair.decode.planes[0].fail(5, reason, quiescent=False)
    pair.decode.step()
    assert fetched.error is None, "it may still be written to"
    pair.decode.planes[0].settle(5)
    pair.decode.step()
    assert fetched.error == reason
    assert pair.decode.planes[1].cancelled, "the other rank reads for nothing"
    assert len(pair.decode.free) < NUM_PAGES, "the other rank still reads"
    pair.decode.planes[1].fail(5, "cancelled")
    pair.decode.step()
    assert len(pair.decode.free) == NUM_PAGES


def test_what_is_proven_after_an_abort_is_not_decoded(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(1)
    _, fetched = pair.send(5)
    pair.decode.abort(fetched)
    assert pair.decode.planes[0].cancelled == ["5.0"]
    pair.decode.step()
    assert fetched.error is None
    pair.prove(5, 0)
    pair.step()
    pair.step()
    assert (fetched.is_done, fetched.error) == (False, "Aborted by AbortReq.")
    pair.assert_nothing_is_left()


def test_a_prompt_that_waits_for_pages_is_held_and_its_abort_gives_it_up(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(1)
    pair.send(5)
    pair.send(6)
    waiting = pair.decode.add(7, IDS)
    pair.decode.step()
    assert pair.decode.planes[0].held == ["5.0", "6.0", "7.0"]
    pair.decode.abort(waiting)
    pair.decode.step()
    assert pair.decode.planes[0].cancelled == ["7.0"]
    assert waiting.error == "Aborted by AbortReq."


def test_a_prompt_for_which_there_are_never_pages_fails(make_pair: Callable[..., Pair]) -> None:
    """SGLang sets no limit for it."""
    pair = make_pair(1)
    now = [0.0]
    pair.decode.managers[0].rooms._clock = lambda: now[0]
    waiting = pair.decode.add(7, list(range(100)))
    now[0] = 8.0
    pair.decode.step()
    assert waiting.error is None
    now[0] = 10.0
    pair.decode.step()
    assert waiting.error == "no pages for it within 9 s"
    assert pair.decode.planes[0].cancelled == ["7.0"]
    pair.assert_nothing_is_left()


def test_a_producer_that_is_another_now_is_looked_up_again(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(1)
    _, fetched = pair.send(5)
    pair.decode.planes[0].fail(5, "incarnation")
    pair.decode.step()
    manager = pair.decode.managers[0]
    assert (manager.prefill_info_table, fetched.ends[0].bootstrap_infos) == ({}, [])


def test_a_read_that_brings_no_metadata_fails(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(1)
    _, fetched = pair.send(5)
    plain = pair.prefill.planes[0].rows["5.0"]
    pair.decode.planes[0].prove("5.0", SampledTokens(choices=plain.choices))
    pair.decode.step()
    assert fetched.error == "the producer sent no metadata"


@pytest.mark.parametrize("verify_kv", ["0", "1"])
@pytest.mark.parametrize(
    ("prefill", "decode", "is_mla"),
    [(1, 1, False), (2, 2, False), (1, 2, False), (2, 1, False), (2, 4, False), (2, 1, True), (1, 2, True)],
)
def test_two_servers_move_pages_and_metadata(
    conn: Any, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int, is_mla: bool, verify_kv: str
) -> None:
    """With a plane for each rank, over tcp."""
    monkeypatch.setenv("KVFERRY_TRANSFER", "tcp")
    monkeypatch.setenv("KVFERRY_VERIFY_KV", verify_kv)
    table: list[Any] = []
    with ExitStack() as stack:
        lender = started(conn, Prefill, prefill, table, prefill, is_mla, stack)
        reader = started(conn, Decode, decode, table, prefill, is_mla, stack)
        move(lender, reader)


def started(
    conn: Any, kind: Any, ranks: int, table: list[Any], prefill: int, is_mla: bool, stack: ExitStack
) -> Any:
    """A scheduler whose ranks have planes. `table`: of SGLang's bootstrap server."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=dict), quantization=None, dtype="float32", model_path="m",
        revision=None, context_len=64, get_total_num_kv_heads=lambda: HEADS,
    )  # fmt: skip
    managers = []
    for rank in range(ranks):
        args = SimpleNamespace(
            rank=rank, tp_size=ranks, disaggregation_bootstrap_port=1, bootstrap_table=table, model_path="m",
            host="127.0.0.1", port=1, device="cpu", load_format="auto", random_seed=1,
            prefill_info=SimpleNamespace(attn_tp_size=prefill),
        )  # fmt: skip
        mode = Mode.PREFILL if kind is Prefill else Mode.DECODE
        manager = conn.KvferryManager(Memory(HEADS if is_mla else HEADS // ranks), mode, args, is_mla)
        manager.open_plane(SimpleNamespace(model_config=model))
        stack.callback(manager._worker.close)
        stack.callback(manager.plane.close)
        managers.append(manager)
    return kind(managers, [Plane() for _ in managers], conn.CLASSES, NUM_PAGES)


def memory_of(scheduler: Any) -> np.ndarray:
    """What all ranks hold: buffer, page, token, head. With MLA, that is the first rank's."""
    pages = [manager.kv_args.pages for manager in scheduler.managers]
    return pages[0] if scheduler.managers[0].is_mla_backend else np.concatenate(pages, axis=3)


def move(prefill: Any, decode: Any) -> None:
    first = prefill.managers[0].kv_args.pages
    for manager in prefill.managers:
        pages = manager.kv_args.pages
        pages[:] = np.random.default_rng(manager.attn_tp_rank).integers(1, 255, pages.shape)
        if manager.is_mla_backend:
            pages[:] = first
    lent, fetched = prefill.add(5, IDS), decode.add(5, IDS)
    until(lambda: lent.is_done and fetched.is_done, prefill.step, decode.step)
    pages = lent.had_pages, fetched.had_pages
    source, target = memory_of(prefill), memory_of(decode)
    assert np.array_equal(source[:, pages[0]], target[:, pages[1]])
    for manager in decode.managers:
        mine = manager.kv_args.pages
        assert mine[:, pages[1]].all()
        assert not mine[:, sorted(decode.free - set(pages[1]))].any(), "only its own pages are written to"

    _, refused = prefill.add(6, IDS), decode.add(6, [*IDS[:-1], 99])
    until(lambda: refused.error, prefill.step, decode.step)
    # Of a lease's readers the first that notices ends it for the others, which may fail before it does: they
    # learn of that by what they ask next, which is their open, or a renewal.
    is_shared = len(decode.managers) > len(prefill.managers)
    expected = ("mismatch", "lease_finished", "lease_gone") if is_shared else "mismatch"
    assert str(refused.error).startswith(expected), "another prompt of the same length"
    reports = [manager.rooms.counts for manager in decode.managers]
    until(lambda: any("mismatch" in counts.work(0).failures for counts in reports), decode.step)
