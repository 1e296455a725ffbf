# SPDX-License-Identifier: Apache-2.0
"""Stand-in agents: the native dialect over real HTTP and real ZMQ pings, with invented tokens and no KV.

For the proxy's tests and its cost benchmark. A stand-in draws its tokens from (prompt, seed, choice,
position), as a real agent does, so that a retry can be checked; it fails on demand (`Fault`); it remembers
what it was asked, what was aborted and which transfers it still holds a lease for.

`python -m tests.standins.agents --role decode --proxy 127.0.0.1:36367` runs one as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import ssl
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from kvferry.common.addresses import host_port
from kvferry.proxy.wire import registration as wire

Leg = Literal["prefill", "decode", "alone"]
CONTEXT_TOKENS = 4096
HARMLESS = ("late_end", "other_tokens")
"""Faults that do not cut a stream short."""
STOP_AT_ONCE = "stop at once"
"""A prompt that contains this draws the end of sequence as its first token."""
UNEVEN = "uneven"
"""A prompt that contains this ends choice i with "stop", i tokens before the others' limit."""
DEADLY_TO = "deadly to "
"""A prompt that contains this before a moment ("prefill", "decode", "alone", or "stream": after two events of
one) brings down every agent that gets so far with it."""
HELD_BACK = "held back"
"""A prompt that contains this has every second token's text come with the next token's."""


@dataclass(slots=True)
class Fault:
    """How one leg is to fail, once.

    Kinds: `status` answers that HTTP status, with an error in its body unless `bare`; `reset` resets the
    connection before any answer; `hang` never answers; `silent` sends headers and then nothing; `empty` ends
    a stream without any event; `cut` resets in the midst of an event, after `after_events` events; `no_done`
    ends cleanly without `[DONE]`; `stall` falls silent after some events; `error` sends an error event about
    the request, `failure` one about the agent; `late_end` ends its stream a while after
    `[DONE]`; `garbage` answers JSON of no known shape; `other_tokens` draws other tokens than the seed says.
    `dropped` answers as a prefill does whose KV nobody wants any more. `latin_1` (of other
    engines' servers only) answers text that is no UTF-8, in a stream after some events.
    """

    leg: Leg
    kind: Literal[
        "status", "reset", "hang", "silent", "empty", "cut", "no_done", "stall", "error", "garbage",
        "failure", "late_end", "other_tokens", "dropped", "latin_1",
    ]  # fmt: skip
    status: int = 500
    encoding: str = "utf-8"
    """Of what a `status` answer says."""
    bare: bool = False
    message: str = "as it was told to fail"
    retry_after: str | None = None
    after_events: int = 2

    def answer(self) -> web.Response:
        """What a `status` fault answers."""
        if self.bare:
            answer = web.Response(
                status=self.status, text="<html>no upstream</html>", content_type="text/html"
            )
        else:
            answer = _error(self.status, self.message, encoding=self.encoding)
        if self.retry_after is not None:
            answer.headers["Retry-After"] = self.retry_after
        return answer


@dataclass(slots=True)
class Asked:
    """One request as it arrived."""

    leg: Leg
    path: str
    headers: Mapping[str, str]
    connection: tuple[Any, ...]
    """The client's end of the connection that it came on."""
    body: dict[str, Any]


@dataclass(slots=True)
class StandInAgent:
    """One agent. An async context: entering listens (and pings, if told where), leaving closes everything."""

    role: wire.Role
    proxies: tuple[str, ...] = ()
    model: str = "stand-in"
    interval_s: float = 0.0
    """Seconds between events of a stream."""
    host: str = "127.0.0.1"
    port: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the registration that differ from the default."""
    ping_interval_s: float = 0.2
    drop_delay_s: float = 0.0
    max_running: int | None = None
    """What it says that it runs at once; it does not hold itself to that."""
    keep_requests: bool = True
    prefill_gate: asyncio.Event | None = None
    """When given, a prefill leg neither answers nor fails before it is set."""
    tls: ssl.SSLContext | None = None
    death: Literal["ends", "killed", "stopped"] = "ends"
    """By a deadly prompt: it ends as far as others can tell, or its process is killed or stopped."""
    answer_headers: dict[str, str] = field(default_factory=dict)
    """Headers that all its answers carry."""

    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    """The most it ever had running."""
    aborted: int = 0
    acks: int = 0
    is_asked_to_drain: bool = False
    refusals: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _pings: int = 0
    _listener: socket.socket = field(init=False)
    _runner: web.AppRunner | None = None
    _pinger: asyncio.Task[None] | None = None
    _http: aiohttp.ClientSession | None = None
    _dying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.on_response_prepare.append(self._add_headers)
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, self.port), family=family)
        self.port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener, ssl_context=self.tls).start()
        self._http = aiohttp.ClientSession()
        if self.proxies:
            self._pinger = asyncio.get_running_loop().create_task(self._ping())
        return self

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """What it answers."""
        router.add_post("/v1/completions", self._serve)
        router.add_post("/v1/chat/completions", self._serve)
        router.add_post("/kv/drop", self._drop)
        router.add_post("/stand-in/release", self._release)
        router.add_post("/stand-in/open", self._open)

    async def __aexit__(self, *_: object) -> None:
        await self.silence()
        if self._dying is not None:
            await self._dying
        await self.close_http()
        if self._http is not None:
            await self._http.close()

    async def silence(self) -> None:
        """Stop pinging, without a bye."""
        if self._pinger is not None:
            self._pinger.cancel()
            await asyncio.wait([self._pinger])
            self._pinger = None

    async def close_http(self) -> None:
        """Close every connection and refuse new ones, while the pings go on."""
        if self._runner is None:
            return
        # CPython 3.11 forgets, and leaves open, a connection whose acceptance the closing overtakes.
        asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(10):
            await asyncio.sleep(0)
        await self._runner.cleanup()
        self._runner = None

    @property
    def is_dead(self) -> bool:
        """Whether a deadly prompt has ended it."""
        return self._dying is not None

    async def _survive(self, request: web.Request, body: dict[str, Any], moment: str) -> None:
        """Return unless the prompt is deadly to it at this moment."""
        if f"{DEADLY_TO}{moment}" not in str(body.get("prompt") or body.get("messages")):
            return
        match self.death:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "ends":
                if self._pinger is not None:
                    self._pinger.cancel()
                if self._dying is None:
                    self._dying = asyncio.get_running_loop().create_task(self._end())
                await _reset(request)

    async def _end(self) -> None:
        await self.close_http()
        self.leases.clear()

    @property
    def address(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{host_port(self.host, self.port)}"

    def registration(self) -> wire.Register:
        """What it says of itself in its next ping."""
        self._pings += 1
        fields: dict[str, Any] = {
            "role": self.role,
            "incarnation": self.incarnation,
            "index": self._pings,
            "address": self.address,
            "control": f"tcp://{host_port(self.host, self.port)}",
            "dialect": "native",
            "model": self.model,
            "max_model_len": CONTEXT_TOKENS,
            "tp_size": 1,
            "dp_size": 1,
            "transfers": ("tcp",),
            "host_id": "stand-in",
            "layout": "stand-in",
            "weights": "stand-in",
            "tokenizer": "stand-in",
            "transfer_mode": "read",
            "version": "0",
            "state": "ready",
            "steps": self._pings,
            "load": wire.Load(
                running=self.running,
                waiting=0,
                kv_blocks_free=64,
                kv_blocks_total=64,
                kv_blocks_leased=len(self.leases),
                max_running=self.max_running,
            ),
        }
        return wire.Register(**(fields | self.overrides))

    def registrations(self) -> list[wire.Register]:
        """Its next pings: one, unless it is several agents."""
        return [self.registration()]

    async def until(self, claim: Any, timeout_s: float = 20.0) -> None:
        """Wait until `claim()` is true; it is asked again whenever something has changed here."""
        async with asyncio.timeout(timeout_s):
            while not claim():
                self.changed.clear()
                await self.changed.wait()

    async def _ping(self) -> None:
        context = zmq.asyncio.Context()
        dealers = []
        try:
            for proxy in self.proxies:
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://{proxy}")
                dealers.append(dealer)
            while True:
                for info in self.registrations():
                    for dealer in dealers:
                        await dealer.send(wire.encode(info))
                try:
                    async with asyncio.timeout(self.ping_interval_s):
                        await asyncio.gather(*(self._hear(dealer) for dealer in dealers))
                except TimeoutError:
                    continue
        finally:
            for dealer in dealers:
                dealer.close()
            context.term()

    async def _hear(self, dealer: zmq.asyncio.Socket) -> None:
        while True:
            message = wire.decode_proxy_message(await dealer.recv())
            if isinstance(message, wire.Ack):
                self.acks += 1
                self.is_asked_to_drain |= message.drain
            else:
                self.refusals.append(message.reason)
            self.changed.set()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.changed.set()
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            self.changed.set()

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.answer_headers)

    async def _drop(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["incarnation"] != self.incarnation:
            return _error(409, "another incarnation")
        await asyncio.sleep(self.drop_delay_s)
        self.dropped.append(body["transfer_id"])
        held = body["transfer_id"] in self.leases
        self.leases.discard(body["transfer_id"])
        self.changed.set()
        return web.json_response({"dropped": held})

    async def _release(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.leases.discard(body["transfer_id"])
        self.changed.set()
        return web.json_response({})

    async def _open(self, request: web.Request) -> web.Response:
        """Wait until there is KV to be read, and release it; or until there will be none."""
        transfer_id = (await request.json())["transfer_id"]
        await self.until(lambda: transfer_id in self.leases or transfer_id in self.dropped)
        self.leases.discard(transfer_id)
        self.changed.set()
        return web.json_response({})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        with self._busy():
            body = await request.json()
            params = body.get("kv_transfer_params") or {}
            leg: Leg = "prefill" if params.get("do_remote_decode") else "decode" if params else "alone"
            if self.keep_requests:
                self.asked.append(Asked(leg, request.path, request.headers, _connection(request), body))
                self.changed.set()
            if leg == "prefill" and self.prefill_gate is not None:
                await self.prefill_gate.wait()
            await self._survive(request, body, leg)
            fault = self._fault(leg)
            if fault is not None and fault.kind == "dropped":
                return _error(409, "nobody wants it", code="transfer_dropped")
            if fault is not None and fault.kind == "status":
                return fault.answer()
            if fault is not None and fault.kind == "hang":
                await asyncio.Event().wait()
            if fault is not None and fault.kind == "reset":
                return await _reset(request)
            if fault is not None and fault.kind == "garbage":
                return web.json_response({"choices": 7})
            if fault is not None and fault.kind == "silent":
                return await _headers_alone(request)
            drawn = _Drawn(request, body, other=fault is not None and fault.kind == "other_tokens")
            if leg == "prefill":
                return self._answer_prefill(drawn, params)
            if leg == "decode":
                await self._pull(params)
            if body.get("stream"):
                return await self._stream(request, body, drawn, fault)
            if self.interval_s:
                await asyncio.sleep(self.interval_s)
            return web.json_response(drawn.whole(), headers={"Server-Timing": "decode;dur=1"})

    def _fault(self, leg: Leg) -> Fault | None:
        for fault in self.faults:
            if fault.leg == leg:
                self.faults.remove(fault)
                return fault
        return None

    def _answer_prefill(self, drawn: _Drawn, params: dict[str, Any]) -> web.Response:
        limit = params["client_max_tokens"]
        if drawn.stops_at_once or limit == 1:
            return web.json_response(drawn.whole(limit=1))
        self.leases.add(params["transfer_id"])
        self.changed.set()
        answer = drawn.whole(limit=1)
        answer["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params["transfer_id"],
            "remote_engine_id": self.incarnation,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": drawn.prompt_tokens,
            "remote_tp_size": 1,
            "remote_dp_rank": 0,
            "remote_cached_tokens": 0,
            "first_tokens": [
                {"id": drawn.token(index, 0), "text": drawn.text(index, 0), "logprobs": None,
                 "finish_reason": drawn.finish_reason(index, 0), "margin": 1.0}
                for index in range(drawn.n)
            ],
            "prompt_token_ids": list(range(drawn.prompt_tokens)),
        }  # fmt: skip
        return web.json_response(answer)

    async def _pull(self, params: dict[str, Any]) -> None:
        """Release the producer's lease, as a decode agent does once it has the KV.

        A streamed leg waits until there is one. If the producer is gone, a decode agent computes the prompt
        itself: no reason to fail.
        """
        assert self._http is not None
        host = params["remote_host"]
        shown = f"[{host}]" if ":" in host else host
        what = "open" if params.get("streamed") else "release"
        scheme = "http" if self.tls is None else "https"
        url = f"{scheme}://{shown}:{params['remote_port']}/stand-in/{what}"
        body = {"transfer_id": params["transfer_id"]}
        with suppress(aiohttp.ClientError):
            async with self._http.post(url, json=body, ssl=False) as answer:
                await answer.read()

    async def _stream(
        self, request: web.Request, body: dict[str, Any], drawn: _Drawn, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        kind = None if fault is None else fault.kind
        await response.prepare(request)
        if kind == "empty":
            return response
        if drawn.streamed:
            await response.write(drawn.first_event())
        sent = 0
        for position in range(min(drawn.known), drawn.limit):
            if self.interval_s:
                await asyncio.sleep(self.interval_s)
            for index in range(drawn.n):
                if not drawn.known[index] <= position < drawn.length(index):
                    continue
                if fault is not None and sent == fault.after_events and kind not in HARMLESS:
                    return await self._break_off(request, response, kind)
                await response.write(drawn.event(index, position))
                sent += 1
                if sent == 2:
                    await self._survive(request, body, "stream")
        if fault is not None and sent == fault.after_events and kind not in HARMLESS:
            return await self._break_off(request, response, kind)
        await response.write(drawn.last_event())
        if fault is not None and sent + 1 == fault.after_events and kind not in HARMLESS:
            return await self._break_off(request, response, kind)
        await response.write(b"data: [DONE]\n\n")
        if kind == "late_end":
            await asyncio.sleep(0.05)
        return response

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, kind: str | None
    ) -> web.StreamResponse:
        if kind == "stall":
            await asyncio.Event().wait()
        if kind in ("error", "failure"):
            whose = "server_error" if kind == "failure" else "invalid_request_error"
            await response.write(_event({"error": {"message": "no more", "code": "gone", "type": whose}}))
            await response.write(b"data: [DONE]\n\n")
        if kind == "cut":
            await response.write(b'data: {"choices": [{"te')
            return await _reset(request)
        return response


class _Drawn:
    """The answer to one request: a pure function of its prompt and seed."""

    def __init__(self, request: web.Request, body: dict[str, Any], *, other: bool) -> None:
        prompt = body.get("prompt") or body.get("messages")
        self.chat = request.path.endswith("chat/completions")
        self.n = body.get("n") or 1
        params = body.get("kv_transfer_params") or {}
        asked = params if params.get("do_remote_decode") else body
        limits = [asked.get(name) for name in ("client_max_tokens", "max_completion_tokens", "max_tokens")]
        self.limit = next(filter(None, limits), 8)
        self.streamed = bool(params.get("streamed"))
        self.include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        self.stops_at_once = STOP_AT_ONCE in str(prompt)
        self.known = self._known(body)
        self._uneven = UNEVEN in str(prompt)
        self._holds_back = HELD_BACK in str(prompt)
        self._with_ids = bool(body.get("return_token_ids"))
        self._with_timing = bool(body.get("kvferry_timing"))
        self._with_lines = bool(body.get("kvferry_token_lines"))
        self._first_choice = body.get("kvferry_first_choice") or 0
        self._salt = f"{prompt}/{body.get('seed')}/{'other' if other else ''}"
        self._envelope = {
            "id": request.headers.get("X-Kvferry-Answer-Id", "cmpl-direct"),
            "created": int(request.headers.get("X-Kvferry-Created", "0")),
            "model": body["model"],
        }

    def _known(self, body: dict[str, Any]) -> list[int]:
        """How many tokens of each choice the client has already."""
        params = body.get("kv_transfer_params") or {}
        resume = body.get("resume") or [
            {"output_ids": [each["id"]]} for each in params.get("first_tokens", ())
        ]
        return [len(each["output_ids"]) for each in resume] or [int(self.streamed)] * self.n

    def length(self, index: int) -> int:
        """How many tokens a choice has in all."""
        return max(1, self.limit - index) if self._uneven else self.limit

    def finish_reason(self, index: int, position: int) -> str | None:
        """Why a choice ends with the token at `position`; None if it does not."""
        if position < self.length(index) - 1:
            return None
        return "length" if position == self.limit - 1 else "stop"

    def token(self, index: int, position: int) -> int:
        return zlib.crc32(f"{self._salt}/{index}/{position}".encode()) % 50000

    def text(self, index: int, position: int) -> str:
        return f" {self.token(index, position)}"

    def first_event(self) -> bytes:
        """What the stream of a leg begins with that was sent together with its prefill leg."""
        ids = ",".join(str(self.token(index, 0)) for index in range(self.n))
        return f": first {ids}\n\n".encode()

    def event(self, index: int, position: int) -> bytes:
        reason = self.finish_reason(index, position)
        line = f": t {index} {self.token(index, position)}{f' {reason}' if reason else ''}\n".encode()
        line = line if self._with_lines else b""
        text = self._released(index, position)
        if not text and not self._with_ids:
            return line and line + b"\n"
        shown = {"delta": {"content": text}} if self.chat else {"text": text}
        index_shown = self._first_choice + index
        choice = {"index": index_shown, **shown, "logprobs": None, "finish_reason": reason}
        if self._with_ids:
            choice["token_ids"] = [self.token(index, position)]
        return line + _event({**self._envelope, "choices": [choice]})

    def _released(self, index: int, position: int) -> str:
        """The text that the token at `position` lets be shown."""
        if not self._holds_back:
            return self.text(index, position)
        if position % 2 and self.finish_reason(index, position) is None:
            return ""
        held = self.text(index, position - 1) if position and not position % 2 else ""
        return held + self.text(index, position)

    def last_event(self) -> bytes:
        line = b": t end\n" if self._with_lines else b""
        told: dict[str, Any] = {"usage": self._usage(self.limit)} if self.include_usage else {}
        if self._with_timing:
            told["kvferry_timing"] = {"queue_s": 0.25}
        return line + _event({**self._envelope, "choices": [], **told}) if told else line and line + b"\n"

    def whole(self, limit: int | None = None) -> dict[str, Any]:
        tokens = self.limit if limit is None else limit
        choices = []
        for index in range(self.n):
            positions = range(min(tokens, self.length(index)))
            reason = "stop" if self.stops_at_once else self.finish_reason(index, positions[-1]) or "length"
            text = "".join(self.text(index, position) for position in positions)
            shown = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choice: dict[str, Any] = {"index": index, **shown, "logprobs": None, "finish_reason": reason}
            if self._with_ids:
                choice["token_ids"] = [self.token(index, position) for position in positions]
            choices.append(choice)
        return {**self._envelope, "choices": choices, "usage": self._usage(tokens)}

    def _usage(self, tokens: int) -> dict[str, int]:
        completion = sum(min(tokens, self.length(index)) for index in range(self.n))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }


def _connection(request: web.Request) -> tuple[Any, ...]:
    assert request.transport is not None
    return tuple(request.transport.get_extra_info("peername"))


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _error(status: int, message: str, code: str = "as_told", *, encoding: str = "utf-8") -> web.Response:
    error = {"message": f"déjà vu: {message}", "type": "stand_in", "param": None, "code": code}
    body = json.dumps({"error": error}, ensure_ascii=False).encode(encoding)
    return web.Response(body=body, status=status, content_type="application/json")


async def _headers_alone(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.Event().wait()
    return response


async def _reset(request: web.Request) -> web.StreamResponse:
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("unreachable: the reset cancels this handler")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--role", nargs="+", choices=["prefill", "decode", "both"], required=True, help="more: a process each"
    )
    parser.add_argument("--proxy", required=True)
    parser.add_argument("--model", default="stand-in")
    parser.add_argument("--interval-s", type=float, default=0.0)
    parser.add_argument("--death", choices=["killed", "stopped"], default="killed")
    options = parser.parse_args()
    role, *others = options.role
    for other in others:
        if os.fork() == 0:
            role = other
            break
    asyncio.run(_run(role, options))


async def _run(role: wire.Role, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with StandInAgent(
        role=role,
        proxies=(options.proxy,),
        model=options.model,
        interval_s=options.interval_s,
        keep_requests=False,
        death=options.death,
    ) as agent:
        print(json.dumps({"listening": {"url": agent.address}}) + "\n", end="", flush=True)  # one write
        await stop.wait()


if __name__ == "__main__":
    _main()
