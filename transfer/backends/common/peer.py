# SPDX-License-Identifier: Apache-2.0
"""One producer rank as a reader sees it that greets before it reads: greeted, met, and in the end lost."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from kvferry.transfer.backends.common.handshake import Visit, VisitState
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.engine import PeerUnreachable


class PeerState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


_TABLE: Mapping[PeerState, frozenset[PeerState]] = MappingProxyType(
    {
        PeerState.GREETING: frozenset({PeerState.READY, PeerState.LOST}),
        PeerState.READY: frozenset({PeerState.LOST}),
        PeerState.LOST: frozenset(),
    }
)

Read = TypeVar("Read", bound=BaseTransfer)


class GreetedPeer(ABC, Generic[Read]):
    """See `transfer.engine.Peer`. It lives no longer than its `visit`, and its `transfers` fail with it."""

    def __init__(self, backend: str, visit: Visit) -> None:
        self.state = PeerState.GREETING
        self.transfers: list[Read] = []
        """Reads that are not quiescent, and maybe some that are."""
        self._backend = backend
        self._visit = visit
        self._error = ""

    def poll(self) -> bool:
        if self.state is PeerState.LOST:
            raise PeerUnreachable(f"{self._backend}: {self._error}")
        return self.state is PeerState.READY

    def close(self) -> None:
        self._lose("closed")

    def progress(self, now: float) -> None:
        """Follow the connection."""
        self._visit.expire(now)
        if self._visit.state is VisitState.LOST:
            self._lose(self._visit.error)
        elif self._visit.state is VisitState.WELCOME and self.state is PeerState.GREETING:
            try:
                self._meet()
            except PeerUnreachable as error:
                self._lose(str(error))
            else:
                self._transition(PeerState.READY)

    def next_deadline(self) -> float | None:
        return self._visit.next_deadline()

    @abstractmethod
    def _meet(self) -> None:
        """Make what reads need, as the peer has answered. Raises `PeerUnreachable` with the reason."""

    def _lose(self, why: str) -> None:
        if self.state is PeerState.LOST:
            return
        self._transition(PeerState.LOST)
        self._error = why
        self._visit.close()
        for transfer in self.transfers:
            transfer.fail("peer_lost")

    def _transition(self, to: PeerState) -> None:
        if to not in _TABLE[self.state]:
            raise AssertionError(f"peer {self.state.value} → {to.value}")
        self.state = to
