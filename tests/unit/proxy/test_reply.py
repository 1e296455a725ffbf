# SPDX-License-Identifier: Apache-2.0
"""How a streamed answer is accounted for, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from proxy import sse
from proxy.history import History
from proxy.ids import RequestId
from proxy.metrics import Metrics
from proxy.record import Record
from proxy.reply import EventStream

EVENT = b'data: {"choices": [{"index": 0, "text": "7"}]}\n\n'


async def later(*items: bytes) -> AsyncGenerator[bytes, None]:
    for item in items:
        yield item


@pytest.mark.parametrize(("last", "status"), [(EVENT, "499"), (EVENT + sse.DONE, "200")])
async def test_a_client_is_served_once_it_has_done(last: bytes, status: str) -> None:
    """Clients hang up on `[DONE]` without waiting for the end of the body: that is not leaving early."""
    metrics = Metrics()
    record = Record("completions", RequestId("r"), metrics, History())
    deadline = asyncio.get_running_loop().time() + 10
    with pytest.raises(asyncio.CancelledError):
        async with EventStream(EVENT, later(last, EVENT), record, deadline) as events:
            async for item in events:
                if item is last:
                    raise asyncio.CancelledError
    line = f'kvferry_requests_total{{endpoint="completions",status="{status}"}} 1.0'
    assert line in metrics.exposition().decode()
