# SPDX-License-Identifier: Apache-2.0
"""What is done to a pair while a wave of requests is in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.wrong.questions import Asker, Result
from benchmarks.wrong.systems import LEASE_S, Pair, Variant

STOPPED_S = 12.0
LATEST_S = 0.5
"""A fault comes so long after its wave, at most."""
BACKLOG_S = LEASE_S - 0.5
"""In which prompts are computed whose reads then begin together."""
SALTS = ("", "one", "other")
Wave = Callable[[Pair, Asker, Sequence[int]], Awaitable[list[Result]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        title: In tables.
        inflict: Asks so many questions, and does the harm; returns all results.
        size: Of a wave.
        variant: How the servers are started.
    """

    title: str
    inflict: Wave
    size: int
    variant: Variant = "base"


async def nothing(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    return await _all(asker, numbers)


async def late_reader(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """The decode engine stands still until the leases have ended and the blocks hold other prompts."""
    asking = asyncio.ensure_future(_all(asker, numbers))
    await asyncio.sleep(random.uniform(0, LATEST_S))
    with pair.decode_stopped():
        await asyncio.sleep(LEASE_S + 1)
        with suppress(TimeoutError):
            await pair.recycle()
    return await asking


async def prefill_killed(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """When many reads have just begun: the decode engine stood still before. The server is started again."""
    asking = asyncio.ensure_future(_all(asker, numbers))
    await asyncio.sleep(random.uniform(0, LATEST_S))
    with pair.decode_stopped():
        await asyncio.sleep(BACKLOG_S)
    await asyncio.sleep(random.uniform(0, LATEST_S))
    await pair.kill("prefill")
    results, _ = await asyncio.gather(asking, pair.start("prefill"))
    return results


async def restarted(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """The prefill server, known to the decode server, is killed at rest and comes back at its address."""
    await pair.kill("prefill")
    await pair.start("prefill")
    return await _all(asker, numbers)


async def aborts(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """As many clients again leave within half a second."""

    async def leave(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0, 0.5)):
                await asker.ask(number)

    storm = [task for number in numbers for task in (asker.ask(number), leave(number))]
    return [result for result in await asyncio.gather(*storm) if result is not None]


async def stale_prefix(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """With prefix caches: four questions about each list, whose beginnings are equal, by three salts."""
    apart = len(asker.prompts) // 4
    asked = [number // 4 + apart * (number % 4) for number in numbers]
    random.shuffle(asked)
    return await asyncio.gather(*(asker.ask(number, random.choice(SALTS)) for number in asked))


async def clock_stopped(pair: Pair, asker: Asker, numbers: Sequence[int]) -> list[Result]:
    """Every process of the system, as in a virtual machine that is paused."""
    asking = asyncio.ensure_future(_all(asker, numbers))
    await asyncio.sleep(random.uniform(0, 2 * LATEST_S))
    with pair.all_stopped():
        await asyncio.sleep(STOPPED_S)
    return await asking


async def _all(asker: Asker, numbers: Sequence[int]) -> list[Result]:
    return await asyncio.gather(*map(asker.ask, numbers))


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "none": Fault("no fault", nothing, 250),
        "late-reader": Fault("late reader", late_reader, 60),
        "clock-stopped": Fault("all stopped for 12 s", clock_stopped, 250),
        "aborts": Fault("abort storm", aborts, 100),
        "prefill-killed": Fault("prefill killed in mid-read", prefill_killed, 500),
        "restarted": Fault("prefill restarted at its address", restarted, 500),
        "flip": Fault("one bit flipped in each prompt's KV", nothing, 250, "flip"),
        "stale-prefix": Fault("equal beginnings, other salts", stale_prefix, 250, "prefix"),
    }
)
