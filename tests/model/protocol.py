# SPDX-License-Identifier: Apache-2.0
"""One transfer as a transition system: the product's machines, and what the world does between them.

Producer and consumer share nothing but messages, which may be lost, repeated, delayed and reordered at will.
The checks, by invariant (docs/architecture.md):

    I1  `_granted`: only blocks that are computed and still the prompt's are named to a reader;
        `_released`: `valid` only to the one reader of a lease that was alive from `ready` until then;
        `_begin_read`: every block goes to its place in the prompt;
        `_decoding`: a reader that may decode holds the right bytes of every block, on every rank.
    I2  `_freed`: nothing is freed twice, nor while its reader was promised it; `expire`: nothing outlives its
        promise once the timer has fired; `_released`, `_drop`, `register`: freed when no reader needs it;
        `check`: the table pins what the truth pins, and in every state time alone would free all of it.
    I3  `_handed_over`: no rank writes any more when a destination is released or decoded from;
        `_check_reading`: and it is released once no rank does.
    I6  `_decoding`: every rank of every read reported done; `_check_reading`: one failed rank fails the pull.
    I7  `check`: a sibling can register no second lease; `_granted`: one reader; `_decoding`: one transfer.

A failed check raises `Violation`. A machine's own assertions count as failed checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from kvferry.transfer.plane import one_group
from tests.model.machines import Handle, Machines
from tests.model.world import (
    BLOCKS,
    LEASE_S,
    REQUEST_S,
    TOKENS,
    Bounds,
    Bytes,
    End,
    Message,
    Phase,
    Prompt,
    RankRead,
    Reader,
    Reading,
    World,
    blocks_of,
    checksums_of,
    hashes_of,
    incarnation,
    replaced,
    transfer_id,
)

Step = tuple[str, Callable[[], World]]

_WAIT_S = 1
_HASH = "hash"
_BLOCK_SIZE = 4
_AGES = 1000
_ANSWERS = ("grant", "pending", "gone", "lent", "released", "refused", "renewed")


class Violation(AssertionError):
    """Something that must always hold does not."""


def must(holds: bool, claim: str) -> None:
    if not holds:
        raise Violation(claim)


class Protocol:
    """The steps that a world can take. Holds no state of the world; `seen` collects kinds of step and end."""

    def __init__(self, bounds: Bounds, machines: Machines) -> None:
        self._bounds = bounds
        self._machines = machines
        self._audited: set[Handle] = set()
        self._no_second: set[tuple[Handle, int]] = set()
        self.seen: set[str] = set()

    def start(self) -> World:
        machines, bounds = self._machines, self._bounds
        pulls = [
            Reading(
                machines.keep(machines.pull.Pull(transfer_id(request), TOKENS, verify=bounds.verify)),
                reader,
                request,
            )
            for reader, request in bounds.pulls
        ]
        ranks = machines.keep(machines.aggregate.Aggregator(bounds.ranks))
        return World(
            now=0,
            incarnation=0,
            table=self._new_table(),
            prompts=(Prompt(),) * bounds.requests,
            pulls=tuple(pulls),
            readers=(Reader(True, ranks),) * bounds.readers,
            network=frozenset(),
            faults=bounds.faults,
            renewals=bounds.renewals,
        )

    def steps(self, world: World) -> Iterator[Step]:
        """Everything that can happen next, by name."""
        yield from self._steps_of_time(world)
        for request in range(len(world.prompts)):
            yield from self._steps_of_scheduler(world, request)
        for index, pull in enumerate(world.pulls):
            if world.readers[pull.reader].alive:
                yield from self._steps_of_reader(world, index)
                for place in range(len(pull.reads)):
                    yield from self._steps_of_rank(world, index, place)
        for message in world.network:
            yield self._step(f"deliver {_text(message)}", self.deliver, world, message, False)
            if world.faults:
                yield self._step(f"repeat {_text(message)}", self.deliver, world, message, True)

    def check(self, world: World) -> None:
        """What must hold in every state."""
        table = self._machines[world.table]
        if world.table not in self._audited:
            table.check_integrity()
            self._audited.add(world.table)
        pinned = {transfer_id(each) for each, prompt in enumerate(world.prompts) if prompt.pinned}
        must(table.leased == len(pinned), "I2: the leases are those that pin blocks")
        _, effects = self._machines.call(world.table, "expire", _AGES)
        freed = [effect.transfer_id for effect in effects if isinstance(effect, self._machines.lease.Freed)]
        must(sorted(freed) == sorted(pinned), "I2: time alone frees every block, once")
        for request, prompt in enumerate(world.prompts):
            if prompt.phase is not Phase.NEW and not world.incarnation and self._remembers_all:
                self._check_no_second(world.table, request)
        for pull in world.pulls:
            if world.readers[pull.reader].alive:
                self._check_reading(pull)

    def _step(self, name: str, act: Callable[..., World], world: World, *arguments: object) -> Step:
        return name, partial(self._act, name, act, world, *arguments)

    def _act(self, name: str, act: Callable[..., World], world: World, *arguments: object) -> World:
        after = act(world, *arguments)
        self.seen.add(name.split()[0])
        return self._without_idle_messages(after)

    # The producer: scheduler, clock, and the death of the whole agent.

    def _steps_of_time(self, world: World) -> Iterator[Step]:
        if world.now < self._bounds.time:
            yield self._step("time passes", self.time_passes, world)
        due = self._machines[world.table].next_deadline()
        if due is not None and due <= world.now:
            yield self._step("expire (the timer fires)", self.expire, world)
        if world.faults and not world.incarnation:
            yield self._step("restart the producer", self.restart, world)

    def _steps_of_scheduler(self, world: World, request: int) -> Iterator[Step]:
        prompt = world.prompts[request]
        if prompt.phase is Phase.NEW and not self._bounds.lent:
            yield self._step(f"register {request}", self.register, world, request)
        if prompt.phase is Phase.FILLING and prompt.pinned:
            if prompt.computed < (BLOCKS if self._bounds.whole else BLOCKS - 1):
                yield self._step(f"advance {request}", self.advance, world, request)
            yield self._step(f"ready {request}", self.ready, world, request)
        if world.faults:
            if prompt.pinned and not self._bounds.lent:
                yield self._step(f"preempt {request}", self.preempt, world, request)
            if not world.incarnation and not prompt.dropped:
                yield self._step(f"drop {request}", self.drop, world, request)

    def time_passes(self, world: World) -> World:
        return world._replace(now=world.now + 1)

    def expire(self, world: World) -> World:
        world = self._table(world, "expire", world.now)[0]
        for prompt in world.prompts:
            must(not prompt.pinned or world.now < prompt.until, "I2: nothing outlives its promise")
        return world

    def restart(self, world: World) -> World:
        """All that the producer knew is gone, its pool too, and its connections break."""
        over = tuple(
            prompt._replace(phase=Phase.OVER, pinned=False, intact=False) for prompt in world.prompts
        )
        return self._fault(world._replace(incarnation=1, table=self._new_table(), prompts=over))

    def register(self, world: World, request: int) -> World:
        limit = world.now + REQUEST_S
        dropped = world.prompts[request].dropped
        world = self._prompt(world, request, phase=Phase.FILLING, pinned=True, limit=limit, until=limit)
        ids = blocks_of(request)
        world = self._table(
            world, "register", world.now, transfer_id(request), one_group(ids), TOKENS, _HASH, REQUEST_S
        )[0]
        if dropped and self._remembers_all:
            must(not world.prompts[request].pinned, "I2: what was dropped before it began is freed at once")
        return world

    def advance(self, world: World, request: int) -> World:
        computed = world.prompts[request].computed + 1
        world = self._prompt(world, request, computed=computed)
        added = self._checksums(request, computed - 1, computed)
        return self._table(world, "advance", world.now, transfer_id(request), computed, added)[0]

    def ready(self, world: World, request: int) -> World:
        prompt = world.prompts[request]
        until = prompt.until
        if world.now < until:
            until = min(world.now + LEASE_S, prompt.limit)
        added = self._checksums(request, prompt.computed, BLOCKS)
        world = self._prompt(world, request, phase=Phase.READY, computed=BLOCKS, until=until)
        return self._table(world, "ready", world.now, transfer_id(request), added)[0]

    def preempt(self, world: World, request: int) -> World:
        """Abort or preemption: the table hears of it first, then the blocks are someone else's."""
        handle, effects = self._machines.call(world.table, "withdraw", transfer_id(request))
        freed = [effect for effect in effects if isinstance(effect, self._machines.lease.Freed)]
        must(not freed, "I2: a withdrawn lease's blocks are the scheduler's already")
        world = self._perform(world._replace(table=handle), effects)
        return self._fault(self._prompt(world, request, phase=Phase.OVER, pinned=False, intact=False))

    def drop(self, world: World, request: int) -> World:
        """The client left, and the proxy says so, once or twice, at any time."""
        world = self._fault(self._prompt(world, request, dropped=True))
        return self._drop(world, request)

    # The reader: its engine, its ranks, and their death.

    def _steps_of_reader(self, world: World, index: int) -> Iterator[Step]:
        pull = world.pulls[index]
        machine = self._machines[pull.machine]
        if pull.verifying:
            yield self._step(f"verify {index}", self.verify, world, index)
        if pull.clearing:
            yield self._step(f"clear {index}", self.clear, world, index)
        if not machine.live or pull.end is not End.NONE:
            return
        if machine.state is self._machines.pull.PullState.HELD:
            yield self._step(f"open {index}", self.open, world, index)
        elif world.incarnation:  # a hold only meets the producer anew
            yield self._step(f"lose the link of {index}", self.lose, world, index)
        if world.renewals:
            yield self._step(f"renew {index}", self.renew, world, index)
        if world.faults:
            if pull.awaited is not None:
                yield self._step(f"unanswered {index}", self.unanswered, world, index)
            yield self._step(f"cancel {index}", self.cancel, world, index)
            yield self._step(f"crash of the reader of {index}", self.crash, world, index)

    def _steps_of_rank(self, world: World, index: int, place: int) -> Iterator[Step]:
        read = world.pulls[index].reads[place]
        name = f"{read.seq} of {index} on rank {read.rank}"
        if read.state is Bytes.FLYING:
            yield self._step(f"read {name}", self.land, world, index, place)
            if world.faults and self._bounds.verify:
                yield self._step(f"damage read {name}", self.damage, world, index, place)
            if world.faults or read.cancelled or world.incarnation:
                yield self._step(f"break read {name}", self.break_read, world, index, place)
            return
        if read.state is Bytes.FAILED:
            yield self._step(f"quiesce read {name}", self.quiesce, world, index, place)
        if read.outcome is None:
            yield self._step(f"report read {name}", self.report, world, index, place)
        elif read.state is Bytes.QUIET and not read.quiescence_reported:
            yield self._step(f"report-quiescent read {name}", self.report_quiescent, world, index, place)
        if read.outcome is not None and world.faults:
            yield self._step(f"report-again read {name}", self.report_again, world, index, place)

    def open(self, world: World, index: int) -> World:
        """There is room for it. The handshake is no part of the model."""
        hashes = hashes_of(world.pulls[index].request)
        if self._bounds.asked and not world.pulls[index].asked:
            world = self._reading(world, index, asked=True)
            world = self._pull(world, index, "ask_prefix", hashes, _BLOCK_SIZE)
        elif self._bounds.asked:
            world = self._pull(world, index, "start", 0.0, one_group(_destination(index)), hashes[-1].hex())
        elif self._bounds.lent:
            world = self._pull(world, index, "start_prefix", 0.0, _destination(index), hashes, _BLOCK_SIZE)
        else:
            world = self._pull(world, index, "start", 0.0, one_group(_destination(index)), _HASH)
        return self._pull(world, index, "connected", "tcp")

    def renew(self, world: World, index: int) -> World:
        return self._send(world._replace(renewals=world.renewals - 1), index, "renew")

    def lose(self, world: World, index: int) -> World:
        return self._pull(world, index, "lost", "unreachable")

    def unanswered(self, world: World, index: int) -> World:
        return self._fault(self._pull(self._reading(world, index, awaited=None), index, "unanswered"))

    def cancel(self, world: World, index: int) -> World:
        """Abort, or the deadline."""
        return self._fault(self._pull(world, index, "fail", "cancelled"))

    def crash(self, world: World, index: int) -> World:
        """The whole agent dies: its ranks with it, and all that they would have written to."""
        reader = world.pulls[index].reader
        dead = world.readers[reader]._replace(alive=False)
        return self._fault(world._replace(readers=replaced(world.readers, reader, dead)))

    def land(self, world: World, index: int, place: int) -> World:
        """All bytes of one rank's read are copied, as they are now."""
        pull = world.pulls[index]
        prompt = world.prompts[pull.request]
        right = prompt.intact and pull.reads[place].blocks <= prompt.computed
        return self._rank(world, index, place, state=Bytes.RIGHT if right else Bytes.WRONG)

    def damage(self, world: World, index: int, place: int) -> World:
        """All bytes of one rank's read arrive, but not as they were."""
        return self._fault(self._rank(world, index, place, state=Bytes.WRONG))

    def verify(self, world: World, index: int) -> World:
        """Every rank has summed what landed. Bytes that are wrong have other sums."""
        right = all(read.state is Bytes.RIGHT for read in world.pulls[index].reads)
        world = self._reading(world, index, verifying=False)
        return self._pull(world, index, "verified", "" if right else "a slice differs")

    def clear(self, world: World, index: int) -> World:
        """Every rank has written zeros over what landed."""
        return self._pull(self._reading(world, index, clearing=False), index, "cleared")

    def break_read(self, world: World, index: int, place: int) -> World:
        free = world.pulls[index].reads[place].cancelled or world.incarnation
        world = self._rank(world, index, place, state=Bytes.FAILED)
        return world if free else self._fault(world)

    def quiesce(self, world: World, index: int, place: int) -> World:
        return self._rank(world, index, place, state=Bytes.QUIET)

    def report(self, world: World, index: int, place: int) -> World:
        state = world.pulls[index].reads[place].state
        ok = state in (Bytes.RIGHT, Bytes.WRONG)
        quiescent = state is not Bytes.FAILED
        outcome = self._machines.aggregate.Outcome(
            ok=ok, reason="" if ok else "peer_lost", quiescent=quiescent, nbytes=1, descriptors=1
        )
        world = self._rank(world, index, place, outcome=outcome, quiescence_reported=quiescent)
        return self._reported(world, index, place)

    def report_again(self, world: World, index: int, place: int) -> World:
        return self._fault(self._reported(world, index, place))

    def report_quiescent(self, world: World, index: int, place: int) -> World:
        world = self._rank(world, index, place, quiescence_reported=True)
        pull = world.pulls[index]
        read = pull.reads[place]
        world, quiescent = self._ranks(world, pull, "quiescent", _key(pull, read.seq), read.rank)
        return self._pull(world, index, "read_quiescent", read.seq) if quiescent else world

    def _reported(self, world: World, index: int, place: int) -> World:
        pull = world.pulls[index]
        read = pull.reads[place]
        world, outcome = self._ranks(world, pull, "report", _key(pull, read.seq), read.rank, read.outcome)
        if outcome is not None:
            return self._pull(world, index, "read_ended", read.seq, outcome)
        assert read.outcome is not None
        return world if read.outcome.ok else self._cancel_read(world, index, read.seq)

    # The network.

    def deliver(self, world: World, message: Message, repeat: bool) -> World:
        left = world._replace(network=world.network - {message})
        world = self._fault(world) if repeat else left
        if message.kind in _ANSWERS:
            return self._answered(world, message)
        if message.incarnation != world.incarnation:
            return self._answer(world, message, "refused")
        match message.kind:
            case "open":
                return self._opened(world, message)
            case "lend":
                return self._lent(world, message)
            case "renew":
                return self._renewed(world, message)
            case "release":
                return self._released(world, message)
        return self._drop(world, world.pulls[message.pull].request)

    def _opened(self, world: World, message: Message) -> World:
        pull = world.pulls[message.pull]
        arguments = (transfer_id(pull.request), incarnation(pull.reader), message.body, _WAIT_S)
        world, effects = self._table(world, "open", world.now, *arguments, message)
        lease = self._machines.lease
        refused = any(
            isinstance(effect, lease.CompleteOpen)
            and effect.waiter == message
            and isinstance(effect.result, lease.Denied)
            for effect in effects
        )
        prompt = world.prompts[pull.request]
        if refused or not prompt.pinned:
            return world
        must(world.now < prompt.until, "I1: a lease that is over is not revived")
        return self._promise(world, pull.request)

    def _lent(self, world: World, message: Message) -> World:
        """The scheduler finds the blocks in its cache, and leases them to the reader for a request's time."""
        pull = world.pulls[message.pull]
        request, before = pull.request, world
        must(message.body == hashes_of(request), "I1: the hashes are those of the prompt")
        dropped, limit = world.prompts[request].dropped, world.now + REQUEST_S
        fresh = world.prompts[request].phase is Phase.NEW
        if fresh:
            world = self._prompt(
                world, request, phase=Phase.FILLING, pinned=True, limit=limit, until=limit, computed=BLOCKS
            )
        tokens, ids_hash = BLOCKS * _BLOCK_SIZE, hashes_of(request)[-1].hex()
        arguments = (incarnation(pull.reader), blocks_of(request), tokens, ids_hash, REQUEST_S)
        try:
            world = self._table(world, "grant_prefix", world.now, transfer_id(request), *arguments)[0]
        except self._machines.lease.DuplicateTransfer:
            must(not fresh or bool(world.incarnation) or not self._remembers_all or
                 self._is_awaited_by_another(before, pull), "what nobody has used is lent")  # fmt: skip
            return self._answer(before, message, "lent", 0)
        must(fresh, "I7: a second lease for the same transfer")
        if dropped and self._remembers_all:
            must(not world.prompts[request].pinned, "I2: what was dropped before it began is freed at once")
        if world.prompts[request].pinned:
            world = self._prompt(world, request, reader=pull.reader)
            world = self.ready(world, request)
        return self._answer(world, message, "lent", BLOCKS)

    def _is_awaited_by_another(self, world: World, pull: Reading) -> bool:
        """Whether another reader has opened the transfer early."""
        return any(other.request == pull.request and other.reader != pull.reader for other in world.pulls)

    def _renewed(self, world: World, message: Message) -> World:
        pull = world.pulls[message.pull]
        each = transfer_id(pull.request)
        handle, (alive, gone, effects) = self._machines.call(
            world.table, "renew", world.now, incarnation(pull.reader), (each,)
        )
        world = self._perform(world._replace(table=handle), effects)
        prompt = world.prompts[pull.request]
        if each in alive and prompt.pinned:
            must(prompt.reader in (None, pull.reader), "I2: only the reader of a lease can prolong it")
            must(world.now < prompt.until, "I1: a lease that is over is not revived")
            world = self._promise(world, pull.request)
        return self._answer(world, message, "renewed") if each in gone else world

    def _released(self, world: World, message: Message) -> World:
        pull = world.pulls[message.pull]
        before = world.prompts[pull.request]
        handle, (valid, effects) = self._machines.call(
            world.table,
            "release",
            world.now,
            transfer_id(pull.request),
            incarnation(pull.reader),
            message.body,
        )
        world = self._perform(world._replace(table=handle), effects)
        its_own = before.pinned and world.now < before.until and before.reader == pull.reader
        if its_own:
            must(not world.prompts[pull.request].pinned, "I2: a release frees at once")
        elif before.pinned and before.reader is not None and world.now < before.until:
            must(world.prompts[pull.request].pinned, "I2: a promise is kept, whatever a stranger says")
        proof = its_own and before.phase is Phase.READY and bool(message.body)
        if valid and before.proven != pull.reader:
            must(proof, "I1: valid only if the lease was alive from ready until now, and this reader's")
        if (proof or before.proven == pull.reader) and self._remembers_all:
            must(valid, "a reader that did all right gets valid, however often it asks")
        if valid:
            world = self._prompt(world, pull.request, proven=pull.reader)
        return self._answer(world, message, "released", valid)

    def _drop(self, world: World, request: int) -> World:
        handle, (_, effects) = self._machines.call(world.table, "drop", world.now, transfer_id(request))
        world = self._perform(world._replace(table=handle), effects)
        must(not world.prompts[request].pinned, "I2: a drop frees at once")
        if world.prompts[request].phase is Phase.NEW:
            world = self._prompt(world, request, dropped=True)
        return world

    def _answered(self, world: World, message: Message) -> World:
        index = message.pull
        if message.kind == "renewed":
            return self._pull(world, index, "gone", "gone")
        if world.pulls[index].awaited != message.seq:
            return world  # its request is over
        world = self._reading(world, index, awaited=None)
        match message.kind:
            case "grant":
                return self._pull(world, index, "opened", 0.0, message.body)
            case "pending":
                return self._pull(world, index, "pending")
            case "lent":
                return self._pull(world, index, "lent", 0.0, message.body)
            case "gone":
                return self._pull(world, index, "gone", message.body)
            case "released":
                return self._pull(world, index, "released", 0.0, message.body)
        return self._pull(world, index, "lost", "incarnation")

    def _without_idle_messages(self, world: World) -> World:
        """Forget messages that can have no effect any more, so that equal futures are one state."""
        kept = frozenset(message for message in world.network if self._matters(world, message))
        return world if len(kept) == len(world.network) else world._replace(network=kept)

    def _matters(self, world: World, message: Message) -> bool:
        pull = world.pulls[message.pull]
        alive = world.readers[pull.reader].alive and pull.end is End.NONE
        if message.kind == "renewed":
            return alive
        if message.kind in _ANSWERS or message.incarnation != world.incarnation:
            return alive and pull.awaited == message.seq
        return True

    # The table's effects, and the truth about leases.

    def _table(self, world: World, method: str, *arguments: Any) -> tuple[World, Iterable[Any]]:
        handle, effects = self._machines.call(world.table, method, *arguments)
        return self._perform(world._replace(table=handle), effects), effects

    def _perform(self, world: World, effects: Iterable[Any]) -> World:
        for effect in effects:
            request = int(effect.transfer_id[1:])
            if isinstance(effect, self._machines.lease.Freed):
                world = self._freed(world, request, effect.cause)
            else:
                world = self._replied(world, request, effect)
        return world

    def _freed(self, world: World, request: int, cause: str) -> World:
        prompt = world.prompts[request]
        must(prompt.pinned, "I2: nothing is freed twice")
        must(cause != "expired" or prompt.until <= world.now, "I2: a promise is kept until its end")
        self.seen.add(f"lease {cause}")
        return self._prompt(world, request, phase=Phase.OVER, pinned=False, intact=False)

    def _replied(self, world: World, request: int, reply: Any) -> World:
        lease = self._machines.lease
        match reply.result:
            case lease.Grant():
                world = self._granted(world, request, reply)
                return self._answer(world, reply.waiter, "grant", reply.result)
            case lease.NotYet():
                return self._answer(world, reply.waiter, "pending")
        self.seen.add(f"denied {reply.result.reason}")
        return self._answer(world, reply.waiter, "gone", reply.result.reason)

    def _granted(self, world: World, request: int, reply: Any) -> World:
        prompt, grant = world.prompts[request], reply.result
        reader = world.pulls[reply.waiter.pull].reader
        known = grant.first_block + len(grant.block_ids)
        must(grant.block_ids == blocks_of(request)[grant.first_block : known], "I1: its own blocks")
        must(known <= prompt.computed and prompt.intact, "I1: only blocks that are computed and kept")
        sums = self._checksums(request, grant.first_block, known)
        must(grant.checksums == sums, "I1: with checksums of these very blocks")
        must(not grant.ready or prompt.phase is Phase.READY, "I1: ready only after the prefill")
        must(world.now < prompt.until, "I1: nothing is lent once the lease is over")
        must(prompt.reader in (None, reader), "I7: a lease has one reader")
        return self._prompt(world, request, reader=reader)

    def _promise(self, world: World, request: int) -> World:
        prompt = world.prompts[request]
        if prompt.phase is not Phase.READY:
            return world
        until = max(prompt.until, min(world.now + LEASE_S, prompt.limit))
        return self._prompt(world, request, until=until)

    # The pull's effects, and the truth about its destination.

    def _pull(self, world: World, index: int, method: str, *arguments: Any) -> World:
        names = self._machines.pull
        before = self._machines[world.pulls[index].machine].state
        handle, effects = self._machines.call(world.pulls[index].machine, method, *arguments)
        world = self._reading(world, index, machine=handle)
        if before is names.PullState.HELD and not self._machines[handle].live:
            world = self._reading(world, index, end=End.FAILED)  # a hold has no blocks, and ends in silence
        for effect in effects:
            match effect:
                case names.EnsureLink():
                    pass
                case names.SendLend(hashes):
                    world = self._send(world, index, "lend", hashes, awaited=True)
                case names.SendOpen(have):
                    world = self._send(world, index, "open", have, awaited=True)
                case names.SendRelease(read_ok):
                    world = self._send(world, index, "release", read_ok, awaited=read_ok)
                case names.SendDrop():
                    world = self._send(world, index, "drop")
                case names.ReadBlocks():
                    world = self._begin_read(world, index, effect)
                case names.Verify():
                    world = self._begin_verify(world, index, effect)
                case names.ClearBlocks(blocks):
                    must(blocks == (_destination(index),), "I3: nothing else is cleared")
                    world = self._reading(world, index, clearing=True)
                case names.CancelRead(seq=seq):
                    world = self._cancel_read(world, index, seq)
                case names.Emit(event):
                    world = self._emitted(world, index, event)
        return world

    def _begin_read(self, world: World, index: int, read: Any) -> World:
        pull = world.pulls[index]
        places = dict(zip(blocks_of(pull.request), _destination(index), strict=True))
        (group,) = read.groups
        wanted = tuple(places[block] for block in group.remote_blocks)
        must(group.local_blocks == wanted, "I1: every block goes to its own place")
        world, _ = self._ranks(world, pull, "expect", _key(pull, read.seq))
        upto = 1 + blocks_of(pull.request).index(group.remote_blocks[-1])
        begun = tuple(RankRead(read.seq, rank, upto) for rank in range(self._bounds.ranks))
        return self._reading(world, index, reads=pull.reads + begun)

    def _begin_verify(self, world: World, index: int, verify: Any) -> World:
        pull = world.pulls[index]
        must(
            all(read.outcome is not None and read.outcome.ok for read in pull.reads),
            "I1: what is summed has landed",
        )
        must(verify.local_blocks == (_destination(index),), "I1: every block is summed")
        must(verify.checksums == checksums_of(pull.request), "I1: and compared with its own checksums")
        return self._reading(world, index, verifying=True)

    def _cancel_read(self, world: World, index: int, seq: int) -> World:
        reads = tuple(
            read._replace(cancelled=True) if read.seq == seq and read.state is Bytes.FLYING else read
            for read in world.pulls[index].reads
        )
        return self._reading(world, index, reads=reads)

    def _emitted(self, world: World, index: int, event: Any) -> World:
        pull = world.pulls[index]
        match type(event).__name__:
            case "PrefixLent":
                self.seen.add("prefix lent")
                if event.num_blocks:
                    return world  # it is held from now on
                end = End.DONE
            case "PullDone":
                must(pull.end is End.NONE, "a pull ends once")
                self.seen.add("pull done")
                world = self._decoding(world, index)
                end = End.DONE
            case "PullFailed":
                must(pull.end is End.NONE, "a pull ends once")
                self.seen.add(f"pull {event.reason}")
                end = End.FAILED if event.quiescent else End.QUARANTINED
            case _:
                must(pull.end is End.QUARANTINED, "I3: a quarantine ends once")
                self.seen.add("quarantine ended")
                end = End.FAILED
        if end is not End.QUARANTINED:
            self._handed_over(pull)
        return self._reading(world, index, end=end)

    def _handed_over(self, pull: Reading) -> None:
        writing = pull.clearing or any(read.writing for read in pull.reads)
        must(not writing, "I3: no byte lands in a block that was released")

    def _decoding(self, world: World, index: int) -> World:
        pull = world.pulls[index]
        if self._bounds.lent and not pull.reads:
            return world  # nothing was lent, and nothing counts as computed
        must(
            all(read.outcome is not None and read.outcome.ok for read in pull.reads), "I6: every rank is done"
        )
        ranks = {read.rank for read in pull.reads if read.blocks == BLOCKS}
        must(len(ranks) == self._bounds.ranks, "I1: every block was read, on every rank")
        must(all(read.state is Bytes.RIGHT for read in pull.reads), "I1: every byte is this prompt's")
        must(not world.prompts[pull.request].used, "I7: one lease feeds one transfer")
        return self._prompt(world, pull.request, used=True)

    def _check_reading(self, pull: Reading) -> None:
        live = self._machines[pull.machine].live
        must(live == (pull.end is End.NONE), "a pull that is over has said so")
        if pull.end is End.QUARANTINED:
            quiet = all(read.outcome is not None and read.quiescence_reported for read in pull.reads)
            must(not quiet or pull.clearing, "I3: a quarantine ends when the last rank is quiescent")
        if live:
            for seq in {read.seq for read in pull.reads}:
                outcomes = [read.outcome for read in pull.reads if read.seq == seq]
                complete = all(each is not None for each in outcomes)
                must(
                    not complete or all(each is not None and each.ok for each in outcomes),
                    "I6: one failed rank fails the pull",
                )

    def _check_no_second(self, table: Handle, request: int) -> None:
        if (table, request) in self._no_second:
            return
        self._no_second.add((table, request))
        try:
            self._machines.call(
                table, "register", 0, transfer_id(request), one_group((1,)), 4, _HASH, REQUEST_S
            )
        except self._machines.lease.DuplicateTransfer:
            return
        raise Violation("I7: a second lease for the same transfer")

    # Small changes.

    def _checksums(self, request: int, first: int, upto: int) -> tuple[bytes, ...]:
        return checksums_of(request)[first:upto] if self._bounds.verify else ()

    @property
    def _remembers_all(self) -> bool:
        return self._bounds.memory >= self._bounds.requests and self._bounds.staged >= self._bounds.requests

    def _new_table(self) -> Handle:
        bounds = self._bounds
        table = self._machines.lease.LeaseTable(LEASE_S, max_staged=bounds.staged, max_ended=bounds.memory)
        return self._machines.keep(table)

    def _fault(self, world: World) -> World:
        return world._replace(faults=world.faults - 1)

    def _prompt(self, world: World, request: int, **changes: Any) -> World:
        prompt = world.prompts[request]._replace(**changes)
        return world._replace(prompts=replaced(world.prompts, request, prompt))

    def _reading(self, world: World, index: int, **changes: Any) -> World:
        pull = world.pulls[index]._replace(**changes)
        return world._replace(pulls=replaced(world.pulls, index, pull))

    def _rank(self, world: World, index: int, place: int, **changes: Any) -> World:
        reads = world.pulls[index].reads
        return self._reading(world, index, reads=replaced(reads, place, reads[place]._replace(**changes)))

    def _ranks(self, world: World, pull: Reading, method: str, *arguments: Any) -> tuple[World, Any]:
        reader = world.readers[pull.reader]
        handle, result = self._machines.call(reader.aggregator, method, *arguments)
        readers = replaced(world.readers, pull.reader, reader._replace(aggregator=handle))
        return world._replace(readers=readers), result

    def _send(self, world: World, index: int, kind: str, body: Any = None, *, awaited: bool = False) -> World:
        seq = world.pulls[index].seq
        world = self._reading(world, index, seq=seq + 1, awaited=seq if awaited else None)
        return world._replace(network=world.network | {Message(kind, index, seq, 0, body)})

    def _answer(self, world: World, message: Message, kind: str, body: Any = None) -> World:
        answer = Message(kind, message.pull, message.seq, world.incarnation, body)
        return world._replace(network=world.network | {answer})


def _key(pull: Reading, seq: int) -> tuple[str, int]:
    return (transfer_id(pull.request), seq)


def _destination(index: int) -> tuple[int, ...]:
    """The reader's own blocks."""
    return tuple(range(100 * (index + 1), 100 * (index + 1) + BLOCKS))


def _text(message: Message) -> str:
    return f"{message.kind} {message.pull}#{message.seq}"
