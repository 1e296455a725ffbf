# SPDX-License-Identifier: Apache-2.0
"""Rate limits per key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.proxy.api.auth import ApiKeys, BadKeyFile
from kvferry.proxy.api.rate_limit import Rate, RateLimit
from kvferry.proxy.errors import RateLimited
from tests.unit.proxy.conftest import Stage, StartStage

KEY = "client-key-0123456789"
OTHER = "another-key-0123456789"
BODY = {"model": "stand-in", "prompt": [1, 2, 3], "max_tokens": 5}


def refused(limit: RateLimit, now: float) -> int | None:
    """Seconds to wait, or None when the request is admitted."""
    try:
        limit.admit(now)
    except RateLimited as error:
        return int(error.headers["Retry-After"])
    return None


def test_requests_may_come_all_at_once_and_then_at_their_rate() -> None:
    limit = RateLimit(Rate.parse("6/min"), None)
    assert [refused(limit, 100.0) for _ in range(7)] == [None] * 6 + [10]
    assert refused(limit, 105.0) == 5
    assert [refused(limit, 110.0) for _ in range(2)] == [None, 10]
    assert [refused(limit, 9999.0) for _ in range(7)] == [None] * 6 + [10], "no more is saved up"


def test_tokens_may_be_overdrawn_once_and_then_refill() -> None:
    limit = RateLimit(None, Rate.parse("60/min"))
    assert refused(limit, 0.0) is None
    limit.charge(90, 1.0)
    assert refused(limit, 1.0) == 31
    assert refused(limit, 31.5) == 1
    assert refused(limit, 32.0) is None


def test_a_rejected_request_is_not_charged() -> None:
    limit = RateLimit(Rate.parse("1/s"), Rate.parse("10/s"))
    limit.charge(20, 0.0)
    assert refused(limit, 0.0) == 2
    assert refused(limit, 1.5) is None


@pytest.mark.parametrize("text", ["", "10", "0/s", "-1/s", "1.5/s", "10/day", "10 /s", "1e3/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        Rate.parse(text)


@pytest.mark.parametrize(
    "words", ["requests", "requests=", "requests=5/s requests=6/s", "tokens=5", "cost=5/s"]
)
def test_a_key_file_with_a_mistaken_limit_is_refused_by_line(tmp_path: Path, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{KEY} {words}\n")
    with pytest.raises(BadKeyFile, match="line 2") as caught:
        ApiKeys.read(path)
    assert KEY not in str(caught.value)


async def limited(start_stage: StartStage, tmp_path: Path, words: str) -> Stage:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} {words}\n{OTHER}\n")
    stage = await start_stage(api_keys=path)
    await stage.pair()
    return stage


async def status(stage: Stage, key: str, stream: bool = False) -> tuple[int, str | None]:
    headers = {"Authorization": f"Bearer {key}"}
    async with stage.post({**BODY, "stream": stream}, headers=headers) as response:
        if response.status == 429:
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        else:
            await response.read()
        return response.status, response.headers.get("Retry-After")


async def test_a_rate_limited_key_gets_a_retry_after(start_stage: StartStage, tmp_path: Path) -> None:
    """Per-key rate limit. Others are served meanwhile, and it is counted."""
    stage = await limited(start_stage, tmp_path, "requests=2/h")
    assert [await status(stage, KEY) for _ in range(3)] == [(200, None), (200, None), (429, "1800")]
    assert await status(stage, OTHER) == (200, None)
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="429"}') == 1
    [failure] = stage.proxy.services.failures.latest()
    assert failure.last.code == "rate_limit_exceeded"
    async with stage.http.get(
        f"{stage.proxy.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    ) as response:
        assert response.status == 200, "only answers are limited"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_count(
    start_stage: StartStage, tmp_path: Path, stream: bool
) -> None:
    """Three of the prompt and five of the answer: after two requests the sixteen are gone."""
    stage = await limited(start_stage, tmp_path, "tokens=16/h")
    assert [(await status(stage, KEY, stream))[0] for _ in range(3)] == [200, 200, 429]
