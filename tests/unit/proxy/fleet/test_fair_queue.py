# SPDX-License-Identifier: Apache-2.0
"""The order in which the requests of one model that wait are admitted."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.fleet.fair_queue import FairQueue

FLOOD, CLIENT = b"flood", b"client"


@dataclass(slots=True, eq=False)
class Waiter:
    key: bytes = b""
    order: tuple[float, int] = (0.0, 0)
    priority: float = 0.0
    work: float = 1.0
    came_at: float = 0.0
    name: str = ""


_NUMBERS = count()


def waiter(name: str = "", deadline: float = 0.0, **fields: object) -> Waiter:
    return Waiter(order=(deadline, next(_NUMBERS)), name=name, **fields)  # type: ignore[arg-type]


def queue_of(waiters: Iterable[Waiter]) -> FairQueue[Waiter]:
    queue = FairQueue[Waiter]()
    for each in waiters:
        queue.add(each)
    return queue


def admitted(queue: FairQueue[Waiter]) -> Iterator[Waiter]:
    while queue:
        head = queue.head()
        queue.remove(head, head.work)
        yield head


def num_keys(queue: FairQueue[Waiter]) -> int:
    """Keys that are kept, of each priority."""
    return sum(len(each.flows) for each in queue._classes.values())


def names(queue: FairQueue[Waiter]) -> str:
    return "".join(each.name for each in admitted(queue))


@pytest.mark.parametrize("works", [(1, 1, 1, 1), (900, 1, 30, 2)])
def test_of_one_key_first_come_is_first_served(works: tuple[int, ...]) -> None:
    assert (
        names(queue_of(waiter(name, work=work) for name, work in zip("abcd", works, strict=True))) == "abcd"
    )


def test_lower_priorities_go_first_whatever_the_rest() -> None:
    waiting = [
        waiter("d", deadline=0.0, priority=7, key=CLIENT),
        waiter("b", deadline=9.0),
        waiter("c", deadline=10.0, work=1e6),
        waiter("a", deadline=99.0, priority=-(2**31), work=1e6),
        waiter("e", priority=2**31 - 1),
    ]
    assert names(queue_of(waiting)) == "abcde"


def test_within_a_key_the_earliest_deadline_goes_first_and_equals_as_they_came() -> None:
    waiting = [waiter("d", 3.0), waiter("a", 1.0), waiter("e", math.inf), waiter("b", 2.0), waiter("c", 2.0)]
    assert names(queue_of(waiting)) == "abcde"


def test_a_deadline_does_not_overtake_another_keys_share() -> None:
    waiting = [waiter("a", 9.0, key=FLOOD), *(waiter("b", 0.0, key=CLIENT) for _ in range(4))]
    assert names(queue_of(waiting)).index("a") <= 1


def test_keys_that_wait_get_equal_work_and_not_equal_numbers() -> None:
    """Of 10 tokens each, and of 100: ten to one."""
    queue = queue_of(
        waiter(key=key, work=work) for key, work in ((FLOOD, 10), (CLIENT, 100)) for _ in range(200)
    )
    order = admitted(queue)
    work: Counter[bytes] = Counter()
    for _ in range(110):
        each = next(order)
        work[each.key] += int(each.work)
    assert abs(work[FLOOD] - work[CLIENT]) <= 110


def test_work_that_was_admitted_counts_when_the_key_comes_again() -> None:
    """One large request at a time is as much of a flood as many small ones that wait together."""
    queue = queue_of(waiter(key=FLOOD, work=10) for _ in range(100))
    work: Counter[bytes] = Counter()
    for _ in range(60):
        if not any(each.key == CLIENT for each in queue):
            queue.add(waiter(key=CLIENT, work=200))
        head = queue.head()
        queue.remove(head, head.work)
        work[head.key] += int(head.work)
    assert abs(work[FLOOD] - work[CLIENT]) <= 210


def test_a_key_that_was_idle_saves_nothing_up() -> None:
    queue = queue_of(waiter(key=FLOOD, work=10) for _ in range(300))
    order = admitted(queue)
    for _ in range(100):
        next(order)
    for _ in range(100):
        queue.add(waiter(key=CLIENT, work=10))
    assert Counter(next(order).key for _ in range(40)) == {FLOOD: 20, CLIENT: 20}


def test_who_leaves_is_not_counted_and_leaves_nothing() -> None:
    """Nothing but its key, and that until the next one is admitted."""
    queue = queue_of(waiter(key=FLOOD) for _ in range(3))
    for number in range(1000):
        leaving = waiter(key=b"%d" % number, priority=number % 7)
        queue.add(leaving)
        queue.head()
        queue.remove(leaving)
    next(admitted(queue))
    queue.head()
    assert len(queue) == 2 and num_keys(queue) == 1


def test_keys_whose_work_is_made_up_for_are_forgotten() -> None:
    """While requests wait all the time, thousands of keys come and go."""
    queue = queue_of(waiter(key=FLOOD, work=10) for _ in range(2))
    for number in range(2000):
        queue.add(waiter(key=FLOOD, work=10))
        queue.add(waiter(key=b"%d" % number, work=10))
        for _ in range(2):
            head = queue.head()
            queue.remove(head, head.work)
    assert num_keys(queue) < 10
    list(admitted(queue))
    assert not queue and num_keys(queue) == 0


def test_the_last_of_the_longest_flow_of_the_least_urgent_makes_place() -> None:
    queue = queue_of([waiter(key=FLOOD) for _ in range(3)] + [waiter(key=CLIENT)])
    assert [each.key for each in queue.longest()] == [FLOOD] * 3
    queue.add(waiter("late", key=CLIENT, priority=1))
    assert [each.name for each in queue.longest()] == ["late"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "admit", "leave"]),
        st.integers(0, 3),
        st.sampled_from([-1, 0, 5]),
        st.floats(0, 10),
        st.sampled_from([1.0, 7.0, 1e9]),
        st.randoms(use_true_random=False),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_happens_all_are_there_and_the_next_is_of_the_most_urgent(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, there = FairQueue[Waiter](), list[Waiter]()
    for what, key, priority, deadline, work, rng in steps:
        if what == "add":
            there.append(waiter(key=b"%d" % key, priority=priority, deadline=deadline, work=work))
            queue.add(there[-1])
        elif there:
            each = queue.head() if what == "admit" else rng.choice(there)
            there.remove(each)
            queue.remove(each, each.work if what == "admit" else None)
        assert sorted(map(id, queue)) == sorted(map(id, there)) and len(queue) == len(there)
        assert num_keys(queue) <= 4 * 3
        if there:
            head = queue.head()
            urgent = [each for each in there if each.priority == min(each.priority for each in there)]
            assert head in urgent
            assert head.order == min(each.order for each in urgent if each.key == head.key)
    assert bool(queue) == bool(there) and (there or not num_keys(queue))


@given(st.lists(st.tuples(st.sampled_from([1.0, 30.0, 1e9]), st.booleans()), max_size=50))
def test_with_one_key_and_equal_objectives_it_is_a_fifo(steps: list[tuple[float, bool]]) -> None:
    queue, fifo = FairQueue[Waiter](), list[Waiter]()
    for at, (work, adds) in enumerate(steps):
        if adds or not fifo:
            fifo.append(waiter(deadline=at + 2.0, work=work))
            queue.add(fifo[-1])
        else:
            head = queue.head()
            assert head is fifo.pop(0)
            queue.remove(head, head.work)


@dataclass(slots=True)
class Servers:
    """Servers that compute one request at a time each, behind the queue, in virtual time."""

    slots: int
    queue: FairQueue[Waiter] = field(default_factory=FairQueue[Waiter])
    first_tokens: dict[bytes, list[float]] = field(default_factory=dict)

    def run(self, arrivals: Iterable[Waiter]) -> None:
        """Serve all. A request takes as many seconds as it is work."""
        numbers, free = count(), self.slots
        events: list[tuple[float, int, Waiter | None]] = [
            (each.came_at, next(numbers), each) for each in arrivals
        ]
        heapq.heapify(events)
        while events:
            now, _, came = heapq.heappop(events)
            if came is None:
                free += 1
            else:
                self.queue.add(came)
            while free and self.queue:
                head = self.queue.head()
                self.queue.remove(head, head.work)
                free -= 1
                self.first_tokens.setdefault(head.key, []).append(now + head.work - head.came_at)
                heapq.heappush(events, (now + head.work, next(numbers), None))


def arrivals(rng: Random, key: bytes, per_s: float, seconds: float, work: float = 1.0) -> Iterator[Waiter]:
    now = 0.0
    while (now := now + rng.expovariate(per_s)) < seconds:
        yield waiter(key=key, came_at=now, work=rng.uniform(0.5, 1.5) * work, deadline=now + 2.0)


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("work", [0.2, 1.0], ids=["small", "equal"])
def test_who_floods_does_not_delay_the_others(seed: int, work: float) -> None:
    """The other's first tokens: p99 at most 1.3 times as late as alone. Of the capacity, half is its
    share, and it uses a quarter.
    """
    own = [*arrivals(Random(seed), CLIENT, 5.0, 200.0)]
    flood = [*arrivals(Random(seed + 99), FLOOD, 30.0 / work, 200.0, work)]
    alone, both, fifo = Servers(20), Servers(20), Servers(20)
    alone.run(own)
    both.run([*own, *flood])
    assert p99(both.first_tokens[CLIENT]) <= 1.3 * p99(alone.first_tokens[CLIENT])
    for each in (*own, *flood):
        each.key = b""
    fifo.run([*own, *flood])
    assert p99(fifo.first_tokens[b""]) > 10.0, "so there was a flood"
