# SPDX-License-Identifier: Apache-2.0
"""The channel between the supervisor and a worker."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.workers import messages
from kvferry.proxy.workers.messages import (
    ChannelClosed,
    Collect,
    ProcessChannel,
    Registration,
    Start,
    ToSupervisor,
    ToWorker,
)
from tests.unit.proxy.builders import registration


async def open_ends() -> tuple[ProcessChannel[Any, Any], ProcessChannel[Any, Any]]:
    ours, theirs = socket.socketpair()
    return await ProcessChannel.open(ours, ToSupervisor), await ProcessChannel.open(theirs, ToWorker)


async def test_settings_and_registrations_arrive_as_they_were_sent() -> None:
    ours, theirs = await open_ends()
    config = ProxyConfig(
        port=5, workers=3, decode_policy="prefix_aware", api_keys=Path("/keys"), prefill=("http://a:1,dialect=sglang",)
    )  # fmt: skip
    agent = Registration(info=registration("decode", 1, refusals={"a": "b"}), heard_at=1.5)
    start = Start(config=config, port=5, agents=(agent,), cordoned=(agent.info.incarnation,))  # type: ignore[arg-type]
    ours.send(start)
    assert await theirs.receive() == start
    for each in (ours, theirs):
        each.close()


async def test_the_end_of_the_other_process_is_seen() -> None:
    ours, theirs = await open_ends()
    theirs.close()
    with pytest.raises(ChannelClosed, match=r"^it closed the channel$"):
        await ours.receive()
    ours.close()


async def test_an_end_within_a_message_is_said_to_be_one() -> None:
    ours, theirs = socket.socketpair()
    channel: ProcessChannel[Any, Any] = await ProcessChannel.open(ours, ToSupervisor)
    theirs.send(b"\x00\x00\x00\x09abc")
    theirs.close()
    with pytest.raises(ChannelClosed, match=r"^it closed the channel within a message$"):
        await channel.receive()
    channel.close()


@pytest.mark.parametrize("sent", [b"\x00\x00\x00\x01\xc1", b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x01"])
async def test_what_is_no_message_ends_a_channel(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel: ProcessChannel[Any, Any] = await ProcessChannel.open(ours, ToSupervisor)
    with theirs:
        theirs.send(sent)
        with pytest.raises(ChannelClosed, match=r"not a message|a frame of"):
            await channel.receive()
    channel.close()


async def test_a_peer_that_does_not_keep_up_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNSENT_BYTES", 100_000)
    ours, theirs = socket.socketpair()
    channel: ProcessChannel[Any, Any] = await ProcessChannel.open(ours, ToSupervisor)
    with theirs:
        for _ in range(1000):
            channel.send(Registration(info=registration("decode", 1, model="m" * 10_000), heard_at=0.0))
        async with asyncio.timeout(20):
            with pytest.raises(ChannelClosed):
                await channel.receive()
        channel.send(Collect(1))
