# SPDX-License-Identifier: Apache-2.0
"""Ids are random; that of an answer has its request's in it."""

from __future__ import annotations

import pytest

from kvferry.proxy.ids import RequestId, new_identity, new_transfer_id


def test_no_id_comes_twice() -> None:
    ids = [new_transfer_id() for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {32}


@pytest.mark.parametrize(
    ("request_id", "answer_id"),
    [("mine", "chatcmpl-mine-"), ('a "b" \\', 'chatcmpl-a "b" \\-'), ("x" * 102, f"chatcmpl-{'x' * 102}-")],
)
def test_the_id_of_an_answer_carries_the_requests_and_is_unique(request_id: str, answer_id: str) -> None:
    """OpenAI's reference calls it a unique identifier; clients use one `X-Request-Id` for many requests."""
    ids = [new_identity("chat/completions", RequestId(request_id), None, None).answer_id for _ in range(100)]
    assert len(set(ids)) == 100
    assert {each[: len(answer_id)] for each in ids} == {answer_id}
    assert {len(each) for each in ids} == {len(answer_id) + 16}


def test_a_request_id_too_long_for_an_answers_id_is_left_out() -> None:
    """Agents take over at most 128 characters."""
    first, second = (new_identity("chat/completions", RequestId("x" * 103), None, None) for _ in range(2))
    assert first.answer_id.startswith("chatcmpl-") and len(first.answer_id) == len("chatcmpl-") + 32
    assert first.answer_id != second.answer_id
