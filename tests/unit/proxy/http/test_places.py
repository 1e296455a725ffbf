# SPDX-License-Identifier: Apache-2.0
"""Places go round in order, and none is lost with those who leave the queue."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.proxy.http.places import ConnectionLimit

FOREVER = float("inf")


def waiting(places: ConnectionLimit, count: int) -> list[asyncio.Task[None]]:
    """So many who want a place; they get as far as they can before anything else happens."""
    return [asyncio.get_running_loop().create_task(places.take(FOREVER)) for _ in range(count)]


async def turns() -> None:
    """Let everybody go on who can."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_places_are_given_in_order() -> None:
    places = ConnectionLimit(1)
    tasks = waiting(places, 3)
    for index in range(3):
        await turns()
        assert [task.done() for task in tasks] == [True] * (index + 1) + [False] * (2 - index)
        assert not places.free
        places.release()
    assert places.free == 1


async def test_a_place_that_comes_too_late_is_a_timeout() -> None:
    places = ConnectionLimit(1)
    await places.take(FOREVER)
    with pytest.raises(TimeoutError):
        await places.take(asyncio.get_running_loop().time())
    places.release()
    assert places.free == 1


@pytest.mark.parametrize("steps", ["cancel, end, give", "cancel, give, end", "give, cancel, end"])
async def test_who_leaves_the_queue_keeps_no_place(steps: str) -> None:
    """Whether the place comes after it has left, as it leaves, or just before."""
    places = ConnectionLimit(1)
    holder, leaver, last = waiting(places, 3)
    await turns()
    for step in steps.split(", "):
        if step == "cancel":
            leaver.cancel()
        elif step == "give":
            places.release()
        else:
            await asyncio.wait([leaver])
    await asyncio.wait_for(last, 5)
    assert holder.done() and leaver.cancelled() and not places.free
    places.release()
    assert places.free == 1
