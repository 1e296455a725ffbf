# SPDX-License-Identifier: Apache-2.0
"""Our agents' responses, which are the client's as they come, but for the token lines of a stream.

The lines say what the client has (`SentTokens`). A request of several prompts has a response of each: then
what ends each of them is held back, and choices are counted from the first prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import Prefilled, SubRequest
from kvferry.proxy.dialects.sent_tokens import END_LINE, MARK, SentTokens
from kvferry.proxy.errors import NOT_JSON, AgentLost, AgentRejected, BadResponse, agent_error
from kvferry.proxy.exchange.sub_requests import SubResponse
from kvferry.proxy.wire.registration import Incarnation, Register

_NULL = msgspec.Raw(b"null")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_USAGE = msgspec.json.Decoder(dict[str, Any] | None)


class RelayedResponse(SubResponse):
    """An agent's own response, whose events pass to the client up to `[DONE]`; tokens are noted in `sent`.

    Args:
        writer: The client's.
        is_part: Whether the client's response has other parts: then what ends this one is held back.
    """

    def __init__(
        self, sub: SubRequest, agent: Register, sent: SentTokens, writer: sse.EventWriter, *, is_part: bool
    ) -> None:
        super().__init__(sub)
        self.done = False
        """See `EventReader`, as which this serves itself."""
        self._agent = agent
        self._sent = sent
        self._writer = writer
        self._is_part = is_part
        self._write_event = self._show_part_event if is_part else writer.write_event
        self.opening: OpeningEvent | None = None
        """Strips what the stream begins with, if that is not the client's."""
        self._has_error = False
        """Whether the client was sent an error event of the agent's."""
        self._scanner: sse.Scanner
        self._on_done: Callable[[], None]

    @property
    def complete(self) -> bool:
        return self._sent.complete or self.whole is not None or bool(self.choices)

    def reader(self, on_done: Callable[[], None]) -> sse.EventReader:
        self._scanner, self._on_done = sse.Scanner(), on_done
        return self

    def feed(self, piece: bytes) -> None:
        """See `EventReader`. Raises `AgentLost` when the agent reports a failure of its own, begins with
        other tokens than it should, or sends `[DONE]` before every choice has ended, and `BadResponse` for an
        event without end.
        """
        if self.opening is not None:
            piece = self.opening.strip(piece)
            if self.opening.is_over:
                self.opening = None
        if (
            piece.startswith(MARK)
            and piece.endswith(sse.END_OF_EVENT)
            and piece.count(b"\n") == 3
            and not piece.startswith(END_LINE)
            and self._scanner.between_events
        ):
            # One event of a token behind its line: `[DONE]` and errors come without one.
            self._write_event(self._sent.strip_one(piece))
        elif not self._scanner.done:
            self._pass_on(self._scanner.feed(piece))

    def num_held(self) -> int:
        return self._scanner.num_held + self._sent.num_held

    def read_whole(self, raw: bytes) -> None:
        """Read the response: of a part, its choices, counted from the part's first; else only its ends."""
        native.require_whole(raw, self.sub)
        self._keep(raw)

    def read_prefilled(self, prefilled: Prefilled) -> bytes:
        assert isinstance(prefilled, native.NativePrefilled) and prefilled.whole is not None
        if not self.sub.request.stream:
            self._keep(prefilled.whole)
            return b""
        news = self._sent.begin(())
        events = native.first_events(self.sub, prefilled, news) + native.closing_events(self.sub, prefilled)
        self._sent.end()
        self.done, self.has_done = True, not self._is_part
        return events

    def show(self, events: bytes) -> None:
        if self._is_part:
            self._show_part(events)
        else:
            self._writer.write(events)

    show_opening = show

    def end_without_server(self, prefilled: Prefilled | None) -> None:
        """Nothing is missing but `[DONE]`."""

    def _keep(self, raw: bytes) -> None:
        self.size = len(raw)
        if not self._is_part:
            self.whole = raw
            return
        try:
            self.envelope = _MEMBERS.decode(raw)
            self.choices = _CHOICES.decode(self.envelope.pop("choices", _NULL))
            self._usage = _USAGE.decode(self.envelope.pop("usage", _NULL))
        except NOT_JSON as error:
            raise BadResponse.of_json(error, "the agent's answer") from error
        for index, choice in zip(self.sub.choices, self.choices, strict=True):
            choice["index"] = msgspec.Raw(b"%d" % index)

    def _pass_on(self, events: bytes) -> None:
        events = self._sent.strip(events)
        failure = native.agent_failure(events)
        self._has_error |= sse.has_error(events)
        if failure is None and self._scanner.done and not (self._sent.complete or self._has_error):
            failure = events.removesuffix(sse.DONE), "[DONE] came before the end of every choice"
        if failure is not None:
            events, message = failure
        if events:
            self.show(events)
        if failure is not None:
            raise AgentLost(f"{self._agent.address} failed: {message}", self._agent.incarnation)
        if self._scanner.done:
            self.done, self.has_done = True, not self._is_part
            self._on_done()

    def _show_part_event(self, event: bytes) -> None:
        if sse.has_empty_choices(event):
            self._show_part(event)
        else:
            self._writer.write_event(event)

    def _show_part(self, events: bytes) -> None:
        """Raises `BadResponse`, and an agent's error, which ends all parts."""
        shown = []
        for event in sse.split(events):
            if event.startswith(sse.ERROR_EVENT):
                raise AgentRejected(400, agent_error(sse.data(event) or b""))
            last = None if event == sse.DONE else native.last_event(event)
            if last is not None:
                self._usage, self.envelope = last.usage, native.envelope(self.sub, last)
            elif event != sse.DONE:
                shown.append(event)
        if shown:
            self._writer.write(b"".join(shown))


class OpeningEvent:
    """Strips the event with which an early leg's stream says which first tokens it goes on from.

    The client has those of the prefill leg. A decode agent that could not pull has sampled its own, and two
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
        """Whether the event has been stripped, and what comes now is the client's."""
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
