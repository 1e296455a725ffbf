# SPDX-License-Identifier: Apache-2.0
"""A stand-in engine that costs next to nothing, so that a router beside it on the same cores can be measured.

It speaks plain OpenAI completions, the native dialect and those of vLLM's NixlConnector, of ours inside vLLM
and of SGLang, answers at once, and sends one event of a stream every `--interval-s`. It draws nothing and
keeps nothing: `tests/standins/agents.py` and `engines.py` are the ones that behave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
from functools import partial
from typing import Any, cast

import uvloop
import zmq
import zmq.asyncio

from kvferry.proxy.wire import registration as wire

MODEL = "stand-in"
ENVELOPE = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1763600000, "model": MODEL}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LINE = b": t 0 12345\n"
FIRST_TOKEN = {"id": 12345, "text": " 12345", "logprobs": None, "finish_reason": None, "margin": 1.0}


def chunk(payload: bytes) -> bytes:
    """One chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def whole(body: Any, status: str = "200 OK") -> bytes:
    """A whole HTTP answer."""
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def answer(finish_reason: str) -> dict[str, Any]:
    """A whole completion."""
    choice = {"index": 0, "text": " 12345 23456", "logprobs": None, "finish_reason": finish_reason}
    return {**ENVELOPE, "choices": [choice], "usage": USAGE}


def page(text: str) -> bytes:
    """A page of metrics."""
    raw = text.encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


def event(finish_reason: str | None, **more: Any) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "text": " 12345", "logprobs": None, "finish_reason": finish_reason, **more}
    return b"data: " + json.dumps({**ENVELOPE, "choices": [choice]}).encode() + b"\n\n"


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
PLAIN = chunk(event(None)), chunk(event("length")) + DONE
"""An event, and the end of a stream from its last event on."""
LINED = (
    chunk(LINE + event(None)),
    chunk(b": t 0 12345 length\n" + event("length")) + chunk(b": t end\n\n") + DONE,
)
WITH_IDS = (
    chunk(event(None, token_ids=[12345])),
    chunk(event("length", token_ids=[12345])) + DONE,
)
ONE_TOKEN = STREAM_HEAD + PLAIN[1]
ANSWER = whole(answer("length"))
MODELS = whole({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})
METRICS = page("process_start_time_seconds 1.0\nvllm:nixl_num_kv_expired_reqs_total 0.0\n")
HEALTHY = whole({"status": "ok", "model_path": MODEL})


class EngineConnection(asyncio.Protocol):
    """One client's connection: one request after the other."""

    def __init__(self, role: wire.Role, interval_s: float, incarnation: str) -> None:
        self._role = role
        self._interval_s = interval_s
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._event, self._end = PLAIN
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(rest) >= length:
            self._received = rest[length:]
            self._serve(head.split(b" ", 2)[1], rest[:length])

    def _serve(self, path: bytes, raw: bytes) -> None:
        if not path.startswith(b"/v1/") or not raw:
            self._transport.write({b"/v1/models": MODELS, b"/metrics": METRICS}.get(path, HEALTHY))
            return
        body = json.loads(raw)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self._transport.write(whole(self._prefilled(params)))
        elif "bootstrap_room" in body and self._role == "prefill":
            self._transport.write(ONE_TOKEN if body.get("stream") else ANSWER)
        elif body.get("stream"):
            has_lines, has_ids = body.get("kvferry_token_lines"), body.get("return_token_ids")
            self._event, self._end = LINED if has_lines else WITH_IDS if has_ids else PLAIN
            self._left = body["max_tokens"] - len(params.get("first_tokens", ()))
            self._transport.write(STREAM_HEAD)
            self._tick()
        else:
            self._transport.write(ANSWER)

    def _prefilled(self, params: dict[str, Any]) -> dict[str, Any]:
        if "client_max_tokens" in params:
            return self._prefilled_natively(params)
        return self._prefilled_by_us(params) if "transfer_id" in params else self._prefilled_by_nixl()

    def _prefilled_natively(self, params: dict[str, Any]) -> dict[str, Any]:
        if params["client_max_tokens"] == 1:
            return answer("length")
        where = {"remote_engine_id": self._incarnation, "remote_host": "127.0.0.1", "remote_port": 9}
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": params["transfer_id"],
            **where,
            "first_tokens": [FIRST_TOKEN],
            "prompt_token_ids": [1, 2, 3, 4, 5],
        }
        return answer("length") | {"kv_transfer_params": told}

    def _prefilled_by_us(self, params: dict[str, Any]) -> dict[str, Any]:
        told = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": params["transfer_id"],
            "remote_engine_id": self._incarnation, "remote_host": "127.0.0.1", "remote_port": 9,
            "remote_num_tokens": 5, "remote_tp_size": 1, "remote_dp_rank": 0, "continuable": True,
        }  # fmt: skip
        ids = {"prompt_token_ids": [1, 2, 3, 4, 5], "token_ids": [12345]}
        whole_answer = answer("length") | {"kv_transfer_params": told}
        [choice] = whole_answer["choices"]
        return whole_answer | {"choices": [choice | {"text": " 12345"} | ids]}

    def _prefilled_by_nixl(self) -> dict[str, Any]:
        told = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[2, 3]],
            "remote_engine_id": self._incarnation, "remote_request_id": f"cmpl-{self._incarnation}",
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 5,
            "transfer_mode": "pull",
        }  # fmt: skip
        return answer("length") | {"kv_transfer_params": told}

    def _tick(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._transport.write(self._end)
            return
        self._transport.write(self._event)
        self._timer = self._loop.call_later(self._interval_s, self._tick)


async def ping(
    context: zmq.asyncio.Context, proxy: str, dialect: str, role: wire.Role, address: str, incarnation: str
) -> None:
    """Announce the engine, every second, until cancelled."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{proxy}")
        index = 0
        while True:
            index += 1
            load = wire.Load(running=0, waiting=0, kv_blocks_free=64, kv_blocks_total=64, kv_blocks_leased=0)
            message = wire.Register(
                role=role,
                incarnation=wire.Incarnation(incarnation),
                index=index,
                address=address,
                control="tcp://127.0.0.1:9",
                dialect=dialect,
                model=MODEL,
                max_model_len=1_000_000,
                tp_size=1,
                dp_size=1,
                transfers=("tcp",),
                host_id="bench",
                layout="bench",
                weights="bench",
                tokenizer="bench",
                transfer_mode="read",
                version="0",
                state="ready",
                steps=index,
                load=load,
            )
            await dealer.send(wire.encode(message))
            await asyncio.sleep(wire.PING_INTERVAL_S)


async def main(role: wire.Role, proxy: str | None, dialect: str, interval_s: float, count: int) -> None:
    """Serve until killed."""
    engines: dict[str, str] = {}
    for _ in range(count):
        incarnation = secrets.token_hex(8)
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        engines[f"http://127.0.0.1:{listener.getsockname()[1]}"] = incarnation
        await asyncio.get_running_loop().create_server(
            partial(EngineConnection, role, interval_s, incarnation), sock=listener
        )
    print(json.dumps({"listening": {"url": next(iter(engines)), "urls": list(engines)}}), flush=True)
    with zmq.asyncio.Context() as context:
        async with asyncio.TaskGroup() as tasks:
            if proxy is not None:
                for url, incarnation in engines.items():
                    tasks.create_task(ping(context, proxy, dialect, role, url, incarnation))
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A stand-in engine for benchmarks.")
    parser.add_argument("--role", choices=["prefill", "decode", "both"], default="both")
    parser.add_argument("--proxy", help="host:port to announce itself to")
    parser.add_argument("--dialect", default="native", help="the dialect that it announces")
    parser.add_argument("--interval-s", type=float, default=0.02)
    parser.add_argument("--count", type=int, default=1, help="so many engines, in this one process")
    options = parser.parse_args()
    uvloop.run(main(options.role, options.proxy, options.dialect, options.interval_s, options.count))
