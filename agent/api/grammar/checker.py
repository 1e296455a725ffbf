# SPDX-License-Identifier: Apache-2.0
"""Tries grammars before anything is generated, in a process that can be killed: some never end compiling."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

import msgspec

from kvferry.agent.api.grammar.constraint import Constraint
from kvferry.agent.errors import ApiError, bad_request, unavailable
from kvferry.common.child_process import ChildProcess
from kvferry.common.hashing import Purpose, digest

GRAMMAR_MODULE = "kvferry.agent.api.grammar.process"
COMPILE_TIMEOUT_S = 5.0
MAX_VERDICTS = 1024
MAX_WAITING = 64
_START_TIMEOUT_S = 120.0
WAIT_TIMEOUT_S = 30.0
_ANSWER_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class GrammarChecker:
    """Knows which grammars can be used with a checkpoint's tokenizer.

    Its process is started by the first grammar, tries one at a time, and is killed with one that takes longer
    than `timeout_s`. The last verdicts are kept.
    """

    def __init__(
        self, directory: Path, *, timeout_s: float = COMPILE_TIMEOUT_S, module: str = GRAMMAR_MODULE
    ) -> None:
        self._argv = ("-m", module, str(directory))
        self._timeout_s = timeout_s
        self._child: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        """By the grammar's hash: why it cannot be used, or ""."""

    async def check(self, constraint: Constraint) -> None:
        """Return if the grammar can be used.

        Raises:
            ApiError: 400, it cannot, or takes too long to compile; 503, too many wait to be tried.
        """
        key = digest(Purpose.GRAMMAR, constraint.grammar, size=16)
        if key not in self._verdicts:
            await self._try(key, constraint.grammar)
        self._verdicts.move_to_end(key)
        if reason := self._verdicts[key]:
            raise bad_request(f"{constraint.field}: {reason}", constraint.field, "invalid_grammar")

    async def close(self) -> None:
        """Kill the process."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop(grace_s=0.0)

    async def _try(self, key: bytes, grammar: str) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise unavailable("grammars_busy", "too many grammars wait to be compiled")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise unavailable("grammars_busy", "grammars of others take too long to compile") from None
        finally:
            self._num_waiting -= 1
        try:
            if key not in self._verdicts:
                self._verdicts[key] = await self._compile(grammar)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        finally:
            self._turn.release()

    async def _compile(self, grammar: str) -> str:
        """Return why a grammar cannot be used, or ""."""
        answered = False
        try:
            child = await self._serving()
            if isinstance(child, str):
                return child
            async with asyncio.timeout(self._timeout_s):
                reason = msgspec.json.decode(await child.query(msgspec.json.encode(grammar)), type=str)
            answered = True
            return reason
        except (TimeoutError, EOFError):
            return "it takes too long to compile"
        finally:
            if not answered:  # also where its client has gone: the next one's answer would be this one's
                await self.close()

    async def _serving(self) -> ChildProcess | str:
        """Return the process, started if need be; or why nothing can be compiled at all."""
        if self._child is not None:
            return self._child
        self._child = await ChildProcess.start_serving(self._argv, "grammars", _ANSWER_BYTES)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                reason = msgspec.json.decode(await self._child.query(b""), type=str)
        except (TimeoutError, EOFError) as error:
            log.error("the process that compiles grammars does not start")
            raise ApiError(500, "grammars_failed", "grammars cannot be compiled here") from error
        return reason or self._child
