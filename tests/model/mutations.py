# SPDX-License-Identifier: Apache-2.0
"""Seeded defects of the state machines: one line each, in a copy of the product's source."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

import kvferry.transfer.consumer.pull
import kvferry.transfer.producer.lease
import kvferry.transfer.ranks.aggregate
from tests.model.machines import Machines

_MODULES = {
    "lease": kvferry.transfer.producer.lease,
    "pull": kvferry.transfer.consumer.pull,
    "aggregate": kvferry.transfer.ranks.aggregate,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`old`, which occurs once in the module's source, becomes `new`; `world` is small and shows it."""

    sentence: str
    module: str
    old: str
    new: str
    world: str = "one reader, one fault, time"


MUTATIONS = (
    Mutation(
        sentence="A loan may be opened by any reader.",
        module="lease",
        old="            lease.readers.add(consumer)\n        return effects\n\n    def advance",
        new="            lease.readers.clear()\n        return effects\n\n    def advance",
        world="a loan that two readers ask for",
    ),
    Mutation(
        sentence="A release that comes after the deadline, but before the timer, is called valid.",
        module="lease",
        old="""        effects = self.expire(now)
        lease = self._live.get(transfer_id)
        if lease is None:
            verdict = self""",
        new="""        effects: list[Effect] = []
        lease = self._live.get(transfer_id)
        if lease is None:
            verdict = self""",
    ),
    Mutation(
        sentence="An open that comes after the deadline, but before the timer, revives the lease.",
        module="lease",
        old="""        effects = self.expire(now)
        lease = self._live.get(transfer_id) or""",
        new="""        effects: list[Effect] = []
        lease = self._live.get(transfer_id) or""",
    ),
    Mutation(
        sentence="A prefill that completes after the request's deadline is still lent.",
        module="lease",
        old="lease.state is LeaseState.STAGED or lease.deadline <= now:\n            return None",
        new="lease.state is LeaseState.STAGED:\n            return None",
        world="one reader, renewals",
    ),
    Mutation(
        sentence="Any consumer may release the lease of another reader.",
        module="lease",
        old="        if consumer not in lease.readers:\n            return False, effects\n",
        new="",
        world="two readers of one request",
    ),
    Mutation(
        sentence="A second reader may open a lease that has one.",
        module="lease",
        old="if num_readers != self.num_readers or not self.may_read(consumer):",
        new="if num_readers != self.num_readers:",
        world="two readers of one request",
    ),
    Mutation(
        sentence="Any consumer may renew the lease of another reader.",
        module="lease",
        old="if lease is not None and lease.may_read(consumer):",
        new="if lease is not None:",
        world="two readers of one request",
    ),
    Mutation(
        sentence="A reader whose read failed gets valid.",
        module="lease",
        old="return False, effects + self._end(lease, LeaseState.RELEASED)",
        new="return True, effects + self._end(lease, LeaseState.RELEASED)",
    ),
    Mutation(
        sentence="How a lease ended is remembered as well for every reader that failed.",
        module="lease",
        old="_Verdict(to, frozenset(lease.proven), registered)",
        new="_Verdict(to, frozenset(lease.readers), registered)",
    ),
    Mutation(
        sentence="A preempted prefill's lease goes on.",
        module="lease",
        old="return self._end(lease, LeaseState.WITHDRAWN)",
        new="return []",
    ),
    Mutation(
        sentence="A drop that comes before the prefill is forgotten.",
        module="lease",
        old="            if transfer_id not in self._ended:\n                self._remember(",
        new="            if transfer_id in self._ended:\n                self._remember(",
    ),
    Mutation(
        sentence="Renewals carry a lease past its request's deadline.",
        module="lease",
        old="return min(now + self._lease_s, lease.limit)",
        new="return now + self._lease_s",
    ),
    Mutation(
        sentence="A renewal cuts a lease short.",
        module="lease",
        old="lease.deadline = max(lease.deadline, self._extended(now, lease))",
        new="lease.deadline = now",
    ),
    Mutation(
        sentence="Blocks are named to the reader before they are computed.",
        module="lease",
        old="upto = min(self.readable, have + max_blocks)",
        new="upto = min(len(self.block_ids), have + max_blocks)",
    ),
    Mutation(
        sentence="An expired lease is never reported to the scheduler.",
        module="lease",
        old="if registered and to in _CAUSES:",
        new="if registered and to in _CAUSES and to is not LeaseState.EXPIRED:",
    ),
    Mutation(
        sentence="A lease that ends at this very moment lives until the next timer.",
        module="lease",
        old="            if lease.deadline <= now:\n",
        new="            if lease.deadline < now:\n",
    ),
    Mutation(
        sentence="A transfer that was used before may be registered again.",
        module="lease",
        old="or (verdict and verdict.registered)",
        new="",
    ),
    Mutation(
        sentence="The proof is asked for before the last read has ended.",
        module="pull",
        old="if self._reading or self.state is not PullState.READING:",
        new="if self.state is not PullState.READING:",
    ),
    Mutation(
        sentence="Decoding starts although the producer denies the proof.",
        module="pull",
        old='        if not valid:\n            return self._failed("invalid")\n',
        new="",
    ),
    Mutation(
        sentence="The producer is asked for its proof before what landed is verified.",
        module="pull",
        old="        if not self._checksums:\n            return self._release()\n",
        new="        return self._release()\n",
        world="one reader that verifies",
    ),
    Mutation(
        sentence="What differs from its checksums is decoded from all the same.",
        module="pull",
        old="if not mismatch:",
        new="if True:",
        world="one reader that verifies",
    ),
    Mutation(
        sentence="A prompt is ready as soon as its last block is readable.",
        module="lease",
        old="whole = ready and upto == self.readable",
        new="whole = upto == len(self.block_ids)",
        world="one reader that may have all blocks early",
    ),
    Mutation(
        sentence="Only the last chunk is verified.",
        module="pull",
        old="self._checksums += grant.checksums[low - begin : high - begin]",
        new="self._checksums = grant.checksums[low - begin : high - begin]",
        world="one reader that verifies",
    ),
    Mutation(
        sentence="Later blocks come with the checksums of the first.",
        module="lease",
        old="self.checksums[have:upto],",
        new="self.checksums[: upto - have],",
        world="one reader that verifies",
    ),
    Mutation(
        sentence="A failed read counts as one that arrived.",
        module="pull",
        old="        if not outcome.ok:\n",
        new="        if outcome.ok is None:\n",
    ),
    Mutation(
        sentence="A failed pull gives its blocks back whatever may still be written.",
        module="pull",
        old="quiescent=not self._writing,",
        new="quiescent=True,",
    ),
    Mutation(
        sentence="The end of a failed read counts as its quiescence.",
        module="pull",
        old="        if outcome.quiescent:\n            del self._reading[seq]\n",
        new="        del self._reading[seq]\n",
    ),
    Mutation(
        sentence="A quarantine is never ended.",
        module="pull",
        old="if self._writing or self.state is not PullState.FAILED:",
        new="if self._writing or self.state is PullState.FAILED:",
    ),
    Mutation(
        sentence="Chunks land in the wrong places of the prompt.",
        module="pull",
        old="local = run.ids[low - skipped : high - skipped]",
        new="local = run.ids[: high - low]",
    ),
    Mutation(
        sentence="One good rank makes the whole good.",
        module="aggregate",
        old="ok=not failures,",
        new="ok=len(failures) < len(reports),",
        world="two ranks",
    ),
    Mutation(
        sentence="The first rank to report settles the whole.",
        module="aggregate",
        old="if len(group.reports) < self._num_ranks:",
        new="if len(group.reports) < 1:",
        world="two ranks",
    ),
    Mutation(
        sentence="The first rank that is quiescent speaks for all.",
        module="aggregate",
        old="if not group.settled or group.writing:",
        new="if not group.settled:",
        world="two ranks",
    ),
    Mutation(
        sentence="A failed whole counts as quiescent while a rank still writes.",
        module="aggregate",
        old="quiescent=not group.writing)",
        new="quiescent=True)",
    ),
)


def mutated(mutation: Mutation) -> Machines:
    """The product's machines, one of them with the defect."""
    original = _MODULES[mutation.module]
    source = inspect.getsource(original)
    assert source.count(mutation.old) == 1, f"the line to mutate has changed: {mutation.sentence}"
    module = ModuleType(f"{original.__name__}_mutated")
    sys.modules[module.__name__] = module  # where dataclasses look their annotations up
    try:
        exec(compile(source.replace(mutation.old, mutation.new), module.__name__, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return Machines(**{mutation.module: module})
