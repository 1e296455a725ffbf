# SPDX-License-Identifier: Apache-2.0
"""`kvferry plan` from its command line to its table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from kvferry.common.exceptions import message_of
from kvferry.common.http.tls import BadCertificate
from kvferry.common.options import check_files, is_server_url, parse_flags, read_settings
from kvferry.common.shared_options import check_at_least_1, check_positive
from kvferry.deploy.bench.arrivals import SizedArrival, at_rate, poisson, read_trace
from kvferry.deploy.bench.config import Lengths
from kvferry.deploy.http_client import StatusFailed
from kvferry.deploy.plan.running_fleet import fetch_agents, server_model
from kvferry.deploy.plan.simulation import ServerModel, SimulatedFleet
from kvferry.proxy.fleet.fleet import FleetSettings
from kvferry.proxy.objectives import ModelObjectives, Objective
from kvferry.proxy.wire.registration import Role

PROG = "kvferry plan"
NUM_SERVERS = 8
MAX_SPLITS = 8
EVERY_PROMPT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The options of `kvferry plan`.

    Load:
        trace: Trace to serve: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, as Azure's, or JSONL
            with timestamp (ms), input_length and output_length, as Mooncake's; gzipped or not. Default: a
            generated load.
        rate: Requests per second; a trace is played faster or more slowly. Default: the trace's own; 8.
        requests: Maximum number of requests to serve.
        prompt_tokens: Without a trace, length of the prompts: N, LOW:HIGH, or several of these with commas.
        output_tokens: Length of the answers, in the same form.
        seed: Seed of lengths and arrival times.

    Engine:
        servers: Number of servers, all alike. Default: those of the proxy's fleet; 8.
        server: YAML file with the times of a server: token-s, step-s, prompt-step-s, sequence-s, chunk,
            batch-tokens, kv-tokens, max-running, pull-s, pull-token-s, leg-s. Default: what the proxy's
            agents have measured; without a proxy, about an H100 with an 8B model.
        proxy: Base URL of a proxy, whose agents' own measurements are used for the servers.
        model: Model of these agents, if the proxy serves several.

    Routing:
        split_min_tokens: Threshold with which each split is tried, besides no threshold.

    Security:
        key: File that holds the operator's key, if the proxy has one.
        ca: PEM file of the authority that signed the proxy's certificate.

    Results:
        ttft_s: Objective for goodput and for the proxy's choices: time to the first token, in seconds.
        tpot_ms: The same for the mean time per token after the first, in ms.
    """

    trace: Path | None = None
    rate: float | None = None
    requests: int = 10_000
    prompt_tokens: str = "256,8192"
    output_tokens: str = "256"
    seed: int = 0
    servers: int | None = None
    server: Path | None = None
    proxy: str | None = None
    model: str | None = None
    split_min_tokens: int = 512
    key: Path | None = None
    ca: Path | None = None
    ttft_s: float = 2.0
    tpot_ms: float = 30.0

    def __post_init__(self) -> None:
        servers = 1 if self.servers is None else self.servers
        check_at_least_1(requests=self.requests, servers=servers, split_min_tokens=self.split_min_tokens)
        check_positive(ttft_s=self.ttft_s, tpot_ms=self.tpot_ms, rate=self.rate or 1.0)
        for name in ("model", "key", "ca"):
            if self.proxy is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is of a fleet that is read with proxy")
        if self.proxy is not None and not is_server_url(self.proxy):
            raise ValueError(f"proxy must be http://HOST:PORT or https://HOST:PORT, got {self.proxy!r}")


class PlanRow(NamedTuple):
    """A row of the table. `goodput`: the share of requests that keep both objectives."""

    name: str
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    goodput: float
    busy: float


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 0, or 1 if the load or the servers cannot be read."""
    config = parse_flags(
        PlanConfig, argv, prog=PROG, description="Predict, in virtual time, what a fleet makes of a load.",
        check=_checked,
    )  # fmt: skip
    try:
        load = load_of(config)
        number, model = servers_of(config)
    except (OSError, ValueError, StatusFailed, BadCertificate) as error:
        print(f"{PROG}: {message_of(error)}", file=sys.stderr)
        return 1
    print(
        f"{'prefill + decode':24} {'TTFT s p50':>10} {'p99':>7} {'TPOT ms p50':>12} {'p99':>7} "
        f"{'goodput':>8} {'busy':>5}"
    )
    for row in outcomes(config, load, model, number):
        print(
            f"{row.name:24} {row.ttft_p50_s:10.3f} {row.ttft_p99_s:7.2f} {row.tpot_p50_ms:12.1f} "
            f"{row.tpot_p99_ms:7.1f} {row.goodput:8.3f} {row.busy:5.2f}",
            flush=True,
        )
    return 0


def load_of(config: PlanConfig) -> list[SizedArrival]:
    """Return the load. Raises `OSError`, and `ValueError` for a trace that is none."""
    if config.trace is not None:
        load = read_trace(config.trace)[: config.requests]
        return load if config.rate is None else at_rate(load, config.rate)
    prompts = Lengths.parse("--prompt-tokens", config.prompt_tokens)
    answers = Lengths.parse("--output-tokens", config.output_tokens)
    return poisson(prompts.choose, answers.choose, config.rate or 8.0, config.requests, Random(config.seed))


def outcomes(
    config: PlanConfig, load: Sequence[SizedArrival], model: ServerModel, number: int
) -> Iterator[PlanRow]:
    """Serve the load by all servers together, by splits with and without the threshold, and by choice."""
    both: list[Role] = ["both"] * number
    yield serve("together", config, load, model, both, EVERY_PROMPT)
    for prefills in range(1, number, max(1, number // MAX_SPLITS)):
        yield from split_outcomes(config, load, model, number, prefills)
    yield serve("auto", config, load, model, both, None)


def split_outcomes(
    config: PlanConfig, load: Sequence[SizedArrival], model: ServerModel, number: int, prefills: int
) -> Iterator[PlanRow]:
    """Serve the load by so many prefill servers and decode servers, without the threshold and with it."""
    roles: list[Role] = [*["prefill"] * prefills, *["decode"] * (number - prefills)]  # type: ignore[list-item]
    name, threshold = f"{prefills} + {number - prefills}", config.split_min_tokens
    yield serve(name, config, load, model, roles, 0)
    yield serve(f"{name}, from {threshold}", config, load, model, roles, threshold)


def serve(
    name: str,
    config: PlanConfig,
    load: Sequence[SizedArrival],
    model: ServerModel,
    roles: Sequence[Role],
    split_min_tokens: int | None,
) -> PlanRow:
    """Serve the load by servers of these roles."""
    settings = FleetSettings(
        split_min_tokens=split_min_tokens,
        objectives=ModelObjectives(Objective(config.ttft_s, config.tpot_ms / 1000)),
    )
    fleet = SimulatedFleet(roles, model, settings)
    jobs = fleet.run(load)
    ttfts = [job.first_at - job.arrival.at for job in jobs]
    tpots = [1000 * (job.ended_at - job.first_at) / max(1, job.arrival.answer_tokens - 1) for job in jobs]
    kept = sum(
        ttft <= config.ttft_s and tpot <= config.tpot_ms for ttft, tpot in zip(ttfts, tpots, strict=True)
    )
    busy = sum(server.busy_s for server in fleet.servers) / len(roles) / fleet.now
    ttfts.sort()
    tpots.sort()
    half, most = len(jobs) // 2, len(jobs) * 99 // 100
    return PlanRow(name, ttfts[half], ttfts[most], tpots[half], tpots[most], kept / len(jobs), busy)


def servers_of(config: PlanConfig) -> tuple[int, ServerModel]:
    """Return how many servers there are, and what each takes. What a file says goes before what agents do.

    Raises as `fetch_agents` and `server_model` do.
    """
    number, model = NUM_SERVERS, ServerModel()
    if config.proxy is not None:
        agents = asyncio.run(fetch_agents(config.proxy, config.key, config.ca, config.model))
        number, model = len(agents), server_model(agents)
    if config.server is not None:
        figures = {
            name.replace("-", "_"): value for name, value in read_settings(str(config.server), PROG).items()
        }
        model = msgspec.convert(msgspec.structs.asdict(model) | figures, ServerModel)
    return config.servers or number, model


def _checked(config: PlanConfig) -> PlanConfig:
    check_files(config, ("trace", "server", "key", "ca"))
    Lengths.parse("--prompt-tokens", config.prompt_tokens)
    Lengths.parse("--output-tokens", config.output_tokens)
    return config
