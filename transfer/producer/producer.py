# SPDX-License-Identifier: Apache-2.0
"""The producer's half of an engine's transfer plane: a lease table, the control channel and a timer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from kvferry.transfer.checksum import SUM_BYTES
from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import Caller, ControlServer
from kvferry.transfer.events import LeaseEnded
from kvferry.transfer.first_tokens import FirstTokens
from kvferry.transfer.ids import Incarnation, TransferId
from kvferry.transfer.layout import differences, num_columns
from kvferry.transfer.plane import PlaneConfig
from kvferry.transfer.producer.checksum_publisher import Sealer
from kvferry.transfer.producer.lease import Denied, Effect, Freed, Grant, LeaseTable, NotYet, Reply
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import Serve
from kvferry.transfer.tokens import mint

_GREETED_S = 15.0
"""A peer's ranks connect within this time after its `hello`; our ranks wait for them for so long."""
_MAX_GREETED = 1024
"""Peers whose ranks are waited for; one more, and the one that greeted first is not."""
_TIMER_SLACK_S = 0.001


class Producer:
    """Lends prompts' blocks to readers. Every method commits before it returns."""

    def __init__(self, config: PlaneConfig, ranks: RankGroup, emit: Callable[[LeaseEnded], None]) -> None:
        self._config = config
        self._ranks = ranks
        self._emit = emit
        columns = num_columns(config.geometry, config.tp_size) if config.verify_kv else 0
        self._table = LeaseTable(
            config.lease_s,
            max_blocks=wire.max_blocks(columns * SUM_BYTES),
            max_staged=config.max_staged,
        )
        self._sealer = Sealer(ranks, self._advance, self._ready) if config.verify_kv else None
        self._server = ControlServer(self._requested, config.key)
        self._timer: asyncio.TimerHandle | None = None
        self._greeted: dict[bytes, float] = {}
        """Control connections of peers whose ranks are on their way, and until when they may be, in order."""
        self._serving_until = 0.0
        self._serving = Serve(on=False, awaited=False)
        self.ended: Counter[str] = Counter()
        self.handshakes = 0

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> int:
        """Bind the control channel, and return its port."""
        return self._server.start(context, self._config.bind_host, self._config.control_port)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.close()

    @property
    def leased(self) -> int:
        return self._table.leased

    @property
    def bad_frames(self) -> int:
        return self._server.bad_frames

    def check_integrity(self) -> None:
        self._table.check_integrity()
        assert self._sealer is None or len(self._sealer) == self._table.leased, "prompts to be summed"

    # The scheduler's calls; see `SchedulerConnector`.

    def register(
        self,
        transfer_id: TransferId,
        block_ids: Sequence[int],
        num_tokens: int,
        ids_hash: str,
        timeout_s: float,
    ) -> None:
        now = time.monotonic()
        effects = self._table.register(now, transfer_id, block_ids, num_tokens, ids_hash, timeout_s)
        if self._sealer is not None:
            self._sealer.register(transfer_id, block_ids)
        self._perform(effects)

    def advance(self, transfer_id: TransferId, readable_blocks: int) -> None:
        if self._sealer is not None:
            self._sealer.advance(transfer_id, readable_blocks)
        else:
            self._advance(transfer_id, readable_blocks)

    def ready(self, transfer_id: TransferId, first_tokens: FirstTokens | None) -> None:
        self._table.tell(transfer_id, first_tokens)
        if self._sealer is not None:
            self._sealer.ready(transfer_id)
        else:
            self._ready(transfer_id)

    def fail(self, transfer_id: TransferId) -> None:
        if self._table.is_registered(transfer_id):
            self.ended["failed"] += 1
        self._forget(transfer_id)
        self._serve_on()
        self._perform(self._table.fail(transfer_id))

    def drop(self, transfer_id: TransferId) -> bool:
        dropped, effects = self._table.drop(time.monotonic(), transfer_id)
        self._perform(effects)
        return dropped

    def _advance(self, transfer_id: TransferId, readable: int, checksums: Sequence[bytes] = ()) -> None:
        self._perform(self._table.advance(time.monotonic(), transfer_id, readable, checksums))

    def _ready(self, transfer_id: TransferId, checksums: Sequence[bytes] = ()) -> None:
        self._perform(self._table.ready(time.monotonic(), transfer_id, checksums))

    def _forget(self, transfer_id: TransferId) -> None:
        if self._sealer is not None:
            self._sealer.forget(transfer_id)

    # The control channel.

    def _requested(self, caller: Caller, request: wire.Request) -> None:
        if request.incarnation != self._config.incarnation:
            self._refuse(caller, "incarnation", self._config.incarnation, request.incarnation)
            return
        match request:
            case wire.Hello():
                self._greet(caller, request)
            case wire.Open():
                self._open(caller, request)
            case wire.Renew():
                self._renew(caller, request)
            case wire.Release():
                self._release(caller, request)
            case wire.Drop():
                self.drop(TransferId(request.transfer_id))
                self._answer(caller, wire.Dropped, transfer_id=request.transfer_id)

    def _greet(self, caller: Caller, hello: wire.Hello) -> None:
        refusal = self._objection(hello)
        if refusal is not None:
            self._refuse(caller, *refusal)
            return
        transfer = next(name for name in hello.transfers if name in self._ranks.transfers)
        self.handshakes += 1
        self._greeted.pop(caller.identity, None)
        self._greeted[caller.identity] = time.monotonic() + _GREETED_S
        if len(self._greeted) > _MAX_GREETED:
            del self._greeted[next(iter(self._greeted))]
        self._perform([])
        self._answer(
            caller,
            wire.HelloOk,
            transfer=transfer,
            num_blocks=self._config.num_blocks,
            ranks=self._ranks.descriptions(transfer),
            token=mint(self._ranks.secret),
        )

    def _objection(self, hello: wire.Hello) -> tuple[str, str, str] | None:
        """The first thing in which this consumer does not fit us: field, our value, its value."""
        config = self._config
        for field, ours, theirs in differences(config.geometry, hello.geometry):
            return field, ours, theirs
        layout = config.geometry.fingerprint()
        if hello.layout != layout:
            return "layout", layout, hello.layout
        if hello.weights != config.weights:
            return "weights", config.weights, hello.weights
        if not set(hello.transfers) & set(self._ranks.transfers):
            return "transfers", ",".join(self._ranks.transfers), ",".join(hello.transfers)
        if hello.verify_kv and not config.verify_kv:
            return "verify_kv", "off", "on"
        return None

    def _open(self, caller: Caller, request: wire.Open) -> None:
        self._greeted.pop(caller.identity, None)  # it asks once its ranks are connected
        effects = self._table.open(
            time.monotonic(),
            TransferId(request.transfer_id),
            Incarnation(request.consumer),
            request.have,
            request.wait_s,
            caller,
        )
        self._perform(effects)

    def _renew(self, caller: Caller, request: wire.Renew) -> None:
        alive, gone, effects = self._table.renew(
            time.monotonic(), Incarnation(request.consumer), wire.transfer_ids(request.transfer_ids)
        )
        self._perform(effects)
        self._answer(caller, wire.Renewed, alive=tuple(alive), gone=tuple(gone))

    def _release(self, caller: Caller, request: wire.Release) -> None:
        valid, effects = self._table.release(
            time.monotonic(), TransferId(request.transfer_id), Incarnation(request.consumer), request.read_ok
        )
        # The answer first: a request waits for it to be decoded, and what else there is to do can wait.
        self._answer(caller, wire.Released, transfer_id=request.transfer_id, valid=valid)
        if not valid:
            self._serve_on()
        self._perform(effects)

    def _refuse(self, caller: Caller, field: str, ours: str, theirs: str) -> None:
        self._answer(caller, wire.Refused, field=field, ours=ours[:256], theirs=theirs[:256])

    def _answer(self, caller: Caller, kind: Callable[..., wire.Answer], **fields: object) -> None:
        self._server.answer(caller, kind(seq=caller.seq, incarnation=self._config.incarnation, **fields))

    # Effects and time.

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self._reply(effect)
                case Freed():
                    self.ended[effect.cause] += 1
                    if effect.cause != "released":
                        self._serve_on()
                    self._forget(effect.transfer_id)
                    self._emit(LeaseEnded(transfer_id=effect.transfer_id, cause=effect.cause))
        self._update_serving()
        self._arm()

    def _reply(self, reply: Reply) -> None:
        match reply.answer:
            case Grant() as grant:
                self._answer(
                    reply.waiter,
                    wire.Opened,
                    transfer_id=reply.transfer_id,
                    state="ready" if grant.ready else "filling",
                    first_block=grant.first_block,
                    block_ids=grant.block_ids,
                    num_tokens=grant.num_tokens,
                    lease_s=self._config.lease_s,
                    ids_hash=grant.ids_hash,
                    checksums=b"".join(grant.checksums),
                    first_tokens=grant.first_tokens,
                )
            case NotYet():
                self._answer(reply.waiter, wire.Pending, transfer_id=reply.transfer_id)
            case Denied(reason):
                self._answer(reply.waiter, wire.Gone, transfer_id=reply.transfer_id, reason=reason)

    def _serve_on(self) -> None:
        """Some lease did not end well: a reader may have given its reads up, and they may end only if we take
        part. Nobody reads where nobody was served before.
        """
        if self._serving.on:
            self._serving_until = time.monotonic() + self._config.quarantine_s

    def _update_serving(self) -> None:
        """Tell the ranks when a peer needs them, when one may, and when none can."""
        now = time.monotonic()
        for identity in [each for each, until in self._greeted.items() if until <= now]:
            del self._greeted[identity]
        awaited = bool(self._greeted) or self._table.open_count > 0
        serving = Serve(on=awaited or now < self._serving_until, awaited=awaited)
        if serving != self._serving:
            self._serving = serving
            self._ranks.broadcast(serving)

    def _arm(self) -> None:
        """Set the timer to the next thing that time alone brings about."""
        deadlines = [self._table.next_deadline(), next(iter(self._greeted.values()), None)]
        if self._serving.on and not self._serving.awaited:
            deadlines.append(self._serving_until)
        due = min((each for each in deadlines if each is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(due - time.monotonic(), 0.0) + _TIMER_SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._perform(self._table.expire(time.monotonic()))
