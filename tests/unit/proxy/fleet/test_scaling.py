# SPDX-License-Identifier: Apache-2.0
"""The signals to scale by, against fleets in simulated time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.routing.costs import RouteCosts
from kvferry.proxy.fleet.routing.routing_request import RoutingRequest
from kvferry.proxy.fleet.scaling import (
    GONE_S,
    LEAST_AGE_S,
    MAX_MODELS,
    PREFILL_LATENCY,
    AgentLoad,
    Costs,
    DecayingRate,
    OwnLoad,
    ScalingSignals,
    Signals,
    decode_agents_per_sequence,
    signals_of,
)
from kvferry.proxy.fleet.snapshot import NoPair
from kvferry.proxy.fleet.snapshot import Speed as NodeSpeed
from kvferry.proxy.objectives import DEFAULT
from kvferry.proxy.telemetry.collectors import ScalingCollector
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Bye, Capacity, Incarnation, Register, Role
from tests.standins.simulated_fleet import Mix, SimulatedFleet, Speed
from tests.unit.proxy.builders import load, registration, snapshot

MIXES = {
    "long prompts, short answers": Mix(prompt=4000, answer=40),
    "short prompts, long answers": Mix(prompt=200, answer=600),
    "balanced": Mix(prompt=1000, answer=150),
}
SIZE = 3
"""Agents of each role that there are."""
ENOUGH = 12
TARGET = 0.8
"""What the chart gives as `averageValue`: agents are to be busy four fifths of the time."""
BUSY = Capacity(
    prompts=10, prefill_s=20.0, answers=10, answer_tokens=1000, slots=10, step_s=0.01, sequence_s=0.001,
    backlog_s=4.0,
)  # fmt: skip


@cache
def fleet_can_do(mix: Mix) -> float:
    """Requests per second that the fleet serves of a load that is too large for it."""
    flooded = SimulatedFleet(SIZE, SIZE, mix=mix, per_s=lambda _: 60.0, seed=1)
    flooded.run(100)
    return flooded.served_per_s


def observed(mix: Mix, share: float, **settings: Speed) -> dict[Role, float]:
    """What both proxies want together, for so many times what the fleet can do."""
    fleet = SimulatedFleet(SIZE, SIZE, mix=mix, per_s=lambda _: share * fleet_can_do(mix), seed=2, **settings)
    fleet.run(150)
    return {"prefill": fleet.wanted("prefill"), "decode": fleet.wanted("decode")}


def serves(prefill: int, decode: int, mix: Mix, share: float) -> bool:
    """Whether a fleet keeps up with the load."""
    fleet = SimulatedFleet(prefill, decode, mix=mix, per_s=lambda _: share * fleet_can_do(mix), seed=3)
    fleet.run(200)
    return fleet.served_share >= 0.97


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_at_twice_what_the_fleet_can_do_wanted_is_right_within_one(mix: Mix) -> None:
    """The truth is found by trying: with enough agents of the other role, the smallest number that serves."""
    wanted = {role: math.ceil(number) for role, number in observed(mix, 2.0).items()}
    assert max(wanted.values()) >= 2 * SIZE - 1, "what limits the fleet must double"
    for number, fleet in (
        (wanted["prefill"], lambda number: (number, ENOUGH)),
        (wanted["decode"], lambda number: (ENOUGH, number)),
    ):
        assert serves(*fleet(number + 1), mix=mix, share=2.0)
        if number > 2:
            assert not serves(*fleet(number - 2), mix=mix, share=2.0)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_at_half_the_load_it_shrinks_but_to_no_fewer_than_serve_it(mix: Mix) -> None:
    wanted = {role: math.ceil(number / TARGET) for role, number in observed(mix, 0.5).items()}
    assert min(wanted.values()) < SIZE
    assert max(wanted.values()) <= SIZE
    assert serves(wanted["prefill"], wanted["decode"], mix, 0.5)


def test_slots_that_are_held_while_prompts_are_computed_count() -> None:
    """With few slots they are what limits: decoding alone would keep half an agent busy."""
    mix, speed = MIXES["long prompts, short answers"], Speed(slots=4)

    def fleet(prefill: int, decode: int) -> SimulatedFleet:
        made = SimulatedFleet(prefill, decode, mix=mix, per_s=lambda _: 4.7, seed=4, speed=speed)
        made.run(200)
        return made

    wanted = math.ceil(fleet(3, 3).wanted("decode"))
    assert fleet(12, wanted + 1).served_share >= 0.97
    assert fleet(12, wanted - 2).served_share < 0.97


def test_it_follows_a_load_that_changes() -> None:
    def per_s(now: float) -> float:
        return 2.0 if now < 150 else 8.0

    fleet = SimulatedFleet(SIZE, SIZE, mix=MIXES["balanced"], per_s=per_s, seed=5)
    fleet.run(145)
    before = fleet.wanted("prefill")
    fleet = SimulatedFleet(SIZE, SIZE, mix=MIXES["balanced"], per_s=per_s, seed=5)
    fleet.run(330)
    assert 3.0 < fleet.wanted("prefill") / before < 5.0


def test_each_proxy_exports_its_own_part() -> None:
    fleet = SimulatedFleet(SIZE, SIZE, mix=MIXES["balanced"], per_s=lambda _: 30.0, seed=6)
    fleet.run(100)
    one, other = fleet.signals()
    assert one.decode_pressure and other.decode_pressure
    assert one.prefill_backlog_s and other.prefill_backlog_s
    for role in ("prefill", "decode"):
        assert 0.7 < one.wanted[role] / other.wanted[role] < 1.4
    assert fleet.wanted("prefill") == one.wanted["prefill"] + other.wanted["prefill"]


# The parts.


def own(**fields: Any) -> OwnLoad:
    values = {
        "prompts_per_s": 0.0, "sequences_per_s": 0.0, "waiting_prompts": 0, "waiting_sequences": 0,
    }  # fmt: skip
    return OwnLoad(**(values | fields))  # type: ignore[arg-type]


def agent(role: Role, port: int, *, in_flight: int = 0, ours_at_ping: int = 0, **fields: Any) -> AgentLoad:
    return AgentLoad(
        info=registration(role, port, **fields),
        in_flight=in_flight,
        ours_at_ping=ours_at_ping,
        decodes=role != "prefill",
    )


def costs_of(*reports: tuple[Role, Capacity]) -> Costs:
    costs = Costs()
    for role, capacity in reports:
        costs.add(role, capacity, Capacity(), 0.0)
    return costs


def test_a_full_batch_shares_its_step() -> None:
    assert decode_agents_per_sequence(100, 0.0, 10, 0.01, 0.001) == pytest.approx(100 * 0.02 / 10)


def test_a_slot_that_is_held_is_not_decoding_but_steps_are_shorter_for_it() -> None:
    # A step's time is the same for any batch: the slots' time simply adds up.
    assert decode_agents_per_sequence(100, 2.0, 10, 0.01, 0.0) == pytest.approx((100 * 0.01 + 2.0) / 10)
    # A batch gains nothing: slots that do not decode cost nothing, as long as one other is left.
    assert decode_agents_per_sequence(100, 0.5, 10, 0.0, 0.01) == pytest.approx(1.0)


def test_wanted_is_the_rate_times_the_seconds_of_each_role() -> None:
    agents = [agent("prefill", 1, capacity=BUSY), agent("decode", 2, capacity=BUSY)]
    costs = costs_of(
        ("prefill", Capacity(prompts=10, prefill_s=1.0)), ("decode", Capacity(answers=10, answer_tokens=1000))
    )
    got = signals_of(agents, costs, own(prompts_per_s=20.0, sequences_per_s=30.0))
    assert got.wanted["prefill"] == pytest.approx(2.0)
    assert got.wanted["decode"] == pytest.approx(
        30.0 * decode_agents_per_sequence(100, 0.15, 10, 0.01, 0.001)
    )


def test_agents_of_both_roles_are_wanted_for_both_kinds_of_work() -> None:
    costs = costs_of(("both", Capacity(prompts=10, prefill_s=1.0, answers=10, answer_tokens=1000)))
    got = signals_of([agent("both", 1, capacity=BUSY)], costs, own(prompts_per_s=20.0, sequences_per_s=20.0))
    assert got.wanted.keys() == {"both"}
    assert got.wanted["both"] > 2.0 + 20.0 * 100 * 0.02 / 10


@pytest.mark.parametrize("prompt_s", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("per_s", [0.5, 30.0])
def test_with_as_many_as_wanted_routing_predicts_full_agents(prompt_s: float, per_s: float) -> None:
    """Scaling solves for the number of agents what `RouteCosts` predicts of one: they are one model."""
    tokens, hold_s = 100, PREFILL_LATENCY * prompt_s
    done = Capacity(prompts=10, prefill_s=10 * prompt_s, answers=10, answer_tokens=10 * tokens)
    got = signals_of(
        [agent("both", 1, capacity=BUSY)],
        costs_of(("both", done)),
        own(prompts_per_s=per_s, sequences_per_s=per_s),
    )
    wanted, per_sequence = got.wanted["both"], decode_agents_per_sequence(tokens, hold_s, 10, 0.01, 0.001)
    decoding = tokens * 0.01 / (per_sequence - tokens * 0.001)
    speed = NodeSpeed(token_s=0.0, step_s=0.01, sequence_s=0.001)
    share = per_s * prompt_s / wanted
    (node,) = (
        replace(each, speed=speed, prefill_share=share) for each in snapshot(registration("both", 1)).nodes
    )
    costs = RouteCosts(lambda _: 0, {}, {}, DEFAULT)
    costs.at(0.0, (), cast(Any, SimpleNamespace(model="", tokens=0, decoded_sequences=decoding)))
    predicted = costs.predict(node, node)
    assert predicted is not None and predicted.token_s is not None
    assert per_s * tokens * predicted.token_s / wanted == pytest.approx(decoding)
    assert decoding + hold_s / per_sequence == pytest.approx(10), "its slots"


def test_prompts_that_decode_agents_compute_are_work_of_theirs() -> None:
    """As with --split-min-tokens, or when KV could not be pulled."""
    costs = costs_of(
        ("prefill", Capacity(prompts=5, prefill_s=5.0)),
        ("decode", Capacity(prompts=5, prefill_s=1.0, answers=10, answer_tokens=10)),
    )
    agents = [agent("prefill", 1, capacity=BUSY), agent("decode", 2, capacity=BUSY)]
    got = signals_of(agents, costs, own(prompts_per_s=10.0))
    assert got.wanted == pytest.approx({"prefill": 5.0, "decode": 1.0})


def test_what_is_not_known_is_not_said() -> None:
    silent = [agent("prefill", 1), agent("decode", 2, load=load(max_running=None))]
    assert signals_of(silent, Costs(), own(prompts_per_s=5.0, sequences_per_s=5.0)) == Signals(
        prefill_backlog_s=None, decode_pressure=None, wanted={}
    )
    prefilled = costs_of(("prefill", Capacity(prompts=1, prefill_s=1.0)))
    got = signals_of(silent, prefilled, own(prompts_per_s=5.0, sequences_per_s=5.0))
    assert got.wanted == {"prefill": 5.0}


def test_a_role_whose_agents_report_nothing_is_not_said_to_be_of_no_use() -> None:
    """As with prefill servers of another engine: an autoscaler would take the last of them away."""
    agents = [agent("prefill", 1), agent("decode", 2, capacity=BUSY)]
    costs = costs_of(("decode", BUSY))
    load_of_clients = own(prompts_per_s=5.0, sequences_per_s=5.0)
    assert signals_of(agents, costs, load_of_clients).wanted.keys() == {"decode"}
    costs.add("prefill", Capacity(), None, 1.0)
    wanted = signals_of(agents, costs, load_of_clients).wanted
    assert wanted["prefill"] == 0.0, "it computes no prompts: decode agents do"


def test_backlog_is_what_waits_here_and_our_share_of_what_waits_at_agents() -> None:
    agents = [
        agent("prefill", 1, ours_at_ping=3, load=load(2, waiting=4), capacity=BUSY),
        agent("prefill", 2, in_flight=1),  # it does not say: like the others
    ]
    costs = costs_of(("prefill", Capacity(prompts=2, prefill_s=1.0)))
    got = signals_of(agents, costs, own(waiting_prompts=10))
    assert got.prefill_backlog_s == pytest.approx(10 * 0.5 + 4.0 * 3 / 6 + 0.5)


def test_pressure_is_over_one_when_not_all_can_be_decoded_at_once() -> None:
    agents = [
        agent(
            "decode",
            1,
            in_flight=6,
            load=load(max_running=10),
            capacity=msgspec.structs.replace(BUSY, slots=6),
        ),
        agent("decode", 2, in_flight=4, load=load(max_running=4)),
        agent("prefill", 3, in_flight=9),
    ]
    assert signals_of(agents, Costs(), own()).decode_pressure == 1.0
    assert signals_of(agents, Costs(), own(waiting_sequences=5)).decode_pressure == 1.5
    assert signals_of(agents, Costs(), own(), decode_limit=2).decode_pressure == 10 / 4


def test_a_rate_needs_no_full_minute() -> None:
    rate = DecayingRate(since=0.0)
    for second in range(10):
        rate.add(3, float(second))
    assert rate.per_second(10.0) == pytest.approx(3.0, rel=0.1)
    assert rate.per_second(3600.0) == pytest.approx(0.0, abs=1e-9)
    burst = DecayingRate(since=0.0)
    burst.add(10, 0.01)
    assert burst.per_second(0.02) < 2.5


def test_costs_follow_the_work_and_outlast_idle_hours() -> None:
    costs = Costs()
    costs.add("prefill", Capacity(prompts=100, prefill_s=100.0), Capacity(), 0.0)
    costs.add("prefill", Capacity(prompts=100, prefill_s=100.0), Capacity(prompts=100, prefill_s=100.0), 9e4)
    assert costs.prefill_s() == 1.0
    costs.add("prefill", Capacity(prompts=101, prefill_s=103.0), Capacity(prompts=100, prefill_s=100.0), 9e4)
    assert costs.prefill_s() == pytest.approx(1.0, rel=0.1), "one prompt does not outweigh a hundred"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ping(signals: ScalingSignals, capacity: Capacity | None, port: int = 1, **fields: Any) -> Register:
    info = registration("prefill", port, capacity=capacity, **fields)
    signals.note(info)
    return info


def prefill_wanted(signals: ScalingSignals, info: Register) -> float | None:
    at = AgentLoad(info=info, in_flight=0, ours_at_ping=0, decodes=False)
    return signals.of_models([at], lambda _: (0, 0))[info.model].wanted.get("prefill")


def test_a_new_proxy_takes_what_an_agent_has_done_so_far_for_one_prompt() -> None:
    clock = Clock()
    signals = ScalingSignals(clock)
    info = ping(signals, Capacity(prompts=1_000_000, prefill_s=2_000_000.0))
    for _ in range(50):
        clock.now += 0.1
        signals.arrived("m", 1, 1)
    assert prefill_wanted(signals, info) == pytest.approx(20.0, rel=0.1)
    info = ping(signals, Capacity(prompts=1_000_099, prefill_s=2_000_000.0 + 99 * 1.0))
    assert prefill_wanted(signals, info) == pytest.approx(10.1, rel=0.1), "what it does now is what counts"


def test_memory_is_bounded() -> None:
    """By models, which agents name; a client's word for one is not kept."""
    signals = ScalingSignals(Clock())
    for number in range(MAX_MODELS + 10):
        ping(signals, BUSY, port=number + 1, model=f"m{number}")
        signals.arrived(f"other{number}", 1, 1)
    agents = [agent("prefill", number, model=f"m{number}") for number in range(MAX_MODELS + 10)]
    assert len(signals.of_models(agents, lambda _: (0, 0))) == MAX_MODELS
    signals.note(Bye(incarnation=Incarnation("0" * 15 + "1")))


def test_a_model_whose_agents_are_gone_makes_room_for_another() -> None:
    clock = Clock()
    signals = ScalingSignals(clock)
    for number in range(MAX_MODELS):
        ping(signals, BUSY, port=number + 1, model=f"m{number}")
    clock.now += GONE_S
    ping(signals, BUSY, port=1, model="m0")
    ping(signals, BUSY, port=100, model="another")
    ping(signals, BUSY, port=101, model="a third")
    agents = [
        agent("prefill", port, model=name)
        for port, name in enumerate(("m0", "m1", "m2", "m3", "another", "a third"))
    ]
    assert signals.of_models(agents, lambda _: (0, 0)).keys() == {"m0", "m3", "another", "a third"}


async def test_the_page_shows_what_arrives_waits_and_is_sent() -> None:
    """A retry is no arrival, and a request that is rejected is one."""
    clock, metrics = Clock(), Metrics()
    fleet = Fleet(FleetSettings(), metrics, clock)
    room = load(max_running=2)
    for role, port in (("prefill", 1), ("decode", 2)):
        for prompts in (0, 10):
            capacity = Capacity(prompts=prompts, prefill_s=prompts * 0.5, slots=2) if port == 1 else None
            info = registration(role, port, load=room, capacity=capacity)
            assert fleet.registry.register(info, clock()) is None

    async def acquire(n: int = 1, *, by: float = math.inf, **fields: Any) -> Reservation | NoPair:
        asked = RoutingRequest(model="m", n=n)
        return await fleet.acquire(AcquireRequest(routing_request=asked, by=by, **fields))

    granted = await acquire(2)
    assert isinstance(granted, Reservation)
    with pytest.raises(Overloaded):
        await acquire(by=-math.inf)
    waiting = [asyncio.ensure_future(acquire()), asyncio.ensure_future(acquire(3))]
    retry = asyncio.ensure_future(acquire(exclude=frozenset({Incarnation("x")})))
    await asyncio.sleep(0)
    page = {
        (sample.name, *sample.labels.values()): sample.value
        for family in ScalingCollector(fleet).collect()
        for sample in family.samples
    }
    backlog = page.pop(("kvferry_proxy_prefill_backlog_seconds", "m"))
    assert backlog == pytest.approx((3 + 1) * 0.5), "three wait, and one was sent"
    assert page.pop(("kvferry_proxy_decode_pressure", "m")) == (2 + 1 + 3 + 1) / 2
    rate = page.pop(("kvferry_proxy_wanted_agents", "m", "prefill")) / 0.5
    assert rate == pytest.approx(4 / LEAST_AGE_S, rel=0.05)
    assert not page, "decode agents have measured nothing yet"
    for each in (*waiting, retry):
        each.cancel()
    await asyncio.gather(*waiting, retry, return_exceptions=True)
    granted.release()


@pytest.mark.parametrize("number", [0.0, 1e12])
def test_no_report_breaks_the_page(number: float) -> None:
    capacity = Capacity(
        prompts=2**62, prefill_s=number, answers=1, answer_tokens=2**62, slots=2**62, step_s=number,
        sequence_s=number, backlog_s=number,
    )  # fmt: skip
    agents = [agent("both", 1, capacity=capacity)]
    got = signals_of(agents, costs_of(("both", capacity)), own(prompts_per_s=1.0, sequences_per_s=1.0))
    assert all(map(math.isfinite, got.wanted.values()))
