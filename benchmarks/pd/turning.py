# SPDX-License-Identifier: Apache-2.0
"""A mix that turns: how several servers keep up by each fixed split, together, and when the proxy chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import plan_reality
from benchmarks.pd.fleet import Setup, System, pin_roles, proxied, servers_running
from benchmarks.pd.load import OBJECTIVES, WARM_UP_RATE, Seen, offer, requests, send, summary
from benchmarks.turns import turning
from kvferry.deploy.bench.arrivals import SizedArrival
from kvferry.deploy.plan.command import EVERY_PROMPT, PlanConfig, serve
from kvferry.deploy.plan.running_fleet import fetch_agents, server_model
from kvferry.proxy.wire.registration import Role
from tests.helpers.servers import free_port

WARM_UP_S = 8.0


class Turn(NamedTuple):
    """Requests of one kind: tokens of each, and requests a second for four servers."""

    name: str
    prompt: int
    answer: int
    rate: float


TURNS = (
    Turn("long prompts", 8192, 64, 11.0),
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


def pairs() -> dict[str, Fleet]:
    """Every way to use two servers, one with a threshold among them."""
    return fleets(2) | {"1 + 1, from 512": Fleet("by-hand", ["prefill", "decode"], 512)}


def arrivals(num_servers: int, seconds: float) -> list[SizedArrival]:
    """Each kind for so many seconds, one after the other."""
    kinds = [(turn.prompt, turn.answer, turn.rate * num_servers / 4) for turn in TURNS]
    return turning(kinds, len(kinds), seconds)


async def turn(
    names: Sequence[str], setup: Setup, seconds: float, vocabulary: int, found: dict[str, dict[str, Any]]
) -> AsyncIterator[tuple[str, list[Seen]]]:
    """Offer the mix to each of these fleets, and yield what clients saw. All have the same servers, which can
    do both: each has its own proxy, which pins their roles.

    The figures go to `found`, also by kind of request, and what share of each server's work was prompts, each
    second; where the proxy chooses, what `kvferry plan` says of every fleet.
    """
    number, discovery_port = len(setup.gpus), free_port()
    load, ports = arrivals(number, seconds), [free_port() for _ in setup.gpus]
    async with servers_running("auto-both", setup, ["both"] * number, ports, discovery_port):
        for at, name in enumerate(names):
            system, roles, _ = fleets(number)[name]
            async with proxied(system, setup, discovery_port) as url:
                await pin_roles(url, roles)
                await offer(url, WARM_UP_RATE * number / 2, WARM_UP_S, vocabulary, seed=0)
                shares: list[tuple[float, list[float]]] = []
                sampling = asyncio.ensure_future(plan_reality.sample(url, shares))
                rate = len(load) / seconds / len(TURNS)
                seen = await send(url, rate, requests(load, vocabulary, seed=4 + at))
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
                found[name] = summary(seen, []) | {"turns": by_turn(seen, seconds), "prompt shares": shares}
                if system == "auto-both":
                    found[name]["plan"] = await plans(url, load, fleets(number))
            yield name, seen


def by_turn(seen: Sequence[Seen], seconds: float) -> dict[str, dict[str, object]]:
    """The figures of the requests that were sent in each turn of so many seconds."""
    began = seen[0].sent
    sent_in = [int((one.sent - began) // seconds) for one in seen]
    return {
        turn.name: summary([one for one, its in zip(seen, sent_in, strict=True) if its == number], [])
        for number, turn in enumerate(TURNS)
    }


async def plans(url: str, load: Sequence[SizedArrival], named: Mapping[str, Fleet]) -> dict[str, Any]:
    """What `kvferry plan` says of the load, by the servers of a proxy and the stricter objectives."""
    agents = await fetch_agents(url, None, None, None)
    model = server_model(agents)
    config = PlanConfig(ttft_s=OBJECTIVES[0][0], tpot_ms=1000 * OBJECTIVES[0][1])
    rows = {}
    for name, fleet in named.items():
        row = await asyncio.to_thread(serve, name, config, load, model, fleet.roles, fleet.split)
        rows[name] = row._asdict()
    return {"server": str(model), "fleets": rows}
