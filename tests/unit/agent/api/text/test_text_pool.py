# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.agent.api.text.text_pool import MAX_QUEUED_BYTES, SHORT_BYTES, text_pool
from kvferry.agent.errors import ApiError

LONG = SHORT_BYTES + 1


async def test_work_is_done_elsewhere_and_its_errors_come_back() -> None:
    pool = text_pool()
    assert await pool.run(1, threading.current_thread) is not threading.current_thread()

    def fail() -> None:
        raise ApiError(400, "no", "no")

    with pytest.raises(ApiError, match="no"):
        await pool.run(1, fail)


async def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    pool, done = text_pool(), threading.Event()
    waiting = [asyncio.ensure_future(pool.run(LONG, done.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await pool.run(10, lambda: "short") == "short"
    done.set()
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_what_waits_is_bounded_in_bytes_and_given_back() -> None:
    pool, done = text_pool(), threading.Event()
    first = asyncio.ensure_future(pool.run(MAX_QUEUED_BYTES, done.wait))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as busy:
        await pool.run(10, lambda: None)
    assert (busy.value.status, busy.value.code) == (503, "tokenizer_busy")
    done.set()
    await first
    await asyncio.sleep(0.01)
    assert await pool.run(MAX_QUEUED_BYTES + 1, lambda: "alone it may be longer") is not None


async def test_a_text_that_does_not_get_its_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.agent.api.text.text_pool.TEXT_TIMEOUT_S", 0.05)
    pool, done = text_pool(), threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(pool.run(LONG, done.wait))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="in time"):
        await pool.run(LONG, lambda: ran.append(1))
    with pytest.raises(ApiError, match="in time"):
        await first
    done.set()
    assert await pool.run(LONG, lambda: "next") == "next"
    assert ran == [], "nobody waits for it any more"
