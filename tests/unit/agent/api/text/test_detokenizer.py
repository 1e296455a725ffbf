# SPDX-License-Identifier: Apache-2.0
"""Incremental text: whole characters, stop strings held back, and in the end what the tokenizer says."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.agent.api.text.detokenizer import Detokenizer
from kvferry.agent.api.text.tokenizer import Tokenizer
from tests.standins.checkpoint import byte_fallback_tokenizer, byte_level_tokenizer, write_checkpoint

KINDS = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}
each_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(write_checkpoint(Path(directory), KINDS[kind]()))


def pieces_of(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0
) -> list[str]:
    """What is released by each token, and at the end; nothing after a stop string."""
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.found is not None:
            return pieces
    return [*pieces, detokenizer.finish()]


def ids_of(kind: str, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer_of(kind).vocab_size - 1), max_size=max_size)


@each_kind
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_tokenizers_own_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(kind))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@each_kind
@given(text=st.text(max_size=30))
def test_pieces_of_a_text_join_to_it_and_never_hold_half_a_character(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@each_kind
@given(data=st.data())
def test_a_stop_string_cuts_the_text_before_it_and_none_of_it_is_shown(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(kind))
    text = tokenizer.decode(ids)
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    found = text[begin : begin + data.draw(st.integers(1, 5))]
    stop = tuple({found or "x", data.draw(st.text("ab c", min_size=1, max_size=3))})
    shown = ""
    detokenizer = Detokenizer(tokenizer, stop)
    for token_id in ids:
        shown += detokenizer.push(token_id)
        if detokenizer.found is not None:
            break
    shown += detokenizer.finish()
    assert (detokenizer.found in stop) == any(each in text for each in stop)
    assert text.startswith(shown)
    assert not any(each in shown for each in stop)
    if detokenizer.found is None:
        assert shown == text
    else:
        assert any(text[len(shown) :].startswith(each) for each in stop)


@each_kind
@given(data=st.data())
def test_what_is_released_depends_on_the_ids_alone(kind: str, data: st.DataObject) -> None:
    """A decode agent that feeds the prefill's ids again stands where the prefill stood (L2, L5)."""
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(kind))
    split = data.draw(st.integers(0, len(ids)))
    stop = ("ab", "the", " f")
    whole = pieces_of(tokenizer, ids, stop)
    before = pieces_of(tokenizer, ids[:split], stop)
    shown_early = "".join(before[:split])
    again = pieces_of(tokenizer, ids, stop)
    assert again == whole
    assert "".join(again).startswith(shown_early)


def test_a_character_split_over_tokens_appears_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = list(tokenizer.encode("\U0001f980!", add_special_tokens=False))
    assert len(ids) == 5
    assert pieces_of(tokenizer, ids) == ["", "", "", "\U0001f980", "!", ""]


def test_broken_bytes_do_not_hold_text_back_for_ever() -> None:
    """A model of random weights writes bytes that no character ends: all but the last three must go out."""
    tokenizer = tokenizer_of("byte-level")
    (first_byte,) = [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"\xe2"]
    pieces = pieces_of(tokenizer, [first_byte] * 10)
    assert "".join(pieces) == "\ufffd" * 10
    assert all(len(piece) <= 1 for piece in pieces)


def test_ids_that_spell_no_character_are_not_read_again_with_each_further_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D3: biased towards a token that is U+FFFD itself, each step cost more than the one before."""
    tokenizer = tokenizer_of("byte-fallback")
    (broken,) = tokenizer.encode("\ufffd", add_special_tokens=False)[-1:]
    read = 0
    decode = tokenizer.decode

    def counted(ids: list[int], show_special: bool) -> str:
        nonlocal read
        read += len(ids)
        return decode(ids, show_special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert "".join(pieces_of(tokenizer, [broken] * 1000)) == "\ufffd" * 1000
    assert read < 40 * 1000


def test_text_that_may_become_a_stop_string_waits_and_comes_out_when_it_does_not() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    a, b, c = (tokenizer.encode(each, add_special_tokens=False)[-1] for each in "abc")
    assert pieces_of(tokenizer, [a, b, a, b, c], ("bac",)) == ["a", "", "", "ba", "bc", ""]
    assert pieces_of(tokenizer, [a, b, a, c, a], ("bac",)) == ["a", "", "", ""]


@each_kind
@given(stop=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=3), text=st.text("ab"))
def test_no_more_text_waits_than_may_become_a_stop_string(kind: str, stop: list[str], text: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer, shown = Detokenizer(tokenizer, stop), ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        shown += detokenizer.push(token_id)
        if detokenizer.found is not None:
            return
        so_far = shown + detokenizer._held
        may_become = (each[:size] for each in stop for size in range(len(each)))
        assert len(detokenizer._held) == max(len(begin) for begin in may_become if so_far.endswith(begin))


def test_a_text_that_begins_stop_strings_costs_no_more_than_another() -> None:
    """N1: 500 comparisons for each token and choice, in the process that serves everybody."""
    tokenizer = tokenizer_of("byte-level")
    detokenizer = Detokenizer(tokenizer, ("a" * 500 + "b", "c" + "a" * 500))
    (token_id,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(600):
        detokenizer.push(token_id)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        detokenizer.push(token_id)
    finally:
        sys.setprofile(None)
    assert calls < 60, calls


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    a, b = (tokenizer.encode(each, add_special_tokens=False)[-1] for each in "ab")
    assert pieces_of(tokenizer, [a, b, a, b], ("b",), min_tokens=3) == ["a", "b", "a", ""]


def test_an_id_that_only_the_model_has_does_not_end_a_run_of_bytes() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    low, bad = (t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) in (b"\x00", b"\x80"))
    ids = [low, tokenizer.vocab_size - 1, bad]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd\ufffd"
