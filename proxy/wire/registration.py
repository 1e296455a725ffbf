# SPDX-License-Identifier: Apache-2.0
"""The registration messages that agents and proxies exchange over ZMQ (docs/architecture.md#discovery).

Agents send maps over DEALER; the proxy's ROUTER answers. Frames are packed by `msgpack` with strict limits
and typed here with msgspec; nothing downstream of this module sees an untyped map.

A proxy rejects by name a registration in a version that it does not speak. Fields that a side does not know
are ignored: what an agent adds costs it no proxy of the same version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NewType, TypeVar

import msgpack
import msgspec

from kvferry.common.roles import Role as Role
from kvferry.common.roles import TransferMode as TransferMode

MAX_VERSION = 64
_Version = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]
Versions = tuple[_Version, _Version]
"""The lowest and the highest version of a protocol that a program speaks."""
VERSION = 1
"""Version of the messages below."""
DEFAULT_DISCOVERY_PORT = 36367
PING_INTERVAL_S = 1.0
NODE_EXPIRY_S = 3.5
MAX_FRAME_BYTES = 64 * 1024

MAX_REFUSALS = 64
MAX_TEXT_CHARS = 1024
MAX_TRANSFERS = 16
MAX_GEOMETRY = 64
MAX_LINKS = 16
MAX_REASONS = 32
PULL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds, in seconds, of the buckets in which pulls are counted; the last bucket has none."""

Incarnation = NewType("Incarnation", str)
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
"""Operators' pages repeat it for every agent."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
NodeState = Literal["starting", "ready", "draining"]


class BadFrame(ValueError):
    """A discovery frame that is not one of the messages below."""


class OtherVersion(BadFrame):
    """A registration in a version that is not spoken here."""

    def __init__(self, info: OtherRegister) -> None:
        super().__init__(f"version {info.v}; spoken is {VERSION}")
        self.info = info


class OtherRegister(msgspec.Struct, frozen=True, kw_only=True):
    """What a registration says in any version."""

    v: int
    role: Text
    address: Text
    control: Text


class Load(msgspec.Struct, frozen=True):
    """How busy an agent is, in sequences and KV blocks. Cached blocks that can be evicted count as free.

    `max_running` is how many sequences it runs at once; None when unknown.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    max_running: int | None = None


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent has pulled from one producer since it started. `backend`: of the last pull; empty where
    none has ended well. `tail_s`: those of `seconds` after the prefill had ended; None from an older agent.
    """

    producer: Annotated[Incarnation, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
    backend: Text = ""
    pulls: Count = 0
    failures: Count = 0
    nbytes: Count = 0
    seconds: Seconds = 0.0
    tail_s: Seconds | None = None


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent has done since it started; every number only grows.

    `prompt_tokens` are those of prompts that it did not pull, and `cached_tokens` those of them that its
    prefix cache had. `pulls` are those that were proven right, counted in `PULL_BUCKETS`. `failures`: failed
    pulls by reason. `links`: the producers that it used last, at most `MAX_LINKS`.
    """

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    recomputes: Count = 0
    leases_expired: Count = 0
    pull_bytes: Count = 0
    pulls: Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(PULL_BUCKETS) + 1)] = ()
    failures: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_REASONS)] = {}
    links: Annotated[tuple[LinkUse, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's work takes, as it has measured it while it worked.

    These only grow from its start on: `prompts` that it has computed, but for those that another agent had
    computed before; `prefill_s`, seconds of its steps that went into prompts, and `decode_s`, the others;
    `answers`, sequences that it has decoded to their end, and `answer_tokens`, their tokens that it decoded.

    `slots`: sequences that it can decode at once: as many as it may, and as its KV blocks hold of the length
    seen lately. A step that decodes n sequences takes `step_s + n * sequence_s`; None until it has decoded.
    If its batches were all of one size, `step_s` is 0: larger ones may gain nothing.
    A step that computes n tokens of prompts takes `prompt_step_s + n * prompt_token_s`, likewise.
    `token_s`: seconds of prefill for each token of a prompt, those that its prefix cache had included;
    `backlog_s`: those that its prompts will still take. Both None until it has computed a prompt.
    """

    prompts: Count = 0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    answers: Count = 0
    answer_tokens: Count = 0
    slots: Count = 0
    step_s: Seconds | None = None
    sequence_s: Seconds | None = None
    prompt_step_s: Seconds | None = None
    prompt_token_s: Seconds | None = None
    token_s: Seconds | None = None
    backlog_s: Seconds | None = None


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's ping. `address` and `control` are what peers connect to, whatever is bound.

    `geometry`: what `layout` is the fingerprint of, in readable form. `refusals`: prefill agents, by
    incarnation, whose KV it can never read, as found at the first handshake, and why.
    `prefill_chunk`: prompt tokens computed per step; None when unknown. `loop_lag_s`: by how many seconds the
    event loop that serves HTTP is late. Pings show that an agent is alive; `steps` and this, that it makes
    progress. `control_versions`: what it speaks on the control channel to other agents. `work` and
    `capacity`: None from an agent that does not say. `name`: for operators, empty if it has none. `device`:
    what each rank computes on, "cpu" or the name of a GPU; empty when unknown. `uptime_s`: since the start.
    `dp_rank`: which of its server's data-parallel ranks it is, where each is an agent of its own; they share
    `address`, and `dp_size` is 1.
    """

    v: Literal[1] = 1
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
    control_versions: Versions = (1, 1)
    work: WorkReport | None = None
    capacity: Capacity | None = None
    name: Text = ""
    device: Text = ""
    uptime_s: Seconds | None = None
    dp_rank: Rank | None = None

    @property
    def location(self) -> str:
        """Distinguishes agents: the address, and `#RANK` where several share it."""
        return self.address if self.dp_rank is None else f"{self.address}#{self.dp_rank}"


class Bye(msgspec.Struct, frozen=True, kw_only=True):
    """The agent stops now; no need to wait for its pings to expire."""

    v: Literal[1] = 1
    type: Literal["bye"] = "bye"
    incarnation: Incarnation


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy has taken a ping. `in_flight`: sequences of its clients that are at the agent, or routed to
    it and still to come. `drain`: an operator has asked the proxy to let the agent drain and end.
    """

    type: Literal["ack"] = "ack"
    proxy: str
    index: int
    in_flight: int = 0
    drain: bool = False


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """The ping has changed nothing."""

    type: Literal["rejected"] = "rejected"
    reason: str


AgentMessage = Register | Bye
ProxyMessage = Ack | Rejected
_M = TypeVar("_M")
_S = TypeVar("_S")

_AGENT_TYPES: dict[object, type[AgentMessage]] = {"register": Register, "bye": Bye}
_PROXY_TYPES: dict[object, type[ProxyMessage]] = {"ack": Ack, "rejected": Rejected}


def common_version(ours: Versions, theirs: Versions) -> int | None:
    """Return the highest version that both sides speak, or None."""
    highest = min(ours[1], theirs[1])
    return highest if highest >= max(ours[0], theirs[0]) else None


def encode(message: AgentMessage | ProxyMessage) -> bytes:
    """Pack one message into one frame."""
    return msgpack.packb(msgspec.to_builtins(message), use_bin_type=True)  # type: ignore[no-any-return]


def decode_agent_message(frame: bytes) -> AgentMessage:
    """Type one frame sent by an agent.

    Raises `BadFrame`, and nothing else, whatever the bytes are: `OtherVersion` for a registration in another
    version.
    """
    return agent_message(unpack_map(frame))


def agent_message(body: dict[str, Any]) -> AgentMessage:
    """Type one map sent by an agent. Raises what `decode_agent_message` does."""
    version = body.get("v")
    if isinstance(version, int) and version != VERSION and body.get("type") == "register":
        raise OtherVersion(_convert(body, OtherRegister))
    return _decode(body, _AGENT_TYPES)


def checked(info: Register) -> Register:
    """Return a registration that was made of another engine's ping. Raises `BadFrame`."""
    try:
        return msgspec.convert(msgspec.to_builtins(info), Register)
    except msgspec.ValidationError as error:
        raise BadFrame(str(error)) from error


def decode_proxy_message(frame: bytes) -> ProxyMessage:
    """Type one frame sent by a proxy. Raises `BadFrame`, and nothing else, whatever the bytes are."""
    return _decode(unpack_map(frame), _PROXY_TYPES)


def unpack_map(frame: bytes) -> dict[str, Any]:
    """Unpack a frame into a map with string keys, within strict size limits. Raises `BadFrame`."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        # The frame's size bounds everything in it: unpackb refuses lengths beyond its input.
        body = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BadFrame(f"not msgpack: {error}") from error
    if not isinstance(body, dict) or not {str}.issuperset(map(type, body)):
        raise BadFrame("not a map with string keys")
    return body


def _decode(body: dict[str, Any], types: dict[object, type[_M]]) -> _M:
    kind = body.get("type")
    message_type = types.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise BadFrame(f"unknown type {kind!r}")
    return _convert(body, message_type)


def _convert(body: dict[str, Any], message_type: type[_S]) -> _S:
    try:
        return msgspec.convert(body, message_type)
    except msgspec.ValidationError as error:
        raise BadFrame(str(error)) from error
