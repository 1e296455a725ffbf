# SPDX-License-Identifier: Apache-2.0
"""Settings of an agent's transfer plane, and where a remote prompt's KV lies."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvferry.common.addresses import host_port
from kvferry.common.curve import ClusterKey
from kvferry.transfer.layout import KVGeometry

RENEWALS = 3.3
"""So many within a lease's time at least: one or two may be lost."""
MAX_STAGED = 1024
"""Readers that may wait for prefills which have not begun."""
MAX_LOAN_BLOCKS = 1 << 14
"""Blocks asked for at once of another agent's prefix cache: those of the longest contexts that there are."""
MAX_LOAN_S = 5.0
"""Limit for such blocks to be asked for and to come, and for a loan; computing them is the alternative."""


class RemotePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's KV lies: the producer's control channel and what it pinned.

    Ranks of engines that have a plane each, and that split the heads differently, read from each other with:

    Attributes:
        heads: The first and the last of our heads that are read there; by default all.
        num_readers: How many read under the same lease.
    """

    engine_id: str
    """The producer's incarnation."""
    host: str
    port: int
    num_tokens: int
    tp_size: int
    dp_rank: int = 0
    heads: tuple[int, int] | None = None
    num_readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRank:
    """Where a rank listens for an engine process on another host; `key` is its public key (Z85)."""

    host: str
    port: int
    key: bytes

    def __str__(self) -> str:
        return host_port(self.host, self.port)


RankAddress = Path | RemoteRank
"""Where a rank listens: the path of a Unix socket, or on another host."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one KV-cache group at consecutive positions of a prompt: `ids[i]` is at `first + i`.

    A prompt's blocks are one run for each of the engine's groups. A run begins behind what its group does not
    keep (tokens before a window), and in a pull behind what the reader has.
    """

    first: int
    ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + len(self.ids)


def all_blocks(runs: Sequence[BlockRun]) -> tuple[int, ...]:
    """The blocks of all groups, one group after the other."""
    return tuple(block for run in runs for block in run.ids)


def blocks_by_group(runs: Sequence[BlockRun], begin: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Those of `all_blocks` from `begin` to before `end`, a tuple for each group."""
    parts, at = [], 0
    for run in runs:
        parts.append(run.ids[max(begin - at, 0) : max(end - at, 0)])
        at += len(run.ids)
    return tuple(parts)


def is_sampled(transfer_id: str, share: float) -> bool:
    """Whether a transfer is among this share of all, by its id: the same on both sides, and among every
    larger share too.
    """
    return zlib.crc32(transfer_id.encode()) < share * (1 << 32)


def one_group(block_ids: Sequence[int], first: int = 0) -> tuple[BlockRun]:
    """A prompt's blocks from position `first` on, at an engine with one group."""
    return (BlockRun(first, tuple(block_ids[first:])),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneConfig:
    """Settings of one agent's transfer plane.

    Args:
        control_port: Port of the control channel; 0 lets the OS choose.
        transfer: Backend that the ranks open, or auto.
        lease_s: Seconds until a lease expires that is not renewed.
        renew_s: Seconds between renewals, or less for producers whose leases are shorter; by default at most
            3, and under a third of the lease.
        quarantine_s: Seconds after which a failed read that may still be written ends by force.
        weights: Identity of the weights; KV of other weights is of no use.
        host_id: Identity of the host, for backends that work within one only.
        rank_addresses: Where this agent's ranks listen, in order of rank: all of them, whatever they split.
        verify_kv: Share of the transfers, from 0 to 1, of which we sum what we lend, and check what we pull.
        lends_prefixes: Our scheduler answers `LoanRequested`; else nothing of our prefix cache is lent.
        max_staged: Readers that may wait for prefills which have not begun.
        curve_secret: CURVE secret key (Z85) of the control channel: only agents with the same key connect.
    """

    incarnation: str
    bind_host: str
    control_port: int
    advertise_host: str
    transfer: str
    lease_s: float
    renew_s: float | None = None
    quarantine_s: float = 30.0
    geometry: KVGeometry
    num_blocks: int
    weights: str
    host_id: str
    rank_addresses: tuple[RankAddress, ...]
    verify_kv: float = 0.0
    lends_prefixes: bool = False
    max_staged: int = MAX_STAGED
    curve_secret: str | None = field(default=None, repr=False)

    @property
    def num_ranks(self) -> int:
        return len(self.rank_addresses)

    @property
    def cluster_key(self) -> ClusterKey | None:
        """The key pair of `curve_secret`, if there is one. Raises `BadClusterKey` if it is no key."""
        return None if self.curve_secret is None else ClusterKey.of(self.curve_secret)

    @property
    def renewal_interval_s(self) -> float:
        return self.renew_s if self.renew_s is not None else min(3.0, self.lease_s / RENEWALS)
