# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation: what a decode server keeps, and what the next prefill pulls of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.agent.lender import PAUSE_S
from kvferry.agent.plugin.kept_prompts import KeptEnded
from kvferry.agent.vllm.identity import prefix_hashes
from kvferry.transfer.events import LeaseEnded, PrefixLent, PullFailed, PullQuiescent
from kvferry.transfer.plane import MAX_LOAN_S, one_group
from tests.standins.vllm_scheduler import Status, VllmRequest, prompt
from tests.standins.vllm_specs import FullAttentionSpec, SlidingWindowSpec
from tests.unit.agent.vllm.test_connector_scheduler import (
    BLOCK,
    BLOCKS,
    HAND_OVER,
    Engine,
    done,
    fetch_params,
)

SOURCE = {
    "remote_engine_id": "lender", "remote_host": "10.0.0.3", "remote_port": 6301, "remote_tp_size": 1,
    "min_tokens": 8,
}  # fmt: skip


def begin(engine: Engine, length: int = 18, **fields: Any) -> VllmRequest:
    """A prefill leg that another server may have the beginning of."""
    params = HAND_OVER | {"transfer_id": "t", "prefix_source": SOURCE | fields.pop("source", {})}
    request = engine.vllm.add(VllmRequest("p", prompt(length), params, **fields))
    engine.vllm.step()
    return request


def lend(engine: Engine, num_blocks: int) -> str:
    """The other server's answer; returns the transfer."""
    (transfer_id,) = engine.plane.asked
    engine.plane.events.append(PrefixLent(transfer_id=transfer_id, num_blocks=num_blocks))
    engine.vllm.step()
    engine.vllm.step()
    return transfer_id


def end(engine: Engine, request: VllmRequest) -> None:
    engine.vllm.finish(request)
    engine.plane.events.append(LeaseEnded(transfer_id="t", cause="released"))
    engine.vllm.step()
    engine.check_all_free()


@pytest.mark.parametrize("cached", [0, BLOCK])
def test_a_beginning_is_pulled_and_the_rest_is_computed(cached: int) -> None:
    engine = Engine()
    request = begin(engine, cached=cached)
    first = cached // BLOCK
    ((transfer_id, (remote, hashes)),) = engine.plane.asked.items()
    assert (remote.engine_id, remote.port) == ("lender", 6301)
    assert hashes == prefix_hashes(request, prompt(16), BLOCK)[first:], "the last token is computed here"
    assert not engine.vllm.computed, "it waits for the answer"
    lend(engine, 2)
    runs, ids_hash = engine.plane.pulls[transfer_id]
    assert runs == list(one_group(request.blocks[first : first + 2]))
    assert ids_hash == hashes[1].hex()
    assert not engine.vllm.computed, "it waits for the proof"
    engine.plane.events.append(done(transfer_id))
    engine.vllm.step()
    engine.vllm.step()
    assert engine.vllm.computed == {"p": cached + 2 * BLOCK}
    assert engine.scheduler.take_figures() == {"prefix_pulls": 1, "prefix_pull_bytes": 7}
    end(engine, request)


def test_a_prompt_of_which_nothing_is_lent_is_computed() -> None:
    engine = Engine()
    request = begin(engine)
    lend(engine, 0)
    assert engine.vllm.computed == {"p": 0} and not engine.plane.pulls
    end(engine, request)


def test_what_cannot_be_pulled_is_computed_and_the_server_is_left_alone_for_a_while() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now)
    request = begin(engine)
    transfer_id = lend(engine, 2)
    engine.plane.events.append(PullFailed(transfer_id=transfer_id, reason="invalid", quiescent=False))
    engine.vllm.step()
    engine.vllm.step()
    assert not engine.vllm.computed, "something may still write to its blocks"
    engine.plane.events.append(PullQuiescent(transfer_id=transfer_id))
    for _ in range(3):
        engine.vllm.step()
    assert engine.vllm.computed == {"p": 0}
    assert engine.scheduler.take_figures() == {"failed_prefix_pulls:invalid": 1}
    end(engine, request)
    engine.plane.asked.clear()
    end(engine, begin(engine))
    assert not engine.plane.asked
    now = PAUSE_S
    request = begin(engine)
    assert engine.plane.asked
    lend(engine, 0)
    end(engine, request)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_the_plane_does() -> None:
    engine = Engine()
    request = begin(engine)
    (transfer_id,) = engine.plane.asked
    engine.plane.events.append(PullFailed(transfer_id=transfer_id, reason="deadline", quiescent=True))
    engine.vllm.step()
    engine.vllm.step()
    assert engine.vllm.computed == {"p": 0}
    end(engine, request)


@pytest.mark.parametrize("when", ["asking", "held", "pulling"])
def test_a_request_that_ends_leaves_nothing(when: str) -> None:
    engine = Engine()
    request = begin(engine)
    (transfer_id,) = engine.plane.asked
    if when == "held":
        engine.plane.events.append(PrefixLent(transfer_id=transfer_id, num_blocks=2))
        engine.scheduler.build_metadata(0)
    elif when == "pulling":
        lend(engine, 2)
    engine.vllm.finish(request, Status.FINISHED_ABORTED)
    assert engine.plane.cancelled == [transfer_id]
    engine.plane.events.append(PullFailed(transfer_id=transfer_id, reason="cancelled", quiescent=True))
    engine.vllm.step()
    engine.vllm.step()
    engine.check_all_free()
    lender = engine.scheduler._lenders["lender"]
    assert not lender.num_asking and lender.may_be_asked(0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 8},  # of which one block could be pulled
        {"cached": 3 * BLOCK},
        {"source": {"min_tokens": 17}},
        {"skips_cache": True},
        {"mm_features": (SimpleNamespace(identifier="an image"),)},
    ],
    ids=["short", "cached", "few", "logprobs", "images"],
)
def test_who_is_not_asked(fields: dict[str, Any]) -> None:
    engine = Engine()
    request = begin(engine, **fields)
    assert not engine.plane.asked and engine.vllm.computed
    end(engine, request)


def test_a_cache_that_has_changed_meanwhile_is_not_filled_with_other_blocks() -> None:
    engine = Engine()
    request = begin(engine)
    request.cached = BLOCK
    transfer_id = lend(engine, 2)
    assert engine.plane.cancelled == [transfer_id] and not engine.plane.pulls
    assert engine.vllm.computed == {"p": BLOCK}
    end(engine, request)


def test_what_was_lent_too_long_ago_is_not_pulled_any_more() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now)
    request = begin(engine)
    now = MAX_LOAN_S / 2
    transfer_id = lend(engine, 2)
    assert engine.plane.cancelled == [transfer_id] and not engine.plane.pulls
    end(engine, request)


def test_a_model_with_windows_neither_keeps_nor_asks() -> None:
    engine = Engine(FullAttentionSpec(BLOCK), SlidingWindowSpec(BLOCK, 8))
    begin(engine)
    assert not engine.plane.asked


# Keeping.


def decoded(
    engine: Engine, name: str = "d", length: int = 10, keep_s: float = 9.0, ahead: int = 0, client: str = ""
) -> VllmRequest:
    """A decode leg that has ended after three tokens. `ahead`: steps that vLLM has scheduled beyond them."""
    request = engine.vllm.add(
        VllmRequest(name, prompt(length), fetch_params(name, length) | {"keep_s": keep_s, "keep_for": client})
    )
    engine.vllm.step()
    engine.plane.events.append(done(name))
    for _ in range(4):
        engine.vllm.step()
    request._all_token_ids += [91, 92, 93]
    request.num_computed_tokens = length + 2 + ahead
    engine.vllm.finish(request)
    return request


def test_a_turn_is_kept_without_its_last_token_until_the_plane_gives_it_up() -> None:
    engine = Engine()
    request = decoded(engine, length=10)
    ((blocks, hashes, limit_s),) = engine.plane.kept.values()
    assert (blocks, limit_s) == (request.blocks[:3], 9.0), "12 of 13 tokens have KV"
    assert hashes == prefix_hashes(request, [*prompt(10), 91, 92], BLOCK)
    engine.vllm.step()
    assert request.is_delayed and request.blocks and not engine.scheduler.leased_blocks, (
        "no drain waits for it"
    )
    engine.plane.events.append(KeptEnded(key="d"))
    engine.vllm.step()
    engine.check_all_free()


def test_a_token_that_was_sampled_last_has_no_kv_though_vllm_has_scheduled_it() -> None:
    engine = Engine()
    decoded(engine, length=9, ahead=2)
    assert len(engine.plane.kept["d"][0]) == 2, "of 12 tokens 11 have KV"


@pytest.mark.parametrize("keep_s", [0.0, 9.0])
def test_a_turn_that_was_aborted_or_not_asked_for_is_not_kept(keep_s: float) -> None:
    engine = Engine()
    request = engine.vllm.add(VllmRequest("d", prompt(10), fetch_params("d", 10) | {"keep_s": keep_s}))
    engine.vllm.step()
    engine.plane.events.append(done("d"))
    engine.vllm.step()
    engine.vllm.step()
    engine.vllm.finish(request, Status.FINISHED_ABORTED if keep_s else Status.FINISHED_STOPPED)
    assert not engine.plane.kept
    engine.check_all_free()


def test_the_oldest_goes_when_much_is_kept() -> None:
    engine = Engine()
    names = [f"d{number}" for number in range(BLOCKS // 4 // 4 + 1)]
    for name in names:
        decoded(engine, name, length=13)
    assert engine.plane.ended == ["d0"]
    decoded(engine, "another", length=13)
    assert engine.plane.ended == ["d0", "d1"]
    names.append("another")
    decoded(engine, "long", length=4 * (BLOCKS // 4) + 1)
    assert "long" not in engine.plane.kept
    engine.plane.events += [KeptEnded(key=name) for name in names]
    engine.vllm.step()
    engine.check_all_free()


def test_of_two_clients_the_one_that_has_most_loses_its_oldest() -> None:
    """One with many turns does not displace another's only one, be it larger, and of equals loses its own."""
    engine = Engine()
    decoded(engine, "first", length=13 + 2 * BLOCK, client="few")
    names = [f"d{number}" for number in range(BLOCKS // 4 // 4)]
    for name in names:
        decoded(engine, name, length=13, client="many")
    assert engine.plane.ended == ["d0", "d1"]
    engine.plane.events.append(KeptEnded(key="first"))
    engine.vllm.step()
    decoded(engine, "other", length=13, client="few")
    assert engine.plane.ended == ["d0", "d1"], "its time was over, so there is room again"
    engine.plane.events += [KeptEnded(key=name) for name in ["other", *names]]
    engine.vllm.step()
    engine.check_all_free()


def test_the_oldest_goes_when_vllm_has_few_free_blocks() -> None:
    engine = Engine()
    decoded(engine, "a")
    decoded(engine, "b")
    decoded(engine, "c")
    engine.vllm.step()
    assert not engine.plane.ended
    big = engine.vllm.add(VllmRequest("big", prompt(BLOCK * (len(engine.vllm.free) - 2))))
    for _ in range(3):
        engine.vllm.step()
    assert engine.plane.ended == ["a"], "one at a time"
    engine.plane.events.append(KeptEnded(key="a"))
    engine.vllm.step()
    engine.vllm.finish(big)
    engine.scheduler.reset()
    assert engine.plane.dropped_kept == ["b", "c"]
    engine.plane.events += [KeptEnded(key="b"), KeptEnded(key="c")]
    engine.vllm.step()
    engine.check_all_free()


def test_hashes_differ_by_all_that_kv_depends_on() -> None:
    plain = VllmRequest("p", prompt(8))
    salted = VllmRequest("p", prompt(8), cache_salt="s")
    other = VllmRequest("p", prompt(8, first=1))
    found = {
        hash_ for each in (plain, salted, other) for hash_ in prefix_hashes(each, each.all_token_ids, BLOCK)
    }
    assert len(found) == 6
