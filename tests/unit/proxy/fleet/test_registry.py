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
from kvferry.proxy.fleet.registry import BUSY_LAG_S, MODEL_MEMORY_S, STALL_S, Place
from kvferry.proxy.fleet.snapshot import NodeState
from kvferry.proxy.telemetry.event_log import EventKind
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation
from tests.unit.proxy.builders import TimedRegistry, load, registration

ONE = registration("both", 1)
ONE_ID = Incarnation(ONE.incarnation)
ONE_ELSEWHERE = registration("both", 3)


def states(registry: TimedRegistry, now: float) -> dict[str, NodeState]:
    return {node.info.incarnation: node.state for node in registry.at(now).snapshot().nodes}


def test_an_agent_leaves_after_three_and_a_half_silent_seconds_and_may_come_back() -> None:
    """X2, X28."""
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    assert states(registry, NODE_EXPIRY_S - 0.1) == {ONE.incarnation: NodeState.READY}
    assert states(registry, NODE_EXPIRY_S) == {}
    assert registry.at(10.0).register(ONE) is None
    assert states(registry, 10.0) == {ONE.incarnation: NodeState.READY}


def test_bye_is_at_once_and_final() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    registry.bye(ONE_ID)
    registry.bye(ONE_ID)
    assert states(registry, 0.0) == {}
    assert registry.at(0.1).register(ONE), "a ping that the bye overtook"
    assert states(registry, 0.1) == {}


def test_an_old_ping_changes_nothing() -> None:
    """Nor does it keep a dead agent alive."""
    registry = TimedRegistry()
    registry.at(0.0).register(registration("both", 1, index=7, load=load(running=2)))
    assert registry.at(1.0).register(registration("both", 1, index=6, state="draining")) is RejectReason.STALE
    [node] = registry.at(1.0).snapshot().nodes
    assert (node.state, node.heard_at, node.info.load.running) == (NodeState.READY, 0.0, 2)
    assert registry.at(2.0).register(registration("both", 1, index=7)) is None, (
        "two proxies may share a number"
    )


def test_an_agent_outside_the_rules_is_refused_and_shown() -> None:
    """A rogue address changes nothing, also when a known agent moves there."""
    registry = TimedRegistry(rules=AddressRules("10.0.0.0/8"))
    rogue = registration("decode", 2, address="http://192.168.0.1:80", control="tcp://10.0.0.2:1")
    assert registry.at(0.0).register(rogue) is RejectReason.ADDRESS
    assert registry.at(1.0).register(rogue) is RejectReason.ADDRESS
    assert registry.at(1.0).register(ONE) is None
    moved = registration("both", 1, address="http://192.168.0.2:80", control="tcp://10.0.0.2:1")
    assert registry.at(2.0).register(moved) is RejectReason.ADDRESS
    snapshot = registry.at(2.0).snapshot()
    assert [node.info.address for node in snapshot.nodes] == [ONE.address]
    assert [(each.address, each.count) for each in registry.rejected_agents()] == [
        (moved.address, 1),
        (rogue.address, 2),
    ]
    assert not registry.at(100.0).rejected_agents(), "old news are forgotten"


def test_an_agent_that_does_not_speak_tls_is_refused_where_that_is_asked_for() -> None:
    registry = TimedRegistry(rules=AddressRules(tls_only=True))
    assert registry.at(0.0).register(ONE) is RejectReason.PLAINTEXT
    assert registry.at(0.0).register(registration("both", 1, address="https://10.0.0.1:1")) is None


def test_rejected_agents_take_bounded_memory() -> None:
    registry = TimedRegistry(rules=AddressRules("10.0.0.0/8"))
    for port in range(1, 1000):
        registry.at(0.0).register(registration("decode", port, address=f"http://rogue{'x' * 1000}:{port}"))
        registry.at(0.0).register(registration("decode", port, address=f"http://r:{port}"))
    refused = registry.at(0.0).rejected_agents()
    assert len(refused) == MAX_SHOWN
    assert max(len(each.address) for each in refused) == MAX_ADDRESS_CHARS


def test_a_bye_of_a_stranger_changes_nothing() -> None:
    registry = TimedRegistry()
    registry.bye(ONE_ID)
    assert registry.at(0.0).register(ONE) is None


def test_a_new_incarnation_takes_the_address_and_the_old_one_stays_out() -> None:
    """X23, and row 4 of docs/sources.md#failures: a restart invalidates all that was known."""
    registry = TimedRegistry()
    old, new = ONE, registration("both", 1, incarnation="f" * 16)
    registry.at(0.0).register(old)
    assert registry.at(1.0).register(new) is None
    assert states(registry, 1.0) == {new.incarnation: NodeState.READY}
    assert "was replaced at its address" in (registry.at(1.1).register(old) or "")
    assert states(registry, 1.1) == {new.incarnation: NodeState.READY}


def test_an_agent_that_moves_is_known_at_its_new_address_only() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    registry.at(0.0).register(registration("both", 2))
    moved = registration("both", 2, incarnation=ONE.incarnation)
    registry.at(1.0).register(moved)
    assert [node.info.address for node in registry.at(1.0).snapshot().nodes] == [moved.address]
    registry.check_integrity()


def ranks(port: int, count: int, start: str = "", **fields: Any) -> list[Any]:
    """The agents of a server, one for each of its data-parallel ranks."""
    return [
        registration("both", port, incarnation=f"{start}{port}-{rank}", dp_rank=rank, **fields)
        for rank in range(count)
    ]


def test_the_ranks_of_a_server_are_agents_at_one_address() -> None:
    registry = TimedRegistry(breakers=BreakerSettings(failures=1))
    first, second = ranks(1, 2)
    for info in (first, second):
        assert registry.at(0.0).register(info) is None
    registry.at(0.1).cordon(first.incarnation)
    assert states(registry, 0.1) == {"1-0": NodeState.CORDONED, "1-1": NodeState.READY}
    registry.at(0.2).leg_failed(second.incarnation)
    assert states(registry, 0.2) == {"1-0": NodeState.CORDONED, "1-1": NodeState.TRIPPED}
    assert [node.info.location for node in registry.snapshot().nodes] == [
        "http://10.0.0.1:1#0",
        "http://10.0.0.1:1#1",
    ]
    [restarted, _] = ranks(1, 2, "new")
    registry.at(0.3).register(restarted)
    assert states(registry, 0.3) == {"new1-0": NodeState.READY, "1-1": NodeState.TRIPPED}
    registry.check_integrity()


def test_a_servers_ranks_drain_and_refuse_together() -> None:
    """They have one API, whose end ends all of them."""
    registry = TimedRegistry()
    for info in [*ranks(1, 2), *ranks(2, 2), ONE_ELSEWHERE]:
        registry.at(0.0).register(info)
    registry.at(0.1).connection_refused(Incarnation("1-1"))
    assert registry.drain(Incarnation("2-0")) is True
    assert states(registry, 0.1) == {
        "1-0": NodeState.REFUSING,
        "1-1": NodeState.REFUSING,
        "2-0": NodeState.DRAINING,
        "2-1": NodeState.DRAINING,
        ONE_ELSEWHERE.incarnation: NodeState.READY,
    }
    assert all(registry.drain_requested(Incarnation(each)) for each in ("2-0", "2-1"))
    assert registry.drain(Incarnation("unknown")) is None


@pytest.mark.parametrize("back", [False, True])
def test_a_server_that_is_started_with_or_without_ranks_replaces_what_was_at_its_address(back: bool) -> None:
    registry = TimedRegistry()
    old, new = [registration("both", 1)], ranks(1, 2)
    if back:
        old, new = new, old
    for info in (*old, *new):
        registry.at(0.0).register(info)
    assert set(states(registry, 0.0)) == {info.incarnation for info in new}
    registry.check_integrity()


def test_a_servers_ranks_are_one_place_for_they_end_together() -> None:
    registry = TimedRegistry()
    for info in [*ranks(1, 2), ONE_ELSEWHERE]:
        registry.at(0.0).register(info)
    place = registry.place(Incarnation("1-0"))
    assert registry.agents_at(place, 0.0) == {"1-0", "1-1"}
    assert registry.agents_at(place.host, 0.0) == {"1-0", "1-1", ONE_ELSEWHERE.incarnation}


@pytest.mark.parametrize(
    ("said", "state"), [("starting", NodeState.STARTING), ("draining", NodeState.DRAINING)]
)
def test_what_an_agent_says_of_itself_is_believed_at_once(said: str, state: NodeState) -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    registry.at(0.5).register(registration("both", 1, state=said))
    assert states(registry, 0.5) == {ONE.incarnation: state}
    assert not registry.at(0.5).snapshot().nodes[0].serves("prefill")


def test_a_refused_connection_counts_until_a_ping_that_was_sent_after_it() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    registry.at(0.5).connection_refused(ONE_ID)
    assert states(registry, 0.5) == {ONE.incarnation: NodeState.REFUSING}
    registry.at(0.6).register(ONE)
    assert states(registry, 0.6) == {ONE.incarnation: NodeState.REFUSING}
    registry.at(1.6).register(ONE)
    assert states(registry, 1.6) == {ONE.incarnation: NodeState.READY}
    registry.at(1.6).connection_refused(Incarnation("unknown"))


def test_an_engine_that_runs_something_without_stepping_is_stalled() -> None:
    """Pings alone prove only that a process lives."""
    registry = TimedRegistry()
    now = 0.0
    while now < STALL_S:
        registry.at(now).register(registration("both", 1, steps=5, load=load(running=2)))
        assert states(registry, now) == {ONE.incarnation: NodeState.READY}
        now += 1.0
    registry.at(now).register(registration("both", 1, steps=5, load=load(running=2)))
    assert states(registry, now) == {ONE.incarnation: NodeState.STALLED}
    registry.at(now + 1).register(registration("both", 1, steps=6, load=load(running=2)))
    assert states(registry, now + 1) == {ONE.incarnation: NodeState.READY}


def test_an_idle_engine_need_not_step() -> None:
    registry = TimedRegistry()
    for second in range(100):
        registry.at(float(second)).register(ONE)
    registry.at(100.0).register(registration("both", 1, load=load(running=1)))
    assert states(registry, 100.0) == {ONE.incarnation: NodeState.READY}


def test_other_engines_may_ping_more_slowly() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(registration("both", 1, dialect="atom"))
    assert len(registry.at(10.0).snapshot().nodes) == 1
    assert len(registry.at(17.5).snapshot().nodes) == 0


def test_a_model_is_remembered_for_a_while_after_its_last_agent() -> None:
    """Its absence is an outage (503) and not a wrong name (404)."""
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    assert registry.at(100.0).snapshot().models == {"m"}
    assert registry.at(MODEL_MEMORY_S).snapshot().models == frozenset()


def test_the_registry_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_NODES", 3)
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_RETIRED", 3)
    registry = TimedRegistry()
    refusals = [registry.at(0.0).register(registration("both", port)) for port in range(1, 6)]
    assert refusals == [None] * 3 + [RejectReason.FULL] * 2
    for generation in range(10):
        registry.at(1.0).register(registration("both", 1, incarnation=f"{generation}"))
    registry.check_integrity()


def test_a_replacement_is_welcome_in_a_full_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.fleet.registry.MAX_NODES", 1)
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    assert registry.at(0.1).register(registration("both", 1, incarnation="f" * 16)) is None


@given(st.data())
def test_snapshots_are_ordered_by_address(data: st.DataObject) -> None:
    ports = data.draw(st.lists(st.integers(1000, 9999), unique=True, max_size=8))
    registry = TimedRegistry()
    for port in ports:
        registry.at(0.0).register(registration("both", port))
    addresses = [node.info.address for node in registry.at(0.0).snapshot().nodes]
    assert addresses == sorted(addresses)


class RegistryMachine(RuleBasedStateMachine):
    """Any order of pings, byes, refusals and silence keeps the indices whole."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = TimedRegistry()
        self.now = 0.0

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(port=st.integers(1, 3), incarnation=st.integers(0, 4))
    def ping(self, port: int, incarnation: int) -> None:
        info = registration("both", port, incarnation=f"{incarnation}")
        refusal = self.registry.at(self.now).register(info)
        known = {node.info.incarnation for node in self.registry.at(self.now).snapshot().nodes}
        assert (info.incarnation in known) == (refusal is None)

    @rule(incarnation=st.integers(0, 4))
    def bye(self, incarnation: int) -> None:
        self.registry.bye(Incarnation(f"{incarnation}"))

    @rule(incarnation=st.integers(0, 4))
    def refuse(self, incarnation: int) -> None:
        self.registry.at(self.now).connection_refused(Incarnation(f"{incarnation}"))

    @invariant()
    def whole(self) -> None:
        self.registry.check_integrity()


TestRegistryMachine = RegistryMachine.TestCase


def test_an_agent_that_is_asked_to_drain_is_out_of_rotation_for_good() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(registration("both", 1))
    registry.at(0.0).register(registration("both", 2), reads_acks=False)
    assert registry.drain(Incarnation(f"{2:016x}")) is False, "it would not be told"
    assert registry.drain(Incarnation("nobody")) is None
    assert registry.drain(ONE_ID) and registry.drain_requested(ONE_ID)
    registry.cordon(ONE_ID, cordoned=False)
    registry.at(0.1).register(registration("both", 1, index=2))
    one, two = registry.at(0.1).snapshot().nodes
    assert one.state is NodeState.DRAINING
    assert two.state is NodeState.READY
    assert registry.at(0.1).is_leaving(ONE_ID)


def test_a_cordoned_agent_is_out_of_rotation_until_told_otherwise_or_restarted() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    assert registry.cordon(ONE_ID)
    registry.at(1.0).register(ONE)
    [node] = registry.at(1.0).snapshot().nodes
    assert node.state is NodeState.CORDONED, "its pings do not undo it"
    assert registry.cordon(ONE_ID, cordoned=False)
    assert states(registry, 1.0) == {ONE.incarnation: NodeState.READY}
    registry.cordon(ONE_ID)
    registry.at(2.0).register(registration("both", 1, incarnation="f" * 16))
    assert set(states(registry, 2.0).values()) == {NodeState.READY}
    assert not registry.cordon(ONE_ID), "nobody of that name"


def test_the_role_of_an_agent_for_both_is_pinned_until_told_otherwise() -> None:
    registry = TimedRegistry()
    registry.at(0.0).register(ONE)
    registry.at(0.0).register(registration("prefill", 2))
    assert registry.snapshot().pairing.serves_alone(0)
    published: list[Any] = []
    registry.subscribe(published.append)
    assert registry.pin_role(ONE_ID, "decode")
    assert [each.role for each in published] == ["decode"], "workers hear of it"
    for at in (1.0, 2.0):
        node, _ = registry.at(at).snapshot().nodes
        assert (node.info.role, node.role_pinned) == ("decode", True)
        pairing = registry.snapshot().pairing
        assert not pairing.serves_alone(0) and pairing.serving(ONE.model, "prefill") == [1]
        registry.at(at).register(ONE)  # its pings do not undo it
    assert registry.pin_role(ONE_ID, "both")
    assert registry.snapshot().nodes[0].info.role == "both" and not registry.snapshot().nodes[0].role_pinned
    assert registry.snapshot().pairing.serves_alone(0)
    assert registry.pin_role(Incarnation(f"{2:016x}"), "both") is False, "it was started as one of them"
    assert registry.pin_role(Incarnation("nobody"), "both") is None
    kinds = [event.kind for event in registry.events.latest()]
    assert kinds.count(EventKind.ROLE_PINNED) == 2


def test_an_agent_that_keeps_failing_is_out_but_for_its_probes() -> None:
    registry = TimedRegistry(breakers=BreakerSettings(failures=2, pause_s=1.0))
    registry.at(0.0).register(ONE)
    for _ in range(2):
        registry.at(0.0).leg_failed(ONE_ID)
    assert states(registry, 0.9) == {ONE.incarnation: NodeState.TRIPPED}
    assert states(registry, 1.0) == {ONE.incarnation: NodeState.READY}
    registry.at(1.0).attempt_started([ONE_ID])
    assert states(registry, 1.1) == {ONE.incarnation: NodeState.TRIPPED}, "one probe at a time"
    registry.leg_succeeded(ONE_ID)
    [node] = registry.at(1.1).snapshot().nodes
    assert (node.state, node.breaker) == (NodeState.READY, BreakerState.CLOSED)


def test_a_restart_begins_with_a_clean_record() -> None:
    registry = TimedRegistry(breakers=BreakerSettings(failures=1))
    registry.at(0.0).register(ONE)
    registry.at(0.0).leg_failed(ONE_ID)
    registry.at(0.1).register(registration("both", 1, incarnation="f" * 16))
    assert set(states(registry, 0.1).values()) == {NodeState.READY}
    registry.leg_failed(ONE_ID)  # legs of the old one may still end
    registry.attempt_started([ONE_ID])
    registry.leg_succeeded(ONE_ID)


def test_a_ping_is_kept_with_what_was_in_flight_when_it_came() -> None:
    in_flight = 3
    registry = TimedRegistry(in_flight=lambda _: in_flight)
    registry.at(0.0).register(ONE)
    in_flight = 5
    assert registry.at(0.5).snapshot().nodes[0].ours_at_ping == 3
    registry.at(1.0).register(ONE)
    assert registry.at(1.0).snapshot().nodes[0].ours_at_ping == 5


def test_an_agent_whose_loop_hangs_pings_but_is_stalled() -> None:
    """Pings show that it is alive, and say that it makes no progress."""
    registry, agent = TimedRegistry(), Incarnation(f"{1:016x}")
    for lag, state in ((0.0, NodeState.READY), (STALL_S - 1, NodeState.READY), (STALL_S, NodeState.STALLED)):
        registry.at(0.0).register(registration("decode", 1, loop_lag_s=lag))
        assert registry.at(0.0).snapshot().nodes[0].state is state
        assert registry.at(0.0).is_alive(agent) == (state is NodeState.READY)
    registry.at(1.0).register(registration("decode", 1))
    assert registry.at(1.0).snapshot().nodes[0].state is NodeState.READY


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
    registry = TimedRegistry()
    registry.at(0.0).register(registration("decode", 1, **fields))
    assert registry.at(0.0).is_busy(Incarnation(f"{1:016x}")) == is_busy
    assert not registry.at(NODE_EXPIRY_S).is_busy(Incarnation(f"{1:016x}")), "it may be dead"


def test_what_happens_to_agents_is_recorded() -> None:
    """Each kind of event once, with the time, and with the text that an operator needs."""
    registry = TimedRegistry(breakers=BreakerSettings(failures=1), rules=AddressRules("10.0.0.0/8"))
    agent, producer = registration("decode", 1, state="starting"), registration("prefill", 2)
    incarnation = Incarnation(agent.incarnation)
    registry.at(0.0).register(producer)
    registry.at(1.0).register(agent)
    for at, fields in ((2.0, {"state": "ready"}), (3.0, {"refusals": {producer.incarnation: "weights"}})):
        registry.at(at).register(registration("decode", 1, index=int(at), **fields))
    registry.at(3.5).connection_refused(incarnation)
    registry.cordon(incarnation)
    registry.cordon(incarnation, cordoned=False)
    registry.at(4.0).leg_failed(incarnation)
    registry.at(5.5).attempt_started([incarnation])
    registry.leg_succeeded(incarnation)
    registry.at(6.0).register(registration("decode", 1, index=6, state="draining"))
    registry.bye(incarnation)
    registry.at(7.0).register(registration("decode", 1, incarnation="new"))
    registry.at(8.0).register(registration("decode", 1, incarnation="newer"))
    registry.at(8.5).register(registration("decode", 3, address="http://1.2.3.4:80"))
    registry.at(8.0 + NODE_EXPIRY_S).sweep()
    mine = [event for event in registry.events.latest()[::-1] if event.address == agent.address]
    kinds = [(event.kind.value, event.at) for event in mine]
    assert kinds == [
        ("joined", 1.0), ("ready", 2.0), ("pairing_refused", 3.0),
        ("connection_refused", 3.5), ("cordoned", 3.5), ("uncordoned", 3.5),
        ("breaker_opened", 4.0), ("breaker_closed", 5.5), ("draining", 6.0),
        ("left", 6.0), ("joined", 7.0), ("replaced", 8.0),
        ("joined", 8.0), ("lost", 8.0 + NODE_EXPIRY_S),
    ]  # fmt: skip
    assert mine[2].detail == f"{producer.address}: weights"
    [rejected] = [event for event in registry.events.latest() if event.kind is EventKind.PING_REJECTED]
    assert (rejected.address, rejected.detail) == ("http://1.2.3.4:80", RejectReason.ADDRESS)


def test_who_watches_an_agent_hears_of_its_pings_and_of_its_end() -> None:
    registry, agent, heard = TimedRegistry(), Incarnation(f"{1:016x}"), []
    registry.at(0.0).register(registration("decode", 1))
    with registry.watching([agent], lambda: heard.append("word")):
        registry.at(0.1).register(registration("decode", 2))
        assert not heard, "another's"
        registry.at(0.2).register(registration("decode", 1, index=2))
        assert len(heard) == 1
        registry.at(0.2 + NODE_EXPIRY_S).sweep()
        assert len(heard) == 2
        registry.at(9.0).register(registration("decode", 1, index=3))
        registry.bye(agent)
        assert len(heard) == 4
    registry.at(9.0).register(registration("decode", 3))
    assert len(heard) == 4 and not registry._watchers


def test_only_a_later_ping_shows_that_an_agent_works_on() -> None:
    registry, agent = TimedRegistry(), Incarnation(f"{1:016x}")
    assert registry.at(0.0).has_served_since(agent, 0.0) is False, "unknown"
    registry.at(0.0).register(registration("decode", 1))
    assert registry.at(0.0).has_served_since(agent, 0.0) is None
    registry.at(0.2).register(registration("decode", 1, index=2))
    assert registry.at(0.2).has_served_since(agent, 0.0) is None, "it may have been sent before"
    registry.at(1.0).register(registration("decode", 1, index=3, state="draining"))
    assert registry.at(1.0).has_served_since(agent, 0.0) is None, "what dies says so too"
    registry.at(2.0).register(registration("decode", 1, index=4))
    assert registry.at(2.0).has_served_since(agent, 0.0) is True
    assert registry.at(3.0).has_served_since(agent, 2.0) is None
    assert registry.at(2.0 + NODE_EXPIRY_S).has_served_since(agent, 2.0) is False, "silent"
    assert registry.at(60.0).has_served_since(agent, 0.0) is True, "it worked on, whenever it ended"
    registry.check_integrity()


def test_an_end_that_was_announced_in_time_is_no_death() -> None:
    registry, agent = TimedRegistry(), Incarnation(f"{1:016x}")
    registry.at(0.0).register(registration("decode", 1))
    registry.at(0.1).register(registration("decode", 1, index=2, state="draining"))
    assert not registry.at(0.2).is_leaving(agent), "its engine may have died just now"
    registry.at(2.0).register(registration("decode", 1, index=3, state="draining"))
    assert registry.at(2.0).is_leaving(agent)
    other = Incarnation(f"{2:016x}")
    registry.at(0.0).register(registration("decode", 2))
    assert not registry.at(3.0).is_leaving(other), "its pings may have stopped"
    registry.cordon(other)
    assert registry.at(3.0).is_leaving(other)


def test_the_place_of_an_agent_is_known_beyond_its_end() -> None:
    registry, host = TimedRegistry(), Place("a")
    registry.at(0.0).register(registration("prefill", 1, host_id="a", address="http://one:1"))
    registry.at(1.0).register(registration("decode", 2, host_id="a", address="http://one:2"))
    registry.at(1.0).register(registration("decode", 3, host_id="a", address="http://[2001:db8::1]:1"))
    registry.at(1.0).register(registration("decode", 4, host_id="b", address="http://one:3"))
    registry.at(1.0).register(registration("decode", 5, host_id="b", address="http://[one"))
    first, second, third, _, fifth = (Incarnation(f"{number:016x}") for number in range(1, 6))
    assert registry.at(1.0).agents_at(host, 1.0) == {first, second, third}
    assert registry.at(1.0).agents_at(Place("a", "one"), 1.0) == {first, second}
    assert registry.at(1.0).agents_at(host, 0.9) == {first}, "the others came later"
    assert registry.at(NODE_EXPIRY_S).agents_at(Place("a", "one"), 1.0) == {second}
    assert registry.place(first) == registry.place(second) == Place("a", "one")
    assert registry.place(third) == Place("a", "2001:db8::1")
    assert registry.place(fifth) == Place("b")
    assert registry.place(Incarnation("stranger")) == Place("")


def test_the_time_for_which_the_proxy_stood_still_is_no_agents_silence() -> None:
    """Its pings wait in the socket; whoever is asked first must not take them for lost."""
    registry = TimedRegistry()
    registry.at(0.0).register(registration("prefill", 1))
    registry.at(0.0).register(registration("decode", 2))
    for tick in range(4):  # until 1.5
        registry.at(tick / 2).check_pause()
    woke = 1.5 + 100.0
    assert len(registry.at(woke).snapshot().nodes) == 2, "before anything that has waited is read"
    registry.at(woke + 0.01).register(registration("prefill", 1, index=2))
    registry.at(woke + 0.02).check_pause()
    ticks = [woke + 0.02 + tick / 2 for tick in range(1, 8)]
    counts = {}
    for at in ticks:
        registry.at(at).check_pause()
        counts[round(at - woke, 2)] = [node.info.role for node in registry.at(at).snapshot().nodes]
    assert counts[1.52] == ["prefill", "decode"]
    assert counts[2.02] == ["prefill"], "silent for 1.5 s before, and for 2 s since"
    assert counts[3.52] == [], "nobody is kept for ever"
