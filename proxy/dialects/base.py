# SPDX-License-Identifier: Apache-2.0
"""What a dialect of another engine is to the exchange: two legs per part, in one of two orders.

A dialect is pure: it turns a share of the client's body (`SubRequest`), the two servers (`Endpoints`) and
what the prefill server answered (`Prefilled`) into the next request (`Leg`). It knows neither clock nor
socket; the exchange (`proxy.exchange.legs`) knows neither fields nor headers of any engine.

These engines draw one choice of one prompt per transfer and no more: n > 1 and batched prompts strand or mix
up their KV (vLLM #43509, SGLang #24223). So a request is cut into parts of one choice each
(`proxy.exchange.sub_requests`), and every part has a transfer id of its own, from which all ids, rooms and
ranks of its legs follow.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvferry.proxy.errors import InvalidRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.messages import Register

RANK_HEADER = "X-data-parallel-rank"
"""Read by vLLM and SGLang alike."""


class Shape(enum.Enum):
    """In which order the two legs of a part run."""

    SERIAL = "prefill, then decode with what it answered"
    CONCURRENT = "both at once; the prefill's answer is read and thrown away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One HTTP request to one server: where, and what."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SubRequest:
    """The share of a client's request that one pair of legs serves.

    `body` is the client's, narrowed to this share: one prompt, one choice and that choice's seed; or all of
    it when one server serves it `alone`. `choices` are its choices' indices in the client's answer, `prompt`
    that of its prompt.
    """

    request: ClientRequest
    ids: Identity
    body: dict[str, Any]
    choices: range
    prompt: int
    transfer_id: TransferId

    @property
    def path(self) -> str:
        """The path of every leg."""
        return f"/v1/{self.request.endpoint}"

    @property
    def room(self) -> int:
        """63 random bits of the transfer id's 128."""
        return int(self.transfer_id, 16) >> 65

    def ends(self, prefill: Register, decode: Register) -> Endpoints:
        """The two servers with a rank drawn for each, independently of the other's."""
        low = int(self.transfer_id, 16) & (2**64 - 1)
        return Endpoints(
            prefill=prefill,
            decode=decode,
            prefill_rank=draw_rank(self.room, prefill),
            decode_rank=draw_rank(low, decode),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The two servers of a part, and the data-parallel rank of each, within its own server's range.

    A rank is None where the server has but one.
    """

    prefill: Register
    decode: Register
    prefill_rank: int | None
    decode_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of one rank of a prefill server before it has answered: where its KV can be fetched."""

    engine_id: str
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """What came of a prefill leg.

    `params` tell the decode leg where the KV is, and may be used once; None: nothing was handed over. `whole`
    is the complete answer of a choice that ended at token 1. `peer` is what was learned for later requests.
    `prompt_tokens_details` is JSON for the client's usage where the decode server cannot know it.
    """

    params: dict[str, Any] | None = None
    whole: bytes | None = None
    peer: Peer | None = None
    prompt_tokens_details: bytes | None = None


class Dialect(ABC):
    """One engine's protocol.

    `name` is as in `Register.dialect`. `serves_alone`: a server of either role also takes a request without a
    partner. `lease_s`: seconds that a prefill server surely keeps KV after its answer, None where that is no
    concern. `expiry_counter`: its Prometheus counter of KV that it gave up unread, if it has one.
    """

    name: ClassVar[str]
    serves_alone: ClassVar[bool] = True
    expiry_counter: ClassVar[str | None] = None
    lease_s: float | None = None

    @abstractmethod
    def check(self, request: ClientRequest) -> None:
        """Refuse what this engine cannot answer rightly. Raises `InvalidRequest`."""

    @abstractmethod
    def shape(self, ends: Endpoints, peer: Peer | None) -> Shape:
        """How the part's legs run."""

    def lookup(self, ends: Endpoints) -> str | None:
        """The URL that tells the `Peer` without which no leg can be sent; None where no such need is."""
        return None

    def read_lookup(self, ends: Endpoints, raw: bytes) -> Peer:
        """Read the answer of that URL. Raises `BadResponse`."""
        raise NotImplementedError

    @abstractmethod
    def prefill_leg(self, part: SubRequest, ends: Endpoints) -> Leg:
        """The prefill leg."""

    @abstractmethod
    def read_prefill(self, part: SubRequest, raw: bytes) -> Prefilled:
        """Read the prefill leg's answer. Raises `BadResponse` when no decode leg could come to anything."""

    @abstractmethod
    def decode_leg(self, part: SubRequest, ends: Endpoints, prefilled: Prefilled, peer: Peer | None) -> Leg:
        """The decode leg. In the concurrent shape `prefilled` is empty."""

    @abstractmethod
    def alone_leg(self, part: SubRequest, rank: int | None) -> Leg:
        """The only leg of a part that one server serves. `rank` is None where the server has but one."""


def draw_rank(number: int, server: Register) -> int | None:
    """The server's data-parallel rank that a random number stands for; None where it has but one."""
    return number % server.dp_size if server.dp_size > 1 else None


def make_leg(part: SubRequest, rank: int | None, body: bytes, *, request_id: str | None = None) -> Leg:
    """A leg to the path that the client asked, by its `traceable_id` unless the engine needs another id.

    No credentials of the client's are among its headers.
    """
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": traceable_id(part) if request_id is None else request_id,
    }
    if part.ids.traceparent is not None:
        headers["traceparent"] = part.ids.traceparent
    if rank is not None:
        headers[RANK_HEADER] = str(rank)
    return Leg(path=part.path, headers=headers, body=body)


def traceable_id(part: SubRequest) -> str:
    """A request id that begins with the client's and is new for every attempt: engines match legs by it."""
    return f"{part.ids.request_id}-{part.transfer_id}"


def refuse(request: ClientRequest, engine: str, *fields: str) -> None:
    """Raise `InvalidRequest` when the client set one of these fields to anything but null or false."""
    for field in fields:
        value = request.body.get(field)
        if value is not None and value is not False:
            raise InvalidRequest(f"{field} is not supported with {engine}", param=field)


def refuse_ranking(request: ClientRequest, engine: str) -> None:
    """Refuse what would need choices to be compared with each other: each is drawn apart from the others."""
    refuse(request, engine, "use_beam_search")
    best_of = request.body.get("best_of")
    if isinstance(best_of, int) and best_of > request.n:
        raise InvalidRequest(f"best_of beyond n is not supported with {engine}", param="best_of")
