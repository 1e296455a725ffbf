# SPDX-License-Identifier: Apache-2.0
"""The producer's half of an engine's transfer plane: a lease table, the control server and a timer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import zmq

from kvferry.transfer.access_tokens import mint
from kvferry.transfer.checksum import SUM_BYTES
from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import Caller, ControlServer
from kvferry.transfer.events import LeaseEnded, LoanRequested
from kvferry.transfer.ids import DuplicateTransfer, Incarnation, TransferId
from kvferry.transfer.layout import differences, num_columns
from kvferry.transfer.plane import MAX_LOAN_S, BlockRun, PlaneConfig, one_group
from kvferry.transfer.producer.checksum_publisher import ChecksumPublisher
from kvferry.transfer.producer.lease import CompleteOpen, Denied, Effect, Freed, LeaseTable, NotYet
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import Serve
from kvferry.transfer.sampled_tokens import SampledTokens

_log = logging.getLogger(__name__)

_HELLO_S = 15.0
"""Limit for a peer's ranks to connect after its `hello`; until then our ranks poll for them."""
_MAX_HELLOS = 1024
"""Peers whose ranks are awaited; one more replaces the oldest."""
_MAX_LOAN_REQUESTS = 256
"""Peers' requests that our scheduler has not answered yet; one more gets nothing."""
_TIMER_SLACK_S = 0.001


@dataclass(frozen=True, slots=True)
class _LoanRequest:
    """A `lend` that the scheduler is to answer."""

    caller: Caller
    consumer: Incarnation
    limit_s: float


def share_text(share: float) -> str:
    """How much is verified, in words."""
    return {0.0: "off", 1.0: "on"}.get(share, f"{share:g}")


class Producer:
    """Lends prompts' blocks to readers. Every method commits before it returns.

    The scheduler's calls are documented at `SchedulerConnector`.
    """

    def __init__(
        self, config: PlaneConfig, ranks: RankGroup, emit: Callable[[LeaseEnded | LoanRequested], None]
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._emit = emit
        self._table = LeaseTable(config.lease_s, max_blocks=wire.max_blocks(0), max_staged=config.max_staged)
        self._publisher = (
            ChecksumPublisher(ranks, config.verify_kv, self._advance, self._ready)
            if config.verify_kv
            else None
        )
        self._server = ControlServer(self._requested, config.cluster_key)
        self._timer: asyncio.TimerHandle | None = None
        self._hellos: dict[bytes, float] = {}
        """Control connections of peers whose ranks are awaited, and until when, in order."""
        self._loan_requests: dict[TransferId, _LoanRequest] = {}
        self._serving_until = 0.0
        self._serving = Serve(on=False, awaited=False)
        self.ended: Counter[str] = Counter()
        self.handshakes = 0
        self.loans = 0

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> int:
        """Bind the control channel, and return its port. Every rank has reported."""
        if self._publisher is not None:
            placements = self._ranks.placements
            groups = range(len(placements[0].groups))
            columns = max(num_columns(placements, group) for group in groups)
            self._table.max_blocks = wire.max_blocks(columns * SUM_BYTES)
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
        assert self._publisher is None or len(self._publisher) == self._table.leased, "prompts to be summed"

    # The scheduler's calls.

    def register(
        self,
        transfer_id: TransferId,
        runs: Sequence[BlockRun],
        num_tokens: int,
        ids_hash: str,
        timeout_s: float,
    ) -> None:
        now = time.monotonic()
        effects = self._table.register(now, transfer_id, runs, num_tokens, ids_hash, timeout_s)
        if self._publisher is not None:
            self._publisher.register(transfer_id, runs)
        self._perform(effects)

    def grant_prefix(
        self, transfer_id: TransferId, block_ids: Sequence[int], num_tokens: int, ids_hash: str
    ) -> bool:
        request = self._loan_requests.pop(transfer_id, None)
        if request is None:
            return False
        lent = bool(block_ids) and self._lend(transfer_id, request, block_ids, num_tokens, ids_hash)
        self._respond_lent(request.caller, transfer_id, len(block_ids) if lent else 0)
        return lent

    def _lend(
        self,
        transfer_id: TransferId,
        request: _LoanRequest,
        block_ids: Sequence[int],
        num_tokens: int,
        ids_hash: str,
    ) -> bool:
        now = time.monotonic()
        try:
            effects = self._table.grant_prefix(
                now, transfer_id, request.consumer, block_ids, num_tokens, ids_hash, request.limit_s
            )
        except DuplicateTransfer:
            return False
        self.loans += 1
        if self._publisher is not None:
            self._publisher.register(transfer_id, one_group(block_ids))
        self._perform(effects)
        self.ready(transfer_id, None)
        return True

    def advance(self, transfer_id: TransferId, readable_blocks: int) -> None:
        if self._publisher is not None:
            self._publisher.advance(transfer_id, readable_blocks)
        else:
            self._advance(transfer_id, readable_blocks)

    def ready(self, transfer_id: TransferId, first_tokens: SampledTokens | None) -> None:
        self._table.set_first_tokens(transfer_id, first_tokens)
        if self._publisher is not None:
            self._publisher.ready(transfer_id)
        else:
            self._ready(transfer_id)

    def withdraw(self, transfer_id: TransferId) -> None:
        if self._table.is_registered(transfer_id):
            self.ended["withdrawn"] += 1
        self._forget(transfer_id)
        self._serve_on()
        self._perform(self._table.withdraw(transfer_id))

    def drop(self, transfer_id: TransferId) -> bool:
        dropped, effects = self._table.drop(time.monotonic(), transfer_id)
        self._perform(effects)
        return dropped

    def _advance(self, transfer_id: TransferId, readable: int, checksums: Sequence[bytes] = ()) -> None:
        self._perform(self._table.advance(time.monotonic(), transfer_id, readable, checksums))

    def _ready(self, transfer_id: TransferId, checksums: Sequence[bytes] = ()) -> None:
        self._perform(self._table.ready(time.monotonic(), transfer_id, checksums))

    def _forget(self, transfer_id: TransferId) -> None:
        if self._publisher is not None:
            self._publisher.forget(transfer_id)

    # The control channel.

    def _requested(self, caller: Caller, request: wire.Received) -> None:
        if request.incarnation != self._config.incarnation:
            self._refuse(caller, "incarnation", self._config.incarnation, request.incarnation)
            return
        match request:
            case wire.Hello():
                self._hello(caller, request)
            case wire.OtherHello():
                self._refuse(caller, "version", str(wire.VERSIONS), str(request.v))
            case wire.Open():
                self._open(caller, request)
            case wire.Lend():
                self._loan_requested(caller, request)
            case wire.Renew():
                self._renew(caller, request)
            case wire.Release():
                self._release(caller, request)
            case wire.Drop():
                self.drop(TransferId(request.transfer_id))
                self._respond(caller, wire.Dropped, transfer_id=request.transfer_id)

    def _hello(self, caller: Caller, hello: wire.Hello) -> None:
        version = wire.common_version(hello)
        if version is None:
            self._refuse(caller, "version", str(wire.VERSIONS), str(hello.versions))
            return
        refusal = self._incompatibility(hello)
        if refusal is not None:
            self._refuse(caller, *refusal)
            return
        transfer = next(name for name in hello.transfers if name in self._ranks.transfers)
        if self._config.transfer == "auto" and transfer == "tcp" and hello.host_id != self._config.host_id:
            _log.warning(
                "KV goes to another host (agent %s) over tcp, the slowest transfer: no other works on both "
                "sides; kvferry doctor says why",
                hello.consumer,
            )
        self.handshakes += 1
        self._hellos.pop(caller.identity, None)
        self._hellos[caller.identity] = time.monotonic() + _HELLO_S
        if len(self._hellos) > _MAX_HELLOS:
            del self._hellos[next(iter(self._hellos))]
        self._perform([])
        self._respond(
            replace(caller, version=version),
            wire.HelloOk,
            transfer=transfer,
            num_blocks=self._config.num_blocks,
            ranks=self._ranks.descriptions(transfer),
            placements=self._ranks.placements,
            token=mint(self._ranks.secret),
        )

    def _incompatibility(self, hello: wire.Hello) -> tuple[str, str, str] | None:
        """Return the first incompatibility: field, our value, the consumer's value."""
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
        if hello.verify_kv > config.verify_kv:
            return "verify_kv", share_text(config.verify_kv), share_text(hello.verify_kv)
        return None

    def _open(self, caller: Caller, request: wire.Open) -> None:
        self._hellos.pop(caller.identity, None)  # its ranks are connected before the first `open`
        effects = self._table.open(
            time.monotonic(),
            TransferId(request.transfer_id),
            Incarnation(request.consumer),
            request.have,
            request.wait_s,
            caller,
            1 if request.num_readers is msgspec.UNSET else request.num_readers,
        )
        self._perform(effects)

    def _loan_requested(self, caller: Caller, request: wire.Lend) -> None:
        self._hellos.pop(caller.identity, None)
        transfer_id = TransferId(request.transfer_id)
        waiting = self._loan_requests
        if transfer_id in waiting and waiting[transfer_id].caller == caller:
            return  # the same request once more; the response to the first is its response
        if not self._config.lends_prefixes or transfer_id in waiting or len(waiting) >= _MAX_LOAN_REQUESTS:
            self._respond_lent(caller, transfer_id, 0)
            return
        waiting[transfer_id] = _LoanRequest(
            caller, Incarnation(request.consumer), min(request.limit_s, MAX_LOAN_S)
        )
        self._emit(LoanRequested(transfer_id=transfer_id, hashes=request.hashes))

    def _respond_lent(self, caller: Caller, transfer_id: TransferId, num_blocks: int) -> None:
        self._respond(caller, wire.Lent, transfer_id=transfer_id, num_blocks=num_blocks)

    def _renew(self, caller: Caller, request: wire.Renew) -> None:
        alive, gone, effects = self._table.renew(
            time.monotonic(), Incarnation(request.consumer), wire.transfer_ids(request.transfer_ids)
        )
        self._perform(effects)
        self._respond(caller, wire.Renewed, alive=tuple(alive), gone=tuple(gone))

    def _release(self, caller: Caller, request: wire.Release) -> None:
        valid, effects = self._table.release(
            time.monotonic(), TransferId(request.transfer_id), Incarnation(request.consumer), request.read_ok
        )
        # The response first: a client's request waits for it, and for nothing else here.
        self._respond(caller, wire.Released, transfer_id=request.transfer_id, valid=valid)
        if not valid:
            self._serve_on()
        self._perform(effects)

    def _refuse(self, caller: Caller, field: str, ours: str, theirs: str) -> None:
        self._respond(caller, wire.RequestRefused, field=field, ours=ours[:256], theirs=theirs[:256])

    def _respond(self, caller: Caller, kind: Callable[..., wire.Response], **fields: object) -> None:
        head = {"v": caller.version, "seq": caller.seq, "incarnation": self._config.incarnation}
        self._server.respond(caller, kind(**head, **fields))

    # Effects and time.

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CompleteOpen():
                    self._complete_open(effect)
                case Freed():
                    self.ended[effect.cause] += 1
                    if effect.cause != "released":
                        self._serve_on()
                    self._forget(effect.transfer_id)
                    self._emit(LeaseEnded(transfer_id=effect.transfer_id, cause=effect.cause))
        self._update_serving()
        self._arm()

    def _complete_open(self, completed: CompleteOpen) -> None:
        match completed.result:
            case wire.Grant() as grant:
                self._respond(
                    completed.waiter,
                    wire.Opened,
                    transfer_id=completed.transfer_id,
                    state="ready" if grant.ready else "filling",
                    first_block=grant.first_block,
                    block_ids=grant.block_ids,
                    num_tokens=grant.num_tokens,
                    lease_s=self._config.lease_s,
                    ids_hash=grant.ids_hash,
                    checksums=b"".join(grant.checksums),
                    first_tokens=grant.first_tokens,
                    groups=grant.groups,
                )
            case NotYet():
                self._respond(completed.waiter, wire.Pending, transfer_id=completed.transfer_id)
            case Denied(reason):
                self._respond(completed.waiter, wire.Gone, transfer_id=completed.transfer_id, reason=reason)

    def _serve_on(self) -> None:
        """Serve for another quarantine: a lease did not end well, and a cancelled read may end only if our
        ranks take part. Without effect while not serving: then no read is in flight.
        """
        if self._serving.on:
            self._serving_until = time.monotonic() + self._config.quarantine_s

    def _update_serving(self) -> None:
        """Set on the ranks whether a peer needs them, may need them, or cannot."""
        now = time.monotonic()
        for identity in [each for each, until in self._hellos.items() if until <= now]:
            del self._hellos[identity]
        awaited = bool(self._hellos) or self._table.open_count > 0
        serving = Serve(on=awaited or now < self._serving_until, awaited=awaited)
        if serving != self._serving:
            self._serving = serving
            self._ranks.broadcast(serving)

    def _arm(self) -> None:
        """Set the timer to the next deadline."""
        deadlines = [self._table.next_deadline(), next(iter(self._hellos.values()), None)]
        if self._serving.on and not self._serving.awaited:
            deadlines.append(self._serving_until)
        due = min((each for each in deadlines if each is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(due - time.monotonic(), 0.0) + _TIMER_SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._perform(self._table.expire(time.monotonic()))
