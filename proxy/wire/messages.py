# SPDX-License-Identifier: Apache-2.0
"""The registration messages that agents and proxies exchange over ZMQ (docs/architecture.md#discovery).

Agents send maps over DEALER; the proxy's ROUTER answers. Frames are packed by `msgpack` with strict limits
and typed here with msgspec; nothing downstream of this module sees an untyped map.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NewType, TypeVar

import msgpack
import msgspec

PROTOCOL_VERSION = 2
DEFAULT_DISCOVERY_PORT = 36367
PING_INTERVAL_S = 1.0
NODE_EXPIRY_S = 3.5
NATIVE_DIALECT = "native"
"""The dialect of our own agents."""
MAX_FRAME_BYTES = 64 * 1024

MAX_REFUSALS = 64
MAX_TEXT_CHARS = 1024
MAX_TRANSFERS = 16
MAX_GEOMETRY = 64

Incarnation = NewType("Incarnation", str)
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
"""Operators' pages repeat it for every agent."""
Role = Literal["prefill", "decode", "both"]
TransferMode = Literal["read", "write"]
NodeState = Literal["starting", "ready", "draining"]


class BadFrame(ValueError):
    """A discovery frame that is not one of the messages below."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How busy an agent is, in sequences and KV blocks. Cached blocks that can be evicted count as free.

    `max_running` is how many sequences it runs at once; None when unknown.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    max_running: int | None = None


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One agent's ping. `address` and `control` are what peers connect to, whatever is bound.

    `geometry`: what `layout` is the fingerprint of, in readable form. `refusals`: prefill agents, by
    incarnation, whose KV it can never read, as found at the first handshake, and why.
    `prefill_chunk`: prompt tokens computed per step; None when unknown. `loop_lag_s`: by how many seconds the
    event loop that serves HTTP is late. Pings show that an agent is alive; `steps` and this, that it makes
    progress.
    """

    v: Literal[2] = 2
    type: Literal["register"] = "register"
    role: Role
    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
    index: int
    address: Text
    control: Text
    dialect: Text
    model: Text
    max_model_len: int
    tp_size: int
    dp_size: int
    transfers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_TRANSFERS)]
    host_id: Text
    geometry: Annotated[dict[Text, Text], msgspec.Meta(max_length=MAX_GEOMETRY)] = {}
    layout: Text
    weights: Text
    tokenizer: Text
    transfer_mode: TransferMode
    version: Text
    state: NodeState
    refusals: Annotated[dict[Text, Text], msgspec.Meta(max_length=MAX_REFUSALS)] = {}
    steps: int
    load: Load
    prefill_chunk: int | None = None
    loop_lag_s: float = 0.0


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agent stops now; no need to wait for its pings to expire."""

    v: Literal[2] = 2
    type: Literal["bye"] = "bye"
    incarnation: Incarnation


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy has taken a ping. `in_flight`: sequences of its clients that are at the agent, or routed to
    it and still to come; None from a proxy that does not say.
    """

    type: Literal["ack"] = "ack"
    proxy: str
    index: int
    in_flight: int | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["refused"] = "refused"
    reason: str


AgentMessage = Register | Bye
ProxyMessage = Ack | Rejected
_M = TypeVar("_M")

_AGENT_TYPES: dict[object, type[AgentMessage]] = {"register": Register, "bye": Bye}
_PROXY_TYPES: dict[object, type[ProxyMessage]] = {"ack": Ack, "refused": Rejected}


def encode(message: AgentMessage | ProxyMessage) -> bytes:
    """Pack one message into one frame."""
    return msgpack.packb(msgspec.to_builtins(message), use_bin_type=True)  # type: ignore[no-any-return]


def decode_agent_message(frame: bytes) -> AgentMessage:
    """Type one frame sent by an agent. Raises `BadFrame`, and nothing else, whatever the bytes are."""
    return _decode(frame, _AGENT_TYPES)


def checked(info: Register) -> Register:
    """Return a registration that was made of another engine's ping. Raises `BadFrame`."""
    try:
        return msgspec.convert(msgspec.to_builtins(info), Register)
    except msgspec.ValidationError as error:
        raise BadFrame(str(error)) from error


def decode_proxy_message(frame: bytes) -> ProxyMessage:
    """Type one frame sent by a proxy. Raises `BadFrame`, and nothing else, whatever the bytes are."""
    return _decode(frame, _PROXY_TYPES)


def unpack_map(frame: bytes) -> dict[str, Any]:
    """Unpack a frame into a map with string keys, within strict size limits. Raises `BadFrame`."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        # The frame's size bounds everything in it: unpackb refuses lengths beyond its input.
        body = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BadFrame(f"not msgpack: {error}") from error
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise BadFrame("not a map with string keys")
    return body


def _decode(frame: bytes, types: dict[object, type[_M]]) -> _M:
    body = unpack_map(frame)
    kind = body.get("type")
    message_type = types.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise BadFrame(f"unknown type {kind!r}")
    try:
        return msgspec.convert(body, message_type)
    except msgspec.ValidationError as error:
        raise BadFrame(str(error)) from error
