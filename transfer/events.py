# SPDX-License-Identifier: Apache-2.0
"""The transfer plane's events for the scheduler, and its counters."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import msgspec

from kvferry.transfer.sampled_tokens import SampledTokens

LeaseEndCause = Literal["released", "expired", "dropped"]
PULL_SECONDS_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Bounds of the buckets that pulls are counted in by how long they took; a last one has none."""
PULL_FAILURE_REASONS = (
    "unreachable", "refused", "incarnation", "read_failed", "deadline", "invalid", "checksum", "mismatch",
    "lease_unknown", "lease_expired", "lease_dropped", "lease_finished",
)  # fmt: skip

WITHDRAWN = "lease_withdrawn"
"""How a pull ends whose prefill ended the whole response: there is nothing to compute again."""
NO_FAULT = ("cancelled", WITHDRAWN)
"""Ends of a pull that are not counted as failures: its client has left, or nothing is left to decode."""


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Producer: the lease is over and its blocks may be freed from now on."""

    transfer_id: str
    cause: LeaseEndCause


class LoanRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Producer: a peer asks for blocks of our prefix cache, by the hashes of a prompt's consecutive blocks.

    To be answered by `SchedulerConnector.grant_prefix`, soon.
    """

    transfer_id: str
    hashes: tuple[bytes, ...]


class PrefixLent(msgspec.Struct, frozen=True, kw_only=True):
    """Consumer: the response to `ask_prefix`. The first `num_blocks` of those asked for are leased to us, to
    be pulled soon; 0: none are, and the transfer is over.
    """

    transfer_id: str
    num_blocks: int


class RankRead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank read: from when to when, by the monotonic clock that all processes of a host share."""

    rank: int
    began_at: float
    ended_at: float
    nbytes: int
    descriptors: int

    def __add__(self, other: RankRead) -> RankRead:
        """Return two reads of one rank as one."""
        return RankRead(
            rank=self.rank,
            began_at=min(self.began_at, other.began_at),
            ended_at=max(self.ended_at, other.ended_at),
            nbytes=self.nbytes + other.nbytes,
            descriptors=self.descriptors + other.descriptors,
        )


class PullDone(msgspec.Struct, frozen=True, kw_only=True):
    """Consumer: the prompt's KV is here and proven right; decoding may start.

    `wait_s` is from `pull` to the first read, `pull_s` from there (`began_at`, by the monotonic clock) to the
    proof; `tail_s` is the part of it after the producer said that the prompt is ready, and `early_blocks`
    were here before that. `num_blocks` were pulled: of another agent's prefix cache maybe fewer than were
    asked for, or none. `rank_reads`, in order of rank, are all reads of each.
    """

    transfer_id: str
    backend: str
    nbytes: int
    descriptors: int
    wait_s: float
    pull_s: float
    tail_s: float = 0.0
    early_blocks: int = 0
    num_blocks: int = 0
    first_tokens: SampledTokens | None = None
    began_at: float = 0.0
    rank_reads: tuple[RankRead, ...] = ()


class PullFailed(msgspec.Struct, frozen=True, kw_only=True):
    """Consumer: nothing that was read may be used.

    Unless `quiescent`, the destination blocks may still be written to and stay quarantined until
    `PullQuiescent`. `reason` is one of `PULL_FAILURE_REASONS`: lease_ and why the lease is gone, or another
    word. `detail` is for the log. `backend` is empty if it failed before it had one. The prefill's
    `first_tokens` are valid even so, if they came before the failure.
    """

    transfer_id: str
    reason: str
    quiescent: bool
    detail: str = ""
    backend: str = ""
    first_tokens: SampledTokens | None = None


class PullQuiescent(msgspec.Struct, frozen=True, kw_only=True):
    """Consumer: the blocks of a failed pull are no longer written to."""

    transfer_id: str


PlaneEvent = LeaseEnded | LoanRequested | PrefixLent | PullDone | PullFailed | PullQuiescent


class PullTimes(msgspec.Struct, kw_only=True):
    """How long the pulls that ended well took: in seconds together, and how many fell into each bucket."""

    seconds: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(PULL_SECONDS_BOUNDS) + 1))

    def add(self, seconds: float) -> None:
        """Count one pull."""
        self.seconds += seconds
        self.buckets[bisect_left(PULL_SECONDS_BOUNDS, seconds)] += 1

    def copy(self) -> PullTimes:
        """Return what was counted up to now."""
        return PullTimes(seconds=self.seconds, buckets=self.buckets.copy())


class PlaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start, except `leased` and `quarantined`, which are as of now (in transfers)."""

    leased: int
    quarantined: int
    leases_ended: dict[str, int]
    pulls: int
    """Those that ended well."""
    pull_bytes: int
    pull_descriptors: int
    pull_times: dict[str, PullTimes]
    """By backend."""
    pull_failures: dict[str, int]
    verify_seconds: float = 0.0
    """Spent on checking what was pulled; part of `pull_times`."""
    handshakes: int
    bad_frames: int
    streamed_pulls: int = 0
    """Pulls that ended well and had blocks before the producer had computed all of them."""
    refusals: dict[str, str] = {}
    """Producers that we do not fit, by incarnation, and why: the field, their value and ours."""
    prefix_loans: int = 0
    """Leases granted over blocks of our prefix cache."""
    prefix_pulls: int = 0
    """Prefixes that peers were asked for; bytes and failures are of those alone, not of pulls."""
    prefix_pull_bytes: int = 0
    prefix_pull_failures: dict[str, int] = {}
    rebuilds: int = 0
    """Transfer engines rebuilt: for a quarantine too long or too large, or a peer out of reach."""
