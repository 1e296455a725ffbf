# SPDX-License-Identifier: Apache-2.0
"""The interface of a dialect: two legs per sub-request, in one of three orders.

A dialect is pure: it turns a share of the client's body (`SubRequest`), the two servers (`Endpoints`), the
prefill server's response (`Prefilled`) and what the client has (`SentTokens`) into the next request
(`LegRequest`). It knows neither clock nor socket; an attempt (`proxy.exchange.attempt`) knows neither fields
nor headers of any engine.

Most engines sample one choice of one prompt per transfer and no more: n > 1 and batched prompts strand or mix
up their KV (vLLM #43509, SGLang #24223). So a request is split into sub-requests of one choice each, or of
one prompt each where an engine samples all choices from one transfer (`proxy.exchange.sub_requests`). Each
has a transfer id of its own, from which all ids, rooms and ranks of its legs follow.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvferry.proxy.dialects.fields import ClientFields, check_fields
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import InvalidRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.registration import Register

RANK_HEADER = "X-data-parallel-rank"
"""Read by vLLM and SGLang alike."""
_FAILED = frozenset({"error", "abort"})
"""Finish reasons by which an engine says, under HTTP 200, that a choice has failed (smg #2382)."""


class LegOrder(enum.Enum):
    """The order of the two legs of a sub-request."""

    SERIAL = "prefill, then decode with the params of its response"
    CONCURRENT = "both at once; the prefill's response is read and discarded"
    EARLY = (
        "both at once; the decode's response is read after the prefill's, and goes on from its first tokens"
    )


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is posted to one server."""

    path: str
    headers: dict[str, str]
    body: bytes


class SubRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a client's request that one pair of legs serves.

    `body` is the client's, narrowed to this share: one prompt, one choice and that choice's seed, or one
    prompt with all its choices; or all of it when one server serves it `alone`. `choices` are its choices'
    indices in the client's response, `prompt` that of its prompt. `ids` are the request's; the seed is the
    prompt's.
    """

    request: ClientRequest
    ids: Identity
    body: dict[str, Any]
    choices: range
    prompt: int
    transfer_id: TransferId

    @property
    def path(self) -> str:
        return f"/v1/{self.request.endpoint}"

    @property
    def room(self) -> int:
        """63 random bits of the transfer id's 128."""
        return int(self.transfer_id, 16) >> 65

    def endpoints(
        self,
        prefill: Register,
        decode: Register,
        *,
        early: bool = False,
        prefix_source: dict[str, Any] | None = None,
    ) -> Endpoints:
        """The two servers with a rank for each, picked independently of the other's."""
        number = int(self.transfer_id, 16)
        return Endpoints(
            prefill=prefill,
            decode=decode,
            prefill_rank=pick_rank(number >> 65, prefill),
            decode_rank=pick_rank(number & (2**64 - 1), decode),
            early=early,
            prefix_source=prefix_source,
        )


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The two servers of a sub-request, and the data-parallel rank of each, within its server's range.

    A rank is None where the server has but one. `early`: whether an early decode leg is wanted, where the
    dialect has such. `prefix_source`: from where the prefill server may pull the prompt's beginning
    (`Dialect.prefix_source`).
    """

    prefill: Register
    decode: Register
    prefill_rank: int | None
    decode_rank: int | None
    early: bool = False
    prefix_source: dict[str, Any] | None = None


class KvEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of one rank of a prefill server is fetched, as far as it is known before its response."""

    engine_id: str
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill leg says of a stream that goes on from its token ids.

    `prompt_ids` is a JSON list. `events` are the first token's, as a decode server would send them, and
    `first_id` is its id; both are empty where the decode server has to sample the first token. `has_ended`:
    the response ends with it. `usage` is the prefill's.
    """

    prompt_ids: bytes
    first_id: bytes
    events: bytes
    has_ended: bool
    usage: dict[str, Any]


class ContinuedChoice(msgspec.Struct, frozen=True):
    """A choice of an event, as the client's, and the ids behind it, as the inside of a JSON list."""

    choice: dict[str, msgspec.Raw]
    ids: bytes
    has_text: bool


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a prefill leg.

    `params` say where the decode server finds the KV, and may be used once; None: there is none. `whole` is
    the complete response where it ended at token 1. `kv_endpoint` is what was learned for later
    requests. `prompt_tokens_details` is JSON for the client's usage where the decode server cannot know it.
    `opening` is there if `Dialect.may_continue`, and the server says how the stream can go on.
    `lender` is the agent whose KV it is, where the response says so. `prompt_tokens`: 0 where the dialect
    does not read them.
    """

    params: Any = None
    whole: bytes | None = None
    kv_endpoint: KvEndpoint | None = None
    prompt_tokens_details: bytes | None = None
    opening: Opening | None = None
    lender: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Dialect(ABC):
    """One engine's protocol.

    `name` is as in `Register.dialect`. `fields`: what clients may send; `allow_fields`: what else the
    operator lets them. `has_leases`: whether a prefill server gives KV up after a while,
    which a decode server does not notice. `lease_s`: how many seconds that is, as the operator says; None
    if unknown. `lease_flag`: where the operator says it. `expiry_counter`: its Prometheus counter of KV that
    expired unread, if it has one. `forks`: whether all choices of a prompt are sampled from one transfer.
    `keeps_turns`: whether a decode server keeps KV for a while that is said in the leg.
    `uses_kv_endpoints`: whether legs may need a `KvEndpoint`, looked up or learned. `drop_status`: the HTTP
    status of a drop that was delivered.

    `is_native`: whether the servers are our agents. Their responses are the client's as they come
    (`proxy.exchange.relay`), they free KV by a drop whether or not the prefill has been answered, and they
    report their own timing.
    """

    name: ClassVar[str]
    fields: ClassVar[ClientFields]
    allow_fields: frozenset[str] = frozenset()
    has_leases: ClassVar[bool] = False
    lease_flag: ClassVar[str] = ""
    expiry_counter: ClassVar[str | None] = None
    lease_s: float | None = None
    forks: ClassVar[bool] = False
    keeps_turns: ClassVar[bool] = False
    uses_kv_endpoints: ClassVar[bool] = False
    drop_status: ClassVar[int] = 404
    is_native: ClassVar[bool] = False

    def check(self, request: ClientRequest) -> None:
        """Raise `InvalidRequest` for a field that is not a client's, and for what this engine would answer
        wrongly or not at all.
        """
        check_fields(request.body, self.fields[request.endpoint], self.allow_fields)
        if not self.keeps_turns:
            reject_cache_ttl(request, self.name)

    @abstractmethod
    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """The order of the sub-request's legs."""

    def lookup(self, endpoints: Endpoints) -> str | None:
        """The URL to ask for the `KvEndpoint` before any leg can be sent; None if legs need none."""
        return None

    def read_lookup(self, endpoints: Endpoints, raw: bytes) -> KvEndpoint:
        """Parse the response of that URL. Raises `BadResponse`."""
        raise NotImplementedError

    @abstractmethod
    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest | None:
        """The prefill leg's request; None where the prefill server could not hand its KV over."""

    @abstractmethod
    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """Parse the prefill leg's response. Raises `BadResponse` when no decode leg could succeed."""

    def is_unread(self, message: str) -> bool:
        """Whether a prefill leg failed, with this message, because the decode server did not read the KV."""
        return False

    @abstractmethod
    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The decode leg's request. In the concurrent order `prefilled` is empty."""

    def early_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The decode leg's request in the early order."""
        raise NotImplementedError

    def early_event(self, prefilled: Prefilled) -> bytes:
        """What the stream of an early leg begins with, if it goes on from the prefill's first tokens."""
        raise NotImplementedError

    def prefix_source(self, lender: Register, min_tokens: int) -> dict[str, Any] | None:
        """From where a prefill server may pull a prompt's beginning, if it lacks at least so many tokens of
        it; None where it cannot.
        """
        return None

    def may_continue(self, sub: SubRequest) -> bool:
        """Whether the client may get the prefill's first token, and a server go on with a stream that another
        has begun: both by a prompt that is longer by the ids that the client has.
        """
        return False

    def opening_events(self, sub: SubRequest, prefilled: Prefilled, sent: SentTokens) -> bytes | None:
        """The prefill's first tokens, as far as the client has not got them; None where the decode server has
        to begin the response.
        """
        return None

    def continued_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, sent: SentTokens
    ) -> LegRequest | None:
        """The decode leg of a stream of which the client has `sent`, or will have the opening's events; None
        where these servers might not take it.
        """
        raise NotImplementedError

    def read_continued(self, request: ClientRequest, choice: dict[str, msgspec.Raw]) -> ContinuedChoice:
        """Read a choice of such a leg's event. Raises what msgspec does."""
        raise NotImplementedError

    def drop_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest | None:
        """What has the prefill server free KV that will not be read, and is answered with `drop_status`; None
        where it offers no way.
        """
        return None

    def client_reason(self, reason: str) -> str | None:
        """The finish reason that the client gets; None where the engine says that the choice has failed."""
        return None if reason in _FAILED else reason

    @abstractmethod
    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """The only leg's request where one server serves all. `rank` is None where the server has but one."""


def pick_rank(number: int, server: Register) -> int | None:
    """The server's data-parallel rank: the agent's own, or one for a random number; None where it has but
    one.
    """
    if server.dp_rank is not None:
        return server.dp_rank
    return number % server.dp_size if server.dp_size > 1 else None


def make_leg(sub: SubRequest, rank: int | None, body: bytes, *, request_id: str | None = None) -> LegRequest:
    """A leg to the client's path, by its `traceable_id` unless the engine needs another id.

    The client's credentials are not passed on.
    """
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": traceable_id(sub) if request_id is None else request_id,
    }
    if sub.ids.traceparent is not None:
        headers["traceparent"] = sub.ids.traceparent
    if rank is not None:
        headers[RANK_HEADER] = str(rank)
    return LegRequest(path=sub.path, headers=headers, body=body)


def traceable_id(sub: SubRequest) -> str:
    """A request id that begins with the client's and is new for every attempt: engines match legs by it."""
    return f"{sub.ids.request_id}-{sub.transfer_id}"


def reject_unsupported(request: ClientRequest, engine: str, *fields: str) -> None:
    """Raise `InvalidRequest` when the client set one of these fields to anything but null or false."""
    for field in fields:
        if request.asks_for(field):
            raise InvalidRequest(f"{field} is not supported with {engine}", param=field)


def reject_cache_ttl(request: ClientRequest, dialect: str) -> None:
    """Raise `InvalidRequest` where the client says for how long its turn is to be kept."""
    if request.cache_ttl_s:
        raise InvalidRequest(f"cache_ttl_s is not supported by {dialect} servers", param="cache_ttl_s")


def reject_ranking(request: ClientRequest, engine: str) -> None:
    """Raise `InvalidRequest` for what compares choices: each is sampled apart from the others."""
    reject_unsupported(request, engine, "use_beam_search")
    if request.best_of > request.n:
        raise InvalidRequest(f"best_of beyond n is not supported with {engine}", param="best_of")
