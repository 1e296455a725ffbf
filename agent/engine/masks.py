# SPDX-License-Identifier: Apache-2.0
"""The masks of constrained answers, as the engine process gets them from a process of their own.

A sequence sits out the steps for which its mask is not there, so a costly grammar delays no other request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvferry.agent.engine.sequence import Request, Sequence
from kvferry.agent.messages.masks import (
    FromMasks,
    Mask,
    MasksBoot,
    MasksReady,
    MaskWanted,
    RequestOver,
    ToMasks,
    current_ticket_path,
    masks_address,
)
from kvferry.common.child_process import ChildProcess
from kvferry.transfer.ranks.channel import RankConnection, RankGone, RankListener

MASKS_MODULE = "kvferry.agent.grammar.process"
_START_TIMEOUT_S = 25.0
"""Below the time after which the proxies take an agent without steps for one that hangs."""

log = logging.getLogger(__name__)


class MaskSource(Protocol):
    """Where the scheduler gets masks; they come later, as `MaskResult`."""

    def want(self, sequence: Sequence) -> None:
        """Have the mask of a sequence's next token computed, unless it is under way."""

    def forget(self, request: Request) -> None:
        """Drop what is known of a request, and the masks that it waits for."""


@dataclass(frozen=True, slots=True)
class MaskResult:
    """The mask of a sequence's output token `position`; or the status, code and message of its failure."""

    sequence: Sequence
    position: int
    bits: bytes = b""
    failure: tuple[int, str, str] | None = None


class MaskProcess:
    """The process that computes masks: started by the first one, and again after its end.

    `run` is a task of the engine's, and `close` comes after it; what the scheduler calls is synchronous.
    """

    def __init__(self, boot: MasksBoot, run_dir: Path, on_result: Callable[[], None]) -> None:
        self._boot = boot
        self._run_dir = run_dir
        self._on_result = on_result
        self._tickets = itertools.count(1)
        self._wanted: dict[int, tuple[Sequence, int]] = {}
        self._described: dict[int, dict[int, int]] = {}
        """By request and choice, how many output tokens the process knows."""
        self._results: list[MaskResult] = []
        self._fresh: set[int] = set()
        """What was wanted since `settle` was last called."""
        self._settled = asyncio.Event()
        self._needed = asyncio.Event()
        self._ready: asyncio.Future[str] | None = None
        self._connection: RankConnection | None = None
        self._child: ChildProcess | None = None
        self._has_answered = False
        self._decoder = msgspec.msgpack.Decoder(FromMasks)

    def want(self, sequence: Sequence) -> None:
        position = sequence.num_outputs
        if sequence.mask_wanted_at == position:
            return
        sequence.mask_wanted_at = position
        ticket = next(self._tickets)
        self._wanted[ticket] = sequence, position
        self._fresh.add(ticket)
        self._needed.set()
        self._describe(ticket)

    def forget(self, request: Request) -> None:
        for ticket in [ticket for ticket, (seq, _) in self._wanted.items() if seq.request is request]:
            del self._wanted[ticket]
            self._fresh.discard(ticket)
        if self._described.pop(request.key, None) is not None:
            self._send(RequestOver(key=request.key))

    def take_results(self) -> list[MaskResult]:
        """Return what has come since the last call."""
        results, self._results = self._results, []
        return results

    async def settle(self, timeout_s: float) -> None:
        """Wait for the masks that were wanted since the last call, but no longer than this."""
        try:
            if self._fresh and self._connection is not None:
                self._settled.clear()
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
        except TimeoutError:
            pass
        finally:
            self._fresh.clear()

    async def run(self) -> None:
        """Keep the process going as long as masks are wanted."""
        listener = RankListener(self._on_frame)
        await listener.start(masks_address(self._run_dir))
        try:
            while True:
                await self._needed.wait()
                self._needed.clear()
                if self._wanted:
                    await self._serve()
        finally:
            listener.close()

    async def close(self) -> None:
        """Kill the process. Idempotent."""
        if self._child is not None:
            await self._child.stop(grace_s=0.0)

    async def _serve(self) -> None:
        """Start the process, and wait until it ends."""
        current_ticket_path(self._run_dir).unlink(missing_ok=True)
        self._ready = asyncio.get_running_loop().create_future()
        self._has_answered = False
        argv = ["-m", MASKS_MODULE, "--run-dir", str(self._run_dir)]
        child = self._child = await ChildProcess.start(argv, "masks", stdin=msgspec.json.encode(self._boot))
        try:
            refusal = await self._started(child)
            if refusal:
                log.error("grammars cannot be used: %s", refusal)
                self._fail_all(f"Grammars cannot be used: {refusal}.")
                return
            status = await child.wait()
            log.warning("the process that computes masks ended with status %d", status)
            self._fail_current()
        finally:
            self._ready = self._connection = None
            self._described.clear()
            await self.close()

    async def _started(self, child: ChildProcess) -> str:
        """Wait until the process is ready; returns why it is not, if it is not."""
        assert self._ready is not None
        ended = asyncio.ensure_future(child.wait())
        first: set[asyncio.Future[Any]] = {self._ready, ended}
        try:
            await asyncio.wait(first, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        return self._ready.result() if self._ready.done() else "their process does not start"

    def _fail_current(self) -> None:
        """Fail the request whose mask the process has died of, and have the others' computed anew."""
        path = current_ticket_path(self._run_dir)
        ticket = int.from_bytes(path.read_bytes(), "little") if path.exists() else 0
        if ticket in self._wanted:
            self._fail(ticket, 400, "grammar_too_costly", "A mask of this grammar takes too much.")
        elif not ticket and not self._has_answered:
            self._fail_all("The process that computes masks dies before it computes any.")
        if self._wanted:
            self._needed.set()

    def _fail_all(self, message: str) -> None:
        for ticket in list(self._wanted):
            self._fail(ticket, 500, "grammars_failed", message)

    def _fail(self, ticket: int, status: int, code: str, message: str) -> None:
        sequence, position = self._wanted.pop(ticket)
        self._results.append(MaskResult(sequence, position, failure=(status, code, message)))
        self._on_result()

    def _on_frame(self, connection: RankConnection, frame: bytes) -> None:
        message: FromMasks = self._decoder.decode(frame)
        if isinstance(message, MasksReady):
            self._begin(connection, message.refusal)
            return
        self._has_answered = True
        self._fresh.discard(message.ticket)
        if not self._fresh:
            self._settled.set()
        if message.ticket not in self._wanted:
            return
        if not isinstance(message, Mask):
            self._fail(message.ticket, 400, message.failure, f"The constraint: {message.message}.")
            return
        sequence, position = self._wanted.pop(message.ticket)
        self._results.append(MaskResult(sequence, position, bits=message.bits))
        self._on_result()

    def _begin(self, connection: RankConnection, refusal: str) -> None:
        if self._ready is None or self._ready.done():
            return
        self._ready.set_result(refusal)
        if not refusal:
            self._connection = connection
            for ticket in self._wanted:
                self._describe(ticket)

    def _describe(self, ticket: int) -> None:
        """Send what is wanted, with what the process does not know yet of its choice."""
        if self._connection is None:
            return
        sequence, position = self._wanted[ticket]
        request = sequence.request
        grammar = "" if request.key in self._described else request.submit.sampling.grammar
        choices = self._described.setdefault(request.key, {})
        known = choices.get(sequence.index, 0)
        ids = sequence.tokens[request.prompt_len + known : request.prompt_len + position]
        choices[sequence.index] = position
        self._send(
            MaskWanted(ticket=ticket, key=request.key, choice=sequence.index, ids=tuple(ids), grammar=grammar)
        )

    def _send(self, message: ToMasks) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(msgspec.msgpack.encode(message))
        except RankGone as error:  # `run` sees it too
            log.debug("mask not wanted: %s", error)
