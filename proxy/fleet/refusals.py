# SPDX-License-Identifier: Apache-2.0
"""Agents whose pings are refused: why, and which ones lately, for whoever looks after the fleet."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.proxy.wire.messages import Register

MAX_SHOWN = 64
MAX_ADDRESS_CHARS = 200
MEMORY_S = 60.0


class Refusal(enum.StrEnum):
    """Why a ping is refused; the words are shown to operators and to the agent."""

    ADDRESS = "its address or control address is outside --allow-address"
    PLAINTEXT = "its address is not https, which --agent-ca asks for"
    STALE = "a later ping of this incarnation was heard before"
    RETIRED = "this incarnation said bye, or another one took its address"
    FULL = "this proxy knows as many agents as it can"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedAgent:
    """Pings from one address that were refused for one reason: how many, and when the last one came."""

    address: str
    control: str
    role: str
    reason: Refusal
    count: int
    at: float


class RefusedAgents:
    """The latest refusals, in bounded memory whatever is sent."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[tuple[str, Refusal], RefusedAgent] = OrderedDict()

    def note(self, info: Register, reason: Refusal, now: float) -> None:
        """A ping was refused."""
        address = info.address[:MAX_ADDRESS_CHARS]
        before = self._by_kind.pop((address, reason), None)
        self._by_kind[address, reason] = RefusedAgent(
            address=address,
            control=info.control[:MAX_ADDRESS_CHARS],
            role=info.role,
            reason=reason,
            count=1 if before is None else before.count + 1,
            at=now,
        )
        if len(self._by_kind) > MAX_SHOWN:
            self._by_kind.popitem(last=False)

    def lately(self, now: float) -> tuple[RefusedAgent, ...]:
        """Those of the last `MEMORY_S` seconds, latest first."""
        return tuple(each for each in reversed(self._by_kind.values()) if now - each.at < MEMORY_S)
