# SPDX-License-Identifier: Apache-2.0
"""A decode leg that was sent together with its prefill leg: its first tokens come with the KV."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.agent.messages.requests import Output, RequestFailed, SamplingParams, Submit
from kvferry.transfer.events import WITHDRAWN
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens
from tests.standins.model import StandInRunner, expected_answer, next_token
from tests.unit.agent.engine.test_scheduler import chunks_run, make_engine, numbers
from tests.unit.agent.local_engine import LIMITS, LocalEngine, remote, request, resumed_choices

PROMPT = numbers(0, 10)


def streamed(**changes: Any) -> Submit:
    """A request `d` for transfer `t`, without any tokens."""
    kv = msgspec.structs.replace(remote("t", PROMPT), streamed=True)
    return request("d", PROMPT, remote=kv, **{"ignore_eos": True, **changes})


def pulling(num_blocks: int = 40, **changes: Any) -> LocalEngine:
    """An engine that pulls for such a request."""
    engine = make_engine(
        num_blocks, **{name: changes.pop(name) for name in list(changes) if name in LIMITS.__slots__}
    )
    engine.submit(streamed(**changes))
    engine.step()
    assert "t" in engine.connector.pulls and "d" not in engine.messages
    return engine


def first_tokens(n: int = 1, ended: tuple[int, ...] = ()) -> SampledTokens:
    """What the prefill's engine would hand over."""
    return SampledTokens(
        choices=tuple(
            SampledToken(id=next_token(PROMPT, choice), finish="stop" if choice in ended else None)
            for choice in range(n)
        ),
        cached_tokens=4,
    )


def arrive(engine: LocalEngine, first: SampledTokens | None) -> None:
    pull = engine.connector.pulls["t"]
    start = pull.first_block * LIMITS.block_size
    assert isinstance(engine.runner, StandInRunner)
    engine.runner.write(pull.block_ids, start, PROMPT[start:])
    engine.connector.finish_pull("t", first)


def test_decoding_starts_from_the_first_tokens_that_came_with_the_kv() -> None:
    engine = pulling(max_tokens=6)
    arrive(engine, first_tokens())
    engine.step()
    first = engine.messages["d"][0]
    assert isinstance(first, Output)
    assert [token.token_id for token in first.tokens] == [next_token(PROMPT, 0)]
    assert (first.done, first.cached_tokens) == (False, 4)
    engine.run()
    assert chunks_run(engine)[0] == (10, 11), "the prompt is not computed here"
    assert engine.tokens("d") == expected_answer(PROMPT, 0, streamed(max_tokens=6).sampling)
    engine.assert_all_free()


def test_only_choices_that_go_on_fork_and_all_are_told() -> None:
    """The trunk stands for choice 0 until it is known that this one has ended."""
    engine = pulling(n=3, max_tokens=4)
    arrive(engine, first_tokens(3, ended=(0,)))
    engine.run()
    told = engine.messages["d"][0]
    assert isinstance(told, Output)
    assert [(token.index, token.finish) for token in told.tokens] == [(0, "stop"), (1, None), (2, None)]
    assert len(engine.tokens("d", 0)) == 1
    for choice in (1, 2):
        assert engine.tokens("d", choice) == expected_answer(
            PROMPT, choice, SamplingParams(seed=7, max_tokens=4, ignore_eos=True)
        )
    engine.assert_all_free()


def test_the_trunk_answers_to_the_choice_that_it_has_become() -> None:
    engine = pulling(n=2, max_tokens=4)
    arrive(engine, first_tokens(2, ended=(0,)))
    engine.step()
    engine.scheduler.stop_choice("d", 1)
    engine.run()
    assert len(engine.tokens("d", 1)) == 2
    last = engine.last("d")
    assert isinstance(last, Output) and last.done
    engine.assert_all_free()


def test_a_stop_string_within_token_1_ends_its_choice() -> None:
    """What the API process says after the first output finds the choices forked already."""
    engine = pulling(n=2)
    arrive(engine, first_tokens(2))
    for event in engine.connector.take_events():
        engine.scheduler.handle_event(event, engine.now)
    engine.scheduler.stop_choice("d", 0)
    engine.run()
    assert len(engine.tokens("d", 0)) == 1
    assert len(engine.tokens("d", 1)) == 8
    engine.assert_all_free()


@pytest.mark.parametrize("n", [1, 3])
def test_without_the_first_tokens_the_prompt_is_computed_and_they_are_drawn_here(n: int) -> None:
    """The prefill failed in the midst: an ordinary request is left."""
    engine = pulling(n=n)
    engine.connector.fail_pull("t", quiescent=True)
    engine.run()
    for choice in range(n):
        expected = expected_answer(PROMPT, choice, streamed(n=n).sampling)
        assert engine.tokens("d", choice) == expected
    assert engine.scheduler.counters.recomputes == 1
    engine.assert_all_free()


def test_with_the_first_tokens_and_without_the_kv_they_are_not_drawn_again() -> None:
    """I4: the client may have them. They are told once the prompt is here."""
    engine = pulling()
    other = SampledTokens(choices=(SampledToken(id=(next_token(PROMPT, 0) + 1) % 50),))
    engine.connector.fail_pull("t", quiescent=True, first_tokens=other)
    engine.step()
    assert "d" not in engine.messages
    engine.run()
    assert engine.tokens("d")[0] == other.choices[0].id
    assert engine.tokens("d")[1] == next_token([*PROMPT, other.choices[0].id], 0)
    assert len(engine.tokens("d")) == 8
    engine.assert_all_free()


@pytest.mark.parametrize(
    "first",
    [None, first_tokens(2), SampledTokens(choices=(SampledToken(id=50),)), first_tokens(1, ended=(0,))],
    ids=["none", "too many", "unknown id", "nothing goes on"],
)
def test_kv_with_first_tokens_that_cannot_be_ours_is_not_used(first: SampledTokens | None) -> None:
    engine = pulling()
    arrive(engine, first)
    engine.run()
    assert engine.tokens("d") == expected_answer(PROMPT, 0, streamed().sampling)
    assert engine.scheduler.counters.recomputes == 1
    engine.assert_all_free()


def test_a_failed_pull_fails_the_request_where_that_is_asked_for() -> None:
    engine = pulling(recompute_on_pull_failure=False)
    engine.connector.fail_pull("t", quiescent=True)
    engine.step()
    answer = engine.last("d")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (502, "pull_failed")
    engine.assert_all_free()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prefill_that_left_nothing_to_decode_is_no_failure(recompute: bool) -> None:
    """Every choice has ended with its first token, or the client has left: the proxy ends this leg too."""
    engine = pulling(recompute_on_pull_failure=recompute)
    engine.connector.fail_pull("t", quiescent=True, reason=WITHDRAWN)
    engine.run()
    answer = engine.last("d")
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code) == (409, "transfer_withdrawn")
    assert not chunks_run(engine), "nothing is computed again"
    assert engine.scheduler.counters.recomputes == 0
    report = engine.scheduler.work.work(0)
    assert (report.recomputes, report.failures) == (0, {})
    engine.assert_all_free()


def test_a_wholly_cached_prompt_still_asks_for_its_first_tokens() -> None:
    engine, prompt = make_engine(), numbers(0, 8)
    engine.submit(request("warm", prompt, max_tokens=1))
    engine.run()
    kv = msgspec.structs.replace(remote("t", prompt), streamed=True)
    engine.submit(request("d", prompt, remote=kv))
    engine.step()
    assert engine.connector.pulls["t"].first_block == 1


def test_the_prefill_may_take_as_long_as_the_request_and_the_moving_no_longer_than_ever() -> None:
    """I5: who waits for a prefill of its own request waits for the request's deadline, not for a pull's."""
    pull = pulling().connector.pulls["t"]
    assert pull.timeout_s == LIMITS.pull_timeout_s
    assert pull.fill_s == pytest.approx(60.0 - LIMITS.pull_timeout_s)
    short = pulling(timeout_s=5.0).connector.pulls["t"]
    assert (short.timeout_s, short.fill_s) == (pytest.approx(5.0), pytest.approx(0.0))


def test_a_streamed_request_brings_no_tokens_and_another_must() -> None:
    engine = make_engine()
    kv = msgspec.structs.replace(remote("t", PROMPT), streamed=True)
    engine.submit(request("d", PROMPT, remote=kv, resumed=resumed_choices(1)))
    engine.step()
    answer = engine.last("d")
    assert isinstance(answer, RequestFailed)
    assert answer.code == "bad_transfer"


def test_an_aborted_streamed_pull_comes_back_by_its_event() -> None:
    engine = pulling()
    engine.scheduler.abort("d")
    arrive(engine, first_tokens())
    engine.step()
    engine.assert_all_free()
    assert "d" not in engine.messages


# The producer's side.


def test_a_prefill_hands_its_first_tokens_over_with_the_lease() -> None:
    engine = make_engine()
    engine.submit(request("p", PROMPT, n=2, produce="t", ignore_eos=True))
    engine.run()
    handed = engine.connector.first_tokens["t"]
    assert handed is not None
    assert [token.id for token in handed.choices] == [next_token(PROMPT, choice) for choice in range(2)]
    assert handed.cached_tokens == 0
    assert engine.tokens("p", 1) == [handed.choices[1].id]
