# SPDX-License-Identifier: Apache-2.0
"""What the fleet adds to its registry, router and admission."""

from __future__ import annotations

import pytest

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import MEASURE_S, AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.routing.routing_request import RoutingRequest
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Capacity
from tests.unit.proxy.builders import Clock, registration


async def test_a_request_that_waited_past_its_objective_measures_no_agent() -> None:
    """Once a minute a request may be late, to measure an agent: by the prediction, and not by the clock."""
    clock = Clock()
    fleet = Fleet(FleetSettings(), Metrics(), clock)
    clock.now = MEASURE_S + 1.0
    measured = Capacity(token_s=1.0, step_s=1e-4, sequence_s=0.0, answers=1, answer_tokens=5)
    fleet.registry.register(registration("prefill", 1, capacity=measured))
    fleet.registry.register(registration("decode", 2, capacity=measured))

    async def acquire(reject_in_s: float) -> None:
        asked = AcquireRequest(
            routing_request=RoutingRequest(model="m", prompt=[1, 2, 3]),
            by=clock.now + 9.0,
            reject_at=clock.now + reject_in_s,
        )
        granted = await fleet.acquire(asked)
        assert isinstance(granted, Reservation)
        granted.release()

    with pytest.raises(Overloaded):
        await acquire(-0.5)
    await acquire(0.5)
    with pytest.raises(Overloaded):
        await acquire(0.5)
