# SPDX-License-Identifier: Apache-2.0
"""Stand-in servers of other engines: their P/D protocols over real HTTP, with invented tokens and no KV.

Each does what `docs/sources.md` says of its engine, as far as a router
can tell: a decode server draws its tokens from the prompt that its *partner* was given, so KV of another
prompt gives another answer; one that asks for KV too late is given another prompt's; servers of a concurrent
protocol wait for each other. Whatever a real server would refuse, mix up or wait for in vain is noted in
`Fabric.wrongs`, which every test expects to be empty.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from kvferry.proxy.wire import registration as wire
from tests.standins.agents import (
    CONTEXT_TOKENS,
    Asked,
    Fault,
    StandInAgent,
    _connection,
    _error,
    _event,
    _reset,
)

PATIENCE_S = 20.0
STOPS_AT_ONCE = "stop at once"
"""A prompt that contains this draws the end of sequence first, unless `min_tokens` forbids it."""
CACHED_AT_PREFILL = 2
NOT_KNOWN_HERE = 77
"""What a decode server says of cached tokens when nobody told it."""


@dataclass(slots=True)
class Kept:
    """A prompt's KV at a prefill server, under a lease."""

    prompt: str
    until: float
    read: bool = False


@dataclass(slots=True)
class Fabric:
    """What lies between the servers of one fleet: KV by key, who has met, and what was done wrong."""

    kept: dict[str, Kept] = field(default_factory=dict)
    expired_elsewhere: int = 0
    """Leases of other routers that have expired."""
    wrongs: list[str] = field(default_factory=list)
    _meetings: dict[tuple[str, str], asyncio.Future[Any]] = field(default_factory=dict)

    def keep(self, prompt: str, lease_s: float, *keys: str) -> None:
        """Keep a prompt's KV under one or more keys."""
        kept = Kept(prompt, _now() + lease_s)
        for key in keys:
            self.expect(key not in self.kept, f"{key} was used before")
            self.kept[key] = kept

    def read(self, key: str) -> str:
        """The prompt whose KV lies at `key`; another one if its lease is over: its blocks are recycled."""
        kept = self.kept.get(key)
        if not self.expect(kept is not None, f"{key} is not known") or kept is None:
            return "somebody else's prompt"
        self.expect(not kept.read, f"{key} was read twice")
        if _now() > kept.until:
            return "somebody else's prompt"
        kept.read = True
        return kept.prompt

    @property
    def expired(self) -> int:
        """Leases that have expired unread, whoever asked for them afterwards."""
        ended = {id(kept) for kept in self.kept.values() if not kept.read and _now() > kept.until}
        return self.expired_elsewhere + len(ended)

    async def meet(self, key: str, leg: str, brought: Any) -> Any:
        """Wait for the other leg with the same key, and take what it has brought."""
        mine = self._meeting(key, leg)
        if not self.expect(not mine.done(), f"{key} was used before by another {leg} leg"):
            raise web.HTTPBadRequest(text="room is taken")
        mine.set_result(brought)
        other = self._meeting(key, "decode" if leg == "prefill" else "prefill")
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.shield(other)

    def expect(self, holds: bool, wrong: str) -> bool:
        """Note what is wrong if it does not hold."""
        if not holds:
            self.wrongs.append(wrong)
        return holds

    def _meeting(self, key: str, leg: str) -> asyncio.Future[Any]:
        return self._meetings.setdefault((key, leg), asyncio.get_running_loop().create_future())


@dataclass(slots=True, kw_only=True)
class StandInServer(StandInAgent):
    """A server of another engine. Its registration is what a sidecar would send for it."""

    dialect: ClassVar[str]
    forks: ClassVar[bool] = False
    """Whether it draws several choices from one transfer."""
    failed: ClassVar[str] = "error"
    """Its finish reason of a choice that has failed."""

    fabric: Fabric
    dp_size: int = 1
    tp_size: int = 1
    lease_s: float = 30.0
    hold_s: float = 0.0
    """How long a decode leg waits before it asks for KV; its lease is not renewed."""
    holds: list[float] = field(default_factory=list)
    """The same for the next decode legs, one each."""
    stagger: asyncio.Event | None = None
    """All prefill legs but the first wait for it."""
    hands_over: bool = True
    models_asked: int = 0
    counts_asked: int = 0
    count_delay_s: float = 0.0
    """How long its metrics take from when they were read until they are sent."""
    started_at: float = 1.8e9
    counts: bool = True
    """Whether its metrics tell of expired leases."""
    engine_id: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self.overrides = {
            "dialect": self.dialect,
            "dp_size": self.dp_size,
            "tp_size": self.tp_size,
            "transfers": (),
            "layout": "",
            "weights": "",
            "tokenizer": "",
            **self.overrides,
        }

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/completions", self._answer)
        router.add_post("/v1/chat/completions", self._answer)
        router.add_get("/metrics", self._metrics)
        router.add_get("/v1/models", self._models)
        router.add_get("/health", self._health)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        self.models_asked += 1
        served = {"id": self.model, "object": "model", "max_model_len": CONTEXT_TOKENS}
        return web.json_response({"object": "list", "data": [served]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.counts_asked += 1
        if not self.counts:
            return web.Response(text="# nothing\n")
        count = f'vllm:nixl_num_kv_expired_reqs_total{{rank="0"}} {self.fabric.expired}.0\n'
        page = f"process_start_time_seconds {self.started_at}\n{count}"
        await asyncio.sleep(self.count_delay_s)
        return web.Response(text=page)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        with self._busy():
            body = await request.json()
            leg = self.leg_of(body)
            self.asked.append(Asked(leg, request.path, request.headers, _connection(request), body))
            self.changed.set()
            self.check(request.headers, body)
            await self._survive(request, body, leg)
            fault = self._fault(leg)
            if fault is not None and fault.kind == "status":
                return fault.answer()
            if fault is not None and fault.kind == "hang":
                await asyncio.Event().wait()
            if fault is not None and fault.kind == "reset":
                return await _reset(request)
            if leg == "prefill":
                if self.stagger is not None and len(self.asked) > 1:
                    await self.stagger.wait()
                if fault is not None and fault.kind == "failure":
                    return await self._streamed(request, self.draw(request, body), fault)
                return await self.prefill(request, body)
            drawn = self.draw(request, body)
            if leg == "decode":
                await asyncio.sleep(self.holds.pop(0) if self.holds else self.hold_s)
                await self.fetch(request, body, drawn)
            if body.get("stream"):
                return await self._streamed(request, drawn, fault)
            if fault is not None and fault.kind == "error":
                drawn.finish_reason = self.failed
            if fault is not None and fault.kind == "latin_1":
                return web.Response(body=_latin_1(drawn.whole()), content_type="application/json")
            return web.json_response(drawn.whole())

    def draw(self, request: web.Request, body: dict[str, Any]) -> Drawn:
        return Drawn(request, body)

    def leg_of(self, body: dict[str, Any]) -> Any:
        params = body.get("kv_transfer_params") or {}
        return "prefill" if params.get("do_remote_decode") else "decode" if params else "alone"

    def check(self, headers: Mapping[str, str], body: dict[str, Any]) -> None:
        """Refuse what the engine would refuse, or what would strand KV on it."""
        expect = self.fabric.expect
        rank = headers.get("X-data-parallel-rank")
        expect((rank is None) == (self.dp_size == 1), f"rank {rank} of {self.dp_size}")
        expect(int(rank or 0) < self.dp_size, f"rank {rank} is not below {self.dp_size}")
        expect("Authorization" not in headers, "credentials")
        if self.leg_of(body) == "alone":
            return
        alone = (body.get("n") or 1) == 1 or (self.forks and self.leg_of(body) == "decode")
        expect(alone, "n > 1 in one transfer")
        expect(isinstance(body.get("prompt", ""), str), "several prompts in one transfer")
        expect(
            (body.get("min_tokens") or 0) <= (body.get("max_tokens") or 1000), "min_tokens over max_tokens"
        )

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The prefill leg's answer."""
        raise NotImplementedError

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        """Get the KV of the prompt that the partner was given into `drawn`."""
        raise NotImplementedError

    def expect_pared_down(self, body: dict[str, Any]) -> None:
        """What a vLLM prefill leg must be like."""
        expect = self.fabric.expect
        expect(body["max_tokens"] == 1 and body["min_tokens"] == 1, "a prefill of more than a token")
        expect(body.get("max_completion_tokens", 1) == 1, "a prefill of more than a token")
        expect(body["stream"] is False, "a streamed prefill answers no params")
        left = {"stream_options", "stop", "logprobs", "prompt_logprobs", "response_format"} & body.keys()
        expect(not left, f"{left} on a prefill leg")

    async def _streamed(self, request: web.Request, drawn: Drawn, fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        kind = None if fault is None else fault.kind
        if kind == "empty":
            await response.write(b"data: [DONE]\n\n")
            return response
        for number, event in enumerate(drawn.events()):
            if fault is not None and number == fault.after_events:
                if kind == "failure":
                    told = {"message": "no more", "type": "InternalServerError", "code": fault.status}
                    await response.write(_event({"error": told}))
                    break
                if kind == "latin_1":
                    await response.write(b"data: " + _latin_1(drawn.whole()) + b"\n\n")
                    continue
                if kind == "stall":
                    await asyncio.Event().wait()
                return await _reset(request) if kind == "cut" else response
            if self.interval_s:
                await asyncio.sleep(self.interval_s)
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response


class Drawn:
    """An answer: a function of the prompt whose KV it is drawn from, the seed and the position."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self.chat = request.path.endswith("chat/completions")
        prompts = body["messages"] if self.chat else body["prompt"]
        self.prompts = prompts if isinstance(prompts, list) and not self.chat else [str(prompts)]
        self.n = body.get("n") or 1
        self.seed = body.get("seed")
        self.limit = body.get("max_completion_tokens") or body.get("max_tokens") or 8
        self.cached = NOT_KNOWN_HERE
        self.finish_reason: str | None = None
        self.first: str | None = None
        """Text of token 1, if another server drew it."""
        self._min_tokens = body.get("min_tokens") or 0
        self._include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._envelope = {
            "id": f"cmpl-{request.headers['X-Request-Id']}",
            "created": 1,
            "model": body["model"],
        }

    def token(self, choice: int, position: int) -> str:
        if position == 0 and self.first is not None:
            return self.first
        prompt, seed = self.prompts[choice // self.n], (self.seed or 0) + choice % self.n
        return f" {zlib.crc32(f'{prompt}/{seed}/{position}'.encode()) % 1000}"

    def ends_at_once(self, choice: int) -> bool:
        return STOPS_AT_ONCE in self.prompts[choice // self.n] and not self._min_tokens

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in range(self.n * len(self.prompts)):
            text = "".join(self.tokens(choice))
            shown = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": choice, **shown, "logprobs": None, "finish_reason": self.reason(choice)})
        told = {"kv_transfer_params": None, "of_the_engine": {"kept": 1.50}}
        return {**self._envelope, "choices": choices, "usage": self.usage(), **told}

    def events(self) -> list[bytes]:
        events = []
        for choice in range(self.n * len(self.prompts)):
            if self.chat:
                events.append(self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}))
            tokens = self.tokens(choice)
            for number, text in enumerate(tokens, 1):
                shown = {"delta": {"content": text}} if self.chat else {"text": text}
                last = number == len(tokens)
                events.append(self._chunk(choice, shown, self.reason(choice) if last else None))
            if not tokens:
                events.append(self._chunk(choice, {"delta": {}} if self.chat else {"text": ""}, "stop"))
        if self._include_usage:
            events.append(_event({**self._envelope, "choices": [], "usage": self.usage()}))
        return events

    def tokens(self, choice: int) -> list[str]:
        if self.ends_at_once(choice):
            return []
        return [self.token(choice, position) for position in range(self.limit)]

    def reason(self, choice: int) -> str:
        return self.finish_reason or ("stop" if self.ends_at_once(choice) else "length")

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(each.split()) for each in self.prompts)
        completion = sum(len(self.tokens(choice)) for choice in range(self.n * len(self.prompts)))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _chunk(self, choice: int, shown: dict[str, Any], reason: str | None = None) -> bytes:
        told = {"index": choice, **shown, "logprobs": None, "finish_reason": reason}
        chunk = {**self._envelope, "object": "chunk", "choices": [told]}
        if reason is not None:
            chunk["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "remote_engine_id": "of the decode server",
            }
        return _event(chunk)


def _latin_1(answer: dict[str, Any]) -> bytes:
    """An answer with a letter that is no UTF-8 in its text."""
    choice = answer["choices"][0] | {"text": "café"}
    return json.dumps({**answer, "choices": [choice]}, ensure_ascii=False).encode("latin-1")


def _answered(request: web.Request, body: dict[str, Any], params: dict[str, Any] | None) -> web.Response:
    """A prefill server's answer: one token, and `params`."""
    drawn = Drawn(request, body)
    drawn.cached = CACHED_AT_PREFILL
    return web.json_response(drawn.whole() | {"kv_transfer_params": params})


@dataclass(slots=True, kw_only=True)
class VllmNixlServer(StandInServer):
    """Pull, or push when `pushes`; then both servers wait for each other."""

    dialect: ClassVar[str] = "vllm-nixl"
    pushes: bool = False
    prefix_cache: dict[tuple[str | None, str], str] = field(default_factory=dict)
    """The prompt whose KV was read for a prompt with that salt: right or wrong, it is used again."""

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.expect_pared_down(body)
        if not self.hands_over:
            return _answered(request, body, None)
        request_id = f"cmpl-{request.headers['X-Request-Id']}-0-{secrets.token_hex(4)}"
        keys = (request_id, request.headers["X-Request-Id"])
        self.fabric.keep(Drawn(request, body).prompts[0], self.lease_s, *keys[: 1 + self.pushes])
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[2, 3]],
            "remote_engine_id": self.engine_id, "remote_request_id": request_id, "remote_host": self.host,
            "remote_port": 5600, "tp_size": self.tp_size, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 3,
            "remote_blocks_expiry_time": None, "transfer_mode": "push" if self.pushes else "pull",
            "remote_prefill_cached_tokens": CACHED_AT_PREFILL,
        }  # fmt: skip
        return _answered(request, body, params)

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        params = body["kv_transfer_params"]
        key = params["remote_request_id"]
        if "remote_block_ids" not in params:  # a push that this server has to announce itself for
            self.fabric.expect(key == request.headers["X-Request-Id"], "another leg's request id")
            async with asyncio.timeout(PATIENCE_S):
                while key not in self.fabric.kept:
                    await asyncio.sleep(0.005)
        cached = (body.get("cache_salt"), drawn.prompts[0])
        drawn.prompts = [self.prefix_cache.setdefault(cached, self.fabric.read(key))]
        drawn.cached = params.get("remote_prefill_cached_tokens", NOT_KNOWN_HERE)


@dataclass(slots=True, kw_only=True)
class VllmKvferryServer(StandInServer):
    """With our connector: the decode server's params are the prefill's, and a lease can be dropped."""

    dialect: ClassVar[str] = "vllm-kvferry"
    forks: ClassVar[bool] = True
    dropped: list[str] = field(default_factory=list)

    continuable: bool = True
    """Whether it says that answers can go on from ids."""
    tells_ids: bool = True
    """Whether it answers with ids that it is asked for."""

    def draw(self, request: web.Request, body: dict[str, Any]) -> Drawn:
        return KvferryDrawn(request, body)

    def check(self, headers: Mapping[str, str], body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        if params.get("drop"):
            self.fabric.expect(params["do_remote_prefill"] is True, "a drop that vLLM would not see")
            self.dropped.append(params["transfer_id"])
            self.asked.pop()  # no leg
            raise web.HTTPNotFound(text="no such model")
        shown = body | {"prompt": ""} if isinstance(body.get("prompt"), list) else body
        StandInServer.check(self, headers, shown)

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("return_token_ids"):
            self.expect_pared_down(body)
        if not self.hands_over:
            return self._prefilled(request, body, None)
        transfer_id = body["kv_transfer_params"]["transfer_id"]
        self.fabric.keep(Drawn(request, body).prompts[0], self.lease_s, transfer_id)
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id,
            "remote_engine_id": self.engine_id, "remote_host": self.host, "remote_port": 6301,
            "remote_num_tokens": 3, "remote_tp_size": self.tp_size, "remote_dp_rank": 0,
            "remote_prefill_cached_tokens": CACHED_AT_PREFILL, "continuable": self.continuable,
        }  # fmt: skip
        return self._prefilled(request, body, params)

    def _prefilled(
        self, request: web.Request, body: dict[str, Any], params: dict[str, Any] | None
    ) -> web.Response:
        drawn = self.draw(request, body if self.tells_ids else body | {"return_token_ids": False})
        drawn.cached = CACHED_AT_PREFILL
        return web.json_response(drawn.whole() | {"kv_transfer_params": params})

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        params = body["kv_transfer_params"]
        assert isinstance(drawn, KvferryDrawn)
        drawn.go_on_from(self.fabric.read(params["transfer_id"]), self.fabric)
        drawn.cached = params.get("remote_prefill_cached_tokens", NOT_KNOWN_HERE)


@dataclass(slots=True, kw_only=True)
class RankedVllmServer(VllmKvferryServer):
    """With data-parallel ranks, each of which announces itself."""

    ranks: int = 2
    honours_header: bool = True
    """Else rank 0 serves all."""
    broken: set[int] = field(default_factory=set)
    """Ranks that fail whatever they are asked."""
    served: list[int] = field(default_factory=list)
    """By which rank each leg was."""
    rank_dropped: list[tuple[int, str]] = field(default_factory=list)

    def registrations(self) -> list[wire.Register]:
        info = self.registration()
        return [
            msgspec.structs.replace(info, incarnation=self.incarnation_of(rank), dp_rank=rank)
            for rank in range(self.ranks)
        ]

    def incarnation_of(self, rank: int) -> wire.Incarnation:
        return wire.Incarnation(f"{self.incarnation}{rank}")

    def check(self, headers: Mapping[str, str], body: dict[str, Any]) -> None:
        rank = headers.get("X-data-parallel-rank", "none")
        self.fabric.expect(rank in map(str, range(self.ranks)), f"rank {rank}")
        params = body.get("kv_transfer_params") or {}
        if params.get("drop"):
            self.rank_dropped.append((int(rank), params["transfer_id"]))
        plain = {name: value for name, value in headers.items() if name != "X-data-parallel-rank"}
        VllmKvferryServer.check(self, plain, body)
        self.served.append(int(rank) if self.honours_header else 0)
        self.engine_id = self.incarnation_of(self.served[-1])
        if self.served[-1] in self.broken:
            raise web.HTTPInternalServerError(text="this rank is broken")


END_ID = 999_999
_DRAWN_ID = 1_000_000
"""Ids from here on are drawn tokens: the number that is their text."""


def ids_of(prompt: str) -> list[int]:
    """The stand-ins' ids of a prompt, one for each word."""
    return [zlib.crc32(word.encode()) % END_ID for word in prompt.split()]


class KvferryDrawn(Drawn):
    """Also with ids, and of a prompt that is ids: those of another prompt and of tokens drawn from it."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        ids = body.get("prompt")
        self._ids: list[int] | None = ids if isinstance(ids, list) and isinstance(ids[0], int) else None
        super().__init__(request, body if self._ids is None else body | {"prompt": ""})
        self._shows_ids = bool(body.get("return_token_ids"))
        self._before: list[int] = []

    def go_on_from(self, prompt: str, fabric: Fabric) -> None:
        """The prompt whose KV was fetched. What follows it in the ids must be what is drawn from it."""
        self.prompts = [prompt]
        if self._ids is None:
            return
        own = ids_of(prompt)
        fabric.expect(self._ids[: len(own)] == own, "ids of another prompt")
        self._before = self._ids[len(own) :]
        drawn = [self._id(Drawn.token(self, 0, position)) for position in range(len(self._before))]
        fabric.expect(bool(drawn) and self._before == drawn, "ids that were not drawn from this prompt")

    def token(self, choice: int, position: int) -> str:
        return super().token(choice, position + len(self._before))

    def whole(self) -> dict[str, Any]:
        told = super().whole()
        if self._shows_ids:
            told |= {"prompt_token_ids": ids_of(self.prompts[0])} if self.chat else {}
            for number, choice in enumerate(told["choices"]):
                prompt = {} if self.chat else {"prompt_token_ids": ids_of(self.prompts[0])}
                choice |= prompt | {"token_ids": [self._id(text) for text in self.tokens(number)] or [END_ID]}
        return told

    def usage(self) -> dict[str, Any]:
        told, before = super().usage(), len(self._before)
        return told | {name: told[name] + before for name in ("prompt_tokens", "total_tokens")}

    def _chunk(self, choice: int, shown: dict[str, Any], reason: str | None = None) -> bytes:
        if self._shows_ids:
            text = shown["text"]
            shown = shown | {"prompt_token_ids": None, "token_ids": [self._id(text) if text else END_ID]}
        return super()._chunk(choice, shown, reason)

    def _id(self, text: str) -> int:
        return _DRAWN_ID + int(text)


_ADDRESSES = re.compile(r"___prefill_addr_(.+?)___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")


@dataclass(slots=True, kw_only=True)
class VllmMoriioServer(StandInServer):
    """READ or WRITE, as `transfer_mode` of its registration says."""

    dialect: ClassVar[str] = "vllm-moriio"
    writes: bool = False

    def __post_init__(self) -> None:
        number = secrets.randbelow(1000)
        self.overrides = {
            "control": f"host:10.0.0.{number % 250},handshake:{6000 + number},notify:61005",
            "transfer_mode": "write" if self.writes else "read",
            **self.overrides,
        }
        StandInServer.__post_init__(self)

    def _transfer(self, request: web.Request, body: dict[str, Any]) -> str:
        """Its transfer id; both addresses must be found in the request id."""
        found = _ADDRESSES.match(request.headers["X-Request-Id"])
        mine = 1 if self.role == "prefill" else 2
        self.fabric.expect(found is not None and found[mine] == self.overrides["control"], "addresses")
        return str(body["kv_transfer_params"]["transfer_id"])

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.expect_pared_down(body)
        transfer_id, params = self._transfer(request, body), body["kv_transfer_params"]
        self.fabric.expect({"remote_dp_size", "remote_tp_size"} <= params.keys(), "the decode server's sizes")
        drawn = Drawn(request, body)
        if self.writes:
            other = await self.fabric.meet(transfer_id, "prefill", drawn.prompts[0])
            rank = int(request.headers.get("X-data-parallel-rank", 0))
            self.fabric.expect(other["remote_dp_rank"] == rank, "the prefill server's rank")
        else:
            self.fabric.keep(drawn.prompts[0], self.lease_s, transfer_id)
        answer = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1],
            "remote_engine_id": self.engine_id, "remote_host": self.host, "remote_handshake_port": 6301,
            "remote_notify_port": 61005, "remote_dp_rank": 0, "tp_size": 1, "transfer_id": transfer_id,
        }  # fmt: skip
        return _answered(request, body, answer)

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        transfer_id, params = self._transfer(request, body), body["kv_transfer_params"]
        self.fabric.expect(params["do_remote_prefill"] is True, "a decode leg's params")
        if self.writes:
            drawn.prompts = [await self.fabric.meet(transfer_id, "decode", params)]
        else:
            self.fabric.expect(params["remote_block_ids"] == [1], "the prefill server's blocks")
            drawn.prompts = [self.fabric.read(transfer_id)]


@dataclass(slots=True, kw_only=True)
class VllmMooncakeServer(StandInServer):
    """A prefill server is its own bootstrap server too."""

    dialect: ClassVar[str] = "vllm-mooncake"
    lookups: int = 0

    def add_routes(self, router: web.UrlDispatcher) -> None:
        StandInServer.add_routes(self, router)
        router.add_get("/query", self._query)

    def registration(self) -> Any:
        self.overrides["control"] = self.address
        return StandInServer.registration(self)

    async def _query(self, _: web.Request) -> web.Response:
        self.lookups += 1
        ranks = {str(rank): {"engine_id": f"{self.engine_id}-{rank}"} for rank in range(self.dp_size)}
        return web.json_response({rank: told | {"worker_addr": {}} for rank, told in ranks.items()})

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.expect_pared_down(body)
        transfer_id = body["kv_transfer_params"]["transfer_id"]
        params = await self.fabric.meet(transfer_id, "prefill", Drawn(request, body).prompts[0])
        rank = request.headers.get("X-data-parallel-rank", "0")
        told = (params["remote_engine_id"], params["remote_bootstrap_addr"])
        if told != (f"{self.engine_id}-{rank}", self.address):
            return _error(500, f"{told} is not me")
        return _answered(request, body, None)

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        params = body["kv_transfer_params"]
        drawn.prompts = [await self.fabric.meet(params["transfer_id"], "decode", params)]


@dataclass(slots=True, kw_only=True)
class SglangServer(StandInServer):
    """Both roles take the same body. The prefill server draws token 1, which the decode server repeats."""

    dialect: ClassVar[str] = "sglang"

    def leg_of(self, body: dict[str, Any]) -> Any:
        return self.role if "bootstrap_room" in body else "alone"

    def registration(self) -> Any:
        self.overrides["control"] = "http://10.0.0.7:8998"
        return StandInServer.registration(self)

    def check(self, headers: Mapping[str, str], body: dict[str, Any]) -> None:
        StandInServer.check(self, headers, body)
        if self.leg_of(body) == "alone":
            raise web.HTTPBadRequest(text="Disaggregated request received without bootstrap room id")
        self.fabric.expect(0 <= body["bootstrap_room"] < 2**63, "a room of 63 bits")
        self.fabric.expect(
            (body["bootstrap_host"], body["bootstrap_port"]) == ("10.0.0.7", 8998), "bootstrap"
        )
        if self.role == "prefill" and self.dp_size > 1:
            rank = int(headers["X-data-parallel-rank"])
            self.fabric.expect(rank == body["bootstrap_room"] % self.dp_size, "the rank that the room says")
            self.fabric.expect(rank == body["disagg_prefill_dp_rank"], "the rank that the body says")

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        drawn = Drawn(request, body)
        first = drawn.token(0, 0)
        other = await self.fabric.meet(str(body["bootstrap_room"]), "prefill", (body, first))
        self.fabric.expect(other == body, "another body for each leg")
        drawn.limit = 1
        if body.get("stream"):
            return await self._streamed(request, drawn, None)
        return web.json_response(drawn.whole())

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        told, drawn.first = await self.fabric.meet(str(body["bootstrap_room"]), "decode", body)
        drawn.prompts = [str(told["messages"] if drawn.chat else told["prompt"])]


class AtomDrawn(Drawn):
    """As recorded in `tests/unit/proxy/dialects/exchanges/atom`: its finish reasons, and ends told twice."""

    def __init__(self, request: web.Request, body: dict[str, Any], *, head: bool) -> None:
        super().__init__(request, body)
        self._min_tokens = 0  # not known there
        self._head = head

    def reason(self, choice: int) -> str:
        reason = self.finish_reason or ("eos" if self.ends_at_once(choice) else "max_tokens")
        if self.chat and self._head:
            return "length" if reason == "max_tokens" else "stop"
        return reason

    def whole(self) -> dict[str, Any]:
        times = {"ttft_s": 0.5, "tpot_s": 0.5, "latency_s": 0.5}
        return super().whole() | {"usage": self.usage() | times}

    def usage(self) -> dict[str, Any]:
        """With the end of sequence as a token; how much was cached is told of streamed chat alone."""
        prompt = sum(len(each.split()) for each in self.prompts)
        completion = sum(len(self.tokens(choice)) or 1 for choice in range(self.n * len(self.prompts)))
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}

    def events(self) -> list[bytes]:
        """Streamed chat ends with `stop`, whatever it was; streamed text ends twice. Usage comes unasked."""
        events = []
        if self.chat:
            events.append(self._chunk(0, {"delta": {"role": "assistant", "content": ""}}))
            events += [self._chunk(0, {"delta": {"content": text}}) for text in self.tokens(0)]
            events.append(self._chunk(0, {"delta": {}}, "stop"))
        else:
            tokens = self.tokens(0) or [""]
            events += [self._chunk(0, {"text": text}) for text in tokens[:-1]]
            events.append(self._chunk(0, {"text": tokens[-1]}, self.reason(0)))
            events.append(self._chunk(0, {"text": ""}, "stop"))
        choices: dict[str, Any] = {"choices": []} if self._head else {}
        events.append(_event({**self._envelope, **choices, "usage": self.usage()}))
        return events


@dataclass(slots=True, kw_only=True)
class AtomServer(StandInServer):
    """ATOM at ffdf3bb5d, or at 0c982ea92 without `head`. The prefill server's token is the answer's first.

    A prefill server keeps what it computes until it is fetched, once.
    """

    dialect: ClassVar[str] = "atom"
    failed: ClassVar[str] = "aborted"
    head: bool = True
    kv_host: str = field(default_factory=lambda: f"10.9.{secrets.randbelow(256)}.{secrets.randbelow(256)}")
    """What it takes its own address to be; nobody but its partners needs to reach it there."""
    handshake_port: int = field(default_factory=lambda: 6301 + secrets.randbelow(1000))
    transfers: int = 0

    def add_routes(self, router: web.UrlDispatcher) -> None:
        StandInServer.add_routes(self, router)
        if self.head:
            router.add_get("/kv_transfer_info", self._info)

    async def _info(self, _: web.Request) -> web.Response:
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[self.role]
        sizes = {"tp_size": self.tp_size, "dp_size": self.dp_size}
        return web.json_response(sizes | {"kv_role": role, "handshake_port": self.handshake_port})

    def registration(self) -> Any:
        self.overrides["control"] = f"tcp://{self.host}:{self.handshake_port}"
        if not self.head:
            self.overrides["version"] = "without /kv_transfer_info"
        return StandInServer.registration(self)

    def draw(self, request: web.Request, body: dict[str, Any]) -> Drawn:
        return AtomDrawn(request, body, head=self.head)

    def check(self, headers: Mapping[str, str], body: dict[str, Any]) -> None:
        StandInServer.check(self, headers, body)
        expect, rank = self.fabric.expect, body.get("data_parallel_rank")
        expect((rank is None) == (self.dp_size == 1), f"rank {rank} of {self.dp_size}")
        expect(rank is None or 0 <= rank < self.dp_size, f"rank {rank} is not below {self.dp_size}")
        expect(isinstance(body.get("stop", []), list), "stop strings that are no list are a 422")
        fetched = self.role == "decode" or self.leg_of(body) == "prefill"
        expect(fetched, "a prefill server keeps for ever what nobody fetches")
        if self.leg_of(body) != "alone":
            expect(self.head or "messages" not in body, "chat takes no params before June 2026")

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.fabric.expect(body["max_tokens"] == 1 and body["stream"] is False, "a prefill of one token")
        params = body["kv_transfer_params"]
        known = {"remote_host", "remote_port", "remote_handshake_port", "remote_dp_size", "remote_tp_size"}
        self.fabric.expect(known <= params.keys(), "where the decode server is")
        drawn = self.draw(request, body)
        self.transfers += 1
        # Before the body could name a rank, the server chose one itself.
        rank = body.get("data_parallel_rank", 0) if self.head else self.transfers % self.dp_size
        where = f"{self.kv_host}:{self.handshake_port}" if self.head else str(self.handshake_port)
        self.fabric.keep(drawn.prompts[0], self.lease_s, f"{where}/{rank}/{self.transfers}")
        told = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [4],
            "remote_engine_id": "None", "remote_host": self.kv_host, "remote_port": 51234,
            "tp_size": self.tp_size, "dp_rank": rank, "transfer_id": self.transfers,
        }  # fmt: skip
        if self.head:
            first = 2 if drawn.ends_at_once(0) else int(drawn.token(0, 0))
            told |= {
                "remote_handshake_port": self.handshake_port, "first_token_id": first, "draft_token_ids": [],
                "prefix_cache_hit_tokens": 0,
            }  # fmt: skip
        return web.json_response(drawn.whole() | {"kv_transfer_params": told})

    async def fetch(self, request: web.Request, body: dict[str, Any], drawn: Drawn) -> None:
        params, expect = body["kv_transfer_params"], self.fabric.expect
        expect(params["remote_block_ids"] == [4], "the prefill server's blocks")
        expect(params["remote_host"].startswith("10.9."), "the prefill server's own host")
        expect(params["remote_dp_rank"] < params["remote_dp_size"], "one of the prefill server's ranks")
        where = str(params["remote_handshake_port"])
        if self.head:
            where = f"{params['remote_host']}:{where}"
            drawn.first = f" {params['first_token_id']}"
        drawn.prompts = [self.fabric.read(f"{where}/{params['remote_dp_rank']}/{params['transfer_id']}")]


SERVERS: dict[str, type[StandInServer]] = {
    server.dialect: server
    for server in (
        AtomServer,
        SglangServer,
        VllmKvferryServer,
        VllmMooncakeServer,
        VllmMoriioServer,
        VllmNixlServer,
    )
}


def _now() -> float:
    return asyncio.get_running_loop().time()
