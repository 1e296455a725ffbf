# SPDX-License-Identifier: Apache-2.0
"""The two ids of the transfer plane. An agent makes its incarnation when it starts (`agent.ids`)."""

from __future__ import annotations

import secrets
from typing import NewType

TransferId = NewType("TransferId", str)
"""One attempt to hand a prompt's KV over: 128 random bits in hex, never reused."""

Incarnation = NewType("Incarnation", str)
"""One life of an agent: 64 random bits in hex. Another value at the same address is another agent."""


class DuplicateTransfer(ValueError):
    """The transfer id is in use, or has been."""


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_hex(16))
