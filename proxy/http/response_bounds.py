# SPDX-License-Identifier: Apache-2.0
"""What the responses of all servers together may hold of this process's memory."""

from __future__ import annotations

from typing import Protocol

from kvferry.common.memory_budget import MemoryBudget, largest
from kvferry.proxy.errors import ProxyError, TooManyResponses

MAX_RESPONSE_BYTES_HELD = 1024 * 1024 * 1024
"""Of all responses: bodies that are read as a whole, events without their end, token lines of streams."""


class HeldResponse(Protocol):
    """A response that is being read (`UpstreamConnection`)."""

    def fail(self, error: ProxyError) -> None:
        """End it, so that what it holds is freed."""


class ResponseBounds(MemoryBudget[HeldResponse]):
    """Beyond the limit the response that holds most is ended.

    So a server that sends much ends its own responses first, and those of others that send little go on.
    """

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES_HELD) -> None:
        super().__init__(max_bytes, largest, _end)


def _end(response: HeldResponse) -> None:
    response.fail(TooManyResponses("the proxy holds as much of servers' responses as it may"))
