# SPDX-License-Identifier: Apache-2.0
"""The short form of `make chaos`, with another seed each time (printed).

150 requests over tcp and nixl, in whose two rounds agents of either role are killed. Over one of the other
backends 75, where the seed chooses the backend and the role; `make test-full` takes each of them.
"""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.run import Settings, ask_alone, run
from tests.chaos.victims import BACKENDS
from tests.helpers.client import Answer

ROUND = 75
ROUNDS = {"tcp": 2, "nixl": 2}
OTHERS = [backend for backend in BACKENDS if backend not in ROUNDS]
DRAWN = "one of the others"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400), pytest.mark.long]


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(
        seed=secrets.randbelow(1_000_000), requests=ROUND, questions=30, stop_s=(1.0, 4.0), round_size=ROUND
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(settings: Settings, log_dir: Path) -> list[Answer]:
    return await ask_alone(settings, log_dir)


@pytest.mark.parametrize(
    "backend", [*ROUNDS, DRAWN, *(pytest.param(backend, marks=pytest.mark.full) for backend in OTHERS)]
)
async def test_nothing_wrong_leaked_hung_or_untyped(
    backend: str, settings: Settings, references: list[Answer], log_dir: Path
) -> None:
    """I1, I2, I3, I5, I8 while agents are killed, stopped and cut off."""
    if backend == DRAWN:
        backend = OTHERS[settings.seed % len(OTHERS)]
    settings = dataclasses.replace(settings, requests=ROUND * ROUNDS.get(backend, 1))
    tally = await run(settings, backend, references, log_dir / f"chaos-{backend}", print)
    print(settings.command(backend))
    print(tally.table())
    assert not tally.complaints(), (settings.command(backend), tally.complaints())
    assert tally.count("kill") and tally.count("stop"), "agents must have been struck"
