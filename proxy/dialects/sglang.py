# SPDX-License-Identifier: Apache-2.0
"""SGLang, whatever its transfer backend: the same body to both servers at once, which meet in a room.

Source: SGLang 0.5.23 (docs/sources.md#sglang). The prefill server samples token 1 with the client's
settings and ships it with the KV. A prefill server's `control` is its bootstrap server's URL. A room must
never be used twice, and with `follow_bootstrap_room` the prefill's rank is the room modulo its number of
ranks, so that is the rank which is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    make_leg,
    reject_ranking,
    reject_unsupported,
)
from kvferry.proxy.dialects.fields import SGLANG_FIELDS, ClientFields
from kvferry.proxy.errors import AgentError, BadResponse, BusyResponse, InvalidRequest, agent_error
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.dialects import KV_UNREAD, SGLANG

_ENGINE = "SGLang servers"


@dataclass(frozen=True, kw_only=True)
class Sglang(Dialect):
    """A server of a pair takes no request without a room, so nothing is served by one alone."""

    name: ClassVar[str] = SGLANG
    fields: ClassVar[ClientFields] = SGLANG_FIELDS

    def check(self, request: ClientRequest) -> None:
        """Also reject the prompt's logprobs: they stay behind at the prefill server."""
        super().check(request)
        reject_ranking(request, _ENGINE)
        reject_unsupported(request, _ENGINE, "prompt_logprobs")
        if request.undivided:
            param, what = ("max_tokens", "0") if request.max_tokens == 0 else ("echo", "with logprobs")
            raise InvalidRequest(f"{param} {what} is not supported with {_ENGINE}", param=param)

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """Each waits for the other."""
        return LegOrder.CONCURRENT

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """Streamed or not, as the client asked: the prefill server itself sees to one token."""
        return make_leg(sub, endpoints.prefill_rank, _body(sub, endpoints))

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """Its token has gone to the decode server: only failures matter."""
        if not sub.request.stream:
            error = agent_error(raw)
        elif sse.has_error(raw):
            error = agent_error(sse.first_error(raw)) or AgentError()
        else:
            error = None
        if error is not None:
            kind = BusyResponse if error.is_busy else BadResponse
            raise kind(f"the prefill server failed: {error.message}")
        return Prefilled()

    def is_unread(self, message: str) -> bool:
        """As servers with our transfer plane say; others answer 500, whichever server has failed."""
        return KV_UNREAD in message

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The prefill leg's very body."""
        return make_leg(sub, endpoints.decode_rank, _body(sub, endpoints))

    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """Never called: its servers take nothing alone (`wire.dialects`)."""
        raise NotImplementedError


@lru_cache(maxsize=4096)
def _bootstrap(control: str) -> tuple[str | None, int | None]:
    """Host and port of a prefill server's bootstrap server."""
    parts = urlsplit(control)
    return parts.hostname, parts.port


def _body(sub: SubRequest, endpoints: Endpoints) -> bytes:
    host, port = _bootstrap(endpoints.prefill.control)
    meeting: dict[str, Any] = {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": sub.room,
    }
    if endpoints.prefill_rank is not None:
        meeting["disagg_prefill_dp_rank"] = endpoints.prefill_rank
    return msgspec.json.encode(sub.body | meeting)
