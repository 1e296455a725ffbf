# SPDX-License-Identifier: Apache-2.0
"""A server's membership of its proxies' fleets, from its first ping to its bye.

| state | pings say | it ends with |
|---|---|---|
| starting | starting | `become_ready`, once the server takes requests |
| ready | ready | `start_draining`, when it is to end |
| draining | draining | no proxy has a request for it, or sends it one any more |
| released | draining | the end of `run`, which says bye |
| left | – | – |

Own agents, servers of other engines with our plane inside, and those that are only attached all follow it.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Collection, Sequence

from kvferry.agent.announce.ping import Announcer
from kvferry.common.curve import ClusterKey
from kvferry.common.state_machine import transition, transitions
from kvferry.proxy.wire.registration import PING_INTERVAL_S, NodeState, Register

log = logging.getLogger(__name__)


class MembershipState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RELEASED = "released"
    LEFT = "left"


MEMBERSHIP_TRANSITIONS = transitions(
    {
        MembershipState.STARTING: {
            MembershipState.READY,
            MembershipState.DRAINING,
            MembershipState.LEFT,
        },
        MembershipState.READY: {MembershipState.DRAINING, MembershipState.LEFT},
        MembershipState.DRAINING: {MembershipState.RELEASED, MembershipState.LEFT},
        MembershipState.RELEASED: {MembershipState.LEFT},
    }
)
_ANNOUNCED: dict[MembershipState, NodeState] = {
    MembershipState.STARTING: "starting",
    MembershipState.READY: "ready",
    MembershipState.DRAINING: "draining",
    MembershipState.RELEASED: "draining",
    MembershipState.LEFT: "draining",
}
Describe = Callable[[int, NodeState], Register | None]


class Membership:
    """Announces one server to its proxies while `run` runs.

    Args:
        proxies: HOST:PORT, or dns:NAME[:PORT] (`Announcer`).
        describe: Returns the registration with a given ping counter and state; None for no ping this time.
            Called in the thread that pings, as `is_ready` is.
        key: When given, only proxies with the same key are announced to.
        asked_to_drain: Called, on the event loop that runs `run`, when an operator has asked a proxy to let
            this server drain and end; maybe more than once.
        is_ready: Asked before each ping of a server that is starting; for those that cannot call
            `become_ready`.
    """

    def __init__(
        self,
        proxies: Sequence[str],
        describe: Describe,
        *,
        key: ClusterKey | None = None,
        asked_to_drain: Callable[[], None] = lambda: None,
        is_ready: Callable[[], bool] = lambda: False,
        interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self._describe = describe
        self._is_ready = is_ready
        self._state = MembershipState.STARTING
        self._lock = threading.Lock()
        """Held while the state changes: the thread that pings may find the server ready."""
        self._changed = threading.Event()
        self._announcer = Announcer(
            proxies, self._changed, self._registration, interval_s, key, drain=asked_to_drain
        )

    @property
    def state(self) -> NodeState:
        """What pings say."""
        return _ANNOUNCED[self._state]

    async def run(self) -> None:
        """Ping until cancelled, then say bye. No other ping follows."""
        try:
            await self._announcer.run()
        finally:
            self.withdraw()
            self._announcer.close()
            self._become(MembershipState.LEFT)

    def ping(self) -> None:
        """Ping at once: there is news."""
        self._changed.set()

    def become_ready(self) -> None:
        """Announce that requests may come, unless the server is to end already."""
        self._become(MembershipState.READY, only_from={MembershipState.STARTING})

    def start_draining(self) -> None:
        """Announce that nothing new may come. Idempotent."""
        self._become(MembershipState.DRAINING, only_from={MembershipState.STARTING, MembershipState.READY})

    async def wait_released(self) -> None:
        """Wait until every proxy knows that the server is draining and has no request left for it.

        To be called after `start_draining`, while `run` runs.
        """
        await self._announcer.wait_released()
        self._become(MembershipState.RELEASED, only_from={MembershipState.DRAINING})

    def withdraw(self) -> None:
        """Say bye for what is announced. A server that comes back must be another incarnation."""
        self._announcer.send_bye()

    def _registration(self, index: int) -> Register | None:
        if self._state is MembershipState.STARTING and self._is_ready():
            self.become_ready()
        return self._describe(index, self.state)

    def _become(self, to: MembershipState, only_from: Collection[MembershipState] | None = None) -> None:
        with self._lock:
            origin = self._state
            if only_from is not None and origin not in only_from:
                return
            self._state = transition("membership", MEMBERSHIP_TRANSITIONS, origin, to)
        log.info("%s -> %s", origin.value, to.value)
        self._changed.set()
