# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an agent's API process: starts a real engine and speaks agent/messages/requests.py to it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.requests import (
    EngineReady,
    FromEngine,
    Output,
    Outputs,
    RequestFailed,
    Stats,
    ToEngine,
)
from kvferry.agent.messages.steps import Boot
from kvferry.common.child_process import ChildProcess

Answer = list[Output | RequestFailed]


class StandInApi:
    """One engine process and everything that it has sent. Use as an async context manager."""

    def __init__(self, config: AgentConfig, run_dir: Path) -> None:
        run_dir.mkdir(mode=0o700)
        self.config = config
        self.run_dir = run_dir
        self.ready: EngineReady | None = None
        self.stats: Stats | None = None
        self.answers: dict[str, Answer] = {}
        self._context = zmq.asyncio.Context()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.bind(f"ipc://{self.run_dir}/from-engine")
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.setsockopt(zmq.LINGER, 0)
        self._to_engine.connect(f"ipc://{self.run_dir}/to-engine")
        boot = msgspec.json.encode(Boot(config=self.config, incarnation=secrets.token_hex(8)))
        argv = ["-m", "kvferry.agent.engine.process", "--run-dir", str(self.run_dir)]
        self.engine = await ChildProcess.start(argv, "engine", stdin=boot)
        self._reader = asyncio.ensure_future(self._read())
        try:
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _until_ready(self) -> None:
        """Wait for the engine's announcement. Raises RuntimeError if it ends instead."""
        ready = asyncio.ensure_future(self.until(lambda: self.ready is not None, timeout_s=50))
        ended = asyncio.ensure_future(self.engine.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)
        if self.ready is None:
            raise RuntimeError(f"the engine ended with status {self.engine.returncode}")

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.engine.stop(grace_s=10)
        self._from_engine.close()
        self._to_engine.close()
        self._context.term()

    async def send(self, message: ToEngine) -> None:
        await self._to_engine.send(msgspec.msgpack.encode(message))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        """Wait until a condition holds; it is looked at after every message from the engine."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def answer(self, request_id: str) -> Answer:
        """All messages about a request, once its last one is here."""
        await self.until(lambda: is_over(self.answers.get(request_id, [])))
        return self.answers[request_id]

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            message = decoder.decode(await self._from_engine.recv())
            async with self._changed:
                self._take(message)
                self._changed.notify_all()

    def _take(self, message: FromEngine) -> None:
        match message:
            case EngineReady():
                self.ready = message
            case Stats():
                self.stats = message
            case RequestFailed():
                self.answers.setdefault(message.request_id, []).append(message)
            case Outputs():
                for output in message.items:
                    self.answers.setdefault(output.request_id, []).append(output)


def is_over(answer: Answer) -> bool:
    return bool(answer) and (isinstance(answer[-1], RequestFailed) or answer[-1].done)


def tokens_of(answer: Answer, choice: int = 0) -> list[int]:
    """The token ids of one choice."""
    outputs = [message for message in answer if isinstance(message, Output)]
    return [token.token_id for output in outputs for token in output.tokens if token.index == choice]


def tiny_config(model: Path, **changes: Any) -> AgentConfig:
    """Settings of an engine that is quick to start."""
    base = AgentConfig(
        model=str(model), port=0, control_port=0, kv_blocks=64, prefill_chunk=32, threads=1, transfer="tcp"
    )
    return dataclasses.replace(base, **changes)
