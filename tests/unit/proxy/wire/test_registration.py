# SPDX-License-Identifier: Apache-2.0
"""The registration messages survive the trip, and nothing else does."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.wire import registration as wire
from tests.unit.proxy.builders import registration


@pytest.mark.parametrize("message", [registration("decode", 1), wire.Bye(incarnation="i")])
def test_agents_messages_make_the_round_trip(message: wire.AgentMessage) -> None:
    assert wire.decode_agent_message(wire.encode(message)) == message


def test_work_is_optional() -> None:
    body = msgpack.unpackb(wire.encode(registration("decode", 1)))
    del body["work"]
    message = wire.decode_agent_message(msgpack.packb(body))
    assert isinstance(message, wire.Register) and message.work is None


@pytest.mark.parametrize(
    "work",
    [
        {"pull_bytes": -1},
        {"pull_bytes": 2**63},
        {"pulls": [0] * (len(wire.PULL_BUCKETS) + 2)},
        {"failures": {str(number): 1 for number in range(wire.MAX_REASONS + 1)}},
        {"links": [{"producer": "p"}] * (wire.MAX_LINKS + 1)},
        {"links": [{"producer": "p", "seconds": float("nan")}]},
        {"links": [{"producer": "p", "backend": "x" * (wire.MAX_TEXT_CHARS + 1)}]},
    ],
)
def test_work_beyond_its_bounds_is_a_bad_frame(work: dict[str, object]) -> None:
    body = msgpack.unpackb(wire.encode(registration("decode", 1))) | {"work": work}
    with pytest.raises(wire.BadFrame, match="work"):
        wire.decode_agent_message(msgpack.packb(body))


def test_max_running_is_optional() -> None:
    """Agents from before the field existed stay welcome."""
    body = msgpack.unpackb(wire.encode(registration("decode", 1)))
    del body["load"]["max_running"]
    message = wire.decode_agent_message(msgpack.packb(body))
    assert isinstance(message, wire.Register) and message.load.max_running is None


@pytest.mark.parametrize("message", [wire.Ack(proxy="p", index=3), wire.Rejected(reason="r")])
def test_proxies_messages_make_the_round_trip(message: wire.ProxyMessage) -> None:
    assert wire.decode_proxy_message(wire.encode(message)) == message


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(wire.BadFrame, match="exceeds"):
        wire.decode_agent_message(b"\x00" * (wire.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"v": "1"}, {"role": "P"}, {"load": {}}, {"index": "1"}, {"type": "hello"}, {"type": []}],
)
def test_a_wrong_field_is_a_bad_frame(change: dict[str, object]) -> None:
    body = msgpack.unpackb(wire.encode(registration("decode", 1))) | change
    with pytest.raises(wire.BadFrame):
        wire.decode_agent_message(msgpack.packb(body))


def test_fields_that_a_newer_agent_adds_are_ignored() -> None:
    """An agent that says more than this proxy knows must stay in its rotation."""
    link = wire.LinkUse(producer=wire.Incarnation("p"), pulls=1)
    work = wire.WorkReport(recomputes=1, links=(link,))
    capacity = wire.Capacity(prompts=1, slots=2)
    said = registration("decode", 1, control_versions=(2, 4), name="d", work=work, capacity=capacity)
    body = msgpack.unpackb(wire.encode(said))
    links = [each | {"news": 3} for each in body["work"]["links"]]
    body |= {
        "news": 1,
        "load": body["load"] | {"news": [2]},
        "work": body["work"] | {"news": 4, "links": links},
        "capacity": body["capacity"] | {"news": 5},
    }
    assert wire.decode_agent_message(msgpack.packb(body)) == said


@pytest.mark.parametrize("change", [{"prefill_s": -1.0}, {"prefill_s": float("nan")}, {"slots": -1}])
def test_a_capacity_that_cannot_be_is_a_bad_frame(change: dict[str, float]) -> None:
    said = registration("decode", 1, capacity=wire.Capacity())
    body = msgpack.unpackb(wire.encode(said))
    with pytest.raises(wire.BadFrame):
        wire.decode_agent_message(msgpack.packb(body | {"capacity": body["capacity"] | change}))


def test_another_version_is_told_apart_from_nonsense() -> None:
    body = {"v": 9, "type": "register", "role": "decode", "address": "http://h:1", "control": "", "news": 1}
    with pytest.raises(wire.OtherVersion) as other:
        wire.decode_agent_message(msgpack.packb(body))
    assert (other.value.info.address, other.value.info.v) == ("http://h:1", 9)


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((2, 3), (2, 2), 2),
        ((2, 3), (3, 5), 3),
        ((2, 3), (1, 9), 3),
        ((2, 3), (4, 5), None),
        ((2, 3), (3, 2), None),
    ],
)
def test_the_highest_common_version_is_spoken(
    ours: wire.Versions, theirs: wire.Versions, common: int | None
) -> None:
    assert wire.common_version(ours, theirs) == wire.common_version(theirs, ours) == common


def test_deep_nesting_is_a_bad_frame() -> None:
    with pytest.raises(wire.BadFrame):
        wire.decode_agent_message(b"\x91" * 60000)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_bad_frame(frame: bytes) -> None:
    for decode in (wire.decode_agent_message, wire.decode_proxy_message):
        with pytest.raises(wire.BadFrame):
            decode(frame)
