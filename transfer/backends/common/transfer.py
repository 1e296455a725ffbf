# SPDX-License-Identifier: Apache-2.0
"""The outcome of a read: set once."""

from __future__ import annotations

from kvferry.transfer.engine import Status


class BaseTransfer:
    """Base of most backends' reads; see `transfer.engine.Transfer`.

    The backend implements `quiescent` and enforces `deadline`.
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
        """Fail, unless it has ended."""
        if self._status is Status.PENDING:
            self._status = Status.FAILED
            self.reason = reason

    def succeed(self) -> None:
        """Succeed, unless it has ended: every byte is in the pool."""
        if self._status is Status.PENDING:
            self._status = Status.DONE
