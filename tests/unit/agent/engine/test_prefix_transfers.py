# SPDX-License-Identifier: Apache-2.0
"""A prefill agent borrows what it lacks of a prompt's beginning, and a decode agent lends what it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.agent.block_hashes import hash_blocks
from kvferry.agent.lender import MAX_PAUSE_S, PAUSE_S
from kvferry.agent.messages.requests import Output, PrefixSource, RequestFailed, Submit
from kvferry.transfer.plane import MAX_LOAN_S, one_group
from tests.standins.connector import StandInPrefixPull
from tests.standins.model import StandInRunner, next_token
from tests.unit.agent.engine.test_scheduler import chunks_run, make_engine, numbers, start_pull
from tests.unit.agent.local_engine import LIMITS, LocalEngine, request

SIZE = LIMITS.block_size
PROMPT = numbers(0, 22)
SOURCE = PrefixSource(engine_id="d" * 16, host="127.0.0.1", port=2, tp_size=1, min_tokens=4)


def produced(request_id: str, prompt: Sequence[int] = PROMPT, **changes: Any) -> Submit:
    """A prefill leg, of transfer `t-<id>`, that may pull."""
    fields = {"prefix_source": SOURCE, "produce": f"t-{request_id}", "ignore_eos": True, **changes}
    return request(request_id, prompt, **fields)


def borrowing(
    num_blocks: int = 40, prompt: Sequence[int] = PROMPT, **changes: Any
) -> tuple[LocalEngine, str, StandInPrefixPull]:
    """An engine that has asked for the beginning of `p`'s prompt; the borrowing and its id."""
    limits = {name: changes.pop(name) for name in list(changes) if name in LIMITS.__slots__}
    engine = make_engine(num_blocks, **limits)
    engine.submit(produced("p", prompt, **changes))
    engine.step()
    ((transfer_id, pull),) = engine.connector.prefix_pulls.items()
    return engine, transfer_id, pull


def arrive(engine: LocalEngine, transfer_id: str, num_blocks: int, first: int = 0) -> None:
    """The first blocks of what was asked for come; of the prompt those from number `first` on."""
    assert isinstance(engine.runner, StandInRunner)
    blocks = engine.connector.prefix_pulls[transfer_id].block_ids[:num_blocks]
    for place, block in enumerate(blocks, first):
        engine.runner.write([0] * place + [block], place * SIZE, PROMPT[place * SIZE : (place + 1) * SIZE])
    engine.connector.finish_prefix_pull(transfer_id, num_blocks)


def prefilled(engine: LocalEngine, request_id: str = "p") -> Output:
    """What the leg came to: its token is the model's, and its lease is ready with all blocks."""
    engine.run()
    output = engine.last(request_id)
    assert isinstance(output, Output) and output.done and output.leased
    assert [token.token_id for token in output.tokens] == [next_token(PROMPT, 0)]
    assert f"t-{request_id}" in engine.connector.ready_leases
    blocks = engine.connector.lease_blocks[f"t-{request_id}"]
    assert isinstance(engine.runner, StandInRunner)
    assert engine.runner.read(blocks, len(PROMPT)) == list(PROMPT)
    return output


def end_lease(engine: LocalEngine, request_id: str = "p") -> None:
    engine.connector.end_lease(f"t-{request_id}", "released")
    engine.step()
    engine.assert_all_free()


def test_only_what_did_not_come_is_computed() -> None:
    engine, transfer_id, pull = borrowing()
    assert pull.hashes == tuple(hash_blocks(PROMPT, SIZE)), "every full block, but for the last token"
    assert not engine.connector.leases, "no lease before it is known in which blocks the KV is going to be"
    arrive(engine, transfer_id, 3)
    output = prefilled(engine)
    assert chunks_run(engine) == [(12, 16), (16, 22)], "chunks end where they always do"
    assert output.cached_tokens == 12
    assert output.timing is not None
    assert (output.timing.prefix_tokens, output.timing.prefix_pull_bytes) == (12, 64 * 3)
    assert engine.scheduler.counters.prompt_tokens == {"pulled_prefix": 12, "computed": 10, "cached": 0}
    end_lease(engine)


def test_the_last_token_is_always_computed() -> None:
    """Its logits are wanted."""
    engine, transfer_id, pull = borrowing(prompt=PROMPT[:20])
    assert len(pull.hashes) == 4
    arrive(engine, transfer_id, 4)
    engine.run()
    assert chunks_run(engine) == [(16, 20)]


def test_no_more_is_asked_for_than_a_loan_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lender rejects a longer list, and the prompt would be computed from its beginning."""
    monkeypatch.setattr("kvferry.agent.engine.prefix_lenders.MAX_LOAN_BLOCKS", 3)
    engine, transfer_id, pull = borrowing()
    assert pull.hashes == tuple(hash_blocks(PROMPT, SIZE)[:3])
    arrive(engine, transfer_id, 3)
    assert prefilled(engine).cached_tokens == 12
    end_lease(engine)


def test_only_what_is_not_cached_here_is_asked_for() -> None:
    engine = make_engine()
    engine.submit(request("before", PROMPT[:9], max_tokens=1))
    engine.run()
    engine.submit(produced("p"))
    engine.step()
    ((transfer_id, pull),) = engine.connector.prefix_pulls.items()
    assert pull.hashes == tuple(hash_blocks(PROMPT, SIZE)[2:])
    arrive(engine, transfer_id, 2, first=2)
    assert prefilled(engine).cached_tokens == 16
    assert engine.scheduler.counters.prompt_tokens == {"pulled_prefix": 8, "computed": 9 + 6, "cached": 8}
    end_lease(engine)


def test_what_was_borrowed_is_cached_for_the_next() -> None:
    engine, transfer_id, _ = borrowing()
    arrive(engine, transfer_id, 5)
    prefilled(engine)
    engine.submit(produced("q"))
    assert prefilled(engine, "q").cached_tokens == 20
    assert not engine.connector.prefix_pulls
    assert chunks_run(engine)[1:] == [(20, 22)]


def test_nothing_lent_means_that_all_is_computed() -> None:
    engine, transfer_id, _ = borrowing()
    arrive(engine, transfer_id, 0)
    assert prefilled(engine).cached_tokens == 0
    assert chunks_run(engine) == [(0, 8), (8, 16), (16, 22)]
    end_lease(engine)


@pytest.mark.parametrize("quiescent", [True, False])
def test_after_a_failure_all_is_computed_into_blocks_that_nothing_is_written_to(quiescent: bool) -> None:
    """I1, I3: what had arrived is scribbled over, and may be still while the prompt is computed."""
    engine, transfer_id, pull = borrowing()
    engine.connector.fail_prefix_pull(transfer_id, quiescent=quiescent)
    engine.step()
    assert isinstance(engine.runner, StandInRunner)
    if not quiescent:
        engine.runner.scribble(pull.block_ids)
        assert engine.allocator.counts().quarantined == len(pull.block_ids)
    prefilled(engine)
    if not quiescent:
        assert not set(engine.connector.lease_blocks["t-p"]) & set(pull.block_ids)
        engine.connector.quieten(transfer_id)
    assert not engine.connector.prefix_pulls, "it is not asked again"
    end_lease(engine)


def test_after_a_failure_an_agent_is_left_alone_for_a_while() -> None:
    """It may be out of reach from here: every prompt would wait for the time limit."""
    engine, transfer_id, _ = borrowing()
    engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
    engine.run()
    other = numbers(100, 22)
    engine.submit(produced("soon", other))
    engine.run()
    assert not engine.connector.prefix_pulls
    elsewhere = PrefixSource(engine_id="e" * 16, host="127.0.0.1", port=3, tp_size=1, min_tokens=4)
    engine.submit(produced("elsewhere", numbers(200, 22), prefix_source=elsewhere))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 1, "others are asked"
    engine.now += PAUSE_S
    engine.submit(produced("later", numbers(300, 22)))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 2


def test_each_failure_upon_another_makes_the_pause_longer_up_to_a_limit() -> None:
    engine, transfer_id, _ = borrowing(num_blocks=400)
    pause_s = PAUSE_S
    for number in range(7):
        engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
        engine.step()
        engine.now += pause_s - 1
        engine.submit(produced(f"soon-{number}", numbers(100 * number, 22)))
        engine.step()
        assert not engine.connector.prefix_pulls
        engine.now += 1
        engine.submit(produced(f"later-{number}", numbers(100 * number + 50, 22)))
        engine.step()
        ((transfer_id, _),) = engine.connector.prefix_pulls.items()
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    assert pause_s == MAX_PAUSE_S
    arrive(engine, transfer_id, 0)
    engine.submit(produced("again", numbers(1000, 22)))
    engine.step()
    ((transfer_id, _),) = engine.connector.prefix_pulls.items()
    engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
    engine.step()
    engine.now += PAUSE_S
    engine.submit(produced("last", numbers(1100, 22)))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 1, "an answer has made the pause the first one again"


def test_an_agent_that_has_not_answered_yet_is_asked_by_one_prompt_at_a_time() -> None:
    """If it is out of reach, the others are not late."""
    engine, transfer_id, _ = borrowing(num_blocks=400)
    for number in (1, 2):
        engine.submit(produced(f"with-{number}", numbers(100 * number, 22)))
    engine.step()
    assert list(engine.connector.prefix_pulls) == [transfer_id]
    arrive(engine, transfer_id, 3)
    engine.run()
    for number in (3, 4):
        engine.submit(produced(f"after-{number}", numbers(100 * number, 22)))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 2
    for transfer_id in list(engine.connector.prefix_pulls):  # they fail together: that is one failure
        engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
    engine.step()
    engine.now += PAUSE_S
    engine.submit(produced("later", numbers(500, 22)))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 1


def test_who_aborts_does_not_keep_others_from_asking() -> None:
    engine, transfer_id, _ = borrowing()
    engine.scheduler.abort("p")
    engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
    engine.step()
    engine.submit(produced("q"))
    engine.step()
    assert len(engine.connector.prefix_pulls) == 1


@pytest.mark.parametrize("quiescent", [True, False])
def test_a_request_that_is_aborted_while_it_borrows_gives_everything_back(quiescent: bool) -> None:
    engine, transfer_id, pull = borrowing()
    engine.scheduler.abort("p")
    assert pull.cancelled
    engine.scheduler.check_integrity()
    engine.connector.fail_prefix_pull(transfer_id, quiescent=quiescent)
    engine.step()
    if not quiescent:
        assert engine.allocator.counts().quarantined == len(pull.block_ids)
        engine.connector.quieten(transfer_id)
        engine.step()
    assert "p" not in engine.messages
    engine.assert_all_free()


def test_what_arrives_for_an_aborted_request_is_freed() -> None:
    engine, transfer_id, pull = borrowing()
    engine.scheduler.abort("p")
    pull.cancelled = False  # it had arrived already
    arrive(engine, transfer_id, 3)
    engine.step()
    engine.assert_all_free()


def test_a_borrowing_has_a_deadline_of_its_own_and_the_request_s() -> None:
    assert borrowing()[2].timeout_s == MAX_LOAN_S
    assert borrowing(pull_timeout_s=2.0)[2].timeout_s == 2.0
    engine, transfer_id, pull = borrowing(timeout_s=1.0)
    assert pull.timeout_s == 1.0
    engine.now += 1.0
    engine.step()
    failed = engine.last("p")
    assert isinstance(failed, RequestFailed) and failed.code == "timeout"
    engine.connector.fail_prefix_pull(transfer_id, quiescent=True)
    engine.step()
    engine.assert_all_free()


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_source": None},
        {"prefix_source": PrefixSource(engine_id="d", host="h", port=2, tp_size=1, min_tokens=21)},
        {"produce": None},
        {"prompt_logprobs": 1},
        {"prefix_cache": False},
    ],
)
def test_who_does_not_borrow(changes: dict[str, object]) -> None:
    """Too little is missing; it is no prefill leg; all of its tokens are to be scored; nothing is cached."""
    changes = dict(changes)
    limits = {name: changes.pop(name) for name in list(changes) if name in LIMITS.__slots__}
    engine = make_engine(**limits)
    engine.submit(produced("p", **changes))
    engine.step()
    assert not engine.connector.prefix_pulls
    assert chunks_run(engine)[0] == (0, 8)


def test_a_transfer_that_was_used_fails_the_request_when_its_prefix_has_come() -> None:
    engine, transfer_id, _ = borrowing()
    engine.connector.register("t-p", one_group([39]), 1, "hash", 1.0)
    engine.connector.end_lease("t-p", "released")
    arrive(engine, transfer_id, 3)
    engine.step()
    failed = engine.last("p")
    assert isinstance(failed, RequestFailed) and failed.code == "duplicate_transfer"
    engine.step()
    engine.assert_all_free()


def test_who_waits_for_a_prefix_takes_a_place_and_holds_up_nobody() -> None:
    engine, transfer_id, _ = borrowing(max_num_seqs=2)
    engine.submit(request("other", numbers(30, 6), max_tokens=2))
    engine.submit(request("third", numbers(40, 6), max_tokens=2))
    engine.step()
    assert engine.scheduler.num_waiting == 2, "one that borrows, and one without a place"
    engine.run()
    assert isinstance(engine.last("other"), Output) and isinstance(engine.last("third"), Output)
    arrive(engine, transfer_id, 2)
    prefilled(engine)


# The lender.


def lender(**limits: Any) -> LocalEngine:
    """An engine that has served a turn of a conversation: the prompt and an answer of 8 tokens."""
    engine = make_engine(**limits)
    engine.submit(request("turn", PROMPT, ignore_eos=True))
    engine.run()
    return engine


def lend(engine: LocalEngine, hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Ask for a loan; returns the blocks."""
    engine.connector.ask_for_loan("loan", hashes)
    engine.step()
    engine.scheduler.check_integrity()
    num_tokens, blocks, ids_hash = engine.connector.loans["loan"]
    assert num_tokens == len(blocks) * SIZE
    assert not blocks or ids_hash == hashes[len(blocks) - 1].hex()
    return blocks


def test_a_turn_s_prompt_and_answer_are_lent_but_not_its_last_token() -> None:
    """The last token's KV was never computed."""
    engine = lender()
    turn = [*PROMPT, *engine.tokens("turn")]
    following = [*turn, *numbers(30, 9)]
    blocks = lend(engine, hash_blocks(following, SIZE))
    assert len(blocks) * SIZE == 28 == (len(turn) - 1) // SIZE * SIZE
    assert isinstance(engine.runner, StandInRunner)
    assert engine.runner.read(blocks, 28) == turn[:28]
    assert engine.allocator.counts().leased == len(blocks)
    engine.connector.end_lease("loan", "expired")
    engine.step()
    engine.assert_all_free()


def test_a_run_in_the_middle_of_a_prompt_is_found() -> None:
    engine = lender()
    blocks = lend(engine, hash_blocks(PROMPT, SIZE)[2:])
    assert isinstance(engine.runner, StandInRunner)
    assert len(blocks) == 3
    assert engine.runner.read(blocks, 3 * SIZE) == PROMPT[8:20]


@pytest.mark.parametrize(
    ("ids", "salt"), [(PROMPT, "other"), ([7, *PROMPT[1:]], ""), (PROMPT, "\0"), ([*PROMPT[1:], 1], "")]
)
def test_another_salt_or_other_ids_find_nothing(ids: list[int], salt: str) -> None:
    assert lend(lender(), hash_blocks(ids, SIZE, salt=salt)) == ()


def test_a_salt_finds_what_was_computed_with_it() -> None:
    engine = make_engine()
    engine.submit(request("turn", PROMPT, cache_salt="mine"))
    engine.run()
    assert len(lend(engine, hash_blocks(PROMPT, SIZE, salt="mine"))) == 5
    engine = make_engine()
    engine.submit(request("turn", PROMPT, cache_salt="mine"))
    engine.run()
    assert lend(engine, hash_blocks(PROMPT, SIZE)) == ()


def test_a_borrower_asks_with_its_request_s_salt() -> None:
    _, _, pull = borrowing(cache_salt="mine")
    assert pull.hashes == tuple(hash_blocks(PROMPT, SIZE, salt="mine"))


def test_lent_blocks_are_not_evicted_before_the_loan_ends() -> None:
    """I2: pinned, then free at once."""
    engine = lender(num_blocks=12)
    blocks = lend(engine, hash_blocks(PROMPT, SIZE))
    engine.submit(request("big", numbers(25, 27), max_tokens=1))
    engine.run()
    assert isinstance(engine.runner, StandInRunner)
    assert isinstance(engine.last("big"), Output)
    assert engine.runner.read(blocks, 20) == PROMPT[:20]
    engine.connector.end_lease("loan", "released")
    engine.step()
    engine.assert_all_free()


def test_what_is_still_running_is_lent_as_far_as_it_is_computed() -> None:
    engine = make_engine()
    engine.submit(request("turn", PROMPT, ignore_eos=True))
    engine.step()
    blocks = lend(engine, hash_blocks(PROMPT, SIZE))
    assert isinstance(engine.runner, StandInRunner)
    assert engine.runner.read(blocks, 20) == PROMPT[:8], "one chunk"
    engine.connector.end_lease("loan", "released")
    engine.run()
    engine.assert_all_free()


def test_nothing_is_lent_that_running_sequences_would_miss() -> None:
    """The cached blocks are all that is free: what runs comes first."""
    engine = lender(num_blocks=8)
    turn = [*PROMPT, *engine.tokens("turn")]
    engine.submit(request("run", numbers(30, 3), ignore_eos=True, max_tokens=20))
    engine.step()
    assert engine.allocator.num_free == 7
    assert lend(engine, hash_blocks(turn, SIZE)) == ()
    assert len(lend(engine, hash_blocks(PROMPT, SIZE))) == 5


def test_without_a_prefix_cache_nothing_is_lent() -> None:
    assert lend(lender(prefix_cache=False), hash_blocks(PROMPT, SIZE)) == ()


def test_pulled_tokens_are_counted_apart_from_cached_ones() -> None:
    engine = make_engine()
    start_pull(engine, PROMPT, max_tokens=2)
    pull = engine.connector.pulls["t"]
    assert isinstance(engine.runner, StandInRunner)
    engine.runner.write(pull.block_ids, 0, PROMPT)
    engine.connector.finish_pull("t")
    engine.run()
    assert engine.scheduler.counters.prompt_tokens == {"cached": 0, "pulled": 22, "computed": 0}
