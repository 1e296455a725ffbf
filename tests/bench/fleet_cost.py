# SPDX-License-Identifier: Apache-2.0
"""What the number of agents costs the proxy: CPU time per request, per ping and per page, in this process.

python -m tests.bench.fleet_cost [--agents 2,32,128,512,1000]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import msgspec

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.fleet.views import FleetCollector, FleetView, fleet_page
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Load, Register

SIZES = (2, 32, 128, 512, 1000)
LEAST_S = 0.3
COLUMNS = ("request", "request after a ping", "ping while one waits", "/nodes", "/ready", "/metrics")


def agent(number: int, running: int = 0) -> Register:
    """Return a ping of the agent; even numbers prefill, odd ones decode."""
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return Register(
        role="decode" if number % 2 else "prefill",
        incarnation=f"{number:016x}",
        index=1,
        address=f"http://{host}:8000",
        control=f"tcp://{host}:9000",
        dialect="native",
        model="m",
        max_model_len=4096,
        tp_size=1,
        dp_size=1,
        transfers=("cuda_ipc", "tcp"),
        host_id=f"host {number // 8}",
        layout="l",
        weights="w",
        tokenizer="t",
        transfer_mode="read",
        version="0",
        state="ready",
        steps=0,
        load=Load(running, 0, 1000, 1000, 0, max_running=256),
    )


def cpu_ms(action: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one call, as the mean of as many as fit `LEAST_S`."""
    action()
    count, begun = 0, time.process_time()
    while (spent := time.process_time() - begun) < LEAST_S or not count:
        action()
        count += 1
    return 1000 * spent / count


async def measure(agents: int) -> list[float]:
    """Return the CPU milliseconds of each of `COLUMNS`."""
    clock = asyncio.get_running_loop().time
    fleet = Fleet(FleetSettings(), Metrics(), clock)
    pings = [agent(number) for number in range(agents)]
    turn = 0

    def keep(registered: list[Register]) -> None:
        for info in registered:
            fleet.registry.register(info, clock())

    def ping() -> None:
        nonlocal turn
        turn += 1
        fleet.registry.register(msgspec.structs.replace(pings[turn % agents], index=turn + 1), clock())

    def request() -> None:
        waiting = fleet.acquire(AcquireRequest(routing_request=RoutingRequest(model="m"), by=clock() + 60))
        try:
            waiting.send(None)
        except StopIteration as done:
            done.value.release()

    def after_ping() -> None:
        ping()
        request()

    def view() -> FleetView:
        return FleetView(
            snapshot=fleet.registry.snapshot(clock()), in_flight=fleet.slots.in_flight, down=(), now=clock()
        )

    collector = FleetCollector(view)
    pages: list[Callable[[], object]] = [
        lambda: fleet_page("nodes", view()),
        lambda: fleet_page("ready", view()),
        lambda: list(collector.collect()),
    ]
    keep(pings)
    figures = [cpu_ms(request)]
    keep(pings)
    figures.append(cpu_ms(after_ping))
    for page in pages:
        keep([msgspec.structs.replace(info, index=turn + 2) for info in pings])
        figures.append(cpu_ms(page))
    turn += 3
    pings = [msgspec.structs.replace(agent(number, running=256), index=turn + 1) for number in range(agents)]
    keep(pings)
    request_ = AcquireRequest(routing_request=RoutingRequest(model="m"), by=clock() + 60)
    waiter = asyncio.create_task(fleet.acquire(request_))
    await asyncio.sleep(0)
    assert fleet.admission.waiting
    figures.insert(2, cpu_ms(ping))
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default=",".join(map(str, SIZES)))
    sizes = [int(size) for size in parser.parse_args().agents.split(",")]
    print(f"| agents | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for size in sizes:
        try:
            figures = asyncio.run(measure(size))
        except Overloaded as error:
            raise SystemExit(str(error)) from error
        print(f"| {size} | {' | '.join(f'{figure:.3f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
