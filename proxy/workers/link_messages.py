# SPDX-License-Identifier: Apache-2.0
"""What the workers of one proxy and its hub tell each other (`link`). `seq` ties answer to question."""

from __future__ import annotations

import msgspec

from kvferry.proxy.fleet.interface import Page, PageName
from kvferry.proxy.fleet.router import NoPair, Pair
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.wire.messages import Incarnation, Register
from kvferry.proxy.workers.reports import Report


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a worker: `config` is the proxy's, as JSON; `port` is where all workers listen."""

    config: bytes
    port: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Accept nothing new, let running requests finish for a while, and end."""


class Entered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker has slots for `choices` sequences at a pair, until it frees them."""

    seq: int
    pair: Pair
    choices: int


class NotEntered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """There is no pair to wait for."""

    seq: int
    why: NoPair


class TurnedAway(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Too many wait, or it waited too long."""

    seq: int
    message: str
    retry_after_s: int


class Unanswered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The hub failed at this `Enter` by a defect of its own, which is in its log."""

    seq: int


class Shown(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seq: int
    page: Page


class Lost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Which of the agents that a `Doubt` named are lost."""

    seq: int
    agents: frozenset[Incarnation]


class Collect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Report what you have counted."""

    seq: int


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The worker takes requests."""


class Enter(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A `fleet.AcquireRequest`; its prompt stays with the worker."""

    seq: int
    ask: RoutingRequest
    wait_s: float
    exclude: frozenset[Incarnation]
    must_match: Register | None


class Leave(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Whoever waited for this `Enter` is gone. If it was let in meanwhile, the worker frees what it got."""

    seq: int


class Free(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Slots are given back."""

    agent: Incarnation
    count: int


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A connection to the agent was refused."""

    agent: Incarnation


class Succeeded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The agent did what a leg asked of it."""

    agent: Incarnation


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The agent was lost, or silent for too long, or answered nonsense."""

    agent: Incarnation


class Spent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A client with limits took so much; the hub passes it on to the other workers. `key`: its digest."""

    key: bytes
    requests: int
    tokens: int


class Show(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seq: int
    name: PageName


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take an agent out of rotation, or put it back; answered by `Shown`."""

    seq: int
    agent: Incarnation
    drained: bool


class Doubt(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """These agents have been quiet for some time; answered by `Lost`."""

    seq: int
    agents: tuple[Register, ...]


class Reported(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seq: int
    report: Report


ToWorker = Begin | Stop | Entered | NotEntered | TurnedAway | Unanswered | Shown | Lost | Collect | Spent
ToHub = (
    Listening | Enter | Leave | Free | Refused | Succeeded | Failed | Show | Drain | Doubt | Reported | Spent
)
