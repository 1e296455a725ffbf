# SPDX-License-Identifier: Apache-2.0
"""A decode leg that is sent together with its prefill leg, so that KV moves while the rest is computed.

Only its begin is early (design §5): the client still gets token 1 from the prefill leg's answer, and what the
decode leg says is looked at after that. Until then it is only listened to for failure, which ends both:

- The prefill leg fails: the decode leg is given up with the attempt, and its agent stops.
- The decode leg fails: the prefill leg is given up, unless it ends by itself within a moment. What one agent
  does may make the other fail (a prefill that ends the answer leaves nothing to pull; a pull that breaks
  off drops the prompt), and of two such failures the first cause is the one to act on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from kvferry.proxy.dialects.native import NativePrefill
from kvferry.proxy.errors import AgentLost, AgentRejected, error_object
from kvferry.proxy.http.pool import UpstreamResponse
from kvferry.proxy.wire.messages import Incarnation

LAST_WORD_S = 1.0
"""How long the failure of one leg waits for the other's end, which may be its cause."""
DROPPED = "transfer_dropped"
"""How an agent says that its prefill was ended because nobody wants the KV any more."""


class EarlyLeg:
    """One decode leg under way. An async context: entering sends it, leaving ends it whatever became of it.

    Args:
        leg: The leg to be sent.
        agent: To whom.
    """

    def __init__(self, leg: AbstractAsyncContextManager[UpstreamResponse], agent: Incarnation) -> None:
        self._leg = leg
        self._agent = agent
        self._entered = AsyncExitStack()
        self._opening: asyncio.Future[UpstreamResponse]

    async def __aenter__(self) -> EarlyLeg:
        self._opening = asyncio.ensure_future(self._entered.enter_async_context(self._leg))
        return self

    async def __aexit__(self, *_: object) -> None:
        await _end(self._opening)
        # An answer that nobody took is given up; that must not look like a failure of its agent.
        given_up = asyncio.CancelledError()
        await self._entered.__aexit__(type(given_up), given_up, None)

    async def beside(self, prefill: Coroutine[Any, Any, NativePrefill]) -> NativePrefill:
        """Run the prefill leg beside this one, and return its answer. Raises what either leg failed with."""
        running = asyncio.ensure_future(prefill)
        legs: set[asyncio.Future[Any]] = {running, self._opening}
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and self._opening.exception() is not None:
                await asyncio.wait({running}, timeout=LAST_WORD_S)
                if not running.done():
                    self._opening.result()
            return await running
        except AgentRejected as refused:
            if (error_object(refused.raw) or {}).get("code") == DROPPED:
                await self._raise_cause()
            raise
        finally:
            await _end(running)

    @asynccontextmanager
    async def answered(self) -> AsyncIterator[UpstreamResponse]:
        """The leg's answer, once its headers are here. What is raised within counts as the leg's failure."""
        answer = await self._opening
        async with self._entered.pop_all():
            yield answer

    async def _raise_cause(self) -> None:
        """The prefill was dropped, which is this leg's doing: say why it failed."""
        await asyncio.wait({self._opening}, timeout=LAST_WORD_S)
        if self._opening.done():
            self._opening.result()
        raise AgentLost("the decode agent gave up a prompt that was still being computed", self._agent)


class FirstTokens:
    """Takes off a stream the event by which it says which first tokens it goes on from.

    The client has those of the prefill leg. A decode agent that could not pull has drawn its own, and two
    machines may disagree where two tokens are as good as equal.

    Args:
        event: What the stream must begin with.
        agent: Whose stream it is.
    """

    def __init__(self, event: bytes, agent: Incarnation) -> None:
        self._event = event
        self._agent = agent
        self._head: bytes | None = b""

    @property
    def is_over(self) -> bool:
        """Whether it has been taken off, and what comes now is the client's."""
        return self._head is None

    def strip(self, chunk: bytes) -> bytes:
        """The chunk without the event. Raises `AgentLost` when the stream begins otherwise."""
        if self._head is None:
            return chunk
        self._head += chunk
        if len(self._head) < len(self._event) and self._event.startswith(self._head):
            return b""
        if not self._head.startswith(self._event):
            raise AgentLost("the decode agent goes on from other first tokens", self._agent)
        rest, self._head = self._head[len(self._event) :], None
        return rest


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and see it end. Its failure, if any, has been told already."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
