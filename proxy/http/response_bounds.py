# SPDX-License-Identifier: Apache-2.0
"""What the responses of all servers together may hold of this process's memory."""

from __future__ import annotations

from typing import Protocol

from kvferry.proxy.errors import ProxyError, TooManyResponses

MAX_RESPONSE_BYTES_HELD = 1024 * 1024 * 1024
"""Of all responses: bodies that are read as a whole, events without their end, token lines of streams."""


class HeldResponse(Protocol):
    """A response that is being read (`UpstreamConnection`)."""

    def fail(self, error: ProxyError) -> None:
        """End it, so that what it holds is freed."""


class ResponseBounds:
    """Counts what is held of responses. Beyond the limit the one that holds most is ended.

    So a server that sends much ends its own responses first, and those of others that send little go on.
    """

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES_HELD) -> None:
        self._room = max_bytes
        self.held: dict[HeldResponse, int] = {}
        """How many bytes by each response."""

    def hold(self, response: HeldResponse, size: int) -> None:
        """Record how many bytes a response holds by now; to be released."""
        self._room -= size - self.held.get(response, 0)
        self.held[response] = size
        while self._room < 0:
            largest = max(self.held, key=self.held.__getitem__)
            self.release(largest)
            largest.fail(TooManyResponses("the proxy holds as much of servers' responses as it may"))

    def release(self, response: HeldResponse) -> None:
        """Record that a response holds nothing any more. Idempotent."""
        self._room += self.held.pop(response, 0)
