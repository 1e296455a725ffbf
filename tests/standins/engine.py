# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine process: speaks `agent.messages.requests` over the real sockets, but has no
model.

Choice i's output at position p is `prompt_ids[(p + i) % len(prompt_ids)]`, so a test writes the answer it
wants into the prompt. What it was told is counted in its Stats as "pull failures" (submit, abort, stop,
drop), so that a test can read it from /metrics. Special seeds make it misbehave: see `Seed`. With `--device
cuda` it never becomes ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvferry.agent.messages.requests import (
    Abort,
    Drain,
    Drained,
    DropTransfer,
    EngineReady,
    FinishReason,
    FromEngine,
    Output,
    Outputs,
    RequestFailed,
    Stats,
    StopChoice,
    Submit,
    Timing,
    ToEngine,
    Token,
    TokenLogprob,
)
from kvferry.common.child_process import die_with_parent
from kvferry.transfer.events import PlaneStats, PullTimes

CACHED_TOKENS = 2
CONTROL_PORT = 6399
MAX_MODEL_LEN = 512
STEP_S = 0.001
SLOW_STEP_S = 0.05


class Seed(IntEnum):
    """Seeds that ask for trouble."""

    REFUSE = 10_001
    DIE = 10_002
    DIE_AT_THIRD_TOKEN = 10_003
    SILENT = 10_004
    SLOW = 10_005
    FAIL_AT_THIRD_TOKEN = 10_006


class StandInEngine:
    """One engine without a model."""

    def __init__(self, run_dir: str, eos_id: int) -> None:
        context = zmq.asyncio.Context()
        self._eos_id = eos_id
        self._receiver = context.socket(zmq.PULL)
        self._receiver.bind(f"ipc://{run_dir}/to-engine")
        self._sender = context.socket(zmq.PUSH)
        self._sender.connect(f"ipc://{run_dir}/from-engine")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._told: Counter[str] = Counter()
        self._steps = 0

    async def run(self, incarnation: str) -> None:
        """Say that it is ready, then serve for ever."""
        await self._send(
            EngineReady(
                incarnation=incarnation,
                control_port=CONTROL_PORT,
                transfers=("tcp",),
                geometry={"block_size": "16"},
                layout="layout",
                weights="weights",
                host_id="host",
                device="cpu",
                max_model_len=MAX_MODEL_LEN,
                kv_blocks_total=64,
            )
        )
        await self._send_stats()
        decoder = msgspec.msgpack.Decoder(ToEngine)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._handle(decoder.decode(await self._receiver.recv()), tasks)

    async def _handle(self, message: Any, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Submit():
                self._told["submit"] += 1
                self._running[message.request_id] = tasks.create_task(self._run(message))
            case Abort():
                self._told["abort"] += 1
                if (task := self._running.get(message.request_id)) is not None:
                    task.cancel()
            case StopChoice():
                self._told["stop"] += 1
                self._stopped.add((message.request_id, message.index))
            case DropTransfer():
                self._told["drop"] += 1
            case Drain():
                await self._send(Drained())
        await self._send_stats()

    async def _run(self, submit: Submit) -> None:
        try:
            await self._serve(submit)
        finally:
            del self._running[submit.request_id]
            await self._send_stats()

    async def _serve(self, submit: Submit) -> None:
        match submit.sampling.seed:
            case Seed.DIE:
                os._exit(3)
            case Seed.SILENT:
                await asyncio.Event().wait()
            case Seed.REFUSE:
                failed = RequestFailed(
                    request_id=submit.request_id, status=429, code="busy", message="no room"
                )
                await self._send(failed)
                return
        known = {resumed.index: len(resumed.token_ids) for resumed in submit.resumed}
        finished = {resumed.index for resumed in submit.resumed if resumed.finished}
        position = min(known.values(), default=0)
        done = len(finished) == submit.sampling.n
        if done:
            await self._send(Outputs(items=(self._output(submit, [], done),)))
        while not done:
            await asyncio.sleep(SLOW_STEP_S if submit.sampling.seed == Seed.SLOW else STEP_S)
            if position == 2 and submit.sampling.seed == Seed.DIE_AT_THIRD_TOKEN:
                os._exit(3)
            if position == 2 and submit.sampling.seed == Seed.FAIL_AT_THIRD_TOKEN:
                failed = RequestFailed(
                    request_id=submit.request_id, status=502, code="lost", message="KV is lost"
                )
                await self._send(failed)
                return
            finished |= {index for name, index in self._stopped if name == submit.request_id}
            tokens = [
                self._token(submit, index, position)
                for index in range(submit.sampling.n)
                if index not in finished and position >= known.get(index, 0)
            ]
            finished |= {token.index for token in tokens if token.finish is not None}
            position += 1
            self._steps += 1
            done = submit.produce is not None or len(finished) == submit.sampling.n
            await self._send(Outputs(items=(self._output(submit, tokens, done),)))

    def _output(self, submit: Submit, tokens: list[Token], done: bool) -> Output:
        remote = submit.remote is not None
        timing = Timing(queue_s=0.25, pull_s=0.5 if remote else 0.0, backend="tcp" if remote else None)
        return Output(
            request_id=submit.request_id,
            tokens=tuple(tokens),
            done=done,
            leased=submit.produce is not None and any(token.finish is None for token in tokens),
            cached_tokens=CACHED_TOKENS,
            timing=timing if done else None,
        )

    def _token(self, submit: Submit, index: int, position: int) -> Token:
        sampling = submit.sampling
        token_id = submit.prompt_ids[(position + index) % len(submit.prompt_ids)]
        finish: FinishReason | None = "length" if position + 1 >= sampling.max_tokens else None
        if token_id in sampling.stop_token_ids or (token_id == self._eos_id and not sampling.ignore_eos):
            finish = "stop"
        logprob = None
        if sampling.logprobs is not None:
            top = tuple((rank, -1.0 - rank) for rank in range(sampling.logprobs))
            logprob = TokenLogprob(logprob=-0.5, margin=float("inf") if position % 2 else 0.25, top=top)
        return Token(index=index, token_id=token_id, logprob=logprob, finish=finish)

    async def _send_stats(self) -> None:
        await self._send(
            Stats(
                steps=self._steps,
                running=len(self._running),
                waiting=0,
                blocks_free=60,
                blocks_used=3,
                blocks_leased=1,
                blocks_quarantined=0,
                blocks_total=64,
                preemptions=0,
                recomputes=2,
                integrity_errors=0,
                plane=PlaneStats(
                    leased=1,
                    quarantined=0,
                    leases_ended={"released": 4},
                    pulls=5,
                    pull_bytes=4096,
                    pull_descriptors=7,
                    pull_times={"tcp": PullTimes(seconds=0.5)},
                    pull_failures=dict(self._told),
                    verify_seconds=0.25,
                    handshakes=1,
                    bad_frames=0,
                    streamed_pulls=2,
                    refusals={"0123456789abcdef": "weights: theirs a, ours b"},
                ),
            )
        )

    async def _send(self, message: FromEngine) -> None:
        await self._sender.send(msgspec.msgpack.encode(message))


def main() -> None:
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    run_dir = parser.parse_args().run_dir
    told = json.load(sys.stdin)
    if told["config"]["load_format"] == "dummy":
        signal.pause()  # loads for ever
    model = json.loads((Path(told["config"]["model"]) / "config.json").read_text())
    asyncio.run(StandInEngine(run_dir, model["eos_token_id"]).run(told["incarnation"]))


if __name__ == "__main__":
    main()
