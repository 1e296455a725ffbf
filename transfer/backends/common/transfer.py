# SPDX-License-Identifier: Apache-2.0
"""How a read ends: once, by its bytes or by what came first."""

from __future__ import annotations

from kvferry.transfer.engine import Status


class BaseTransfer:
    """What most backends' reads have in common; see `transfer.engine.Transfer`.

    When one is `quiescent` is for the backend to say, and `deadline` for it to keep.
    """

    def __init__(self, nbytes: int, descriptors: int, deadline: float) -> None:
        self.reason: str | None = None
        self.nbytes = nbytes
        self.descriptors = descriptors
        self.deadline = deadline
        self._status = Status.PENDING

    def poll(self) -> Status:
        return self._status

    def cancel(self) -> None:
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """End without the bytes, unless it has ended."""
        if self._status is Status.PENDING:
            self._status = Status.FAILED
            self.reason = reason

    def succeed(self) -> None:
        """End with every byte in the pool, unless it has ended."""
        if self._status is Status.PENDING:
            self._status = Status.DONE
