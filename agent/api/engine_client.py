# SPDX-License-Identifier: Apache-2.0
"""The API process's end of the two ipc sockets to the engine process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from pathlib import Path
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from kvferry.agent.errors import ApiError, unavailable
from kvferry.agent.messages.requests import (
    Abort,
    Drain,
    Drained,
    DropTransfer,
    EngineReady,
    FailedPull,
    FromEngine,
    Output,
    Outputs,
    RequestFailed,
    Stats,
    StopChoice,
    Submit,
    ToEngine,
)

log = logging.getLogger(__name__)

_HIGH_WATER_MARK = 10_000
# The engine ends every request at its own deadline; this much later the request counts as lost.
_ENGINE_GRACE_S = 10.0


class BadEngineMessage(RuntimeError):
    """The engine sent a frame that is none of `FromEngine`: the two processes are not of one version."""


class EngineStream:
    """The engine's outputs of one request. An async context: leaving it early aborts the request.

    The queue holds at most one message per output token; one that grows beyond that fails the request.
    """

    def __init__(self, client: EngineClient, submit: Submit) -> None:
        self._client = client
        self._request_id = submit.request_id
        self._deadline = asyncio.get_running_loop().time() + submit.timeout_s + _ENGINE_GRACE_S
        self._bound = submit.sampling.n * submit.sampling.max_tokens + 1
        self._outputs: deque[Output] = deque()
        self._error: ApiError | None = None
        self.failed_pull: FailedPull | None = None
        """Of a request that the engine failed."""
        self._arrived = asyncio.Event()
        self._ended = False

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.leave(self._request_id, abort=not self._ended)

    async def next(self, timeout_s: float | None = None) -> Output:
        """Wait for the next output; one with `done` is the last.

        Raises:
            ApiError: the request failed, here or in the engine, or nothing came in time.
        """
        deadline = self._deadline
        if timeout_s is not None:
            deadline = min(deadline, asyncio.get_running_loop().time() + timeout_s)
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                raise ApiError(504, "engine_timeout", "the engine did not answer in time") from None
        return self._outputs.popleft()

    def stop_choice(self, index: int) -> None:
        """End this choice in the engine: a stop string was found."""
        if not self._ended:
            self._client.send(StopChoice(request_id=self._request_id, index=index))

    def deliver(self, output: Output) -> None:
        """Queue one output; called by the reader, never blocks."""
        self._ended = self._ended or output.done
        if len(self._outputs) >= self._bound:
            self.fail(ApiError(500, "reply_overrun", "the engine sent more than was asked for"))
            return
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, error: ApiError, *, ended: bool = False) -> None:
        """End the stream with an error, after what is queued. `ended`: the engine has ended the request."""
        self._ended = self._ended or ended
        self._error = self._error or error
        self._arrived.set()


class EngineClient:
    """Submits requests and hands each one's outputs to its `EngineStream`.

    `run()` must be awaited by an owner for as long as the client is used; it is the only reader.
    """

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path) -> None:
        self._receiver = context.socket(zmq.PULL)
        self._receiver.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._receiver.setsockopt(zmq.LINGER, 0)
        self._receiver.bind(f"ipc://{run_dir}/from-engine")
        # Plain, not asyncio: a send either fits into the pipe at once or is refused.
        self._sender: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.PUSH)
        self._sender.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._sender.setsockopt(zmq.LINGER, 0)
        self._sender.connect(f"ipc://{run_dir}/to-engine")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._numbers = itertools.count(1)
        self._streams: dict[str, EngineStream] = {}
        self._refusal: ApiError | None = None
        self._is_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._drained = asyncio.Event()
        self.ready: EngineReady | None = None
        self.stats: Stats | None = None

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def engine_id(self, request_id: str) -> str:
        """A name for the request between the two processes: clients may send one request id twice."""
        return f"{request_id}#{next(self._numbers)}"

    async def run(self) -> None:
        """Dispatch engine messages until cancelled. Raises `BadEngineMessage`."""
        while True:
            frame = await self._receiver.recv()
            try:
                message = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise BadEngineMessage(str(error)) from error
            self._dispatch(message)

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """Wait for the engine's first message. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._is_ready.wait()
        assert self.ready is not None
        return self.ready

    def submit(self, message: Submit) -> EngineStream:
        """Send one request. Raises `ApiError` 503 when the engine cannot take it."""
        if self._refusal is not None:
            raise self._refusal
        stream = EngineStream(self, message)
        self.send(message)
        self._streams[message.request_id] = stream
        self._idle.clear()
        return stream

    def drop_transfer(self, transfer_id: str) -> None:
        """Unpin the blocks of a transfer. Idempotent."""
        self.send(DropTransfer(transfer_id=transfer_id))

    def send(self, message: ToEngine) -> None:
        """Queue one message to the engine. Raises `ApiError` 503 when its queue is full."""
        try:
            self._sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise unavailable("engine_busy", "the engine's queue is full") from None

    def leave(self, request_id: str, *, abort: bool) -> None:
        """Forget a request, and `abort` it in the engine."""
        if self._streams.pop(request_id, None) is None:
            return
        if not self._streams:
            self._idle.set()
        if abort:
            try:
                self.send(Abort(request_id=request_id))
            except ApiError:
                log.warning("could not abort %s: the engine's queue is full", request_id)

    def refuse(self, error: ApiError) -> None:
        """Refuse every request from now on."""
        self._refusal = error

    def fail_all(self, error: ApiError) -> None:
        """End every request in flight with an error."""
        for stream in self._streams.values():
            stream.fail(error)

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def wait_drained(self) -> None:
        """Wait until the engine runs nothing and leases no KV. Raises `ApiError` when its queue is full."""
        self._drained.clear()
        self.send(Drain())
        await self._drained.wait()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs(items=items):
                for output in items:
                    # Absent: its client has gone, and the abort is still under way.
                    if (stream := self._streams.get(output.request_id)) is not None:
                        stream.deliver(output)
            case RequestFailed():
                if (stream := self._streams.get(message.request_id)) is not None:
                    stream.failed_pull = message.failed_pull
                    stream.fail(ApiError(message.status, message.code, message.message), ended=True)
            case Stats():
                self.stats = message
            case Drained():
                self._drained.set()
            case EngineReady():
                self.ready = message
                self._is_ready.set()
