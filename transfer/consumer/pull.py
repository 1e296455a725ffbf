# SPDX-License-Identifier: Apache-2.0
"""The consumer's side of one transfer (I1 and I3, docs/architecture.md).

Pure and synchronous: each method is an event and returns what to do. Blocks are read as soon as the producer
reports them computed; the pull is done when every read of every rank is done *and* the producer, asked after
the last of them, confirmed the lease. Everything else ends in one `PullFailed`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.common.state_machine import transition, transitions
from kvferry.transfer.control.messages import Grant, Groups
from kvferry.transfer.events import PrefixLent, PullDone, PullFailed, PullQuiescent, RankRead
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import BlockRun, one_group
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.messages import CancelRead
from kvferry.transfer.sampled_tokens import SampledTokens

MAX_ATTEMPTS = 3
"""Times a control request is sent before the producer counts as unreachable."""


class PullState(enum.Enum):
    HELD = "held"
    """Accepted; there is no room for its blocks yet, so the lease is only renewed."""
    CONNECTING = "connecting"
    ASKING = "asking"
    """For a lease over blocks that the peer's prefix cache may have."""
    OPENING = "opening"
    """Asking for blocks that are not known yet, or whether these are all; earlier reads may be in flight."""
    READING = "reading"
    """All blocks are known; some reads are in flight."""
    VERIFYING = "verifying"
    """All reads are done; the ranks compute their checksums."""
    RELEASING = "releasing"
    """All bytes are here; waiting for the producer's proof."""
    DONE = "done"
    FAILED = "failed"


PULL_TRANSITIONS = transitions(
    {
        PullState.HELD: {PullState.CONNECTING, PullState.FAILED},
        PullState.CONNECTING: {PullState.ASKING, PullState.OPENING, PullState.FAILED},
        PullState.ASKING: {PullState.HELD, PullState.OPENING, PullState.DONE, PullState.FAILED},
        PullState.OPENING: {
            PullState.READING,
            PullState.VERIFYING,
            PullState.RELEASING,
            PullState.FAILED,
        },
        PullState.READING: {PullState.VERIFYING, PullState.RELEASING, PullState.FAILED},
        PullState.VERIFYING: {PullState.RELEASING, PullState.FAILED},
        PullState.RELEASING: {PullState.DONE, PullState.FAILED},
    }
)


@dataclass(frozen=True, slots=True)
class EnsureLink:
    """Effect: have a link to the producer that is ready, then call `connected`."""


@dataclass(frozen=True, slots=True)
class SendLend:
    """Effect: ask for a lease over cached blocks with these hashes; the response must come to `lent`."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Effect: ask for the blocks after the first `have`."""

    have: int


@dataclass(frozen=True, slots=True)
class GroupRead:
    """Blocks of one KV-cache group: `remote_blocks[i]` is read into `local_blocks[i]`."""

    group: int
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Effect: every rank reads these blocks."""

    seq: int
    groups: tuple[GroupRead, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Effect: compare what these local blocks of each group hold with a row of checksums each, then call
    `verified`.
    """

    local_blocks: tuple[tuple[int, ...], ...]
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Effect: write zeros over these local blocks of each group, then call `cleared`."""

    local_blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Effect: release the lease. With `read_ok` the response must come to `released`."""

    read_ok: bool


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Effect: drop the lease; nothing was read."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Effect: pass an event to the scheduler."""

    event: PrefixLent | PullDone | PullFailed | PullQuiescent


Effect = (
    EnsureLink
    | SendLend
    | SendOpen
    | ReadBlocks
    | CancelRead
    | Verify
    | ClearBlocks
    | SendRelease
    | SendDrop
    | Emit
)


class Pull:
    """One transfer into our blocks. With `verify` it takes no block without the producer's checksums.

    Its reads are numbered from `first_seq` on, one for each block at most. No earlier read of a transfer with
    the same id may have had one of these numbers: its late reports would be taken for this one's.
    """

    def __init__(
        self, transfer_id: TransferId, num_tokens: int, *, verify: bool = False, first_seq: int = 0
    ) -> None:
        self.transfer_id = transfer_id
        self.state = PullState.HELD
        self._num_tokens = num_tokens
        self._verify = verify
        self._checksums: tuple[bytes, ...] = ()
        self._damage = ""
        """Why our blocks are being cleared; empty if they are not."""
        self._runs: tuple[BlockRun, ...] = ()
        self._groups: Groups = ()
        """What the producer leases, once it has said so."""
        self._ids_hash: str | None = None
        self._hashes: tuple[bytes, ...] = ()
        self._block_size = 0
        self._known = 0
        self._reading: dict[int, int] = {}
        """Reads that may still write, and how many blocks each has."""
        self._next_seq = first_seq
        self._attempts = 0
        self._backend = ""
        self._nbytes = 0
        self._descriptors = 0
        self._rank_reads: dict[int, RankRead] = {}
        self._started = 0.0
        self._first_read: float | None = None
        self._ready_at: float | None = None
        self._early_blocks = 0
        self._first_tokens: SampledTokens | None = None

    def __repr__(self) -> str:
        return f"<Pull {self.transfer_id} {self.state.value} reading={sorted(self._reading)}>"

    @property
    def over(self) -> bool:
        """It has ended, and nothing is written any more."""
        return not self.live and not self._writing

    @property
    def reading(self) -> bool:
        """A read is in flight, or has failed and is not quiescent."""
        return bool(self._reading)

    @property
    def _writing(self) -> bool:
        return self.reading or bool(self._damage)

    @property
    def backend(self) -> str:
        """The backend of its reads; empty before it is connected."""
        return self._backend

    @property
    def num_written(self) -> int:
        """Our blocks that its reads write to."""
        return sum(len(run.ids) for run in self._runs)

    @property
    def live(self) -> bool:
        return bool(PULL_TRANSITIONS[self.state])

    def start(self, now: float, runs: Sequence[BlockRun], ids_hash: str | None) -> list[Effect]:
        """Begin: pull a prompt's blocks at the positions of these runs into them, a run for each group."""
        if not runs or any(run.first < 0 for run in runs):
            raise ValueError(f"no blocks to pull into: {runs}")
        self._transition(PullState.CONNECTING)
        self._runs = tuple(runs)
        self._ids_hash = ids_hash
        self._started = now
        return [EnsureLink()]

    def start_prefix(
        self, now: float, block_ids: Sequence[int], hashes: Sequence[bytes], block_size: int
    ) -> list[Effect]:
        """Begin: pull into `block_ids` the first of the blocks with these hashes, as many as the peer has.

        Raises ValueError unless there is a hash for each block.
        """
        if not block_ids or len(block_ids) != len(hashes):
            raise ValueError(f"{len(hashes)} hashes of {len(block_ids)} blocks")
        self._hashes = tuple(hashes)
        self._block_size = block_size
        return self.start(now, one_group(block_ids), None)

    def ask_prefix(self, hashes: Sequence[bytes], block_size: int) -> list[Effect]:
        """Ask for a lease over the first of the blocks with these hashes, as many as the peer has. It is held
        until `start`.
        """
        self._transition(PullState.CONNECTING)
        self._hashes = tuple(hashes)
        self._block_size = block_size
        return [EnsureLink()]

    def connected(self, backend: str) -> list[Effect]:
        """The link to the producer is ready."""
        if self.state is not PullState.CONNECTING:
            return []
        self._backend = backend
        if self._hashes:
            self._transition(PullState.ASKING)
            return [SendLend(self._hashes)]
        self._transition(PullState.OPENING)
        return [SendOpen(self._known)]

    def lent(self, now: float, num_blocks: int) -> list[Effect]:
        """The peer leases us the first `num_blocks` of those asked for. With none it is done."""
        if self.state is not PullState.ASKING:
            return []
        if num_blocks > len(self._hashes):
            return self.fail("mismatch", f"{num_blocks} blocks, {len(self._hashes)} asked for")
        if not self._runs:
            return self._held(num_blocks)
        self._runs = one_group(self._runs[0].ids[:num_blocks])
        if not num_blocks:
            self._transition(PullState.DONE)
            return [self._done(now)]
        self._num_tokens = num_blocks * self._block_size
        self._ids_hash = self._hashes[num_blocks - 1].hex()
        self._transition(PullState.OPENING)
        return [SendOpen(self._known)]

    def _held(self, num_blocks: int) -> list[Effect]:
        """It was only asked what there is."""
        self._num_tokens = num_blocks * self._block_size
        self._hashes = ()
        self._transition(PullState.HELD if num_blocks else PullState.DONE)
        return [Emit(PrefixLent(transfer_id=self.transfer_id, num_blocks=num_blocks))]

    def opened(self, now: float, grant: Grant) -> list[Effect]:
        """The producer named more blocks."""
        if self.state is not PullState.OPENING:
            return []
        mismatch = self._mismatch(grant)
        if mismatch:
            return self.fail("mismatch", mismatch)
        self._attempts = 0
        effects = self._read(now, grant)
        if not grant.ready:
            return [*effects, SendOpen(self._known)]
        self._ready_at = now
        self._first_tokens = grant.first_tokens
        if self._reading:
            self._transition(PullState.READING)
            return effects
        return [*effects, *self._complete()]

    def pending(self) -> list[Effect]:
        """The producer has nothing new yet."""
        if self.state is not PullState.OPENING:
            return []
        self._attempts = 0
        return [SendOpen(self._known)]

    def gone(self, reason: str) -> list[Effect]:
        """The producer has no lease for us. Ignored while releasing: that response decides."""
        if not self.live or self.state is PullState.RELEASING:
            return []
        return self._failed(f"lease_{reason}")

    def read_ended(self, seq: int, outcome: Outcome) -> list[Effect]:
        """Every rank has reported one read."""
        if seq not in self._reading:
            return []
        blocks = self._reading[seq]
        if outcome.quiescent:
            del self._reading[seq]
        if not self.live:
            return self._quiesced()
        if not outcome.ok:
            # The ranks keep the same deadline: it is one reason, on whichever side it passes first.
            return self.fail("deadline" if outcome.reason == "deadline" else "read_failed", outcome.reason)
        self._nbytes += outcome.nbytes
        self._descriptors += outcome.descriptors
        for read in outcome.reads:
            earlier = self._rank_reads.get(read.rank)
            self._rank_reads[read.rank] = read if earlier is None else earlier + read
        if self.state is PullState.OPENING:
            self._early_blocks += blocks
        if self._reading or self.state is not PullState.READING:
            return []
        return self._complete()

    def read_quiescent(self, seq: int) -> list[Effect]:
        """No rank writes for a failed read any more."""
        if seq not in self._reading:
            return []
        del self._reading[seq]
        return self._quiesced()

    def verified(self, mismatch: str) -> list[Effect]:
        """The checksums were compared; `mismatch` is the first difference, empty if there is none.

        What is damaged does not stay: a prompt that is computed in these blocks leaves the rest of its last
        one, and attention multiplies that by 0, which makes NaN of an infinity.
        """
        if self.state is not PullState.VERIFYING:
            return []
        if not mismatch:
            return self._release()
        self._damage = mismatch
        return [ClearBlocks(tuple(run.ids for run in self._runs))]

    def cleared(self) -> list[Effect]:
        """The blocks hold zeros."""
        damage, self._damage = self._damage, ""
        return self.fail("checksum", damage) if self.live else self._quiesced()

    def released(self, now: float, valid: bool) -> list[Effect]:
        """The producer's verdict on what was read."""
        if self.state is not PullState.RELEASING:
            return []
        if not valid:
            return self._failed("invalid")
        self._transition(PullState.DONE)
        return [self._done(now)]

    def _done(self, now: float) -> Emit:
        begun = now if self._first_read is None else self._first_read
        done = PullDone(
            transfer_id=self.transfer_id,
            backend=self._backend,
            nbytes=self._nbytes,
            descriptors=self._descriptors,
            wait_s=begun - self._started,
            pull_s=now - begun,
            tail_s=0.0 if self._ready_at is None else now - self._ready_at,
            early_blocks=self._early_blocks,
            num_blocks=self.num_written,
            first_tokens=self._first_tokens,
            began_at=begun,
            rank_reads=tuple(self._rank_reads[rank] for rank in sorted(self._rank_reads)),
        )
        return Emit(done)

    def unanswered(self) -> list[Effect]:
        """A control request got no response in time: repeat it, up to `MAX_ATTEMPTS`."""
        if self.state is PullState.ASKING:
            # Not repeated: what it would take from the cache may have been leased to us already.
            return self.fail("unreachable", "no response on the control channel")
        if self.state not in (PullState.OPENING, PullState.RELEASING):
            return []
        self._attempts += 1
        if self._attempts >= MAX_ATTEMPTS:
            return self._failed("unreachable", "no response on the control channel")
        if self.state is PullState.OPENING:
            return [SendOpen(self._known)]
        return [SendRelease(read_ok=True)]

    def fail(self, reason: str, detail: str = "") -> list[Effect]:
        """Fail, and let the producer free its blocks at once."""
        if not self.live:
            return []
        untouched = self.state in (PullState.HELD, PullState.CONNECTING, PullState.ASKING)
        last: Effect = SendDrop() if untouched else SendRelease(read_ok=False)
        return [last, *self._failed(reason, detail)]

    def lost(self, reason: str, detail: str = "") -> list[Effect]:
        """Fail without a message to the producer, which cannot be reached."""
        return self._failed(reason, detail) if self.live else []

    def _failed(self, reason: str, detail: str = "") -> list[Effect]:
        held = self.state is PullState.HELD
        self._transition(PullState.FAILED)
        if held:
            return []
        failed = PullFailed(
            transfer_id=self.transfer_id,
            reason=reason,
            quiescent=not self._writing,
            detail=detail,
            backend=self._backend,
            first_tokens=self._first_tokens,
        )
        return [
            *(CancelRead(transfer_id=self.transfer_id, seq=seq) for seq in sorted(self._reading)),
            Emit(failed),
        ]

    def _mismatch(self, grant: Grant) -> str:
        """Return why this grant cannot be for our request; empty if it can."""
        known = grant.first_block + len(grant.block_ids)
        total = sum(count for _, count in self._leased(grant))
        if grant.first_block != self._known:
            return f"blocks from {grant.first_block}, expected from {self._known}"
        if grant.num_tokens != self._num_tokens:
            return f"{grant.num_tokens} tokens, expected {self._num_tokens}"
        if self._ids_hash is not None and grant.ids_hash != self._ids_hash:
            return "other token ids"
        if self._known and grant.groups != self._groups:
            return "other groups than before"
        hole = self._hole(grant)
        if hole:
            return hole
        if known > total or (grant.ready and known < total):
            return f"{known} blocks, expected {total}"
        if self._verify and len(grant.checksums) != len(grant.block_ids):
            return f"{len(grant.checksums)} checksums of {len(grant.block_ids)} blocks"
        return ""

    def _leased(self, grant: Grant) -> Groups:
        """The producer's positions by group; of an only group, those that we expect."""
        return grant.groups or ((0, self._runs[0].end),)

    def _hole(self, grant: Grant) -> str:
        """Return which positions that we need the producer does not lease; empty if it leases all."""
        leased = self._leased(grant)
        if len(leased) != len(self._runs):
            return f"{len(leased)} groups of blocks, expected {len(self._runs)}"
        for group, ((first, count), run) in enumerate(zip(leased, self._runs, strict=True)):
            if run.ids and not (first <= run.first and first + count == run.end):
                wanted = f"{run.first} to {run.end}"
                return f"a hole: group {group} has blocks {first} to {first + count}, not {wanted}"
        return ""

    def _read(self, now: float, grant: Grant) -> list[Effect]:
        """Read of the blocks that were granted those that are missing here."""
        reads = []
        begin, end = self._known, self._known + len(grant.block_ids)
        at = 0
        for group, ((first, count), run) in enumerate(zip(self._leased(grant), self._runs, strict=True)):
            skipped = at + run.first - first
            low, high = max(begin, skipped), min(end, at + count)
            if run.ids and low < high:
                local = run.ids[low - skipped : high - skipped]
                reads.append(GroupRead(group, local, grant.block_ids[low - begin : high - begin]))
                if self._verify:
                    self._checksums += grant.checksums[low - begin : high - begin]
            at += count
        self._known = end
        self._groups = grant.groups
        if not reads:
            return []
        if self._first_read is None:
            self._first_read = now
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._reading[seq] = sum(len(read.local_blocks) for read in reads)
        return [ReadBlocks(seq, tuple(reads))]

    def _complete(self) -> list[Effect]:
        """Every read is done."""
        if not self._checksums:
            return self._release()
        self._transition(PullState.VERIFYING)
        return [Verify(tuple(run.ids for run in self._runs), self._checksums)]

    def _release(self) -> list[Effect]:
        self._transition(PullState.RELEASING)
        self._attempts = 0
        return [SendRelease(read_ok=True)]

    def _quiesced(self) -> list[Effect]:
        if self._writing or self.state is not PullState.FAILED:
            return []
        return [Emit(PullQuiescent(transfer_id=self.transfer_id))]

    def _transition(self, to: PullState) -> None:
        self.state = transition(f"pull {self.transfer_id}", PULL_TRANSITIONS, self.state, to)
