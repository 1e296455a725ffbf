# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side, under a stand-in for vLLM's scheduler that asserts vLLM's rules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.agent.plugin.plane_thread import Event, LeaseRefused
from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.vllm.connector_scheduler import KvferryConnectorScheduler
from kvferry.agent.vllm.identity import prompt_hash
from kvferry.agent.vllm.kv_groups import KvGroup, groups_of
from kvferry.proxy.wire.registration import Incarnation, LinkUse
from kvferry.transfer.events import NO_FAULT, LeaseEnded, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import BlockRun, RemotePrompt, one_group
from tests.standins.vllm_scheduler import Status, VllmRequest, VllmScheduler, prompt
from tests.standins.vllm_specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK, BLOCKS = 4, 64
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


def _group(spec: Any) -> KvGroup:
    (group,) = groups_of(KVCacheConfig(BLOCKS, [KVCacheGroupSpec(["layer"], spec)]))
    return group


class StandInPlane:
    """Notes the calls; a test says what comes of them."""

    control_port = 6301

    def __init__(self) -> None:
        self.lent: dict[str, list[BlockRun]] = {}
        self.held: list[str] = []
        self.pulls: dict[str, tuple[list[BlockRun], str]] = {}
        self.cancelled: list[str] = []
        self.dropped: list[str] = []
        self.asked: dict[str, tuple[RemotePrompt, list[bytes]]] = {}
        self.kept: dict[str, tuple[list[int], list[bytes], float]] = {}
        self.ended: list[str] = []
        self.dropped_kept: list[str] = []
        self.events: list[Event] = []

    def register_lease(
        self, transfer_id: str, runs: Sequence[BlockRun], num_tokens: int, ids_hash: str, limit_s: float
    ) -> None:
        self.lent[transfer_id] = list(runs)

    def drop(self, transfer_id: str) -> None:
        self.dropped.append(transfer_id)

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None:
        self.held.append(transfer_id)

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str,
    ) -> None:
        assert transfer_id in self.held or transfer_id in self.asked
        assert not any(0 in run.ids for run in runs), "0 is vLLM's null block"
        self.pulls[transfer_id] = list(runs), ids_hash

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def ask_prefix(
        self, transfer_id: str, remote: RemotePrompt, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        self.asked[transfer_id] = remote, list(hashes)

    def keep(self, key: str, blocks: Sequence[int], hashes: Sequence[bytes], limit_s: float) -> None:
        assert len(blocks) == len(hashes) and 0 not in blocks
        self.kept[key] = list(blocks), list(hashes), limit_s

    def end_kept(self, key: str) -> None:
        self.ended.append(key)

    def drop_kept(self, keys: Sequence[str]) -> None:
        self.dropped_kept += keys

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class Engine:
    """One server."""

    def __init__(
        self,
        *specs: Any,
        fails: bool = False,
        role: str = "both",
        continuable: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        specs = specs or (FullAttentionSpec(BLOCK),)
        self.plane = StandInPlane()
        self.scheduler = KvferryConnectorScheduler(
            self.plane,
            incarnation="i" * 16,
            host="10.0.0.1",
            tp_size=1,
            groups=[_group(spec) for spec in specs],
            lends=role != "decode",
            fetches=role != "prefill",
            continuable=continuable,
            lease_limit_s=150.0,
            pull_timeout_s=30.0,
            hold_timeout_s=120.0,
            max_running=8,
            num_blocks=BLOCKS,
            free_blocks=lambda: len(self.vllm.free),
            clock=clock,
        )
        self.vllm = VllmScheduler(self.scheduler, BLOCKS, *specs, fails=fails)

    def fetch(self, name: str, transfer_id: str, length: int = 10, **fields: Any) -> VllmRequest:
        ids = fields.pop("ids", prompt(length))
        return self.vllm.add(VllmRequest(name, ids, fetch_params(transfer_id, length), **fields))

    def prefilled(self, name: str, transfer_id: str, length: int = 10, **fields: Any) -> VllmRequest:
        """A prefill leg that has ended."""
        params = HAND_OVER | {"transfer_id": transfer_id}
        request = self.vllm.add(VllmRequest(name, prompt(length), params, **fields))
        self.vllm.step()
        self.vllm.finish(request)
        return request

    def check_all_free(self) -> None:
        self.vllm.check_integrity()
        assert not self.vllm.requests and len(self.vllm.free) == BLOCKS - 1
        assert not self.scheduler._beginnings and not self.scheduler._kept.num_blocks
        assert not self.scheduler._fetches and not self.scheduler._lent and not self.scheduler._tasks
        assert self.scheduler.requests == self.scheduler.leased_blocks == 0


def during_one_step(engine: Engine, event: Event) -> Callable[[], None]:
    events = [event]

    def happen() -> None:
        engine.plane.events += events
        events.clear()

    return happen


def fetch_params(transfer_id: str, length: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": "e",
        "remote_host": "10.0.0.2",
        "remote_port": 6301,
        "remote_num_tokens": length,
        "remote_tp_size": 1,
        "remote_dp_rank": 0,
        "remote_prefill_cached_tokens": 0,
    }


def done(transfer_id: str) -> PullDone:
    return PullDone(transfer_id=transfer_id, backend="tcp", nbytes=7, descriptors=1, wait_s=0.0, pull_s=0.1)


def failed(transfer_id: str, *, quiescent: bool = True) -> PullFailed:
    return PullFailed(transfer_id=transfer_id, reason="invalid", quiescent=quiescent)


# Lending.


def test_a_prompt_is_lent_until_its_lease_has_ended() -> None:
    engine = Engine()
    request = engine.prefilled("p", "t", length=10)
    assert request.params == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t",
        "remote_engine_id": "i" * 16, "remote_host": "10.0.0.1", "remote_port": 6301,
        "remote_num_tokens": 10, "remote_tp_size": 1, "remote_dp_rank": 0, "continuable": True,
    }  # fmt: skip
    assert engine.plane.lent == {"t": list(one_group(request.blocks))} and len(request.blocks) == 3
    engine.vllm.step()
    assert engine.vllm.requests
    engine.plane.events.append(LeaseEnded(transfer_id="t", cause="expired"))
    engine.vllm.step()
    engine.check_all_free()
    assert engine.scheduler.take_figures() == {"leases_ended:expired": 1}


def test_a_prompt_with_images_is_not_continued_from_its_ids() -> None:
    """The ids of an image's place say nothing of the image: another server would go on with wrong tokens."""
    engine = Engine()
    request = engine.prefilled("p", "t", mm_features=(SimpleNamespace(identifier="a picture"),))
    assert request.params is not None and request.params["continuable"] is False


def test_several_choices_of_a_prefill_are_one_lease() -> None:
    engine = Engine()
    first, second = engine.prefilled("0_p", "t"), engine.prefilled("1_p", "t")
    assert first.params == second.params and list(engine.plane.lent) == ["t"]
    assert not second.is_delayed
    engine.plane.events.append(LeaseEnded(transfer_id="t", cause="released"))
    engine.vllm.step()
    engine.check_all_free()


def test_a_block_that_several_prompts_share_is_one_leased_block() -> None:
    engine = Engine()
    for number, blocks in enumerate(([1, 2, 3], [1, 2, 4])):
        task = HAND_OVER | {"transfer_id": f"t{number}"}
        request = VllmRequest(f"p{number}", prompt(3 * BLOCK), task, status=Status.FINISHED_STOPPED)
        engine.scheduler.on_new_request(request)
        engine.scheduler.request_finished(request, [blocks])
    leased = [engine.scheduler.leased_blocks]
    for number in range(2):
        engine.plane.events.append(LeaseEnded(transfer_id=f"t{number}", cause="released"))
        engine.scheduler.build_metadata(0)
        leased.append(engine.scheduler.leased_blocks)
    assert leased == [4, 3, 0]


def test_a_transfer_id_that_was_used_before_frees_the_blocks_at_once() -> None:
    engine = Engine()
    engine.prefilled("p", "t")
    engine.plane.events.append(LeaseRefused(transfer_id="t"))
    engine.vllm.step()
    engine.check_all_free()


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
def test_a_prefill_that_did_not_end_well_lends_nothing(status: Status) -> None:
    engine = Engine()
    request = engine.vllm.add(VllmRequest("p", prompt(10), HAND_OVER | {"transfer_id": "t"}))
    engine.vllm.step()
    engine.vllm.finish(request, status)
    assert not engine.plane.lent and request.params is None
    engine.check_all_free()


def test_a_drop_reaches_the_plane_by_a_request_that_vllm_rejects() -> None:
    engine = Engine()
    request = VllmRequest("d", [1], {"do_remote_prefill": True, "drop": True, "transfer_id": "t"})
    engine.vllm.add(request)
    engine.vllm.finish(request, Status.FINISHED_ABORTED)
    assert engine.plane.dropped == ["t"]
    engine.check_all_free()


def test_a_reset_ends_every_lease() -> None:
    engine = Engine()
    engine.prefilled("p", "t")
    engine.scheduler.reset()
    assert engine.plane.dropped == ["t"]


# Fetching.


def test_a_prompt_is_computed_only_after_its_proof() -> None:
    engine = Engine()
    request = engine.fetch("d", "t", length=10)
    assert engine.plane.held == ["t"]
    for _ in range(3):
        engine.vllm.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert engine.plane.pulls["t"] == (list(one_group(request.blocks)), prompt_hash(request, 10))
    engine.plane.events.append(done("t"))
    engine.vllm.step()
    engine.vllm.step()
    assert request.status is Status.RUNNING and engine.vllm.computed == {"d": 9}
    engine.vllm.finish(request)
    engine.check_all_free()
    figures = engine.scheduler.take_figures()
    assert figures == {"transfers": 1, "transfer_bytes": 7, "transfer_seconds": pytest.approx(0.1)}


def test_a_local_prefix_shortens_the_pull_and_a_whole_one_needs_none() -> None:
    engine = Engine()
    request = engine.fetch("d", "t", length=10, cached=4)
    engine.vllm.step()
    assert engine.plane.pulls["t"][0] == list(one_group(request.blocks, 1))
    whole = engine.fetch("w", "u", length=8, cached=8)
    engine.vllm.step()
    assert whole.status is Status.RUNNING and engine.plane.cancelled == ["u"]


def test_a_prompt_that_vllm_computes_all_the_same_is_held_no_longer() -> None:
    """It does for the prompt's logprobs, whatever the connector has found."""
    engine = Engine()
    request = engine.fetch("d", "t")
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.scheduler.update_state_after_alloc(request, [1, 2, 3], 0)
    assert engine.plane.cancelled == ["t"] and not engine.plane.pulls


def test_an_extended_prompt_fetches_what_was_lent() -> None:
    """docs/engines/vllm.md: a stream that goes on elsewhere sends the prompt with what is known already."""
    engine = Engine()
    request = engine.fetch("d", "t", length=10, ids=prompt(14))
    engine.vllm.step()
    runs, ids_hash = engine.plane.pulls["t"]
    assert runs == list(one_group(request.blocks[:3]))
    assert ids_hash == prompt_hash(VllmRequest("x", prompt(10)), 10)


@pytest.mark.parametrize("fails", [False, True], ids=["recompute", "fail"])
@pytest.mark.parametrize("cached", [0, 4])
def test_after_a_failure_nothing_is_believed(fails: bool, cached: int) -> None:
    """I1, by either of vLLM's policies."""
    engine = Engine(fails=fails)
    request = engine.fetch("d", "t", length=10, cached=cached)
    engine.vllm.step()
    engine.plane.events.append(failed("t"))
    metadata = engine.vllm.step()
    assert (metadata.received, metadata.failed) == ({"d"}, {"d"})
    assert len(metadata.failed_blocks) == 3 - cached // BLOCK
    engine.vllm.step()
    if fails:
        assert request.status is Status.FINISHED_ERROR
    else:
        assert request.status is Status.RUNNING and engine.vllm.computed == {"d": cached}
        engine.vllm.finish(request)
    engine.check_all_free()
    assert engine.scheduler.take_figures() == {"failed_transfers:invalid": 1, "recomputed": 1}


def test_what_is_proven_while_a_step_runs_is_computed_on_in_the_next() -> None:
    engine = Engine()
    engine.vllm.add(VllmRequest("r", prompt(4)))
    request = engine.fetch("d", "t")
    engine.vllm.step()
    engine.vllm.while_it_runs = during_one_step(engine, done("t"))
    assert not engine.vllm.step().received, "its own report was on its way by then"
    assert not engine.vllm.step().received
    assert request.status is Status.RUNNING and engine.vllm.computed["d"] == 9


def test_what_a_report_says_itself_is_kept_beside_what_is_proven_meanwhile() -> None:
    engine = Engine()
    engine.vllm.add(VllmRequest("r", prompt(4)))
    first, second = engine.fetch("d", "t"), engine.fetch("e", "u")
    engine.vllm.step()
    engine.plane.events.append(done("t"))
    engine.vllm.while_it_runs = during_one_step(engine, done("u"))
    assert engine.vllm.step().received == {"d"}
    engine.vllm.step()
    assert first.status is second.status is Status.RUNNING


def test_what_fails_while_a_step_runs_is_told_by_a_report_of_its_own() -> None:
    """vLLM reads which loads failed before it shows a report to the connector."""
    engine = Engine()
    engine.vllm.add(VllmRequest("r", prompt(4)))
    request = engine.fetch("d", "t")
    engine.vllm.step()
    engine.vllm.while_it_runs = during_one_step(engine, failed("t"))
    engine.vllm.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert engine.vllm.step().failed == {"d"}
    engine.vllm.step()
    assert request.status is Status.RUNNING and engine.vllm.computed["d"] == 0


def test_a_request_that_has_ended_gives_its_blocks_back_while_a_step_runs() -> None:
    engine = Engine()
    other = engine.vllm.add(VllmRequest("r", prompt(4)))
    request = engine.fetch("d", "t")
    engine.vllm.step()
    engine.vllm.finish(request, Status.FINISHED_ABORTED)
    engine.vllm.while_it_runs = during_one_step(engine, done("t"))
    engine.vllm.step()
    engine.vllm.finish(other)
    engine.check_all_free()


def test_blocks_that_may_still_be_written_are_not_given_back() -> None:
    """I3."""
    engine = Engine()
    request = engine.fetch("d", "t")
    engine.vllm.step()
    engine.plane.events.append(failed("t", quiescent=False))
    for _ in range(3):
        assert not engine.vllm.step().received
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    engine.plane.events.append(PullQuiescent(transfer_id="t"))
    assert engine.vllm.step().failed == {"d"}


@pytest.mark.parametrize("end", ["done", "failed", "quiescent"])
def test_a_request_that_is_aborted_while_it_is_fetched_keeps_its_blocks_until_nothing_writes(
    end: str,
) -> None:
    engine = Engine()
    request = engine.fetch("d", "t")
    engine.vllm.step()
    engine.vllm.finish(request, Status.FINISHED_ABORTED)
    assert engine.plane.cancelled == ["t"] and request.blocks
    if end == "done":
        engine.plane.events.append(done("t"))
    else:
        engine.plane.events.append(failed("t", quiescent=end == "failed"))
    metadata = engine.vllm.step()
    if end == "quiescent":
        assert not metadata.received
        engine.plane.events.append(PullQuiescent(transfer_id="t"))
        metadata = engine.vllm.step()
    assert metadata.received == {"d"} and not metadata.failed and not metadata.failed_blocks
    engine.check_all_free()


def test_a_request_that_is_aborted_before_it_has_room_is_not_fetched() -> None:
    engine = Engine()
    request = engine.fetch("d", "t", length=BLOCKS * BLOCK + 1)
    engine.vllm.step()
    assert not engine.plane.pulls
    engine.vllm.finish(request, Status.FINISHED_ABORTED)
    assert engine.plane.cancelled == ["t"]
    engine.check_all_free()


@pytest.mark.parametrize("length", [1, 10])
def test_a_request_that_never_came_to_the_engine_ends_the_lease_of_its_prompt(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """N8: vLLM adds another request, of one token, in its place. Nothing was wrong with its params."""
    engine = Engine()
    engine.vllm.reject("d", fetch_params("t", length))
    assert engine.plane.held == engine.plane.cancelled == ["t"] and not engine.plane.pulls
    assert engine.scheduler.take_figures() == {"aborted_before_admission": 1}
    assert not caplog.records
    engine.vllm.step()
    assert not engine.scheduler.work.prompt_tokens
    engine.check_all_free()


def test_it_ends_no_lease_that_others_of_its_prompt_need() -> None:
    engine = Engine()
    other = engine.fetch("0_d", "t")
    engine.vllm.reject("1_d", fetch_params("t", 10))
    engine.vllm.step()
    assert "t" in engine.plane.pulls and not engine.plane.cancelled
    engine.plane.events.append(done("t"))
    engine.vllm.step()
    engine.vllm.step()
    engine.vllm.finish(other)
    engine.check_all_free()


def test_a_server_that_fetches_nothing_counts_it_too() -> None:
    engine = Engine(role="prefill")
    engine.vllm.reject("d", fetch_params("t", 10))
    assert not engine.plane.held
    assert engine.scheduler.take_figures() == {"aborted_before_admission": 1}
    engine.check_all_free()


@pytest.mark.parametrize("reason", NO_FAULT)
def test_a_pull_that_nobody_needs_any_more_has_not_failed(reason: str) -> None:
    """As in our own engine: its client has left, or the prefill ended the whole answer."""
    engine = Engine()
    request = engine.fetch("d", "t")
    engine.vllm.step()
    if reason == "cancelled":
        engine.vllm.finish(request, Status.FINISHED_ABORTED)
    engine.plane.events.append(PullFailed(transfer_id="t", reason=reason, quiescent=True))
    engine.vllm.step()
    engine.vllm.step()
    assert engine.scheduler.take_figures() == {}
    assert not engine.scheduler.work.failures and not engine.scheduler.work.recomputes
    if reason != "cancelled":
        engine.vllm.finish(request, Status.FINISHED_ABORTED)
    engine.check_all_free()


def test_several_choices_are_one_transfer_and_the_others_wait_for_it() -> None:
    """I7."""
    engine = Engine()
    children = [engine.fetch(f"{index}_d", "t") for index in range(4)]
    engine.vllm.step()
    engine.vllm.step()
    assert list(engine.plane.pulls) == ["t"] and engine.plane.held == ["t"]
    assert [child.status for child in children[1:]] == [Status.WAITING] * 3
    engine.plane.events.append(done("t"))
    engine.vllm.step()
    assert [child.status for child in children[1:]] == [Status.WAITING] * 3
    for child in children[1:]:
        child.cached = 8  # vLLM caches the blocks when it has scheduled the first
    engine.vllm.step()
    assert {child.status for child in children} == {Status.RUNNING}
    assert engine.vllm.computed == {"0_d": 9, "1_d": 8, "2_d": 8, "3_d": 8}
    for child in children:
        engine.vllm.finish(child)
    engine.check_all_free()


@pytest.mark.parametrize("when", ["held", "pulling"])
def test_choices_do_not_wait_for_one_that_has_left(when: str) -> None:
    engine = Engine()
    first, second = engine.fetch("0_d", "t"), engine.fetch("1_d", "t")
    if when == "pulling":
        engine.vllm.step()
    engine.vllm.finish(first, Status.FINISHED_ABORTED)
    engine.vllm.step()
    assert second.status is Status.RUNNING and engine.vllm.computed == {"1_d": 0}
    engine.vllm.finish(second)
    if when == "pulling":
        engine.plane.events.append(failed("t"))
        engine.vllm.step()
    engine.check_all_free()


def test_what_was_done_is_reported_as_our_own_agents_report_it() -> None:
    """In pings: for the operator's page. A pull that its client has given up is no failure."""
    engine = Engine()
    engine.vllm.add(VllmRequest("here", prompt(10), cached=8))
    for name in ("done", "failed", "given-up"):
        engine.fetch(name, name)
    engine.prefilled("lent", "lent")
    engine.vllm.finish(engine.vllm.requests["given-up"], Status.FINISHED_ABORTED)
    engine.plane.events = [
        done("done"),
        failed("failed"),
        PullFailed(transfer_id="given-up", reason="cancelled", quiescent=True),
        LeaseEnded(transfer_id="lent", cause="expired"),
    ]
    engine.vllm.step()
    work = engine.scheduler.work
    assert (work.prompt_tokens, work.cached_tokens) == (20, 8), "one computed here, and one lent"
    assert (work.pull_bytes, sum(work.pulls), work.failures) == (7, 1, {"invalid": 1})
    assert (work.recomputes, work.leases_expired) == (1, 1)
    (link,) = work.links
    assert link == LinkUse(
        producer=Incarnation("e"), backend="tcp", pulls=1, failures=1, nbytes=7, seconds=0.1, tail_s=0.0
    )


@pytest.mark.parametrize(
    "params",
    [
        "text",
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "t"},
        {"do_remote_decode": True, "transfer_id": 7},
        {"do_remote_decode": True, "transfer_id": "a b"},
        {**fetch_params("t", 10), "remote_port": 65536},
        {**fetch_params("t", 10), "remote_host": "h" * 256},
        {**fetch_params("t", 10), "remote_num_tokens": 0},
        fetch_params("t", 11),
    ],
    ids=str,
)
def test_params_that_cannot_be_used_are_counted_and_the_prompt_is_computed_here(params: Any) -> None:
    engine = Engine()
    request = engine.vllm.add(VllmRequest("d", prompt(10), params))
    engine.vllm.step()
    assert request.status is Status.RUNNING and engine.vllm.computed == {"d": 0}
    engine.vllm.finish(request)
    assert not engine.plane.held and not engine.plane.lent
    engine.check_all_free()
    assert engine.scheduler.take_figures() == {"bad_params": 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_does_what_its_role_says(role: str) -> None:
    engine = Engine(role=role)
    request = engine.prefilled("p", "t")
    assert (request.params is not None) == (role == "prefill")
    engine.fetch("d", "u")
    assert bool(engine.plane.held) == (role == "decode")


def test_embeddings_have_no_ids_to_prove() -> None:
    engine = Engine()
    request = VllmRequest("d", prompt(10), fetch_params("t", 10), prompt_embeds=object())
    engine.vllm.add(request)
    assert not engine.plane.held


def test_the_hash_of_a_prompt_covers_its_adapter_and_its_images() -> None:
    class Named:
        lora_name = "a"
        lora_path = "/a"
        identifier = "image"

    class NamedAlike(Named):
        lora_path = "/b"

    plain = VllmRequest("x", prompt(10))
    hashes = {
        prompt_hash(plain, 10),
        prompt_hash(plain, 9),
        prompt_hash(VllmRequest("x", prompt(10), lora_request=Named()), 10),
        prompt_hash(VllmRequest("x", prompt(10), lora_request=NamedAlike()), 10),
        prompt_hash(VllmRequest("x", prompt(10), mm_features=(Named(),)), 10),
    }
    assert len(hashes) == 5


def test_in_any_order_of_events_every_block_comes_back() -> None:
    """I2, I3: the stand-in asserts vLLM's rules at every step."""
    for seed in range(60):
        Life(seed).run()


class Life:
    """Random requests, ends and events at one server."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.engine = Engine(fails=self.dice.random() < 0.5)
        self.writing: set[str] = set()
        """Failed pulls whose blocks may still be written."""

    def run(self) -> None:
        engine = self.engine
        engine.vllm.while_it_runs = lambda: self.tell_some(chance=0.2)
        for number in range(60):
            self.ask(number)
            self.end_some()
            self.tell_some(chance=0.3)
            engine.vllm.step()
            engine.vllm.check_integrity()
        for request in list(engine.vllm.requests.values()):
            if not request.status.is_finished:
                engine.vllm.finish(request, Status.FINISHED_ABORTED)
        while engine.plane.pulls or engine.plane.lent or engine.plane.events:
            self.tell_some(chance=1.0)
            engine.vllm.step()
        engine.vllm.step()  # which tells what the last one was too early for
        engine.check_all_free()

    def ask(self, number: int) -> None:
        choice, length = self.dice.random(), self.dice.randint(1, 40)
        if choice < 0.4:
            for child in range(self.dice.choice((1, 1, 3))):
                self.engine.fetch(f"{child}_d{number}", f"t{number}", length=length)
        elif choice < 0.6:
            params = HAND_OVER | {"transfer_id": f"t{number}"}
            self.engine.vllm.add(VllmRequest(f"p{number}", prompt(length), params))

    def end_some(self) -> None:
        for request in list(self.engine.vllm.requests.values()):
            if not request.status.is_finished and self.dice.random() < 0.2:
                well = request.status is Status.RUNNING and self.dice.random() < 0.7
                end = Status.FINISHED_STOPPED if well else Status.FINISHED_ABORTED
                self.engine.vllm.finish(request, end)

    def tell_some(self, chance: float) -> None:
        plane = self.engine.plane
        for transfer_id in [each for each in plane.pulls if self.dice.random() < chance]:
            if transfer_id in self.writing:
                plane.events.append(PullQuiescent(transfer_id=transfer_id))
            else:
                quiescent = self.dice.random() < 0.7
                ends = done(transfer_id), failed(transfer_id, quiescent=quiescent)
                plane.events.append(end := self.dice.choice(ends))
                if end is ends[1] and not quiescent:
                    self.writing.add(transfer_id)
                    continue
            del plane.pulls[transfer_id]
        for transfer_id in [each for each in plane.lent if self.dice.random() < chance]:
            plane.events.append(LeaseEnded(transfer_id=transfer_id, cause="released"))
            del plane.lent[transfer_id]


FULL = FullAttentionSpec(BLOCK)
HYBRIDS: dict[str, tuple[Any, ...]] = {
    "windows": (SlidingWindowSpec(BLOCK, sliding_window=6), FULL),
    "chunks": (FULL, ChunkedLocalAttentionSpec(BLOCK, attention_chunk_size=8)),
    "states": (FULL, MambaSpec(2 * BLOCK)),
    "states without a prefix cache": (MambaSpec(1024, mamba_cache_mode="none"), FULL),
    "one group of windows": (SlidingWindowSpec(BLOCK, sliding_window=6),),
}
hybrids = pytest.mark.parametrize("specs", HYBRIDS.values(), ids=HYBRIDS)
lengths = pytest.mark.parametrize("length", [2, 5, 8, 9, 15, 16, 17])
"""At 8, 9, 16 and 17 a chunk, a block or a window begins."""


@hybrids
@lengths
def test_a_hybrid_lends_all_but_the_last_token(specs: tuple[Any, ...], length: int) -> None:
    """A window or a state that holds the last token cannot be gone on from."""
    engine = Engine(*specs)
    request = engine.prefilled("p", "t", length)
    assert request.params is not None and request.params["remote_num_tokens"] == length - 1
    assert (request.max_tokens, request._all_token_ids) == (1, prompt(length - 1))
    runs = engine.plane.lent["t"]
    assert [run.first for run in runs] == [spec.first_kept(length - 1) for spec in specs]
    assert [run.end for run in runs] == [-(-(length - 1) // spec.block_size) for spec in specs]
    assert engine.scheduler.leased_blocks == sum(len(run.ids) for run in runs)
    engine.plane.events.append(LeaseEnded(transfer_id="t", cause="released"))
    engine.vllm.step()
    engine.check_all_free()


@hybrids
@lengths
def test_a_hybrid_fetches_what_each_group_keeps(specs: tuple[Any, ...], length: int) -> None:
    engine = Engine(*specs)
    request = engine.vllm.add(VllmRequest("d", prompt(length + 1), fetch_params("t", length)))
    engine.vllm.step()
    runs, ids_hash = engine.plane.pulls["t"]
    assert ids_hash == prompt_hash(request, length)
    assert [run.first for run in runs] == [spec.first_kept(length) for spec in specs]
    assert [run.end for run in runs] == [-(-length // spec.block_size) for spec in specs]
    assert [list(run.ids) for run in runs] == [
        group[run.first : run.end] for run, group in zip(runs, request.groups, strict=True)
    ]
    engine.plane.events.append(done("t"))
    engine.vllm.step()
    engine.vllm.step()
    assert engine.vllm.computed == {"d": length}


@hybrids
def test_a_hybrid_computes_a_prompt_of_which_all_was_lent(specs: tuple[Any, ...]) -> None:
    engine = Engine(*specs)
    engine.fetch("d", "t", 9)
    engine.vllm.step()
    assert engine.vllm.computed == {"d": 0} and engine.plane.cancelled == ["t"] and not engine.plane.pulls
    assert engine.scheduler.take_figures() == {"whole_prompts": 1}


@pytest.mark.parametrize("continuable", [True, False])
def test_the_last_token_stays_where_the_prefills_token_is_shown(continuable: bool) -> None:
    """The decode leg's prompt is then one token longer."""
    engine = Engine(*HYBRIDS["windows"], continuable=continuable)
    params = HAND_OVER | {"transfer_id": "t", "first_token": True}
    request = engine.vllm.add(VllmRequest("p", prompt(9), params))
    engine.vllm.step()
    engine.vllm.finish(request)
    assert request.params is not None and request.params["remote_num_tokens"] == (9 if continuable else 8)


def test_the_last_token_stays_where_all_tokens_are_kept() -> None:
    assert (Engine().prefilled("p", "t", 9).params or {})["remote_num_tokens"] == 9


IMAGE = SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=6, length=3))


@pytest.mark.parametrize(
    ("length", "fields"),
    [(1, {}), (9, {"skips_cache": True}), (9, {"mm_features": (IMAGE,)})],
    ids=["one token", "prompt logprobs", "an image at the end"],
)
def test_a_prompt_that_cannot_be_left_short_is_lent_whole(length: int, fields: dict[str, Any]) -> None:
    engine = Engine(*HYBRIDS["windows"])
    request = engine.prefilled("p", "t", length, **fields)
    assert request.params is not None and request.params["remote_num_tokens"] == length
    assert request._all_token_ids == prompt(length)


@hybrids
def test_what_holds_more_than_the_prompt_is_not_lent(specs: tuple[Any, ...]) -> None:
    """A state is the one after exactly the tokens that were computed."""
    engine = Engine(*specs)
    request = engine.vllm.add(VllmRequest("p", prompt(9), HAND_OVER | {"transfer_id": "t"}))
    engine.vllm.step()
    request.num_computed_tokens += 1
    engine.vllm.finish(request)
    assert request.params is None and not engine.plane.lent
    assert engine.scheduler.take_figures() == {"not_lent": 1}
    engine.check_all_free()


def test_a_hole_among_a_prompts_blocks_is_not_lent() -> None:
    engine = Engine()
    request = engine.vllm.add(VllmRequest("p", prompt(12), HAND_OVER | {"transfer_id": "t"}))
    engine.vllm.step()
    hole, request.blocks[1] = request.blocks[1], 0
    engine.vllm.free.append(hole)
    engine.vllm.finish(request)
    assert request.params is None and engine.scheduler.take_figures() == {"not_lent": 1}


def test_a_hole_among_blocks_to_be_written_is_never_written_to() -> None:
    engine = Engine()
    request = VllmRequest("d", prompt(13), fetch_params("t", 12))
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
    engine.scheduler.update_state_after_alloc(request, [[5, 0, 6, 7]], 12)
    assert engine.plane.cancelled == ["t"] and not engine.plane.pulls
    metadata = engine.scheduler.build_metadata(0)
    assert metadata.received == metadata.failed == {"d"} and not metadata.failed_blocks
    assert engine.scheduler.take_figures() == {"failed_transfers:mismatch": 1, "recomputed": 1}


def test_a_kind_of_kv_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(NotServed, match="CircularBufferSpec"):
        _group(CircularBufferSpec(BLOCK))
    with pytest.raises(NotServed, match="host memory"):
        groups_of(KVCacheConfig(BLOCKS, [KVCacheGroupSpec(["layer"], FULL, enable_kv_transfer=False)]))
