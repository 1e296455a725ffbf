# SPDX-License-Identifier: Apache-2.0
"""A mix that turns: how several servers keep up by each fixed split, together, and when the proxy chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from benchmarks import plan_reality
from benchmarks.pd.fleet import Setup, System, running
from benchmarks.pd.load import OBJECTIVES, WARM_UP_RATE, Seen, offer, send, summary
from benchmarks.turns import turning
from kvferry.deploy.bench.arrivals import SizedArrival
from kvferry.deploy.bench.workload import PlannedRequest
from kvferry.deploy.plan.command import EVERY_PROMPT, PlanConfig, serve
from kvferry.deploy.plan.running_fleet import fetch_agents, server_model
from kvferry.proxy.wire.registration import Role

WARM_UP_S = 8.0


class Turn(NamedTuple):
    """Requests of one kind: tokens of each, and requests a second for four servers."""

    name: str
    prompt: int
    answer: int
    rate: float


TURNS = (
    Turn("long prompts", 8192, 64, 9.0),
    Turn("short prompts", 256, 256, 45.0),
    Turn("long answers", 512, 1024, 12.0),
)


class Fleet(NamedTuple):
    """`split`: prompts under so many tokens are not split; None: the proxy chooses."""

    system: System
    roles: Sequence[Role]
    split: int | None = 0


def fleets(num_servers: int) -> dict[str, Fleet]:
    """Every way to use so many servers."""
    both: list[Role] = ["both"] * num_servers
    found = {"auto": Fleet("auto-both", both, None)}
    for num in range(1, num_servers):
        split = plan_reality.Fleet(prefill=num, decode=num_servers - num)
        found[str(split)] = Fleet("kvferry-cuda_ipc", split.roles)
    found["together"] = Fleet("together", both, EVERY_PROMPT)
    return found


def arrivals(num_servers: int, seconds: float) -> list[SizedArrival]:
    """Each kind for so many seconds, one after the other."""
    kinds = [(turn.prompt, turn.answer, turn.rate * num_servers / 4) for turn in TURNS]
    return turning(kinds, len(kinds), seconds)


def requests(load: Sequence[SizedArrival], vocabulary: int, seed: int = 4) -> Iterator[PlannedRequest]:
    rng = Random(seed)
    for each in load:
        prompt = [rng.randrange(3, vocabulary) for _ in range(each.prompt_tokens)]
        yield PlannedRequest(each.at, prompt, each.answer_tokens)


async def turn(
    name: str, setup: Setup, seconds: float, vocabulary: int, found: dict[str, dict[str, Any]]
) -> list[Seen]:
    """Offer the mix to a fleet. Its figures go to `found`, also by kind of request, and what share of each
    server's work was prompts, each second; where the proxy chooses, what `kvferry plan` says of every fleet.
    """
    system, roles, _ = fleets(len(setup.gpus))[name]
    load = arrivals(len(roles), seconds)
    shares: list[tuple[float, list[float]]] = []
    async with running(system, setup, roles) as fleet:
        await offer(fleet.url, WARM_UP_RATE * len(roles) / 2, WARM_UP_S, vocabulary, seed=0)
        sampling = asyncio.ensure_future(plan_reality.sample(fleet.url, shares))
        seen = await send(fleet.url, len(load) / seconds / len(TURNS), requests(load, vocabulary))
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        found[name] = summary(seen, []) | {"turns": by_turn(seen), "prompt shares": shares}
        if system == "auto-both":
            found[name]["plan"] = await plans(fleet.url, load)
    return seen


def by_turn(seen: Sequence[Seen]) -> dict[str, dict[str, object]]:
    return {
        turn.name: summary([one for one in seen if one.prompt_tokens == turn.prompt], []) for turn in TURNS
    }


async def plans(url: str, load: Sequence[SizedArrival]) -> dict[str, Any]:
    """What `kvferry plan` says of the load, by the servers of a proxy and the stricter objectives."""
    agents = await fetch_agents(url, None, None, None)
    model = server_model(agents)
    config = PlanConfig(ttft_s=OBJECTIVES[0][0], tpot_ms=1000 * OBJECTIVES[0][1])
    rows = {}
    for name, fleet in fleets(len(agents)).items():
        row = await asyncio.to_thread(serve, name, config, load, model, fleet.roles, fleet.split)
        rows[name] = row._asdict()
    return {"server": str(model), "fleets": rows}
