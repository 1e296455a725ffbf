# SPDX-License-Identifier: Apache-2.0
"""What is believed about agents, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.proxy.fleet.address_rules import MAX_ADDRESS_CHARS, MAX_SHOWN, AddressRules, RejectReason
from kvferry.proxy.fleet.circuit_breaker import BreakerSettings, BreakerState
from kvferry.proxy.fleet.registry import BUSY_LAG_S, MODEL_MEMORY_S, STALL_S, NodeState, Place, Registry
from kvferry.proxy.telemetry.event_log import EventKind
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation
from tests.unit.proxy.builders import load, registration

ONE = registration("both", 1)
ONE_ID = Incarnation(ONE.incarnation)


def states(registry: Registry, now: float) -> dict[str, NodeState]:
    return {node.info.incarnation: node.state for node in registry.snapshot(now).nodes}


def test_an_agent_leaves_after_three_and_a_half_silent_seconds_and_may_come_back() -> None:
    """X2, X28."""
    registry = Registry()
    registry.register(ONE, 0.0)
    assert states(registry, NODE_EXPIRY_S - 0.1) == {ONE.incarnation: NodeState.READY}
    assert states(registry, NODE_EXPIRY_S) == {}
    assert registry.register(ONE, 10.0) is None
    assert states(registry, 10.0) == {ONE.incarnation: NodeState.READY}


def test_bye_is_at_once_and_final() -> None:
    registry = Registry()
    registry.register(ONE, 0.0)
    registry.bye(ONE_ID)
    registry.bye(ONE_ID)
    assert states(registry, 0.0) == {}
    assert registry.register(ONE, 0.1), "a ping that the bye overtook"
    assert states(registry, 0.1) == {}


def test_an_old_ping_changes_nothing() -> None:
    """Issue 4, "Security": nor does it keep a dead agent alive."""
    registry = Registry()
    registry.register(registration("both", 1, index=7, load=load(running=2)), 0.0)
    assert registry.register(registration("both", 1, index=6, state="draining"), 1.0) is RejectReason.STALE
    [node] = registry.snapshot(1.0).nodes
    assert (node.state, node.heard_at, node.info.load.running) == (NodeState.READY, 0.0, 2)
    assert registry.register(registration("both", 1, index=7), 2.0) is None, "two proxies may share a number"


def test_an_agent_outside_the_rules_is_refused_and_shown() -> None:
    """Issue 4, "Security": a rogue address changes nothing, also when a known agent moves there."""
    registry = Registry(rules=AddressRules("10.0.0.0/8"))
    rogue = registration("decode", 2, address="http://192.168.0.1:80", control="tcp://10.0.0.2:1")
    assert registry.register(rogue, 0.0) is RejectReason.ADDRESS
    assert registry.register(rogue, 1.0) is RejectReason.ADDRESS
    assert registry.register(ONE, 1.0) is None
    moved = registration("both", 1, address="http://192.168.0.2:80", control="tcp://10.0.0.2:1")
    assert registry.register(moved, 2.0) is RejectReason.ADDRESS
    snapshot = registry.snapshot(2.0)
    assert [node.info.address for node in snapshot.nodes] == [ONE.address]
    assert [(each.address, each.count) for each in snapshot.rejected] == [
        (moved.address, 1),
        (rogue.address, 2),
    ]
    assert not registry.snapshot(100.0).rejected, "old news are forgotten"


def test_an_agent_that_does_not_speak_tls_is_refused_where_that_is_asked_for() -> None:
    registry = Registry(rules=AddressRules(tls_only=True))
    assert registry.register(ONE, 0.0) is RejectReason.PLAINTEXT
    assert registry.register(registration("both", 1, address="https://10.0.0.1:1"), 0.0) is None


def test_refused_agents_take_bounded_memory() -> None:
    registry = Registry(rules=AddressRules("10.0.0.0/8"))
    for port in range(1, 1000):
        registry.register(registration("decode", port, address=f"http://rogue{'x' * 1000}:{port}"), 0.0)
        registry.register(registration("decode", port, address=f"http://r:{port}"), 0.0)
    refused = registry.snapshot(0.0).rejected
    assert len(refused) == MAX_SHOWN
    assert max(len(each.address) for each in refused) == MAX_ADDRESS_CHARS


def test_a_bye_of_a_stranger_changes_nothing() -> None:
    registry = Registry()
    registry.bye(ONE_ID)
    assert registry.register(ONE, 0.0) is None


def test_a_new_incarnation_takes_the_address_and_the_old_one_stays_out() -> None:
    """X23, and row 4 of docs/sources.md#failures: a restart invalidates all that was known."""
    registry = Registry()
    old, new = ONE, registration("both", 1, incarnation="f" * 16)
    registry.register(old, 0.0)
    assert registry.register(new, 1.0) is None
    assert states(registry, 1.0) == {new.incarnation: NodeState.READY}
    assert "was replaced at its address" in (registry.register(old, 1.1) or "")
    assert states(registry, 1.1) == {new.incarnation: NodeState.READY}


def test_an_agent_that_moves_is_known_at_its_new_address_only() -> None:
    registry = Registry()
    registry.register(ONE, 0.0)
    registry.register(registration("both", 2), 0.0)
    moved = registration("both", 2, incarnation=ONE.incarnation)
    registry.register(moved, 1.0)
    assert [node.info.address for node in registry.snapshot(1.0).nodes] == [moved.address]
    registry.check_integrity()


@pytest.mark.parametrize(
    ("said", "state"), [("starting", NodeState.STARTING), ("draining", NodeState.DRAINING)]
)
def test_what_an_agent_says_of_itself_is_believed_at_once(said: str, state: NodeState) -> None:
    registry = Registry()
    registry.register(ONE, 0.0)
    registry.register(registration("both", 1, state=said), 0.5)
    assert states(registry, 0.5) == {ONE.incarnation: state}
    assert not registry.snapshot(0.5).nodes[0].serves("prefill")


def test_a_refused_connection_counts_until_a_ping_that_was_sent_after_it() -> None:
    registry = Registry()
    registry.register(ONE, 0.0)
    registry.connection_refused(ONE_ID, 0.5)
    assert states(registry, 0.5) == {ONE.incarnation: NodeState.REFUSING}
    registry.register(ONE, 0.6)
    assert states(registry, 0.6) == {ONE.incarnation: NodeState.REFUSING}
    registry.register(ONE, 1.6)
    assert states(registry, 1.6) == {ONE.incarnation: NodeState.READY}
    registry.connection_refused(Incarnation("unknown"), 1.6)


def test_an_engine_that_runs_something_without_stepping_is_stalled() -> None:
    """Pings alone prove only that a process lives."""
    registry = Registry()
    now = 0.0
    while now < STALL_S:
        registry.register(registration("both", 1, steps=5, load=load(running=2)), now)
        assert states(registry, now) == {ONE.incarnation: NodeState.READY}
        now += 1.0
    registry.register(registration("both", 1, steps=5, load=load(running=2)), now)
    assert states(registry, now) == {ONE.incarnation: NodeState.STALLED}
    registry.register(registration("both", 1, steps=6, load=load(running=2)), now + 1)
    assert states(registry, now + 1) == {ONE.incarnation: NodeState.READY}


def test_an_idle_engine_need_not_step() -> None:
    registry = Registry()
    for second in range(100):
        registry.register(ONE, float(second))
    registry.register(registration("both", 1, load=load(running=1)), 100.0)
    assert states(registry, 100.0) == {ONE.incarnation: NodeState.READY}


def test_other_engines_may_ping_more_slowly() -> None:
    registry = Registry()
    registry.register(registration("both", 1, dialect="atom"), 0.0)
    assert len(registry.snapshot(10.0).nodes) == 1
    assert len(registry.snapshot(17.5).nodes) == 0


def test_a_model_is_remembered_for_a_while_after_its_last_agent() -> None:
    """Its absence is an outage (503) and not a wrong name (404)."""
    registry = Registry()
    registry.register(ONE, 0.0)
    assert registry.snapshot(100.0).models == {"m"}
    assert registry.snapshot(MODEL_MEMORY_S).models == frozenset()


def test_the_registry_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_NODES", 3)
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_RETIRED", 3)
    registry = Registry()
    refusals = [registry.register(registration("both", port), 0.0) for port in range(1, 6)]
    assert refusals == [None] * 3 + [RejectReason.FULL] * 2
    for generation in range(10):
        registry.register(registration("both", 1, incarnation=f"{generation}"), 1.0)
    registry.check_integrity()


def test_a_replacement_is_welcome_in_a_full_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_NODES", 1)
    registry = Registry()
    registry.register(ONE, 0.0)
    assert registry.register(registration("both", 1, incarnation="f" * 16), 0.1) is None


@given(st.data())
def test_snapshots_are_ordered_by_address(data: st.DataObject) -> None:
    ports = data.draw(st.lists(st.integers(1000, 9999), unique=True, max_size=8))
    registry = Registry()
    for port in ports:
        registry.register(registration("both", port), 0.0)
    addresses = [node.info.address for node in registry.snapshot(0.0).nodes]
    assert addresses == sorted(addresses)


class RegistryMachine(RuleBasedStateMachine):
    """Any order of pings, byes, refusals and silence keeps the indices whole."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.now = 0.0

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(port=st.integers(1, 3), incarnation=st.integers(0, 4))
    def ping(self, port: int, incarnation: int) -> None:
        info = registration("both", port, incarnation=f"{incarnation}")
        refusal = self.registry.register(info, self.now)
        known = {node.info.incarnation for node in self.registry.snapshot(self.now).nodes}
        assert (info.incarnation in known) == (refusal is None)

    @rule(incarnation=st.integers(0, 4))
    def bye(self, incarnation: int) -> None:
        self.registry.bye(Incarnation(f"{incarnation}"))

    @rule(incarnation=st.integers(0, 4))
    def refuse(self, incarnation: int) -> None:
        self.registry.connection_refused(Incarnation(f"{incarnation}"), self.now)

    @invariant()
    def whole(self) -> None:
        self.registry.check_integrity()


TestRegistryMachine = RegistryMachine.TestCase


def test_an_agent_that_is_to_end_is_out_of_rotation_for_good() -> None:
    registry = Registry()
    registry.register(registration("both", 1, v=3), 0.0)
    registry.register(registration("both", 2), 0.0)
    assert registry.end(Incarnation(f"{2:016x}")) is False, "it would not be told"
    assert registry.end(Incarnation("nobody")) is None
    assert registry.end(ONE_ID) and registry.is_ending(ONE_ID)
    registry.drain(ONE_ID, drained=False)
    registry.register(registration("both", 1, v=3, index=2), 0.1)
    one, two = registry.snapshot(0.1).nodes
    assert (one.state, one.is_ending, one.drained) == (NodeState.DRAINING, True, False)
    assert (two.state, two.is_ending) == (NodeState.READY, False)
    assert registry.is_leaving(ONE_ID, 0.1)


def test_a_drained_agent_is_out_of_rotation_until_told_otherwise_or_restarted() -> None:
    registry = Registry()
    registry.register(ONE, 0.0)
    assert registry.drain(ONE_ID)
    registry.register(ONE, 1.0)
    [node] = registry.snapshot(1.0).nodes
    assert (node.state, node.drained) == (NodeState.DRAINING, True), "its pings do not undo it"
    assert registry.drain(ONE_ID, drained=False)
    assert states(registry, 1.0) == {ONE.incarnation: NodeState.READY}
    registry.drain(ONE_ID)
    registry.register(registration("both", 1, incarnation="f" * 16), 2.0)
    assert set(states(registry, 2.0).values()) == {NodeState.READY}
    assert not registry.drain(ONE_ID), "nobody of that name"


def test_an_agent_that_keeps_failing_is_out_but_for_its_probes() -> None:
    registry = Registry(breakers=BreakerSettings(failures=2, pause_s=1.0))
    registry.register(ONE, 0.0)
    for _ in range(2):
        registry.leg_failed(ONE_ID, 0.0)
    assert states(registry, 0.9) == {ONE.incarnation: NodeState.TRIPPED}
    assert states(registry, 1.0) == {ONE.incarnation: NodeState.READY}
    registry.sent([ONE_ID], 1.0)
    assert states(registry, 1.1) == {ONE.incarnation: NodeState.TRIPPED}, "one probe at a time"
    registry.leg_succeeded(ONE_ID)
    [node] = registry.snapshot(1.1).nodes
    assert (node.state, node.breaker) == (NodeState.READY, BreakerState.CLOSED)


def test_a_restart_begins_with_a_clean_record() -> None:
    registry = Registry(breakers=BreakerSettings(failures=1))
    registry.register(ONE, 0.0)
    registry.leg_failed(ONE_ID, 0.0)
    registry.register(registration("both", 1, incarnation="f" * 16), 0.1)
    assert set(states(registry, 0.1).values()) == {NodeState.READY}
    for late in (registry.leg_failed, lambda agent, now: registry.sent([agent], now)):
        late(ONE_ID, 0.1)  # legs of the old one may still end
    registry.leg_succeeded(ONE_ID)


def test_a_ping_is_kept_with_what_was_in_flight_when_it_came() -> None:
    in_flight = 3
    registry = Registry(lambda _: in_flight)
    registry.register(ONE, 0.0)
    in_flight = 5
    assert registry.snapshot(0.5).nodes[0].ours_at_ping == 3
    registry.register(ONE, 1.0)
    assert registry.snapshot(1.0).nodes[0].ours_at_ping == 5


def test_an_agent_whose_loop_hangs_pings_but_is_stalled() -> None:
    """Pings show that it is alive, and say that it makes no progress."""
    registry, agent = Registry(), Incarnation(f"{1:016x}")
    for lag, state in ((0.0, NodeState.READY), (STALL_S - 1, NodeState.READY), (STALL_S, NodeState.STALLED)):
        registry.register(registration("decode", 1, loop_lag_s=lag), 0.0)
        assert registry.snapshot(0.0).nodes[0].state is state
        assert registry.is_alive(agent, 0.0) == (state is NodeState.READY)
    registry.register(registration("decode", 1), 1.0)
    assert registry.snapshot(1.0).nodes[0].state is NodeState.READY


@pytest.mark.parametrize(
    ("fields", "is_busy"),
    [
        ({}, False),
        ({"load": load(4)}, False),
        ({"load": load(4, waiting=1)}, True),
        ({"loop_lag_s": BUSY_LAG_S}, True),
        ({"loop_lag_s": STALL_S}, False),
    ],
)
def test_an_agent_is_busy_while_it_works_and_more_waits(fields: dict[str, Any], is_busy: bool) -> None:
    registry = Registry()
    registry.register(registration("decode", 1, **fields), 0.0)
    assert registry.is_busy(Incarnation(f"{1:016x}"), 0.0) == is_busy
    assert not registry.is_busy(Incarnation(f"{1:016x}"), NODE_EXPIRY_S), "it may be dead"


def test_what_happens_to_agents_is_recorded() -> None:
    """Each kind of event once, with the time, and with the text that an operator needs."""
    registry = Registry(breakers=BreakerSettings(failures=1), rules=AddressRules("10.0.0.0/8"))
    agent, producer = registration("decode", 1, state="starting"), registration("prefill", 2)
    incarnation = Incarnation(agent.incarnation)
    registry.register(producer, 0.0)
    registry.register(agent, 1.0)
    for at, fields in ((2.0, {"state": "ready"}), (3.0, {"refusals": {producer.incarnation: "weights"}})):
        registry.register(registration("decode", 1, index=int(at), **fields), at)
    registry.connection_refused(incarnation, 3.5)
    registry.drain(incarnation)
    registry.drain(incarnation, drained=False)
    registry.leg_failed(incarnation, 4.0)
    registry.sent([incarnation], 5.5)
    registry.leg_succeeded(incarnation)
    registry.register(registration("decode", 1, index=6, state="draining"), 6.0)
    registry.bye(incarnation)
    registry.register(registration("decode", 1, incarnation="new"), 7.0)
    registry.register(registration("decode", 1, incarnation="newer"), 8.0)
    registry.register(registration("decode", 3, address="http://1.2.3.4:80"), 8.5)
    registry.sweep(8.0 + NODE_EXPIRY_S)
    mine = [event for event in registry.events.latest()[::-1] if event.address == agent.address]
    kinds = [(event.kind.value, event.at) for event in mine]
    assert kinds == [
        ("joined", 1.0), ("ready", 2.0), ("pairing_refused", 3.0),
        ("connection_refused", 3.5), ("drained", 3.5), ("undrained", 3.5),
        ("breaker_opened", 4.0), ("breaker_closed", 4.0), ("draining", 6.0),
        ("left", 6.0), ("joined", 7.0), ("replaced", 8.0),
        ("joined", 8.0), ("lost", 8.0 + NODE_EXPIRY_S),
    ]  # fmt: skip
    assert mine[2].detail == f"{producer.address}: weights"
    [rejected] = [event for event in registry.events.latest() if event.kind is EventKind.PING_REJECTED]
    assert (rejected.address, rejected.detail) == ("http://1.2.3.4:80", RejectReason.ADDRESS)


def test_who_watches_an_agent_hears_of_its_pings_and_of_its_end() -> None:
    registry, agent, heard = Registry(), Incarnation(f"{1:016x}"), []
    registry.register(registration("decode", 1), 0.0)
    with registry.watching([agent], lambda: heard.append("word")):
        registry.register(registration("decode", 2), 0.1)
        assert not heard, "another's"
        registry.register(registration("decode", 1, index=2), 0.2)
        assert len(heard) == 1
        registry.sweep(0.2 + NODE_EXPIRY_S)
        assert len(heard) == 2
        registry.register(registration("decode", 1, index=3), 9.0)
        registry.bye(agent)
        assert len(heard) == 4
    registry.register(registration("decode", 3), 9.0)
    assert len(heard) == 4 and not registry._watchers


def test_only_a_later_ping_shows_that_an_agent_works_on() -> None:
    registry, agent = Registry(), Incarnation(f"{1:016x}")
    assert registry.has_served_since(agent, 0.0, 0.0) is False, "unknown"
    registry.register(registration("decode", 1), 0.0)
    assert registry.has_served_since(agent, 0.0, 0.0) is None
    registry.register(registration("decode", 1, index=2), 0.2)
    assert registry.has_served_since(agent, 0.0, 0.2) is None, "it may have been sent before"
    registry.register(registration("decode", 1, index=3, state="draining"), 1.0)
    assert registry.has_served_since(agent, 0.0, 1.0) is None, "what dies says so too"
    registry.register(registration("decode", 1, index=4), 2.0)
    assert registry.has_served_since(agent, 0.0, 2.0) is True
    assert registry.has_served_since(agent, 2.0, 3.0) is None
    assert registry.has_served_since(agent, 2.0, 2.0 + NODE_EXPIRY_S) is False, "silent"
    assert registry.has_served_since(agent, 0.0, 60.0) is True, "it worked on, whenever it ended"
    registry.check_integrity()


def test_an_end_that_was_announced_in_time_is_no_death() -> None:
    registry, agent = Registry(), Incarnation(f"{1:016x}")
    registry.register(registration("decode", 1), 0.0)
    registry.register(registration("decode", 1, index=2, state="draining"), 0.1)
    assert not registry.is_leaving(agent, 0.2), "its engine may have died just now"
    registry.register(registration("decode", 1, index=3, state="draining"), 2.0)
    assert registry.is_leaving(agent, 2.0)
    other = Incarnation(f"{2:016x}")
    registry.register(registration("decode", 2), 0.0)
    assert not registry.is_leaving(other, 3.0), "its pings may have stopped"
    registry.drain(other)
    assert registry.is_leaving(other, 3.0)


def test_the_place_of_an_agent_is_known_beyond_its_end() -> None:
    registry, host = Registry(), Place("a")
    registry.register(registration("prefill", 1, host_id="a", address="http://one:1"), 0.0)
    registry.register(registration("decode", 2, host_id="a", address="http://one:2"), 1.0)
    registry.register(registration("decode", 3, host_id="a", address="http://[2001:db8::1]:1"), 1.0)
    registry.register(registration("decode", 4, host_id="b", address="http://one:3"), 1.0)
    registry.register(registration("decode", 5, host_id="b", address="http://[one"), 1.0)
    first, second, third, _, fifth = (Incarnation(f"{number:016x}") for number in range(1, 6))
    assert registry.agents_at(host, 1.0, 1.0) == {first, second, third}
    assert registry.agents_at(Place("a", "one"), 1.0, 1.0) == {first, second}
    assert registry.agents_at(host, 0.9, 1.0) == {first}, "the others came later"
    assert registry.agents_at(Place("a", "one"), 1.0, NODE_EXPIRY_S) == {second}
    assert registry.place(first) == registry.place(second) == Place("a", "one")
    assert registry.place(third) == Place("a", "2001:db8::1")
    assert registry.place(fifth) == Place("b")
    assert registry.place(Incarnation("stranger")) == Place("")


def test_the_time_for_which_the_proxy_stood_still_is_no_agents_silence() -> None:
    """Its pings wait in the socket; whoever is asked first must not take them for lost."""
    registry = Registry()
    registry.register(registration("prefill", 1), 0.0)
    registry.register(registration("decode", 2), 0.0)
    for tick in range(4):  # until 1.5
        registry.check_pause(tick / 2)
    woke = 1.5 + 100.0
    assert len(registry.snapshot(woke).nodes) == 2, "before anything that has waited is read"
    registry.register(registration("prefill", 1, index=2), woke + 0.01)
    registry.check_pause(woke + 0.02)
    ticks = [woke + 0.02 + tick / 2 for tick in range(1, 8)]
    counts = {}
    for at in ticks:
        registry.check_pause(at)
        counts[round(at - woke, 2)] = [node.info.role for node in registry.snapshot(at).nodes]
    assert counts[1.52] == ["prefill", "decode"]
    assert counts[2.02] == ["prefill"], "silent for 1.5 s before, and for 2 s since"
    assert counts[3.52] == [], "nobody is kept for ever"
