# SPDX-License-Identifier: Apache-2.0
"""The soak's short form: ordinary answers stay right while attacks go on at random."""

from __future__ import annotations

import pytest

from kvferry.deploy.launcher import Cluster
from tests.abuse.attacks import ATTACKS
from tests.abuse.soak import ATTACKERS, soak
from tests.chaos.plan import make_questions
from tests.helpers.client import Answer, complete_all
from tests.system.conftest import StartAgent

SEED, QUESTIONS, SECONDS = 17, 8, 8.0


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_ordinary_answers_are_right_all_the_time(
    cluster: Cluster, hostile: None, start_agent: StartAgent
) -> None:
    questions = make_questions(SEED, QUESTIONS)
    async with start_agent() as alone:
        references = await complete_all(alone.url, [{**each, "logprobs": 0} for each in questions], 8)
    assert all(isinstance(each, Answer) for each in references)
    right = [each for each in references if isinstance(each, Answer)]
    short = [index for index, each in enumerate(ATTACKS) if not each.full]
    figures = await soak(cluster, SECONDS, questions, right, SEED, short)
    print(figures.table())
    assert not figures.complaints(flat=False)
    assert figures.verdicts.total() > QUESTIONS
    assert figures.attacks.total() >= ATTACKERS
