# SPDX-License-Identifier: Apache-2.0
"""Each kind of work that a client chooses for each token, beside an ordinary stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.abuse.per_step import (
    COSTLY_LATER,
    KINDS,
    LEAST_SHARE,
    NO_LIMIT,
    PLAIN,
    Victim,
    attack,
    check_refused,
    post,
    rate_beside,
)
from tests.helpers.waiting import patient

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.alone]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def victim(cluster: Cluster) -> AsyncIterator[Victim]:
    victim = Victim(cluster.url)
    async with aiohttp.ClientSession(timeout=NO_LIMIT) as http:
        # The processes that grammars need are there before anything is measured.
        body = attack(PLAIN, n=1, max_tokens=8, ignore_eos=False, guided_choice=["yes", "no"])
        status, text = await post(http, cluster.url, body)
        assert status == 200, text
    async with victim.streaming():
        yield victim


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain_rate(cluster: Cluster, victim: Victim) -> float:
    rate = await rate_beside(victim, cluster, PLAIN)
    assert rate > 1
    return rate


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != PLAIN])
async def test_a_stream_goes_on_beside(
    kind: str, cluster: Cluster, victim: Victim, plain_rate: float
) -> None:
    """Judged twice, the second time beside a control of its own: others may use the machine."""
    rate = await rate_beside(victim, cluster, kind)
    print(f"{kind}: {rate:.0f} events a second, {plain_rate:.0f} beside a plain request")
    if rate < LEAST_SHARE * plain_rate:
        plain_rate = await rate_beside(victim, cluster, PLAIN)
        rate = await rate_beside(victim, cluster, kind)
    assert rate >= LEAST_SHARE * plain_rate, (rate, plain_rate)


async def test_a_grammar_that_costs_too_much_fails_by_name(cluster: Cluster, victim: Victim) -> None:
    """N1: and its stream too, with an error and an end."""
    async with aiohttp.ClientSession(timeout=NO_LIMIT) as http, asyncio.timeout(patient(120)):
        body = {"guided_grammar": COSTLY_LATER, "ignore_eos": False}
        whole = asyncio.ensure_future(post(http, cluster.url, attack(PLAIN, **body)))
        status, text = await post(http, cluster.url, attack(PLAIN, stream=True, n=4, **body))
        check_refused(*await whole)
    assert status == 200, text
    *_, error, done = [line for line in text.splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "grammar_too_costly", error
