# SPDX-License-Identifier: Apache-2.0
"""PingListener: pings in, acks out, and whatever else a network may send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.proxy.discovery.ping_listener import PingListener
from kvferry.proxy.fleet.address_rules import RejectReason
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire import registration as wire
from tests.unit.proxy.builders import TimedRegistry, registration

PING = wire.encode(registration("decode", 1))
ATOM_PING = {
    "type": "register", "role": "P", "index": "3", "request_address": "http://10.0.0.9:8000/v1/completions",
    "handshake_port": 6301, "dp_size": 1, "tp_size": 8, "transfer_mode": "read",
}  # fmt: skip
MORIIO_PING = {
    "type": "D", "http_address": "10.0.0.8:8000", "zmq_address": "host:10.0.0.8,handshake:6301,notify:61005",
    "dp_size": 8, "tp_size": 1, "transfer_mode": "WRITE",
}  # fmt: skip


class Setting:
    """A discovery socket with its registry and counters."""

    def __init__(self) -> None:
        self.registry = TimedRegistry()
        self.metrics = Metrics()
        self.in_flight: dict[str, int] = {}
        self.discovery = PingListener(
            self.registry,
            self.metrics,
            "proxy-1",
            in_flight=lambda agent: self.in_flight.get(agent, 0),
        )

    def handle(self, *frames: bytes) -> bytes | None:
        return self.discovery.handle([b"peer", *frames])

    @property
    def addresses(self) -> list[str]:
        return [node.info.address for node in self.registry.snapshot().nodes]

    @property
    def bad(self) -> float:
        rows = self.metrics.exposition().decode().splitlines()
        return float(next(row for row in rows if row.startswith("kvferry_proxy_bad_pings_total")).split()[1])


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    yield made
    made.discovery.close()


async def test_a_ping_is_acked_with_its_index_and_what_is_in_flight_there(setting: Setting) -> None:
    setting.in_flight[registration("decode", 1).incarnation] = 3
    answer = setting.handle(PING)
    assert answer is not None
    assert wire.decode_proxy_message(answer) == wire.Ack(proxy="proxy-1", index=1, in_flight=3)


async def test_an_agent_of_another_version_is_rejected_by_name_and_shown(setting: Setting) -> None:
    body = msgpack.unpackb(PING) | {"v": 9}
    answer = setting.handle(msgpack.packb(body))
    assert answer is not None
    assert wire.decode_proxy_message(answer) == wire.Rejected(reason=RejectReason.VERSION.value)
    [rejected] = setting.registry.rejected_agents()
    assert (rejected.address, rejected.reason) == (body["address"], RejectReason.VERSION)
    assert not setting.addresses and not setting.bad


async def test_acks_ask_an_agent_to_drain_that_is_to_end(setting: Setting) -> None:
    agent = registration("decode", 1)
    for is_asked in (False, True):
        answer = setting.handle(wire.encode(agent))
        assert answer is not None
        ack = wire.decode_proxy_message(answer)
        assert isinstance(ack, wire.Ack) and ack.drain is is_asked
        assert setting.registry.drain(agent.incarnation)


async def test_a_refusal_is_answered_with_its_reason(setting: Setting) -> None:
    setting.handle(PING)
    setting.handle(wire.encode(wire.Bye(incarnation=registration("decode", 1).incarnation)))
    answer = setting.handle(PING)
    assert answer is not None
    assert isinstance(wire.decode_proxy_message(answer), wire.Rejected)


@pytest.mark.parametrize(
    "address",
    ["", "10.0.0.1:8000", "ftp://h:1", "http://h", "http://:80", "http://h:1/v1", "http://u@h:1", "http://h:99999",
     "http://[::1", "http://h:1?q", "http://gpu..7:1", f"http://{'g' * 64}:1", "http://gpu-\u4e03:1",
     "http://a\0b:1", "http://a b:1", "http://[::z]:1", f"http://{'g.' * 127}g:1", f"http://h:1{'/' * 2000}"],
)  # fmt: skip
async def test_an_address_that_nobody_can_dial_is_a_bad_ping(setting: Setting, address: str) -> None:
    assert setting.handle(wire.encode(registration("decode", 1, address=address))) is None
    assert setting.bad == 1
    assert not setting.addresses


@pytest.mark.parametrize(
    "control", ["", "10.0.0.1:6301", "tcp://:1", "tcp://gpu..7:1", "http://h:1", "tcp://a\0b:1"]
)
async def test_neither_may_a_control_address_be_one(setting: Setting, control: str) -> None:
    """Decode agents would dial it for every request."""
    assert setting.handle(wire.encode(registration("decode", 1, control=control))) is None
    assert setting.bad == 1
    starting = registration("decode", 1, control="tcp://h:0", state="starting")
    assert setting.handle(wire.encode(starting)) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 1025},
        {"transfers": ("t",) * 17},
        {"geometry": {str(at): "" for at in range(65)}},
        {"refusals": {str(at): "" for at in range(65)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_pages_repeat_is_bounded(setting: Setting, fields: dict[str, Any]) -> None:
    assert setting.handle(wire.encode(registration("decode", 1, **fields))) is None
    assert setting.bad == 1


async def test_a_refused_ping_is_counted_by_its_reason(setting: Setting) -> None:
    setting.handle(wire.encode(registration("decode", 1, index=9)))
    setting.handle(wire.encode(registration("decode", 1, index=8)))
    assert 'kvferry_proxy_rejected_pings_total{reason="stale"} 1.0' in setting.metrics.exposition().decode()
    assert setting.bad == 0


async def test_an_atom_engine_that_restarts_may_count_from_the_start(setting: Setting) -> None:
    for index in ("7", "0"):
        setting.handle(msgpack.packb(ATOM_PING | {"index": index}))
    assert not setting.registry.rejected_agents()


@pytest.mark.parametrize("address", ["http://host.example:8000", "http://[2001:db8::1]:8000", "https://h:1/"])
async def test_names_and_ipv6_addresses_are_fine(setting: Setting, address: str) -> None:
    """X9."""
    setting.handle(wire.encode(registration("decode", 1, address=address)))
    assert setting.addresses == [address]


@pytest.mark.parametrize(
    ("ping", "address", "dialect", "role", "expiry"),
    [
        (ATOM_PING, "http://10.0.0.9:8000", "atom", "prefill", 17.5),
        (MORIIO_PING, "http://10.0.0.8:8000", "vllm-moriio", "decode", 10.5),
    ],
)
async def test_other_engines_pings_are_listed(
    setting: Setting, ping: dict[str, Any], address: str, dialect: str, role: str, expiry: float
) -> None:
    assert setting.handle(msgpack.packb(ping)) is None, "they read no answers"
    [node] = setting.registry.snapshot().nodes
    assert (node.info.address, node.info.dialect, node.info.role) == (address, dialect, role)
    assert setting.bad == 0
    setting.registry.time.now = expiry
    assert not setting.addresses


@pytest.mark.parametrize("ping", [ATOM_PING, MORIIO_PING])
@pytest.mark.parametrize(
    "change", [{"dp_size": "x"}, {"role": 3, "zmq_address": 3}, {"transfer_mode": "push"}]
)
async def test_other_engines_pings_are_checked_too(
    setting: Setting, ping: dict[str, Any], change: dict[str, Any]
) -> None:
    """X3: a transfer mode that nobody knows is a bad ping and not the end of discovery."""
    setting.handle(msgpack.packb(ping | change))
    assert setting.bad == 1


@pytest.mark.parametrize("frames", [[], [b""], [PING, b""], [b"", PING], [msgpack.packb([1])]])
async def test_other_shapes_of_message_are_counted_and_dropped(setting: Setting, frames: list[bytes]) -> None:
    assert setting.handle(*frames) is None
    assert setting.bad == 1


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KNOWN = [msgpack.unpackb(PING), ATOM_PING, MORIIO_PING, {"v": 1, "type": "bye", "incarnation": "x"}]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    frame=st.binary(max_size=64)
    | VALUES.map(msgpack.packb)
    | st.builds(
        lambda body, key, value: msgpack.packb({**body, key: value}),
        st.sampled_from(KNOWN),
        st.sampled_from(sorted({key for body in KNOWN for key in body})),
        VALUES,
    )
)
async def test_no_frame_can_raise(setting: Setting, frame: bytes) -> None:
    """X3: whatever it is, it is a message or it is counted."""
    setting.handle(frame)
    setting.registry.check_integrity()


@asynccontextmanager
async def serving(setting: Setting) -> AsyncIterator[zmq.asyncio.Socket]:
    port = setting.discovery.bind("127.0.0.1", 0)
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"tcp://127.0.0.1:{port}")
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(setting.discovery.run())
        try:
            yield peer
            assert not listening.done()
        finally:
            listening.cancel()
            peer.close()
            context.term()


async def test_the_listener_outlives_garbage_over_a_real_socket(setting: Setting) -> None:
    """Malformed frames: counted, dropped, the listener lives."""
    async with serving(setting) as peer:
        for frames in ([b""], [b"\xc1"], [b"x"] * 50, [b"", b""], [msgpack.packb({"type": "register"})]):
            await peer.send_multipart(frames)
        await peer.send(PING)
        answer = await asyncio.wait_for(peer.recv(), 20)
        assert isinstance(wire.decode_proxy_message(answer), wire.Ack)
        assert setting.bad == 5


async def test_the_listener_outlives_an_index_that_is_far_too_long(setting: Setting) -> None:
    """Python makes no number of more than 4,300 digits. Nothing is read from an ATOM ping's index."""
    async with serving(setting) as peer:
        await peer.send(msgpack.packb(ATOM_PING | {"index": "9" * 5000}))
        await peer.send(PING)
        await asyncio.wait_for(peer.recv(), 20)
        assert len(setting.addresses) == 2 and setting.bad == 0


async def test_the_listener_outlives_a_defect_in_reading_a_frame(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: one frame is lost, and counted."""
    taking = setting.registry.register
    frames = iter((ZeroDivisionError, None))

    def failing_once(info: wire.Register, *, reads_acks: bool) -> RejectReason | None:
        if (error := next(frames)) is not None:
            raise error
        return taking(info)

    monkeypatch.setattr(setting.registry, "register", failing_once)
    async with serving(setting) as peer:
        await peer.send(PING)
        await peer.send(PING)
        await asyncio.wait_for(peer.recv(), 20)
        assert setting.bad == 1


async def test_the_listener_outlives_a_frame_that_is_far_too_large(setting: Setting) -> None:
    async with serving(setting) as peer:
        await peer.send(b"x" * (1 << 20))
        async with asyncio.timeout(10):
            answered = False
            while not answered:  # libzmq has closed the connection, and makes a new one
                await peer.send(PING)
                answered = bool(await peer.poll(100))


async def test_the_listener_outlives_a_peer_that_reads_no_acks(setting: Setting) -> None:
    async with serving(setting) as peer:
        peer.setsockopt(zmq.RCVHWM, 1)
        for _ in range(3000):
            await peer.send(PING)
        other = peer.context.socket(zmq.DEALER)
        other.setsockopt(zmq.LINGER, 0)
        other.connect(peer.getsockopt_string(zmq.LAST_ENDPOINT))
        await other.send(PING)
        await asyncio.wait_for(other.recv(), 20)
        other.close()


async def test_a_taken_port_is_an_os_error(setting: Setting) -> None:
    port = setting.discovery.bind("127.0.0.1", 0)
    second = Setting()
    with pytest.raises(OSError, match="discovery"):
        second.discovery.bind("127.0.0.1", port)
    second.discovery.close()
