# SPDX-License-Identifier: Apache-2.0
"""I4 over mori: whole clusters whose KV goes through the stand-in for AMD's library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import pytest_asyncio

from tests.helpers.client import Answer, complete_all
from tests.standins import mori_io
from tests.system.conftest import StartCluster
from tests.system.test_equality import CONCURRENCY, Pair, bodies, check_cells, expect_answers

PROMPTS = 20
PAIRS = [pytest.param(1, id="tp1-1"), pytest.param(2, id="tp1-2", marks=pytest.mark.full)]
CELLS = [("greedy", 1, "answers"), ("t1", 4, "answers")]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


class References:
    """Answers of the prefill agent, which does everything itself when it is asked directly, by cell."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int, str], list[Answer]] = {}

    async def get(self, tp: int, cell: tuple[str, int, str], count: int) -> list[Answer]:
        return self.answers[cell]


@pytest.fixture(scope="module")
def standin() -> Iterator[None]:
    with mori_io.on_path():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRS)
async def pair(
    request: pytest.FixtureRequest, standin: None, start_cluster: StartCluster
) -> AsyncIterator[Pair]:
    async with start_cluster(
        args=("--transfer", "mori", "--transfer-options", "mori.qp_per_transfer=2"),
        decode_args=("--tp", str(request.param)),
    ) as cluster:
        agents = cluster.agents
        yield Pair(1, request.param, "mori", cluster.proxy, agents["prefill-0"], agents["decode-0"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(pair: Pair) -> References:
    made = References()
    for cell in CELLS:
        results = await complete_all(pair.prefill.url, bodies(*cell, PROMPTS), CONCURRENCY)
        made.answers[cell] = expect_answers(results)
    return made


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-n{cell[1]}-{cell[2]}")
async def test_apart_equals_together(pair: Pair, references: References, cell: tuple[str, int, str]) -> None:
    await check_cells(pair, cast(Any, references), [cell], PROMPTS)
