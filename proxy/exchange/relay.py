# SPDX-License-Identifier: Apache-2.0
"""An agent's stream on its way to the client: what is done with each piece, as it comes, without an await.

What tokens cost the proxy is spent here. So the usual piece, one event behind its token line, has a short
way of its own; everything else takes the long one.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.proxy import sse
from kvferry.proxy.api.client_stream import ClientStream
from kvferry.proxy.dialects import native
from kvferry.proxy.errors import AgentLost
from kvferry.proxy.exchange.resume import MARK, Progress
from kvferry.proxy.exchange.streamed import FirstTokens
from kvferry.proxy.wire.messages import Incarnation, Register


class Relay:
    """Gives the client whole events of one leg, up to `[DONE]`, and notes the tokens in `progress`.

    `first_tokens`, if any, takes off what the stream begins with.
    `done` is called once, when `[DONE]` has been given; what comes after it is dropped.
    """

    def __init__(
        self,
        agent: Register,
        progress: Progress,
        first_tokens: FirstTokens | None,
        out: ClientStream,
        done: Callable[[], None],
    ) -> None:
        self._agent = agent
        self._progress = progress
        self._first_tokens = first_tokens
        self._out = out
        self._tell_done = done
        self._scanner = sse.Scanner()
        self.done = False
        """Whether the client has been given `[DONE]`."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the stream.

        Raises `AgentLost` when the agent says that it failed or begins with other tokens than it should, and
        `BadResponse` for an event without end.
        """
        if self._first_tokens is not None:
            piece = self._first_tokens.strip(piece)
            if self._first_tokens.is_over:
                self._first_tokens = None
        if (
            piece.startswith(MARK)
            and piece.endswith(sse.END_OF_EVENT)
            and piece.count(b"\n") == 3
            and self._scanner.between_events
        ):
            # One event behind its line. It is neither `[DONE]` nor an error: those come without a line.
            self._out.event(self._progress.cut(piece))
        elif not self._scanner.done:
            self._take(self._scanner.feed(piece))

    def _take(self, events: bytes) -> None:
        events = self._progress.take(events)
        failure = native.agent_failure(events)
        if failure is not None:
            events, said = failure
        if events:
            self._out.write(events)
        if failure is not None:
            raise AgentLost(f"{self._agent.address} failed: {said}", Incarnation(self._agent.incarnation))
        if self._scanner.done:
            self.done = True
            self._tell_done()
