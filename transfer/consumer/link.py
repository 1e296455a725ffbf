# SPDX-License-Identifier: Apache-2.0
"""Our side of one pair of agents: a control connection, and our ranks' connections to the producer's.

There is one link per producer, however many transfers want it at first contact (R30). It is never
repaired: once it is lost, or a read over it broke, the next transfer makes a new one.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import ControlClient
from kvferry.transfer.net import resolve
from kvferry.transfer.plane import PlaneConfig, Remote
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import Connect
from kvferry.transfer.state_machine import transition, transitions

HANDSHAKE_S = 5.0
ANSWER_S = 2.0
"""How long the producer may take to answer, on top of what a request lets it wait."""

_log = logging.getLogger(__name__)


class LinkState(enum.Enum):
    GREETING = "greeting"
    """We dial; then `hello` is out."""
    CONNECTING = "connecting"
    """The producer agreed; our ranks are connecting to its ranks."""
    READY = "ready"
    LOST = "lost"


LINK_TRANSITIONS = transitions(
    {
        LinkState.GREETING: {LinkState.CONNECTING, LinkState.LOST},
        LinkState.CONNECTING: {LinkState.READY, LinkState.GREETING, LinkState.LOST},
        LinkState.READY: {LinkState.LOST},
    }
)


@dataclass(frozen=True, slots=True)
class Source:
    """A life of a producer, and where its control channel is said to be.

    Whoever asks for a transfer names both. We do not hold what we learn at one address against the same life
    at another: one wrong request would cost the right ones their producer.
    """

    engine_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


def source_of(remote: Remote) -> Source:
    """Who is to be asked for a prompt's KV."""
    return Source(remote.engine_id, remote.host, remote.port)


class Link:
    """One producer as seen by a consumer.

    `on_ready` is called once if the handshake succeeds; `on_lost` once with a stable reason and a detail,
    unless `close` came first.
    """

    def __init__(
        self,
        number: int,
        source: Source,
        config: PlaneConfig,
        ranks: RankGroup,
        *,
        on_ready: Callable[[Link], None],
        on_lost: Callable[[Link, str, str], None],
    ) -> None:
        self.number = number
        self.source = source
        self.state = LinkState.GREETING
        self.transfer = ""
        self.tp_size = 0
        self.num_blocks = 0
        self.refusal = ""
        """Why these two agents can never work together, whoever asks again; empty as far as is known."""
        self._config = config
        self._ranks = ranks
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._client = ControlClient(self._broken, config.key)
        self._dialling: asyncio.Task[None] | None = None
        self._offer: tuple[str, ...] = ranks.transfers
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Link {self.number} to {self.source} {self.state.value}>"

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Begin the handshake."""
        self._deadline = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self.lose, "unreachable", "no handshake within the deadline"
        )
        self._dialling = asyncio.create_task(self._dial(context))

    async def _dial(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Resolve the host here: ZMQ would do it on the I/O thread that all links share."""
        host, port = self.source.host, self.source.port
        try:
            self._client.start(context, await resolve(host), port)
        except (OSError, ValueError, zmq.ZMQError) as error:
            self.lose("unreachable", f"cannot dial {host}:{port}: {error}")
            return
        self._greet()

    def close(self) -> None:
        """Let go of the producer; requests that wait are told that no answer comes. Idempotent."""
        if self.state is LinkState.LOST:
            return
        self._transition(LinkState.LOST)
        self._stop_deadline()
        if self._dialling is not None:
            self._dialling.cancel()
        self._ranks.close_link(self.number, self.transfer)
        self._client.close()

    def lose(self, reason: str, detail: str) -> None:
        """Give the producer up, and say why."""
        if self.state is LinkState.LOST:
            return
        _log.info("lost %r: %s: %s", self, reason, detail)
        self.close()
        self._on_lost(self, reason, detail)

    # Requests. Each calls `on_answer` once: with the answer, or None if there is none.

    def open(
        self, transfer_id: str, have: int, wait_s: float, on_answer: Callable[[wire.Answer | None], None]
    ) -> None:
        request = wire.Open(
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            transfer_id=transfer_id,
            consumer=self._config.incarnation,
            have=have,
            wait_s=wait_s,
        )
        self._request(request, wait_s + ANSWER_S, on_answer)

    def renew(self, transfer_ids: Sequence[str], on_answer: Callable[[wire.Answer | None], None]) -> None:
        for first in range(0, len(transfer_ids), wire.MAX_IDS):
            request = wire.Renew(
                seq=self._client.next_seq(),
                incarnation=self.source.engine_id,
                consumer=self._config.incarnation,
                transfer_ids=tuple(transfer_ids[first : first + wire.MAX_IDS]),
            )
            self._request(request, ANSWER_S, on_answer)

    def release(
        self, transfer_id: str, read_ok: bool, on_answer: Callable[[wire.Answer | None], None]
    ) -> None:
        request = wire.Release(
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            transfer_id=transfer_id,
            consumer=self._config.incarnation,
            read_ok=read_ok,
        )
        self._request(request, ANSWER_S, on_answer)

    def drop(self, transfer_id: str) -> None:
        self._request(
            wire.Drop(
                seq=self._client.next_seq(), incarnation=self.source.engine_id, transfer_id=transfer_id
            ),
            ANSWER_S,
            _ignore,
        )

    def connected(self, outcome: Outcome) -> None:
        """Every rank of ours has tried to connect."""
        if self.state is not LinkState.CONNECTING:
            return
        if outcome.ok:
            self._transition(LinkState.READY)
            self._stop_deadline()
            self._on_ready(self)
            return
        _log.warning("%r: %s does not work between us: %s", self, self.transfer, outcome.reason)
        self._offer = tuple(name for name in self._offer if name != self.transfer)
        if self._offer:
            self._transition(LinkState.GREETING)
            self._greet()
        else:
            self.lose("unreachable", outcome.reason)

    def _greet(self) -> None:
        config = self._config
        ranks = tuple(
            {name: self._ranks.descriptions(name)[rank] for name in self._offer}
            for rank in range(config.tp_size)
        )
        hello = wire.Hello(
            seq=self._client.next_seq(),
            incarnation=self.source.engine_id,
            consumer=config.incarnation,
            geometry=config.geometry,
            layout=config.geometry.fingerprint(),
            weights=config.weights,
            transfers=self._offer,
            host_id=config.host_id,
            verify_kv=config.verify_kv,
            ranks=ranks,
        )
        self._request(hello, HANDSHAKE_S, self._greeted)

    def _greeted(self, answer: wire.Answer | None) -> None:
        if self.state is not LinkState.GREETING:
            return
        match answer:
            case wire.HelloOk():
                self._agreed(answer)
            case wire.Refused():
                detail = f"{answer.field}: theirs {answer.ours}, ours {answer.theirs}"
                if answer.field != "transfers" or self._offer == self._ranks.transfers:
                    self.refusal = detail
                self.lose("refused", detail)
            case None:
                self.lose("unreachable", "no answer to hello")
            case _:
                self.lose("refused", f"hello answered by {type(answer).__name__}")

    def _agreed(self, answer: wire.HelloOk) -> None:
        try:
            self._config.geometry.local_heads(len(answer.ranks), 0)
        except ValueError as error:
            self.refusal = str(error)
            self.lose("refused", str(error))
            return
        if answer.transfer not in self._offer:
            self.lose("refused", f"transfer {answer.transfer} was not offered")
            return
        self.transfer = answer.transfer
        self.tp_size = len(answer.ranks)
        self.num_blocks = answer.num_blocks
        self._transition(LinkState.CONNECTING)
        self._ranks.connect(
            Connect(
                link=self.number,
                transfer=answer.transfer,
                ranks=answer.ranks,
                token=answer.token,
                timeout_s=HANDSHAKE_S / 2,
            )
        )

    def _request(
        self, request: wire.Request, timeout_s: float, on_answer: Callable[[wire.Answer | None], None]
    ) -> None:
        def answered(answer: wire.Answer | None) -> None:
            if isinstance(answer, wire.Refused) and answer.field == "incarnation":
                self.refusal = f"incarnation: {answer.ours} is there now, not {self.source}"
                self.lose("incarnation", self.refusal)
            else:
                on_answer(answer)

        self._client.request(request, timeout_s, answered)

    def _broken(self) -> None:
        self.lose("unreachable", "the control connection failed")

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _transition(self, to: LinkState) -> None:
        self.state = transition(f"link {self.number}", LINK_TRANSITIONS, self.state, to)


def _ignore(answer: wire.Answer | None) -> None:
    """Nobody waits for this answer."""
