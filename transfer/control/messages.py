# SPDX-License-Identifier: Apache-2.0
"""The frames of the control channel between two engine processes (docs/architecture.md).

MessagePack maps, packed, unpacked and typed by msgspec, nowhere else. Every frame carries the protocol
version, a `seq` that the response echoes, and the producer's incarnation.

A consumer says `hello` in the lowest version that it speaks, and which it speaks in all. The response, and
all that follows, is in the highest that both speak; without one the producer refuses by the field `version`.
Proxies know these ranges from pings, and pair no agents of which one would refuse the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvferry.transfer.ids import TransferId
from kvferry.transfer.layout import MAX_GROUPS, MAX_REGIONS, KVGeometry, Placement
from kvferry.transfer.plane import MAX_LOAN_BLOCKS
from kvferry.transfer.sampled_tokens import SampledTokens

VERSIONS = (3, 3)
"""The lowest and the highest version that is spoken here. What ranks send each other counts too: a backend's
frames change with a version of this.
"""
MAX_FRAME_BYTES = 1 << 20
_GRANT_SPARE_BYTES = 1 << 16
_BLOCK_ID_BYTES = 9
"""The most that MessagePack makes of an integer."""
MAX_IDS = 4096
"""Transfers named in one `renew`."""

_Id = Annotated[str, Meta(min_length=1, max_length=128)]
_Word = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]
_Blob = Annotated[bytes, Meta(max_length=1 << 16)]
_Sums = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
_Ids = Annotated[tuple[_Id, ...], Meta(max_length=MAX_IDS)]
_Version = Annotated[int, Meta(ge=1, le=64)]
_Spoken = Annotated[int, Meta(ge=VERSIONS[0], le=VERSIONS[1])]
_Hash = Annotated[bytes, Meta(min_length=1, max_length=32)]
_Hashes = Annotated[tuple[_Hash, ...], Meta(min_length=1, max_length=MAX_LOAN_BLOCKS)]
MAX_BLOCKS = 1 << 17
"""Blocks named in one `opened`."""
_Blocks = Annotated[tuple[_Count, ...], Meta(max_length=MAX_BLOCKS)]
_BlockCount = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Groups = Annotated[tuple[tuple[_BlockCount, _BlockCount], ...], Meta(max_length=MAX_GROUPS)]
"""Which positions of a prompt are leased, by KV-cache group: the first, and how many from there on."""

GoneReason = Literal["unknown", "expired", "dropped", "finished", "withdrawn"]


class BadControlFrame(ValueError):
    """A frame that is not a control message."""


class _Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    v: _Spoken = VERSIONS[0]
    seq: _Count
    incarnation: _Id
    """The producer's: of the one that the request is for, and of the one that responds."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's engine and the regions of its pool, as its backend describes them."""

    engine: _Blob
    regions: Annotated[tuple[_Blob, ...], Meta(min_length=1, max_length=MAX_REGIONS)]


_Engines = Annotated[dict[_Word, EngineDescription], Meta(max_length=64)]
"""One rank's, by backend."""


class Hello(_Frame, frozen=True, tag="hello"):
    """Begin a link. `transfers` are those to choose from, the consumer's best first.

    `verify_kv`: the share of transfers (`plane.is_sampled`) of which the consumer accepts no KV without
    checksums. `versions`: the lowest and the highest that it
    speaks.
    """

    consumer: _Id
    geometry: KVGeometry
    layout: _Word
    weights: _Word
    transfers: Annotated[tuple[_Word, ...], Meta(max_length=16)]
    host_id: _Word
    verify_kv: _Share
    ranks: Annotated[tuple[_Engines, ...], Meta(max_length=1024)]
    versions: tuple[_Version, _Version]


class OtherHello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """A `hello` in a version that is not spoken here: what of it is the same in every version."""

    v: _Version
    seq: _Count
    incarnation: _Id


class HelloOk(_Frame, frozen=True, tag="hello_ok"):
    """The chosen transfer, what the consumer's ranks need in order to connect with it, and where each rank's
    KV lies.
    """

    transfer: _Word
    num_blocks: _Count
    ranks: Annotated[tuple[EngineDescription, ...], Meta(min_length=1, max_length=1024)]
    placements: Annotated[tuple[Placement, ...], Meta(min_length=1, max_length=1024)]
    token: _Blob


class RequestRefused(_Frame, frozen=True, tag="refused"):
    """The request is refused: `ours` is the producer's value of the field, `theirs` the consumer's."""

    field: _Word
    ours: _Word
    theirs: _Word


class Open(_Frame, frozen=True, tag="open"):
    """Ask for the blocks after the first `have`; the response may take `wait_s`.

    `num_readers`: so many consumers read under the lease, each with a proof of its own; if it is not there,
    one does. It needs no version: agents that do not know it have no layout in common with those that set it.
    """

    transfer_id: _Id
    consumer: _Id
    have: _Count
    wait_s: _Seconds
    num_readers: Annotated[int, Meta(ge=2, le=1024)] | UnsetType = UNSET


class Opened(_Frame, frozen=True, tag="opened"):
    """Readable blocks, from number `first_block` of the prompt's leased ones on: those of its first group,
    then those of the next. Without `groups` there is one, leased from the prompt's beginning.

    `ready`: those are all, and `first_tokens` are what the prefill sampled, if it is known. `checksums` are
    of a producer that verifies this transfer: 4 bytes (`transfer.checksum`) for each block and each of its
    group's heads (`layout.num_columns`), in this order.
    """

    transfer_id: _Id
    state: Literal["filling", "ready"]
    first_block: _Count
    block_ids: _Blocks
    num_tokens: _Count
    lease_s: _Seconds
    ids_hash: _Word
    checksums: _Sums
    first_tokens: SampledTokens | None = None
    groups: Groups = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """What an `Opened` says, as the state machines at both ends use it: one row of checksums per block."""

    ready: bool
    first_block: int
    block_ids: tuple[int, ...]
    num_tokens: int
    ids_hash: str
    checksums: tuple[bytes, ...] = ()
    first_tokens: SampledTokens | None = None
    groups: Groups = ()


class Pending(_Frame, frozen=True, tag="pending"):
    """Nothing new within `wait_s`; ask again."""

    transfer_id: _Id


class Gone(_Frame, frozen=True, tag="gone"):
    """There is no lease for this reader."""

    transfer_id: _Id
    reason: GoneReason


class Lend(_Frame, frozen=True, tag="lend"):
    """Ask for a lease over blocks of the producer's prefix cache: those with the first of these hashes.

    A hash stands for all of the prompt up to the block's end (`agent.block_hashes.hash_blocks`). The lease
    is the consumer's from the start, and lasts `limit_s` at most.
    """

    transfer_id: _Id
    consumer: _Id
    hashes: _Hashes
    limit_s: _Seconds


class Lent(_Frame, frozen=True, tag="lent"):
    """So many blocks are leased, to be opened like a prompt of as many; 0: there are none, and no lease."""

    transfer_id: _Id
    num_blocks: _Count


class Renew(_Frame, frozen=True, tag="renew"):
    """Renew leases."""

    consumer: _Id
    transfer_ids: _Ids


class Renewed(_Frame, frozen=True, tag="renewed"):
    alive: _Ids
    gone: _Ids


class Release(_Frame, frozen=True, tag="release"):
    """Release a lease. `read_ok`: all of the consumer's reads are done."""

    transfer_id: _Id
    consumer: _Id
    read_ok: bool


class Released(_Frame, frozen=True, tag="released"):
    """`valid`: the lease held from `ready` until now, so what was read before the request is right."""

    transfer_id: _Id
    valid: bool


class Drop(_Frame, frozen=True, tag="drop"):
    """End a lease that is not needed any more."""

    transfer_id: _Id


class Dropped(_Frame, frozen=True, tag="dropped"):
    transfer_id: _Id


Request = Hello | Open | Lend | Renew | Release | Drop
Received = Request | OtherHello
Response = HelloOk | RequestRefused | Opened | Pending | Gone | Lent | Renewed | Released | Dropped
_F = TypeVar("_F")


def max_blocks(sum_bytes: int) -> int:
    """Return how many blocks one `Opened` can name, with checksums of so many bytes each (0: none)."""
    return min(MAX_BLOCKS, (MAX_FRAME_BYTES - _GRANT_SPARE_BYTES) // (_BLOCK_ID_BYTES + sum_bytes))


def common_version(hello: Hello) -> int | None:
    """Return the highest version that a producer here and the consumer both speak; None if there is none."""
    lowest, highest = hello.versions
    common = min(VERSIONS[1], highest)
    return common if common >= max(VERSIONS[0], lowest) else None


def encode(frame: Request | Response) -> bytes:
    """Pack one message. Raises `BadControlFrame` if it exceeds `MAX_FRAME_BYTES`."""
    packed = msgspec.msgpack.encode(frame)
    if len(packed) > MAX_FRAME_BYTES:
        raise BadControlFrame(f"{type(frame).__name__} of {len(packed)} bytes exceeds {MAX_FRAME_BYTES}")
    return packed


def decode_request(frame: bytes) -> Received:
    """Type one frame of a consumer. Raises `BadControlFrame`, and nothing else, for any bytes."""
    try:
        return _decode(frame, _request_decoder)
    except BadControlFrame:
        other = _decode(frame, _other_decoder)
        if VERSIONS[0] <= other.v <= VERSIONS[1]:
            raise
        return other


def decode_response(frame: bytes) -> Response:
    """Type one frame of a producer. Raises `BadControlFrame`, and nothing else, for any bytes."""
    return _decode(frame, _response_decoder)


def transfer_ids(ids: tuple[str, ...]) -> list[TransferId]:
    return [TransferId(each) for each in ids]


# In one pass, without objects in between: both sides of a pull wait for it.
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_other_decoder: msgspec.msgpack.Decoder[OtherHello] = msgspec.msgpack.Decoder(OtherHello)
_response_decoder: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_F]) -> _F:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadControlFrame(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadControlFrame(str(error)) from error
