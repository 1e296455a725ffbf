# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.agent.messages.requests import FailedPull, Output, RequestFailed, ResumedChoice
from kvferry.agent.messages.steps import Chunk, SampleOutput, Step, StepOutputs
from tests.standins.model import StandInRunner, expected_answer, next_token
from tests.unit.agent.local_engine import LIMITS, LocalEngine, remote, request, resumed_choices


def make_engine(num_blocks: int = 40, **limits: Any) -> LocalEngine:
    return LocalEngine(StandInRunner(num_blocks, LIMITS.block_size), num_blocks, **limits)


def numbers(start: int, count: int) -> list[int]:
    """A prompt of distinct tokens; another start gives a prompt that shares no prefix."""
    return [1 + (start + index) % 49 for index in range(count)]


def chunks_run(engine: LocalEngine) -> list[tuple[int, int]]:
    assert isinstance(engine.runner, StandInRunner)
    return engine.runner.chunk_log


def start_pull(engine: LocalEngine, prompt: list[int], **changes: Any) -> None:
    """A request `d` whose KV is being pulled as transfer `t`."""
    first = resumed_choices(next_token(prompt, 0))
    engine.submit(request("d", prompt, ignore_eos=True, remote=remote("t", prompt), resumed=first, **changes))
    engine.step()
    assert "t" in engine.connector.pulls


def finish_pull(engine: LocalEngine, prompt: list[int]) -> None:
    pull = engine.connector.pulls["t"]
    start = pull.first_block * LIMITS.block_size
    runner: Any = engine.runner
    runner.write(pull.block_ids, start, prompt[start:])
    engine.connector.finish_pull("t")


# Chunks and batches.


def test_a_prompt_s_chunks_end_at_absolute_multiples() -> None:
    engine = make_engine()
    engine.submit(request("r", numbers(0, 21), max_tokens=1))
    engine.run()
    assert chunks_run(engine) == [(0, 8), (8, 16), (16, 21)]


def test_a_chunk_that_does_not_fit_waits_and_is_not_split() -> None:
    engine = make_engine(max_batch_tokens=15)
    for index in range(2):
        engine.submit(request(f"r{index}", numbers(20 * index, 8), max_tokens=1))
    engine.step()
    assert chunks_run(engine) == [(0, 8)]
    engine.step()
    assert chunks_run(engine) == [(0, 8), (0, 8)]


def test_decoding_never_starves_prompts() -> None:
    """R16: a delay in front of prefill either has an effect that is wanted, or is not there."""
    engine = make_engine(max_batch_tokens=8, max_num_seqs=10)
    for index in range(9):
        engine.submit(request(f"r{index}", numbers(index, 3), max_tokens=30, ignore_eos=True))
        engine.step()
    engine.submit(request("late", numbers(30, 12), max_tokens=1))
    for _ in range(2):
        engine.step()
    assert isinstance(engine.last("late"), Output)


def test_requests_run_together_and_get_the_answers_of_running_alone() -> None:
    engine = make_engine()
    submits = [request(f"r{index}", numbers(5 * index, 3 + 4 * index), max_tokens=9) for index in range(5)]
    for submit in submits:
        engine.submit(submit)
    engine.step()
    assert engine.last_step is not None
    assert len(engine.last_step.chunks) > 1
    engine.run()
    for submit in submits:
        assert engine.tokens(submit.request_id) == expected_answer(submit.prompt_ids, 0, submit.sampling)
    engine.assert_all_free()


@pytest.mark.parametrize(
    ("changes", "finish"),
    [
        ({"max_tokens": 1}, "length"),
        ({"max_tokens": 5, "ignore_eos": True}, "length"),
        ({"max_tokens": 5, "stop_token_ids": tuple(range(50))}, "stop"),
    ],
)
def test_finish_reasons(changes: dict[str, object], finish: str) -> None:
    """R10: a limit of one token yields exactly one."""
    engine = make_engine()
    engine.submit(request("r", numbers(0, 6), **changes))
    engine.run()
    last = engine.last("r")
    assert isinstance(last, Output)
    assert last.done
    assert last.tokens[-1].finish == finish
    assert len(engine.tokens("r")) == (5 if changes.get("ignore_eos") else 1)


# Prefix cache.


def test_a_known_prefix_is_not_computed_again_and_the_last_token_always_is() -> None:
    engine = make_engine()
    engine.submit(request("first", numbers(0, 16), max_tokens=1))
    engine.run()
    engine.submit(request("same", numbers(0, 16), max_tokens=1))
    engine.submit(request("longer", numbers(0, 19), max_tokens=1))
    engine.run()
    assert chunks_run(engine) == [(0, 8), (8, 16), (12, 16), (16, 19)]
    same = engine.last("same")
    assert isinstance(same, Output)
    assert same.cached_tokens == 12


def test_a_block_is_not_found_behind_another_beginning() -> None:
    """D8: the second block of each prompt is known, but not after the first block of this one."""
    engine = make_engine()
    first, second = numbers(0, 9), numbers(20, 9)
    for name, prompt in (("first", first), ("second", second)):
        engine.submit(request(name, prompt, max_tokens=1))
        engine.run()
    mixed = [*first[:4], *second[4:]]
    engine.submit(request("mixed", mixed, ignore_eos=True))
    engine.run()
    answer = engine.last("mixed")
    assert isinstance(answer, Output)
    assert answer.cached_tokens == 4
    assert engine.tokens("mixed") == expected_answer(mixed, 0, request("x", mixed, ignore_eos=True).sampling)
    engine.assert_all_free()


def test_without_a_prefix_cache_everything_is_computed() -> None:
    engine = make_engine(prefix_cache=False)
    for name in ("first", "same"):
        engine.submit(request(name, numbers(0, 8), max_tokens=1))
        engine.run()
    assert chunks_run(engine) == [(0, 8), (0, 8)]
    engine.assert_all_free()


# Several choices.


def test_n_choices_are_one_prefill_and_the_last_holder_writes_in_place() -> None:
    engine = make_engine()
    submit = request("r", numbers(0, 6), n=3, max_tokens=5, ignore_eos=True)
    engine.submit(submit)
    engine.step()
    assert chunks_run(engine) == [(0, 6)]
    assert engine.allocator.counts().used == 2
    engine.step()
    assert engine.last_step is not None
    assert len(engine.last_step.copies) == 2, "one copy for each choice but the last"
    assert engine.allocator.counts().used == 4
    engine.run()
    for choice in range(3):
        assert engine.tokens("r", choice) == expected_answer(submit.prompt_ids, choice, submit.sampling)
    engine.assert_all_free()


def test_a_stopped_choice_leaves_the_others_alone_and_the_last_one_s_end_is_told() -> None:
    engine = make_engine()
    submit = request("r", numbers(0, 6), n=2, max_tokens=6, ignore_eos=True)
    engine.submit(submit)
    engine.step()
    engine.scheduler.stop_choice("r", 0)
    engine.step()
    assert len(engine.tokens("r", 0)) == 1
    assert len(engine.tokens("r", 1)) == 2
    engine.scheduler.stop_choice("r", 1)
    engine.step()
    last = engine.last("r")
    assert isinstance(last, Output)
    assert (last.done, last.tokens) == (True, ())
    engine.assert_all_free()


def test_a_request_s_settings_are_sent_once_and_forgotten_after_its_end() -> None:
    """D3: they once went to every rank in every step, for every choice."""
    engine = make_engine()
    sent, ended = [], []
    submits = [
        request(name, numbers(start, 6), n=2, max_tokens=5, ignore_eos=True, presence_penalty=0.5)
        for start, name in enumerate(("a", "b", "c"))
    ]
    for submit in submits[:2]:
        engine.submit(submit)
    while engine.step():
        assert engine.last_step is not None
        sent += [setup.key for setup in engine.last_step.setups]
        ended += engine.last_step.ended
        told = [len(row.output_ids) for chunk in engine.last_step.chunks for row in chunk.samples]
        assert all(count <= 1 for count in told), "only what is new"
    assert (len(sent), ended) == (2, [])
    engine.submit(submits[2])
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.ended == tuple(sent)
    engine.run()
    for submit in submits:
        for choice in range(2):
            answer = expected_answer(submit.prompt_ids, choice, submit.sampling)
            assert engine.tokens(submit.request_id, choice) == answer


# Preemption.


def test_growth_without_room_preempts_the_newest_and_answers_stay_the_same() -> None:
    engine = make_engine(num_blocks=7)
    submits = [
        request(f"r{index}", numbers(25 * index, 9), max_tokens=14, ignore_eos=True) for index in range(2)
    ]
    for submit in submits:
        engine.submit(submit)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    for submit in submits:
        assert engine.tokens(submit.request_id) == expected_answer(submit.prompt_ids, 0, submit.sampling)
    messages = [message for message in engine.messages["r0"] if isinstance(message, Output)]
    assert messages[-1].done
    engine.assert_all_free()


def test_a_preempted_sequence_computes_its_outputs_again_one_by_one() -> None:
    engine = make_engine(num_blocks=7, prefix_cache=False)
    for index in range(2):
        engine.submit(request(f"r{index}", numbers(25 * index, 9), max_tokens=14, ignore_eos=True))
    engine.run()
    outputs = [(start, end) for start, end in chunks_run(engine) if start >= 9]
    assert all(end == start + 1 for start, end in outputs)
    assert len(outputs) > len(set(outputs)) > 0
    assert {(start, end) for start, end in chunks_run(engine) if start < 9} == {(0, 8), (8, 9)}


def test_a_preempted_sequence_computes_its_prompt_again_in_the_same_chunks() -> None:
    """Its own blocks are cached, but a chunk that began elsewhere could differ in a bit (I4)."""
    engine = make_engine(num_blocks=10)
    for index in range(2):
        engine.submit(request(f"r{index}", numbers(17 * index, 15), max_tokens=14, ignore_eos=True))
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert len(chunks_run(engine)) > len(set(chunks_run(engine))), "something was computed twice"
    assert {(start, end) for start, end in chunks_run(engine) if start < 15} == {(0, 8), (8, 15)}


def test_a_produced_prompt_is_never_preempted() -> None:
    """Its lease is open: computed again under the same transfer id, it would be refused as a duplicate."""
    engine = make_engine(num_blocks=19)
    old = request("old", numbers(0, 11), max_tokens=20, ignore_eos=True)
    engine.submit(old)
    engine.step()
    engine.submit(request("p", numbers(15, 60), max_tokens=4, produce="t", ignore_eos=True))
    engine.run()
    assert engine.scheduler.counters.preemptions, "the older request outgrew the pool meanwhile"
    answer = engine.last("p")
    assert isinstance(answer, Output)
    assert (answer.done, answer.leased) == (True, True)
    engine.connector.end_lease("t", "released")
    engine.run()
    assert engine.tokens("old") == expected_answer(old.prompt_ids, 0, old.sampling)
    engine.assert_all_free()


def test_nothing_is_admitted_in_the_step_of_a_preemption() -> None:
    """The victim finds its prompt cached by another: at once it would take back what it was preempted for."""
    engine = make_engine(num_blocks=9)
    for name in ("r0", "r1"):
        engine.submit(request(name, numbers(0, 16), max_tokens=6, ignore_eos=True))
    while not engine.scheduler.counters.preemptions:
        assert engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    engine.step()
    assert engine.scheduler.num_running == 2
    engine.run()
    sampling = request("x", numbers(0, 16), max_tokens=6, ignore_eos=True).sampling
    for name in ("r0", "r1"):
        assert engine.tokens(name) == expected_answer(numbers(0, 16), 0, sampling)
    engine.assert_all_free()


# Producing.


def test_a_produced_prompt_is_leased_until_the_plane_says_so() -> None:
    engine = make_engine()
    submit = request("p", numbers(0, 10), n=2, produce="t", ignore_eos=True)
    engine.submit(submit)
    engine.step()
    assert engine.connector.leases == {"t": 2}, "two full blocks of the first chunk are readable"
    engine.run()
    (answer,) = engine.messages["p"]
    assert isinstance(answer, Output)
    assert (answer.done, answer.leased) == (True, True)
    assert [token.index for token in answer.tokens] == [0, 1]
    assert engine.connector.ready_leases == {"t"}
    assert engine.allocator.counts().leased == 3
    engine.connector.end_lease("t", "released")
    engine.step()
    engine.assert_all_free()


def test_a_produced_prompt_is_readable_before_its_first_token_is_drawn() -> None:
    """Its last block too, which is not full. That it is ready is said afterwards."""
    engine = make_engine()
    seen = []

    class Runner(StandInRunner):
        def _draw(self, chunk: Chunk) -> list[SampleOutput]:
            seen.append((dict(engine.connector.leases), set(engine.connector.ready_leases)))
            return super()._draw(chunk)

    engine.runner = Runner(40, LIMITS.block_size)
    engine.submit(request("p", numbers(0, 10), produce="t", ignore_eos=True))
    engine.run()
    assert seen == [({"t": 0}, set()), ({"t": 3}, set())]
    assert engine.connector.ready_leases == {"t"}


def test_nobody_is_told_of_a_prompt_that_is_not_produced_or_whose_reader_has_left() -> None:
    engine = make_engine()
    engine.submit(request("r", numbers(0, 10)))
    engine.step()
    engine.step()
    assert engine.last_step is not None
    assert not engine.last_step.report_written
    engine.submit(request("p", numbers(20, 10), produce="t", ignore_eos=True))
    engine.step()
    engine.connector.end_lease("t", "released")
    engine.step()
    assert not engine.connector.leases
    engine.run()
    engine.assert_all_free()


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"stop_token_ids": tuple(range(50))}])
def test_nothing_stays_pinned_when_no_choice_goes_on(changes: dict[str, object]) -> None:
    engine = make_engine()
    engine.submit(request("p", numbers(0, 10), n=2, produce="t", **changes))
    engine.run()
    answer = engine.last("p")
    assert isinstance(answer, Output)
    assert (answer.done, answer.leased) == (True, False)
    assert engine.connector.withdrawn == ["t"]
    engine.assert_all_free()


@pytest.mark.parametrize("cause", ["dropped", "expired"])
def test_a_lease_that_ends_while_filling_ends_its_request(cause: str) -> None:
    engine = make_engine()
    engine.submit(request("p", numbers(0, 30), produce="t"))
    engine.step()
    engine.connector.end_lease("t", cause)
    engine.run()
    answer = engine.last("p")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (409, "transfer_dropped")
    engine.assert_all_free()


def test_a_reader_that_gives_up_early_still_gets_the_first_tokens() -> None:
    """A pull that breaks while the lease fills costs a prefill at the reader, but not the one here."""
    engine = make_engine()
    engine.submit(request("p", numbers(0, 30), n=2, produce="t"))
    engine.step()
    engine.connector.end_lease("t", "released")
    engine.run()
    answer = engine.last("p")
    assert isinstance(answer, Output) and answer.done
    assert len(answer.tokens) == 2
    engine.assert_all_free()


def test_an_aborted_prefill_fails_its_lease_before_its_blocks_are_free() -> None:
    """X7: a client's disconnect leaves nothing pinned."""
    engine = make_engine()
    engine.submit(request("p", numbers(0, 30), produce="t"))
    engine.step()
    engine.scheduler.abort("p")
    assert engine.connector.withdrawn == ["t"]
    engine.assert_all_free()
    engine.run()
    assert "p" not in engine.messages


def test_a_transfer_id_is_produced_once() -> None:
    engine = make_engine()
    for name in ("p", "q"):
        engine.submit(request(name, numbers(0, 6), produce="t"))
        engine.run()
    answer = engine.last("q")
    assert isinstance(answer, RequestFailed)
    assert answer.code == "duplicate_transfer"
    engine.connector.end_lease("t", "released")
    engine.submit(request("again", numbers(0, 6), produce="t"))
    engine.run()
    answer = engine.last("again")
    assert isinstance(answer, RequestFailed)
    assert answer.code == "duplicate_transfer"
    engine.assert_all_free()


# Consuming.


def test_decoding_starts_from_the_pulled_kv_and_the_first_token() -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    start_pull(engine, prompt, max_tokens=6)
    assert chunks_run(engine) == []
    finish_pull(engine, prompt)
    engine.run()
    assert chunks_run(engine)[0] == (10, 11)
    assert (
        engine.tokens("d")
        == expected_answer(prompt, 0, request("x", prompt, max_tokens=6, ignore_eos=True).sampling)[1:]
    )
    answer = engine.last("d")
    assert isinstance(answer, Output)
    assert answer.timing is not None
    assert (answer.timing.backend, answer.timing.pull_s, answer.timing.recomputed) == ("stand-in", 0.5, False)
    engine.assert_all_free()


def test_only_unfinished_choices_fork_over_the_pulled_blocks() -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    known = tuple(
        ResumedChoice(index=choice, token_ids=(next_token(prompt, choice),), finished=choice == 1)
        for choice in range(3)
    )
    submit = request(
        "d", prompt, n=3, ignore_eos=True, max_tokens=4, remote=remote("t", prompt), resumed=known
    )
    engine.submit(submit)
    engine.step()
    finish_pull(engine, prompt)
    engine.run()
    for choice in range(3):
        answer = expected_answer(prompt, choice, submit.sampling)[1:]
        assert engine.tokens("d", choice) == ([] if choice == 1 else answer)
    engine.assert_all_free()


@pytest.mark.parametrize("cached", [False, True], ids=["pulled", "wholly cached"])
def test_resumed_choices_replay_their_tokens_one_by_one_and_go_on(cached: bool) -> None:
    """Positions go on, in the company that they would have had; nothing known is drawn again."""
    engine, prompt = make_engine(), numbers(0, 12)
    submit = request("d", prompt, n=3, ignore_eos=True, max_tokens=9, remote=remote("t", prompt))
    answers = [expected_answer(prompt, choice, submit.sampling) for choice in range(3)]
    known = tuple(
        ResumedChoice(index=choice, token_ids=tuple(answers[choice][:count]), finished=choice == 1)
        for choice, count in enumerate((5, 2, 1))
    )
    if cached:
        engine.submit(request("warm", prompt, max_tokens=1))
        engine.run()
    before = len(chunks_run(engine))
    engine.submit(msgspec.structs.replace(submit, resumed=known))
    engine.step()
    if not cached:
        finish_pull(engine, prompt)
    engine.run()
    assert all(end - start == 1 for start, end in chunks_run(engine)[before:])
    assert engine.tokens("d", 0) == answers[0][5:]
    assert engine.tokens("d", 1) == []
    assert engine.tokens("d", 2) == answers[2][1:]
    engine.assert_all_free()


def test_a_resumed_choice_that_is_preempted_while_it_replays_goes_on_all_the_same() -> None:
    engine, prompt = make_engine(num_blocks=9), numbers(0, 10)
    submit = request("d", prompt, ignore_eos=True, max_tokens=20, remote=remote("t", prompt))
    answer = expected_answer(prompt, 0, submit.sampling)
    engine.submit(request("old", numbers(20, 8), max_tokens=20, ignore_eos=True))
    engine.step()
    resumed = ResumedChoice(index=0, token_ids=tuple(answer[:12]), finished=False)
    engine.submit(msgspec.structs.replace(submit, resumed=(resumed,)))
    engine.step()
    finish_pull(engine, prompt)
    engine.run()
    assert engine.scheduler.counters.preemptions
    assert engine.tokens("d") == answer[12:]
    engine.assert_all_free()


def test_a_request_whose_choices_are_all_finished_pulls_nothing() -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    known = (ResumedChoice(index=0, token_ids=(1,), finished=True),)
    engine.submit(request("d", prompt, remote=remote("t", prompt), resumed=known))
    engine.step()
    answer = engine.last("d")
    assert isinstance(answer, Output)
    assert answer.done
    assert engine.connector.released_early == ["t"]


def test_a_cached_prefix_shortens_the_pull() -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    engine.submit(request("warm", numbers(0, 8), max_tokens=1))
    engine.run()
    start_pull(engine, prompt)
    assert engine.connector.pulls["t"].first_block == 2
    finish_pull(engine, prompt)
    engine.run()
    answer = engine.last("d")
    assert isinstance(answer, Output)
    assert answer.cached_tokens == 8
    engine.assert_all_free()


def test_a_wholly_cached_prompt_is_not_pulled_and_the_producer_is_told() -> None:
    engine, prompt = make_engine(), numbers(0, 8)
    engine.submit(request("warm", prompt, max_tokens=1))
    engine.run()
    first = resumed_choices(next_token(prompt, 0))
    submit = request("d", prompt, ignore_eos=True, remote=remote("t", prompt), resumed=first)
    engine.submit(submit)
    engine.run()
    assert engine.connector.released_early == ["t"]
    assert engine.connector.pulls == {}
    assert engine.tokens("d") == expected_answer(prompt, 0, submit.sampling)[1:]
    engine.assert_all_free()


def fail_pull(engine: LocalEngine, *, quiescent: bool) -> FailedPull:
    """Fail the pull half a second after its begin. Returns what is to be told of it."""
    began = engine.now
    engine.now += 0.5
    engine.connector.fail_pull("t", quiescent=quiescent)
    engine.step()
    return FailedPull(reason="read_failed", backend="tcp", began_at=began, ended_at=began + 0.5)


@pytest.mark.parametrize("quiescent", [True, False])
def test_a_failed_pull_is_computed_here_into_fresh_blocks(quiescent: bool) -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    start_pull(engine, prompt)
    pulled = set(engine.connector.pulls["t"].block_ids)
    failed_pull = fail_pull(engine, quiescent=quiescent)
    assert engine.last_step is not None
    assert quiescent or not pulled & set(engine.last_step.chunks[0].blocks)
    engine.run()
    expected = request("x", prompt, ignore_eos=True).sampling
    assert engine.tokens("d") == expected_answer(prompt, 0, expected)[1:], (
        "the first token is not drawn again"
    )
    answer = engine.last("d")
    assert isinstance(answer, Output)
    assert answer.timing is not None
    assert answer.timing.recomputed
    assert answer.timing.failed_pull == failed_pull
    assert engine.scheduler.counters.recomputes == 1
    assert engine.allocator.counts().quarantined == (0 if quiescent else 3)
    if not quiescent:
        engine.connector.quieten("t")
        engine.step()
    engine.assert_all_free()


def test_a_failed_pull_fails_the_request_where_that_is_asked_for() -> None:
    engine, prompt = make_engine(recompute_on_pull_failure=False), numbers(0, 10)
    start_pull(engine, prompt)
    failed_pull = fail_pull(engine, quiescent=True)
    answer = engine.last("d")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (502, "pull_failed")
    assert answer.failed_pull == failed_pull
    assert engine.scheduler.counters.recomputes == 0
    engine.assert_all_free()


def test_an_aborted_pull_s_blocks_come_back_by_its_event_only() -> None:
    engine, prompt = make_engine(), numbers(0, 10)
    start_pull(engine, prompt)
    engine.scheduler.abort("d")
    engine.step()
    assert engine.connector.pulls["t"].cancelled
    assert engine.allocator.counts().used == 3
    engine.connector.finish_pull("t")
    engine.step()
    engine.assert_all_free()
    assert "d" not in engine.messages


def test_a_transfer_waits_for_room_with_its_lease_held_and_then_is_refused() -> None:
    engine = make_engine(num_blocks=16)
    engine.submit(request("big", numbers(0, 50), max_tokens=14, ignore_eos=True))
    engine.step()
    prompt = numbers(5, 10)
    engine.submit(request("d", prompt, remote=remote("t", prompt), resumed=resumed_choices(1)))
    engine.step()
    assert engine.connector.holds == {"t"}
    assert engine.connector.hold_timeouts == {"t": 20.0}, "as long as it may wait, not as long as it may run"
    assert engine.scheduler.next_deadline() == pytest.approx(engine.now + 20, abs=0.1)
    engine.now += 20
    engine.step()
    answer = engine.last("d")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (429, "no_kv_room")
    assert engine.connector.released_early == ["t"]


# Refusals and deadlines.


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"prompt": []}, 400, "empty_prompt"),
        ({"prompt": [50]}, 400, "bad_token"),
        ({"prompt": [-1]}, 400, "bad_token"),
        ({"max_tokens": 62}, 400, "context_length_exceeded"),
        ({"n": 7}, 400, "too_many_choices"),
        ({"produce": "t", "resumed": resumed_choices(1)}, 400, "bad_transfer"),
        ({"remote": remote("t", [1, 2]), "resumed": resumed_choices(1)}, 400, "bad_transfer"),
        ({"remote": remote("t", [1, 2, 3])}, 400, "bad_transfer"),
        ({"remote": remote("t", [1, 2, 3]), "resumed": resumed_choices(99)}, 400, "bad_token"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(changes: dict[str, object], status: int, code: str) -> None:
    engine = make_engine()
    prompt = changes.pop("prompt", [1, 2, 3])
    engine.submit(request("r", prompt, **changes))  # type: ignore[arg-type]
    engine.step()
    answer = engine.last("r")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (status, code)
    assert engine.scheduler.is_idle
    assert engine.connector.holds == set()


def test_a_full_queue_is_answered_with_429() -> None:
    engine = make_engine(max_waiting=2)
    for index in range(3):
        engine.submit(request(f"r{index}", [1, 2, 3]))
    engine.run()
    answer = engine.last("r2")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (429, "queue_full")
    assert isinstance(engine.last("r1"), Output)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_ends_at_its_deadline_wherever_it_is(steps: int) -> None:
    engine = make_engine()
    engine.submit(request("r", numbers(0, 12), max_tokens=20, ignore_eos=True, timeout_s=5.0))
    for _ in range(steps):
        engine.step()
    engine.now += 5.0
    engine.run()
    answer = engine.last("r")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (504, "timeout")
    engine.assert_all_free()


def test_the_queue_keeps_its_order() -> None:
    engine = make_engine(num_blocks=8, prefix_cache=False)
    sizes = {"big": 20, "huge": 28, "small": 2}
    for index, (name, size) in enumerate(sizes.items()):
        engine.submit(request(name, numbers(10 * index, size), max_tokens=2, ignore_eos=True))
    engine.run()
    assert list(engine.messages) == ["big", "huge", "small"]


def test_limits_are_not_changed_by_serving() -> None:
    """R28: a transfer changes no other option."""
    engine, prompt = make_engine(), numbers(0, 10)
    before = dataclasses.asdict(engine.limits)
    start_pull(engine, prompt, temperature=0.5, top_k=3, min_tokens=2)
    finish_pull(engine, prompt)
    engine.step()
    assert engine.last_step is not None
    (setup,) = engine.last_step.setups
    assert (setup.sampling.temperature, setup.sampling.top_k, setup.sampling.min_tokens) == (0.5, 3, 2)
    assert dataclasses.asdict(engine.limits) == before


# Prompts that are scored.


def prompt_logprobs(engine: LocalEngine, request_id: str) -> list[float]:
    outputs = [message for message in engine.messages[request_id] if isinstance(message, Output)]
    return [each.logprob for output in outputs for each in output.prompt_logprobs]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_every_token_of_a_scored_prompt_is_computed_whatever_is_cached(max_tokens: int) -> None:
    engine, prompt = make_engine(), numbers(0, 21)
    engine.submit(request("before", prompt))
    engine.run()
    first = len(chunks_run(engine))
    engine.submit(request("r", prompt, prompt_logprobs=0, max_tokens=max_tokens, n=2, ignore_eos=True))
    engine.run()
    assert chunks_run(engine)[first : first + 3] == [(0, 8), (8, 16), (16, 21)]
    assert prompt_logprobs(engine, "r") == [-float(token) for token in prompt[1:]]
    for choice in range(2):
        assert engine.tokens("r", choice) == expected_answer(
            prompt, choice, request("r", prompt, max_tokens=max_tokens, ignore_eos=True).sampling
        )
    assert engine.last("r").done  # type: ignore[union-attr]
    engine.assert_all_free()


def test_one_prompt_is_scored_in_a_step() -> None:
    """All rows' logits take much memory."""
    engine = make_engine()
    for index in range(2):
        engine.submit(request(f"r{index}", numbers(20 * index, 8), prompt_logprobs=0, max_tokens=0))
    engine.step()
    assert chunks_run(engine) == [(0, 8)]
    engine.run()
    assert prompt_logprobs(engine, "r1") == [-float(token) for token in numbers(20, 8)[1:]]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = make_engine()
    engine.submit(request("r", [5], prompt_logprobs=0, max_tokens=0))
    engine.run()
    assert engine.last("r").done and not prompt_logprobs(engine, "r")  # type: ignore[union-attr]


class StuckRunner(StandInRunner):
    """Finds no token for one choice of the last request, at one position."""

    def __init__(self, key: int, choice: int, position: int) -> None:
        super().__init__(40, LIMITS.block_size)
        self._stuck = key, choice, position

    def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs:
        outputs = super().run(step, on_written)
        sampled = tuple(
            tuple(
                msgspec.structs.replace(output, failure="stuck")
                if (row.key, row.choice, row.position) == self._stuck
                else output
                for row, output in zip(chunk.samples, parts, strict=True)
            )
            for chunk, parts in zip(step.chunks, outputs.sampled, strict=True)
        )
        return msgspec.structs.replace(outputs, sampled=sampled)


@pytest.mark.parametrize(("choice", "position"), [(0, 0), (1, 0), (0, 3), (1, 3)])
def test_where_no_token_can_be_sampled_the_request_fails_and_others_go_on(choice: int, position: int) -> None:
    engine = LocalEngine(StuckRunner(2, choice, position), 40)
    other = request("other", numbers(20, 9), max_tokens=9, ignore_eos=True)
    engine.submit(other)
    engine.submit(request("r", numbers(0, 9), max_tokens=9, n=2, ignore_eos=True))
    engine.run()
    assert engine.tokens("other") == expected_answer(other.prompt_ids, 0, other.sampling)
    failure = engine.last("r")
    assert isinstance(failure, RequestFailed)
    assert (failure.status, failure.code, failure.message) == (400, "nothing_allowed", "stuck")
    assert len(engine.tokens("r")) == position
    engine.assert_all_free()


def test_a_produced_prompt_without_a_first_token_lends_nothing() -> None:
    engine = LocalEngine(StuckRunner(1, 0, 0), 40)
    engine.submit(request("r", numbers(0, 9), max_tokens=9, produce="t"))
    engine.run()
    assert isinstance(engine.last("r"), RequestFailed)
    engine.assert_all_free()


# What it measures of its work; a step takes 0.01 s here.


def test_steps_are_measured_by_what_they_computed() -> None:
    engine = make_engine(num_blocks=400)
    engine.submit(request("r", numbers(0, 16), max_tokens=20, ignore_eos=True))
    engine.run()
    said = engine.scheduler.capacity()
    assert (said.prompts, said.answers, said.answer_tokens) == (1, 1, 19)
    assert said.prefill_s == pytest.approx(0.02)
    assert said.step_s is not None
    assert said.sequence_s is not None
    assert said.step_s + said.sequence_s == pytest.approx(0.01)
    assert said.backlog_s == 0.0
    assert said.slots == LIMITS.max_num_seqs


def test_time_between_steps_counts_only_while_there_is_work() -> None:
    engine = make_engine(num_blocks=400)
    for start in (0, 8):
        engine.submit(request(f"r{start}", numbers(start, 8), max_tokens=1))
        engine.run()
        engine.now += 1000.0
    engine.submit(request("long", numbers(20, 24), max_tokens=1))
    for _ in range(3):
        engine.step()
        engine.now += 0.5
    assert engine.scheduler.capacity().prefill_s == pytest.approx(5 * 0.01 + 2 * 0.5)


def test_backlog_is_of_prompts_to_be_computed_here() -> None:
    engine = make_engine(num_blocks=400, max_batch_tokens=8)
    engine.submit(request("first", numbers(0, 8), max_tokens=1))
    engine.run()
    engine.submit(request("half", numbers(8, 16), max_tokens=1))
    engine.submit(request("waits", numbers(24, 16), max_tokens=1))
    prompt = numbers(40, 16)
    engine.submit(
        request("pulled", prompt, remote=remote("t", prompt), resumed=resumed_choices(next_token(prompt, 0)))
    )
    engine.step()
    assert engine.scheduler.capacity().backlog_s == pytest.approx(24 / 8 * 0.01, rel=1e-3)


def test_a_prompt_that_was_computed_elsewhere_before_is_no_other_prompt() -> None:
    """A pull that failed, or a stream that has moved here: the work counts, the prompt does not."""
    engine = make_engine()
    prompt = numbers(0, 16)
    start_pull(engine, prompt)
    engine.connector.fail_pull("t", quiescent=True)
    engine.run()
    said = engine.scheduler.capacity()
    assert said.prompts == 0
    assert said.prefill_s > 0.0
    assert said.answers == 1


def test_a_pulled_prompt_takes_no_prefill() -> None:
    engine = make_engine()
    prompt = numbers(0, 16)
    start_pull(engine, prompt)
    finish_pull(engine, prompt)
    engine.run()
    said = engine.scheduler.capacity()
    assert (said.prompts, said.prefill_s, said.answers, said.answer_tokens) == (0, 0.0, 1, 7)
