# SPDX-License-Identifier: Apache-2.0
"""What is noted of a stream is what its client has been given."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy import sse
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import AnswerDiverged, BadResponse
from kvferry.proxy.wire.kv_params import FirstToken

EVENTS = [
    b": t 0 5,6\n" + sse.event({"text": ": t 0 9 \n: t 0 9\n"}),
    b": t 1 7\n\n",
    b": t 0 8 length\n" + sse.event({"text": "b"}),
    b": t 1 4 stop\n" + sse.event({"text": "c"}),
]
SHOWN = [event[event.index(b"data") :] if b"data" in event else b"" for event in EVENTS]
KNOWN = [
    {"output_ids": [5, 6, 8], "finish_reason": "length"},
    {"output_ids": [7, 4], "finish_reason": "stop"},
]


@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=4))
def test_token_lines_are_cut_out_and_noted_however_the_events_come(cuts: list[int]) -> None:
    sent = SentTokens(2)
    for start, end in itertools.pairwise([0, *sorted(cuts), len(EVENTS)]):
        assert sent.strip(b"".join(EVENTS[start:end])) == b"".join(SHOWN[start:end])
    assert msgspec.to_builtins(sent.resume()) == KNOWN
    assert sent.num_tokens == 5
    sent.end()
    assert sent.num_tokens == 5


@pytest.mark.parametrize("last", [b"\n", sse.event({"usage": 1})])
def test_only_done_is_missing_once_the_end_was_told(last: bytes) -> None:
    sent = SentTokens(2)
    sent.strip(b"".join(EVENTS))
    assert not sent.complete
    assert sent.strip(b": t end\n" + last + sse.DONE) == last.lstrip(b"\n") + sse.DONE
    assert sent.complete


def test_events_without_token_lines_pass_as_they_came() -> None:
    sent = SentTokens(1)
    event = sse.event({"text": ": t 0 1"})
    assert sent.strip(event) is event
    assert not sent.begun


def test_only_first_tokens_that_the_client_has_not_are_news() -> None:
    sent = SentTokens(2)
    first = (FirstToken(id=5, text="a"), FirstToken(id=7, text="b", finish_reason="stop"))
    sent.strip(EVENTS[0])
    assert sent.begin(first) == {1}
    assert sent.begin(first) == frozenset()
    assert msgspec.to_builtins(sent.resume()) == [
        {"output_ids": [5, 6], "finish_reason": None},
        {"output_ids": [7], "finish_reason": "stop"},
    ]


def test_there_is_nothing_to_resume_while_token_1_is_all_there_is() -> None:
    sent = SentTokens(2)
    assert sent.begin([FirstToken(id=5, text="a"), FirstToken(id=7, text="b")]) == {0, 1}
    assert sent.begun
    assert sent.resume() is None


def test_a_prefill_that_contradicts_what_the_client_has_is_refused() -> None:
    for other in ([FirstToken(id=6, text="x"), FirstToken(id=7, text="b")], []):
        sent = SentTokens(2)
        sent.strip(EVENTS[0])
        with pytest.raises(AnswerDiverged):
            sent.begin(other)


def test_a_whole_answer_goes_with_choices_that_have_ended() -> None:
    sent = SentTokens(2)
    sent.strip(b": t 0 5 length\n" + SHOWN[0])
    assert sent.begin([]) == {1}


@pytest.mark.parametrize("line", [b": t 2 5", b": t 0 x", b": t 0 5,", b": t 0 5 why", b": t ", b": t 0"])
def test_a_line_of_another_dialect_is_refused_when_it_is_needed(line: bytes) -> None:
    sent = SentTokens(2)
    assert sent.strip(line + b"\n" + SHOWN[0]) == SHOWN[0]
    with pytest.raises(BadResponse):
        sent.resume()
