# SPDX-License-Identifier: Apache-2.0
"""The judge itself: it calls wrong what is wrong, and one seed makes one run."""

from __future__ import annotations

from dataclasses import replace

import aiohttp
import pytest

from tests.chaos.judge import ClientLeft, Tally, Verdict, judge
from tests.chaos.plan import ROLES, make_questions, make_rounds
from tests.helpers.client import Answer, Choice, RequestFailed, StreamCut


def answer(*tokens: int, text: str = "abc", finish: str = "stop", margins: tuple[float, ...] = ()) -> Answer:
    choice = Choice(text=text, token_ids=list(tokens), margins=list(margins), finish_reason=finish)
    return Answer(choices={0: choice}, prompt_tokens=5, completion_tokens=len(tokens))


REFERENCE = answer(1, 2, 3, margins=(0.5, 0.0005, 0.5))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (answer(1, 2, 3), Verdict.RIGHT),
        (answer(9, 2, 3), Verdict.WRONG),
        (answer(1, 9, 9, text="xyz"), Verdict.TIE),
        (answer(1, 2, 9), Verdict.WRONG),
        (answer(1, 2), Verdict.WRONG),
        (answer(1, 2, 3, text="ab"), Verdict.WRONG),
        (answer(1, 2, 3, finish="length"), Verdict.WRONG),
        (replace(answer(1, 2, 3), completion_tokens=2), Verdict.WRONG),
        (Answer(), Verdict.WRONG),
        (RequestFailed(503, {"code": "no_agent"}), Verdict.FAILED),
        (RequestFailed(None, {"code": "stream_broken"}), Verdict.FAILED),
        (RequestFailed(500, {"message": "oops"}), Verdict.UNTYPED),
        (StreamCut("after 3 events"), Verdict.UNTYPED),
        (aiohttp.ServerDisconnectedError(), Verdict.UNTYPED),
        (TimeoutError(), Verdict.HUNG),
        (ClientLeft(), Verdict.LEFT),
    ],
)
def test_verdicts(result: object, verdict: Verdict) -> None:
    assert judge(result, REFERENCE) is verdict


def test_complaints_name_what_must_not_be() -> None:
    tally = Tally()
    for _ in range(20):
        tally.add("fine", answer(1, 2, 3), REFERENCE)
    assert not tally.complaints()
    tally.add("question 7", TimeoutError(), REFERENCE)
    (complaint,) = tally.complaints()
    assert "hung: question 7" in complaint


def test_too_many_ties_or_failures_prove_nothing() -> None:
    ties, failures = Tally(), Tally()
    for index in range(20):
        ties.add("", answer(1, 9, 9) if index < 2 else answer(1, 2, 3), REFERENCE)
        failed = RequestFailed(503, {"code": "no_agent"})
        failures.add("", failed if index < 11 else answer(1, 2, 3), REFERENCE)
    assert ties.complaints() == ["only 18 of 20 answers could be compared"]
    assert failures.complaints() == ["only 9 of 20 requests were answered"]


def test_a_long_run_without_hardship_proves_nothing() -> None:
    tally = Tally()
    assert len(tally.missing()) == 5
    tally.events.update({"kill api of decode-0": 1, "stop rank of prefill-1": 2})
    tally.events["decode kvferry_transfer_failures_total invalid"] = 0
    assert len(tally.missing()) == 3 and all("kvferry" in missing for missing in tally.missing())


def test_one_seed_makes_one_run() -> None:
    assert make_questions(3, 40) == make_questions(3, 40) != make_questions(4, 40)
    rounds = make_rounds(3, 150, 40, (1.0, 4.0))
    assert rounds == make_rounds(3, 150, 40, (1.0, 4.0)) != make_rounds(4, 150, 40, (1.0, 4.0))
    assert sum(len(each.asks) for each in rounds) == 150
    for role, names in ROLES.items():
        blows = [blow for each in rounds for blow in each.strikes if blow.agent in names]
        assert {blow.blow for blow in blows} == {"kill", "stop"}, role
        assert all(1.0 <= blow.seconds <= 4.0 for blow in blows)
