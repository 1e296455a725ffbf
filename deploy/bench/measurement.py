# SPDX-License-Identifier: Apache-2.0
"""Sends the load, level by level and round by round, to one server after the other."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import msgspec

from kvferry.deploy.bench.arrivals import SizedArrival, read_trace
from kvferry.deploy.bench.client import BenchClient, BenchFailed, Observation, connected_client
from kvferry.deploy.bench.config import BenchConfig, Level
from kvferry.deploy.bench.workload import PlannedRequest, TokensPerWord, Workload, longest, measure_tokens


class BenchRound(msgspec.Struct, frozen=True):
    """The requests of one round to one server, and the time from its start to the end of the last of them."""

    seconds: float
    observations: list[Observation]


class LevelResult(msgspec.Struct, frozen=True):
    """The rounds of one level, by the name of the server."""

    level: Level
    rounds: dict[str, list[BenchRound]]


class BenchResult(msgspec.Struct, frozen=True):
    """Everything that was measured, and the name of each server's model by the name of the server."""

    models: dict[str, str]
    levels: list[LevelResult]


async def measure(config: BenchConfig, show: Callable[[str], None]) -> BenchResult:
    """Send the whole load. `show` gets a line about what goes on.

    The servers take turns within a level, so that a change of the machine or network meets all of them.

    Raises:
        BenchFailed: a server cannot be reached or does not serve the model, or the trace is none or has too
            few requests, before anything is measured.
        OSError, BadCertificate: a file of the configuration cannot be read.
    """
    trace = _trace(config)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connected_client(target, config)) for target in config.targets
        ]
        show("measures how many tokens a word takes")
        tokens = await _measure_tokens(clients[0], longest(config, trace)[0])
        workload = Workload(config, tokens, secrets.token_hex(8), trace)
        for number, client in enumerate(clients):
            show(f"warms {client.target.name} up")
            await _warm_up(client, workload.warmup(number))
        levels = [await _measure_level(workload, clients, level, show) for level in config.levels]
    return BenchResult({client.target.name: client.model for client in clients}, levels)


def _trace(config: BenchConfig) -> list[SizedArrival]:
    if config.trace is None:
        return []
    try:
        trace = read_trace(config.trace)
    except ValueError as error:
        raise BenchFailed(str(error)) from error
    if len(trace) < config.requests:
        raise BenchFailed(
            f"{config.trace} has {len(trace)} requests, fewer than --requests {config.requests}"
        )
    return trace[: config.requests]


async def _measure_tokens(client: BenchClient, longest: int) -> TokensPerWord:
    try:
        return await measure_tokens(client.count_tokens, longest)
    except ValueError as error:
        raise BenchFailed(f"{client.target.url}: its usage cannot be gone by: {error}") from error


async def _warm_up(client: BenchClient, requests: list[PlannedRequest]) -> None:
    for request in requests:
        seen = await client.send(request, time.perf_counter())
        if seen.failure:
            raise BenchFailed(f"{client.target.url}: a request before the measurement failed: {seen.failure}")


async def _measure_level(
    workload: Workload, clients: list[BenchClient], level: Level, show: Callable[[str], None]
) -> LevelResult:
    rounds: dict[str, list[BenchRound]] = {client.target.name: [] for client in clients}
    num_rounds = workload.config.num_rounds
    for number in range(num_rounds):
        for at in range(len(clients)):
            server = (number + at) % len(clients)
            client = clients[server]
            show(f"{level}, round {number + 1} of {num_rounds}: {client.target.name}")
            requests = workload.requests(level, number, server)
            rounds[client.target.name].append(await run_round(client, level, requests, time.perf_counter()))
    return LevelResult(level, rounds)


async def run_round(
    client: BenchClient, level: Level, requests: Iterator[PlannedRequest], start: float
) -> BenchRound:
    """Send requests at a level to one server. `start` is now, by `perf_counter`."""
    observations: list[Observation] = []

    async def send(request: PlannedRequest) -> None:
        observations.append(await client.send(request, start))

    async def send_one_by_one() -> None:
        for request in requests:
            await send(request)

    async with asyncio.TaskGroup() as group:
        if level.kind == "concurrency":
            for _ in range(int(level.value)):
                group.create_task(send_one_by_one())
        else:
            for request in requests:
                await asyncio.sleep(max(0.0, start + request.due_s - time.perf_counter()))
                group.create_task(send(request))
    return BenchRound(time.perf_counter() - start, observations)
