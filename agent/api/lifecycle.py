# SPDX-License-Identifier: Apache-2.0
"""Whether this agent takes requests: starting, ready, draining."""

from __future__ import annotations

import logging
import threading

from kvferry.common.state_machine import transition, transitions
from kvferry.proxy.wire.registration import NodeState

log = logging.getLogger(__name__)

_EDGES: dict[NodeState, tuple[NodeState, ...]] = {"starting": ("ready", "draining"), "ready": ("draining",)}
LIFECYCLE_TRANSITIONS = transitions(_EDGES)


class Lifecycle:
    """The agent's state. `changed` is set by every transition; its only waiter clears it."""

    def __init__(self) -> None:
        self.state: NodeState = "starting"
        self.changed = threading.Event()

    def transition(self, to: NodeState) -> None:
        """Move to another state. Raises `IllegalTransition`."""
        origin, self.state = self.state, transition("agent", LIFECYCLE_TRANSITIONS, self.state, to)
        log.info("%s -> %s", origin, to)
        self.changed.set()
