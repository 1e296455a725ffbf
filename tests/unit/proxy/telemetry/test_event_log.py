# SPDX-License-Identifier: Apache-2.0
"""What is remembered of agents that come and go."""

from __future__ import annotations

from kvferry.proxy.telemetry.event_log import MAX_EVENTS, MAX_TEXT_CHARS, EventKind, EventLog


def kinds(log: EventLog) -> list[str]:
    return [f"{event.kind} {event.address} {event.count}" for event in log.latest()]


def test_an_event_that_repeats_the_agents_last_one_is_counted_with_it() -> None:
    log = EventLog()
    log.add(EventKind.CONNECTION_REFUSED, 1.0, agent="a", address="a")
    log.add(EventKind.JOINED, 2.0, agent="b", address="b")
    log.add(EventKind.CONNECTION_REFUSED, 3.0, agent="a", address="a")
    assert kinds(log) == ["connection_refused a 2", "joined b 1"], "and is as late as the last"
    log.add(EventKind.READY, 4.0, agent="a", address="a")
    log.add(EventKind.CONNECTION_REFUSED, 5.0, agent="a", address="a")
    assert kinds(log)[0] == "connection_refused a 1", "something else came between"


def test_a_lost_agent_stays_in_sight_until_another_one_has_its_address() -> None:
    log = EventLog()
    log.add(EventKind.LOST, 1.0, agent="1", address="a")
    log.add(EventKind.LOST, 2.0, agent="2", address="b")
    log.add(EventKind.LOST, 3.0, agent="3", address="c")
    log.add(EventKind.LEFT, 4.0, agent="4", address="c")
    assert [event.address for event in log.lost(set())] == ["b", "a"], "the last at c said goodbye"
    assert [event.address for event in log.lost({"b"})] == ["a"]


def test_logs_are_merged_by_time_and_bounded() -> None:
    log, other = EventLog(), EventLog()
    for at in range(MAX_EVENTS):
        log.add(EventKind.JOINED, 2.0 * at, agent=str(at), address="x" * 1000)
        other.add(EventKind.BREAKER_OPENED, 2.0 * at + 1, agent=str(at))
    log.merge(other.of_kinds(frozenset({EventKind.BREAKER_OPENED})))
    events = log.latest()
    assert len(events) == MAX_EVENTS
    assert [event.at for event in events] == sorted((event.at for event in events), reverse=True)
    assert {event.kind for event in events} == {EventKind.JOINED, EventKind.BREAKER_OPENED}
    assert max(len(event.address) for event in events) == MAX_TEXT_CHARS


def test_an_agents_name_is_added_to_what_it_did_before_it_said_it() -> None:
    log = EventLog()
    for agent in ("a", "b"):
        log.add(EventKind.JOINED, 1.0, agent=agent, address=agent)
    log.set_name("a", "decode-0")
    assert [event.name for event in log.latest()] == ["", "decode-0"]
