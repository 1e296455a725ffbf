# SPDX-License-Identifier: Apache-2.0
"""Where events end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy import sse
from kvferry.proxy.errors import BadResponse

STREAM = b"".join([sse.event({"text": f"t{index} [DONE]"}) for index in range(5)]) + sse.DONE


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cutting_of_the_bytes_gives_whole_events_in_order(cuts: list[int]) -> None:
    scanner = sse.Scanner()
    edges = [0, *sorted(cuts), len(STREAM)]
    passed = b""
    for start, end in itertools.pairwise(edges):
        events = scanner.feed(STREAM[start:end])
        assert not events or events.endswith(b"\n\n")
        passed += events
        assert scanner.done == passed.endswith(sse.DONE)
    assert passed == STREAM and scanner.done


def test_bytes_that_end_with_an_event_pass_uncopied() -> None:
    chunk = sse.event({"a": 1})
    assert sse.Scanner().feed(chunk) is chunk


def test_half_an_event_is_held_back() -> None:
    scanner = sse.Scanner()
    assert scanner.feed(b'data: {"a":1}\n\ndata: {"b"') == b'data: {"a":1}\n\n'
    assert scanner.feed(b":2}\n") == b""
    assert scanner.feed(b"\n") == b'data: {"b":2}\n\n'


def test_what_follows_done_is_cut_off() -> None:
    scanner = sse.Scanner()
    assert scanner.feed(sse.DONE + b": ping\n\n") == sse.DONE
    assert scanner.done


def test_done_within_text_is_not_the_end() -> None:
    scanner = sse.Scanner()
    scanner.feed(sse.event({"text": "data: [DONE]\n\n"}))
    assert not scanner.done


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.sse.MAX_EVENT_BYTES", 100)
    scanner = sse.Scanner()
    with pytest.raises(BadResponse):
        for _ in range(20):
            scanner.feed(b"data: xxxxxxxx")


def test_events_are_counted_and_told_apart() -> None:
    assert sse.count(STREAM) == 6
    assert sse.has_error(b"data: {}\n\n" + sse.event({"error": {"message": "m"}}))
    assert not sse.has_error(sse.event({"text": 'data: {"error"'}))


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([], False),
        ([{"text": ""}], False),
        ([{"text": "a"}], True),
        ([{"delta": {"role": "assistant", "content": ""}}], False),
        ([{"text": ""}, {"delta": {"content": "a"}}], True),
        ([{"delta": {"content": None, "reasoning_content": "a"}}], True),
        ([{"delta": {"content": None, "tool_calls": [{"index": 0}]}}], True),
    ],
)
def test_the_first_text_is_noticed(choices: list[dict[str, object]], expected: bool) -> None:
    assert sse.has_text(sse.event({"choices": choices}) + b": comment\n\ndata: {bad\n\n") is expected


def test_events_that_are_no_utf_8_are_passed_over() -> None:
    """Not every string is read on the way, so none can be relied on to be one."""
    latin = b'data: {"choices":[{"text":"caf\xe9"}],"kvferry_timing":{}}\n\n'
    assert not sse.has_text(latin)
    assert sse.has_text(latin + sse.event({"choices": [{"text": "a"}]}))
    assert sse.with_leg_times(latin, {"route": 1.0}) == latin
