# SPDX-License-Identifier: Apache-2.0
"""The registration messages survive the trip, and nothing else does."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.wire import messages as wire
from tests.unit.proxy.builders import registration


@pytest.mark.parametrize("message", [registration("decode", 1), wire.Bye(incarnation="i")])
def test_agents_messages_make_the_round_trip(message: wire.AgentMessage) -> None:
    assert wire.decode_agent_message(wire.encode(message)) == message


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
    [{"v": 1}, {"role": "P"}, {"extra": 1}, {"load": {}}, {"index": "1"}, {"type": "hello"}, {"type": []}],
)
def test_a_wrong_field_is_a_bad_frame(change: dict[str, object]) -> None:
    body = msgpack.unpackb(wire.encode(registration("decode", 1))) | change
    with pytest.raises(wire.BadFrame):
        wire.decode_agent_message(msgpack.packb(body))


def test_deep_nesting_is_a_bad_frame() -> None:
    with pytest.raises(wire.BadFrame):
        wire.decode_agent_message(b"\x91" * 60000)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_bad_frame(frame: bytes) -> None:
    for decode in (wire.decode_agent_message, wire.decode_proxy_message):
        with pytest.raises(wire.BadFrame):
            decode(frame)
