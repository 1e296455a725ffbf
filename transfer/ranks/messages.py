# SPDX-License-Identifier: Apache-2.0
"""Messages between an agent's engine process and its own ranks about transfers.

msgspec's msgpack over a Unix socket in a private directory, or a tunnel (`transfer.ranks.tunnel`); both ends
are of one incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.transfer.control.messages import EngineDescription
from kvferry.transfer.layout import BlockPairs, BlockTemplate, Placement, ReadPlan


class RankHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Which backends a rank opened, how peers address them, and where its KV lies: first of all, and after a
    `Rebuild`.
    """

    rank: int
    placement: Placement
    engines: dict[str, EngineDescription]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The secret that signs peers' tokens."""

    secret: bytes


class Welcomed(msgspec.Struct, frozen=True, kw_only=True, tag="welcomed"):
    """The rank's engines have the secret: peers are admitted from now on."""

    rank: int


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Connect to every rank of a producer; comes to one `Connected`. `link` names it from now on.

    `plan`: which bytes of a block this rank reads, by producer rank and group (`pack_plan`).
    """

    link: int
    transfer: str
    ranks: tuple[EngineDescription, ...]
    plan: dict[int, dict[int, bytes]]
    token: bytes
    timeout_s: float


class CloseLink(msgspec.Struct, frozen=True, kw_only=True, tag="close_link"):
    """Close the connections to a producer's ranks."""

    link: int


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Read some blocks of each group, by the link's plan; comes to one `ReadEnded`.

    `blocks`: `BlockPairs` by group (`pack_blocks`).
    """

    link: int
    transfer_id: str
    seq: int
    blocks: dict[int, bytes]
    timeout_s: float


class CancelRead(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_read"):
    """Fail a read that has not ended."""

    transfer_id: str
    seq: int


class Rebuild(msgspec.Struct, frozen=True, kw_only=True, tag="rebuild"):
    """Destroy a backend's engine, and with it all that it could still write; open another. Comes to a
    `ReadEnded` or `ReadQuiescent` for every read that it had in flight, and to a new `RankHello`.
    """

    transfer: str


class SumBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="sum_blocks"):
    """Sum what some blocks of each group hold now (`transfer.checksum`); comes to one `BlocksSummed`.

    `clear`: write zeros over them first.
    """

    number: int
    clear: bool = False
    blocks: tuple[tuple[int, ...], ...]


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Set whether peers may need us, so that backends which have to be polled are; `awaited`: one connects,
    or has blocks to read.
    """

    on: bool
    awaited: bool


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """Every producer rank is reachable, or why not. `broken`: not before our engine is rebuilt."""

    rank: int
    link: int
    transfer: str
    error: str | None
    broken: bool = False


class ReadEnded(msgspec.Struct, frozen=True, kw_only=True, tag="read_ended"):
    """One rank's part of a read is over: every span arrived, or `reason` says why not.

    `began_at` and `ended_at` are readings of the monotonic clock, which all processes of a host share; those
    of another host are adjusted (`RankGroup`).
    """

    rank: int
    transfer_id: str
    seq: int
    ok: bool
    reason: str
    quiescent: bool
    nbytes: int
    descriptors: int
    began_at: float
    ended_at: float


class ReadQuiescent(msgspec.Struct, frozen=True, kw_only=True, tag="read_quiescent"):
    """A read that failed without being quiescent has become so."""

    rank: int
    transfer_id: str
    seq: int


class BlocksSummed(msgspec.Struct, frozen=True, kw_only=True, tag="blocks_summed"):
    """One rank's sums of the blocks that a `SumBlocks` named: by group, a row per block and a column per
    head.
    """

    rank: int
    number: int
    sums: tuple[bytes, ...]


Command = Welcome | Connect | CloseLink | Read | CancelRead | Rebuild | SumBlocks | Serve
Report = RankHello | Welcomed | Connected | ReadEnded | ReadQuiescent | BlocksSummed

_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_command(frame: bytes) -> Command:
    """Type a command. Raises `msgspec.DecodeError` for what none of our processes sends."""
    return _command_decoder.decode(frame)


def decode_report(frame: bytes) -> Report:
    """Type a report. Raises `msgspec.DecodeError` for what none of our processes sends."""
    return _report_decoder.decode(frame)


def pack_plan(plan: ReadPlan) -> dict[int, dict[int, bytes]]:
    return {
        rank: {group: _pack(each.table) for group, each in templates.items()}
        for rank, templates in plan.items()
    }


def unpack_plan(packed: Mapping[int, Mapping[int, bytes]]) -> ReadPlan:
    return {
        rank: {group: BlockTemplate(_unpack(each, 5)) for group, each in templates.items()}
        for rank, templates in packed.items()
    }


def pack_blocks(blocks: Mapping[int, BlockPairs]) -> dict[int, bytes]:
    return {group: _pack(each) for group, each in blocks.items()}


def unpack_blocks(packed: Mapping[int, bytes]) -> dict[int, BlockPairs]:
    return {group: _unpack(each, 3) for group, each in packed.items()}


def _pack(table: npt.NDArray[np.int64]) -> bytes:
    return table.astype("<i8", copy=False).tobytes()


def _unpack(packed: bytes, columns: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype="<i8").reshape(-1, columns)
