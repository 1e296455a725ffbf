# SPDX-License-Identifier: Apache-2.0
"""Constrained sequences sit out the steps for which their masks are not there; nobody else does."""

from __future__ import annotations

import msgspec

from kvferry.agent.engine.masks import MaskResult
from kvferry.agent.engine.sequence import Sequence
from kvferry.agent.messages.requests import RequestFailed
from kvferry.agent.messages.steps import Chunk
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens
from tests.standins.model import StandInRunner, expected_answer, next_token
from tests.unit.agent.local_engine import LIMITS, LocalEngine, remote, request, resumed_choices

PROMPT = list(range(1, 10))
CONSTRAINED = {"grammar": "g", "max_tokens": 6, "ignore_eos": True}


def make_engine(num_blocks: int = 40) -> LocalEngine:
    return LocalEngine(StandInRunner(num_blocks, LIMITS.block_size), num_blocks)


def take_wanted(engine: LocalEngine) -> list[tuple[Sequence, int]]:
    wanted, engine.masks.wanted = engine.masks.wanted, []
    return wanted


def give_all(engine: LocalEngine) -> None:
    for sequence, position in take_wanted(engine):
        engine.scheduler.handle_mask(MaskResult(sequence, position, bits=mask(sequence, position)))


def mask(sequence: Sequence, position: int) -> bytes:
    return b"%d/%d" % (sequence.index, position)


def masked_chunks(engine: LocalEngine) -> list[Chunk]:
    assert engine.last_step is not None
    return [chunk for chunk in engine.last_step.chunks if chunk.mask]


def run(engine: LocalEngine) -> None:
    """Step until nothing is left, with each mask a step late."""
    for _ in range(200):
        stepped = engine.step()
        if not stepped and not engine.masks.wanted:
            return
        give_all(engine)
    raise AssertionError("still busy")


def test_others_go_on_while_a_mask_is_missing() -> None:
    engine = make_engine()
    other = request("other", [20, *PROMPT], max_tokens=9, ignore_eos=True)
    engine.submit(request("r", PROMPT, **CONSTRAINED))
    engine.submit(other)
    for _ in range(12):
        engine.step()
    assert engine.tokens("other") == expected_answer(other.prompt_ids, 0, other.sampling)
    assert not engine.messages.get("r")
    run(engine)
    submitted = request("r", PROMPT, **CONSTRAINED)
    assert engine.tokens("r") == expected_answer(submitted.prompt_ids, 0, submitted.sampling)
    assert engine.masks.forgotten == ["r"]
    engine.assert_all_free()


def test_a_mask_is_wanted_at_once_and_once() -> None:
    engine = make_engine()
    engine.submit(request("r", PROMPT, **CONSTRAINED))
    assert [position for _, position in engine.masks.wanted] == [0]
    engine.step()  # the prompt's first chunk, which samples nothing
    assert engine.last_step is not None
    engine.step()
    assert engine.last_step is None
    give_all(engine)
    engine.step()
    assert [(sequence.index, position) for sequence, position in engine.masks.wanted] == [(0, 1)]


def test_choices_share_the_first_mask_and_have_their_own_then() -> None:
    engine = make_engine()
    engine.submit(request("r", PROMPT, n=3, **CONSTRAINED))
    engine.step()
    give_all(engine)
    engine.step()
    (chunk,) = masked_chunks(engine)
    assert (chunk.mask, len(chunk.samples)) == (b"0/0", 3)
    second, *others = take_wanted(engine)
    engine.scheduler.handle_mask(MaskResult(*second, bits=mask(*second)))
    engine.step()
    (chunk,) = masked_chunks(engine)
    assert chunk.mask == b"%d/1" % second[0].index
    assert [(sequence.index, position) for sequence, position in others] == [(1, 1), (2, 1)]
    engine.masks.wanted += others
    run(engine)
    for choice in range(3):
        submitted = request("r", PROMPT, n=3, **CONSTRAINED)
        expected = expected_answer(submitted.prompt_ids, choice, submitted.sampling)
        assert engine.tokens("r", choice) == expected
    engine.assert_all_free()


def test_a_failed_mask_fails_its_request_alone_and_what_comes_later_is_ignored() -> None:
    engine = make_engine()
    engine.submit(request("r", PROMPT, n=2, **CONSTRAINED))
    engine.submit(request("other", [20, *PROMPT], **CONSTRAINED))
    for _ in range(3):
        engine.step()
        give_all(engine)
    engine.step()
    wanted = take_wanted(engine)
    mine = [each for each in wanted if each[0].request.request_id == "r"]
    failure = (400, "grammar_too_costly", "too much")
    engine.masks.wanted += [each for each in wanted if each not in mine]
    for each in mine:
        engine.scheduler.handle_mask(MaskResult(*each, failure=failure))
    engine.step()
    failed = engine.last("r")
    assert isinstance(failed, RequestFailed)
    assert (failed.status, failed.code, failed.message) == failure
    assert engine.masks.forgotten == ["r"]
    run(engine)
    assert len(engine.tokens("other")) == CONSTRAINED["max_tokens"]
    engine.assert_all_free()


def test_the_mask_of_another_position_is_not_used() -> None:
    engine = make_engine()
    engine.submit(request("r", PROMPT, **CONSTRAINED))
    ((sequence, position),) = take_wanted(engine)
    engine.scheduler.handle_mask(MaskResult(sequence, position + 1, bits=b"wrong"))
    assert sequence.mask is None


def test_after_a_pull_the_mask_is_that_of_the_tokens_that_came_with_it() -> None:
    engine = make_engine()
    first = resumed_choices(next_token(PROMPT, 0), next_token(PROMPT, 1))
    engine.submit(request("d", PROMPT, remote=remote("t", PROMPT), resumed=first, n=2, **CONSTRAINED))
    engine.step()
    pull = engine.connector.pulls["t"]
    engine.runner.write(pull.block_ids, 0, PROMPT)  # type: ignore[attr-defined]
    engine.connector.finish_pull("t")
    give_all(engine)
    engine.step()
    assert [chunk.mask for chunk in masked_chunks(engine)] == [b"0/1"]
    assert (1, 1) in [(sequence.index, position) for sequence, position in engine.masks.wanted]
    run(engine)
    assert len(engine.tokens("d", 1)) == CONSTRAINED["max_tokens"] - 1
    engine.assert_all_free()


def test_the_mask_from_before_the_first_tokens_came_is_not_used() -> None:
    """Those of a streamed pull come with the KV."""
    engine = make_engine()
    kv = msgspec.structs.replace(remote("t", PROMPT), streamed=True)
    engine.submit(request("d", PROMPT, remote=kv, **CONSTRAINED))
    engine.step()
    give_all(engine)
    pull = engine.connector.pulls["t"]
    engine.runner.write(pull.block_ids, 0, PROMPT)  # type: ignore[attr-defined]
    first = SampledToken(id=next_token(PROMPT, 0), finish=None)
    engine.connector.finish_pull("t", SampledTokens(choices=(first,), cached_tokens=0))
    engine.step()
    assert engine.last_step is None
    give_all(engine)
    engine.step()
    assert [chunk.mask for chunk in masked_chunks(engine)] == [b"0/1"]


def test_a_produced_prompt_wants_one_mask() -> None:
    engine = make_engine()
    engine.submit(request("r", PROMPT, n=3, produce="t", **CONSTRAINED))
    engine.step()
    give_all(engine)
    engine.step()
    assert len(engine.tokens("r", 2)) == 1
    assert not engine.masks.wanted
    assert engine.masks.forgotten == ["r"]


def test_a_preempted_sequence_computes_its_tokens_again_without_masks() -> None:
    engine = make_engine(num_blocks=10)
    engine.submit(request("old", [30, *PROMPT], max_tokens=24, ignore_eos=True))
    engine.submit(request("r", PROMPT, **{**CONSTRAINED, "max_tokens": 18}))
    run(engine)
    assert engine.scheduler.counters.preemptions
    assert len(engine.tokens("r")) == 18
    engine.assert_all_free()
