# SPDX-License-Identifier: Apache-2.0
"""Whether this agent takes requests: starting, ready, draining."""

from __future__ import annotations

import asyncio
import logging

from kvferry.proxy.wire.messages import NodeState

log = logging.getLogger(__name__)

_NEXT: dict[NodeState, tuple[NodeState, ...]] = {
    "starting": ("ready", "draining"),
    "ready": ("draining",),
    "draining": (),
}


class IllegalTransition(RuntimeError):
    """The agent was asked to go where its state machine has no edge."""


class Lifecycle:
    """The agent's state. Whoever must act on a change waits for `changed` and clears it."""

    def __init__(self) -> None:
        self.state: NodeState = "starting"
        self.changed = asyncio.Event()

    def transition(self, to: NodeState) -> None:
        """Move on. Raises `IllegalTransition` where the table has no such edge."""
        if to not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.state} cannot become {to}")
        log.info("%s -> %s", self.state, to)
        self.state = to
        self.changed.set()
