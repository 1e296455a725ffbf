# SPDX-License-Identifier: Apache-2.0
"""A signal is acknowledged at once, and a second one ends the waiting."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from kvferry.common.stop import StopRequest


@pytest.mark.parametrize(
    ("number", "drain_s", "said", "again"),
    [
        (signal.SIGINT, 60.0, "3 s", "Ctrl-C again"),
        (signal.SIGINT, 0.5, "0.5 s", "Ctrl-C again"),
        (signal.SIGTERM, 60.0, "60 s", "a second signal"),
    ],
)
async def test_a_signal_is_acknowledged_at_once(
    number: signal.Signals, drain_s: float, said: str, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stop = StopRequest(drain_s)
    stop.on_signals()
    try:
        draining = asyncio.ensure_future(stop.drain(asyncio.sleep(3600.0)))
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.made.wait(), 10.0)
        assert caplog.messages == [f"stopping: what runs has {said} to finish; {again} stops at once"]
        os.kill(os.getpid(), number)
        assert not await asyncio.wait_for(draining, 10.0)
        assert caplog.messages[1:] == ["stopping at once"]
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(each)


async def test_what_is_asked_for_otherwise_is_not_logged_as_a_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    StopRequest(1.0).make()
    assert not caplog.messages
