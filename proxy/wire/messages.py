# SPDX-License-Identifier: Apache-2.0
"""The registration messages that agents and proxies exchange over ZMQ (design §4).

Agents send maps over DEALER; the proxy's ROUTER answers. Frames are packed by `msgpack` with strict limits
and typed here with msgspec; nothing downstream of this module sees an untyped map. This is the one module of
`proxy` that `agent` imports, so it must stay free of every other import of ours.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar

import msgpack
import msgspec
import zmq

PROTOCOL_VERSION = 2
DEFAULT_DISCOVERY_PORT = 36367
PING_INTERVAL_S = 1.0
NODE_EXPIRY_S = 3.5
NATIVE_DIALECT = "native"
"""The dialect of our own agents."""
MAX_FRAME_BYTES = 64 * 1024

Incarnation = NewType("Incarnation", str)
Role = Literal["prefill", "decode", "both"]
NodeState = Literal["starting", "ready", "draining"]


class BadFrame(ValueError):
    """A discovery frame that is not one of the messages below."""


class BadClusterKey(ValueError):
    """A file that holds no cluster key; the message names the file alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKey:
    """What the proxies and agents of one cluster share: a CURVE key pair (Z85), and what follows from it."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read a file made by `kvferry keygen`: a secret key. Raises `OSError` or `BadClusterKey`."""
        secret = path.read_bytes().strip()
        try:
            return cls(public=zmq.curve_public(secret), secret=secret)
        except (zmq.ZMQError, ValueError) as error:
            raise BadClusterKey(f"{path} does not hold a cluster key") from error

    @property
    def bearer(self) -> str:
        """The token that agents ask for over HTTP. The key does not follow from it."""
        return hmac.new(self.secret, b"kvferry http", hashlib.sha256).hexdigest()

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Before `connect`: talk only to a server that has this key, and prove that we have it."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How busy an agent is, in sequences and KV blocks. Cached blocks that can be evicted count as free.

    `max_running` is how many sequences it runs at once; None when it does not say.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    max_running: int | None = None


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One agent's ping. `address` and `control` are what peers must dial, apart from what is bound.

    `geometry`: what `layout` is the fingerprint of, for people to read. `refusals`: prefill agents, by
    incarnation, whose KV it found at first contact that it can never read, and why; at most 64.
    `prefill_chunk`: tokens of a prompt that it computes per step; None when it does not say.
    """

    v: Literal[2] = 2
    type: Literal["register"] = "register"
    role: Role
    incarnation: str
    index: int
    address: str
    control: str
    dialect: str
    model: str
    max_model_len: int
    tp_size: int
    dp_size: int
    transfers: tuple[str, ...]
    host_id: str
    geometry: dict[str, str] = {}
    layout: str
    weights: str
    tokenizer: str
    transfer_mode: Literal["read", "write"]
    version: str
    state: NodeState
    refusals: dict[str, str] = {}
    steps: int
    load: Load
    prefill_chunk: int | None = None


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agent leaves now; no need to wait for its pings to stop."""

    v: Literal[2] = 2
    type: Literal["bye"] = "bye"
    incarnation: str


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["ack"] = "ack"
    proxy: str
    index: int


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["refused"] = "refused"
    reason: str


AgentMessage = Register | Bye
ProxyMessage = Ack | Refused
_M = TypeVar("_M")

_AGENT_TYPES: dict[object, type[AgentMessage]] = {"register": Register, "bye": Bye}
_PROXY_TYPES: dict[object, type[ProxyMessage]] = {"ack": Ack, "refused": Refused}


def encode(message: AgentMessage | ProxyMessage) -> bytes:
    """Pack one message into one frame."""
    return msgpack.packb(msgspec.to_builtins(message), use_bin_type=True)  # type: ignore[no-any-return]


def decode_agent_message(frame: bytes) -> AgentMessage:
    """Type one frame sent by an agent. Raises `BadFrame`, and nothing else, whatever the bytes are."""
    return _decode(frame, _AGENT_TYPES)


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
