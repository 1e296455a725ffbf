# SPDX-License-Identifier: Apache-2.0
"""Events and whole responses of other engines' servers, rewritten for the client.

A client's request may be several sub-requests (`proxy.exchange.sub_requests`), each a response of its own.
What must differ, and why (per engine: `docs/dialects/README.md`):

| member | why |
|---|---|
| `id` | a response has one; a leg's names its transfer, with MoRIIO both servers' control addresses |
| `created` | a response has one; sub-requests begin in different seconds, SGLang's chat stamps every event |
| `choices[].index` | every sub-request's is 0; nothing changes where there is but one |
| `usage` | of the whole response: summed, and last; a running count of a share would be wrong |
| `finish_reason` | clients know OpenAI's only (`Dialect.client_reason`) |
| `kv_transfer_params` | where KV lies is no business of clients |

Everything else (`object`, `model`, texts, logprobs, what an engine adds) passes as it came, down to the byte.
What must be read is that the event is valid, whether it is an error, which choices end and how, and usage
that comes without choices. An event that differs from an earlier one in its text alone needs none of that
read again (`EventTemplates`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import Dialect, Prefilled, SubRequest
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import (
    NOT_JSON,
    AgentBusy,
    AgentError,
    AgentLost,
    AgentRejected,
    BadResponse,
    agent_error,
)
from kvferry.proxy.exchange.sub_requests import SubResponse
from kvferry.proxy.wire.registration import Incarnation, Register

MAX_TEMPLATES = 256
"""Most templates of one stream, which has one per choice and kind of text at a time. Beyond it they are
learned anew."""

_TEXT_MEMBER = re.compile(
    rb'"(?:text|content|reasoning_content|reasoning|arguments)": ?("(?:[^"\\]|\\.)*")', re.DOTALL
)
_ID_MEMBER = re.compile(rb'"token_ids": ?\[(\d+)\]')
_NULL = msgspec.Raw(b"null")
# Made once: with each call msgspec would look at the type anew, which takes longer than to decode.
_STRING = msgspec.json.Decoder(str)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_INDEX = msgspec.json.Decoder(int)
_REASON = msgspec.json.Decoder(str | None)
_USAGE = msgspec.json.Decoder(dict[str, Any] | None)


class RewrittenResponse(SubResponse):
    """The response of another engine's server, made the client's: id, indices, finish reasons, usage.

    `prompt_tokens_details`, once known, overrules what the server says of cached tokens.

    Args:
        sent: What the client has of a stream that this server goes on with, its prompt being longer by that;
            None for a response that is this server's from its beginning.
        writer: The client's, for a stream.
    """

    def __init__(
        self,
        sub: SubRequest,
        server: Register,
        dialect: Dialect,
        sent: SentTokens | None = None,
        writer: sse.EventWriter | None = None,
    ) -> None:
        super().__init__(sub)
        self.prompt_tokens_details: bytes | None = None
        self._server = server
        self._dialect = dialect
        self._writer = writer
        self._ended: set[int] = set()
        """The server's indices of choices that have ended."""
        self._sent = sent
        self._num_before = 0 if sent is None else sent.count
        self._templates = EventTemplates(sent)
        self.rewrite_one = self._templates.fill
        """`rewrite` for what may be one event with nothing but text: the quick path; None if it is not."""
        self._own = {
            "id": msgspec.Raw(msgspec.json.encode(sub.ids.answer_id)),
            "created": msgspec.Raw(msgspec.json.encode(sub.ids.created)),
        }
        if sent is not None and sub.request.chat:
            self._own["object"] = msgspec.Raw(b'"chat.completion.chunk"')

    @property
    def complete(self) -> bool:
        return len(self._ended) == len(self.sub.choices)

    @property
    def num_held(self) -> int:
        """Bytes that are kept of a stream."""
        return 0 if self._sent is None else self._sent.num_held

    def _client_usage(self, reported: dict[str, Any]) -> dict[str, Any]:
        counts = reported
        if self._num_before:
            counts = counts | {
                "prompt_tokens": counts.get("prompt_tokens", 0) - self._num_before,
                "completion_tokens": counts.get("completion_tokens", 0) + self._num_before,
            }
        if self.prompt_tokens_details is not None and "prompt_tokens_details" in counts:
            counts = counts | {"prompt_tokens_details": msgspec.json.decode(self.prompt_tokens_details)}
        return counts

    def reader(self, on_done: Callable[[], None]) -> EventRewriter:
        assert self._writer is not None
        return EventRewriter(self, self._writer, on_done)

    def read_whole(self, raw: bytes) -> None:
        self.size = len(raw)
        response = self._typed(raw)
        self.choices = self._choices(response.pop("choices", _NULL))
        if not self.complete:
            raise BadResponse(f"{self._server.address} answered without ending every choice")
        self._note_usage(response.pop("usage", _NULL))
        response.pop("kv_transfer_params", None)
        self.envelope = response | self._own

    def read_prefilled(self, prefilled: Prefilled) -> bytes:
        assert prefilled.whole is not None
        if self.sub.request.stream:
            return self.rewrite(as_events(prefilled.whole, self.sub))
        self.read_whole(prefilled.whole)
        return b""

    def show(self, events: bytes) -> None:
        assert self._writer is not None
        self._writer.write(events)

    def show_opening(self, events: bytes) -> None:
        assert self._sent is not None
        self.show(self.rewrite(events))
        self.has_answered = False
        if not self.complete:
            self._num_before = self._sent.count

    def end_without_server(self, prefilled: Prefilled | None) -> None:
        """Take for its usage what the server would have reported."""
        assert self._sent is not None and prefilled is not None and prefilled.opening is not None
        if self.sub.request.include_usage:
            usage, sampled = prefilled.opening.usage, self._sent.count_sampled
            total = usage["prompt_tokens"] + sampled
            self._usage = usage | {"completion_tokens": sampled, "total_tokens": total}
            self._num_before = 0

    def rewrite(self, events: bytes) -> bytes:
        """Rewrite whole events of a stream for the client; maybe nothing is left of them.

        Raises `AgentLost`, `AgentRejected` or `BadResponse`.
        """
        return b"".join(map(self.rewrite_event, sse.split(events)))

    def rewrite_event(self, event: bytes) -> bytes:
        """`rewrite` for one event."""
        rewritten = self._templates.fill(event)
        return self._rebuild(event) if rewritten is None else rewritten

    def _rebuild(self, event: bytes) -> bytes:
        """The careful path: parse one event, and build the client's anew; empty if that gets none."""
        data = sse.data(event)
        if data is None or data == b"[DONE]":
            return b""
        num_ended = len(self._ended)
        chunk = self._chunk(data)
        if len(self._ended) > num_ended:
            self._templates.clear()  # the choice must not go on
        if chunk is None:
            return b""
        rebuilt = sse.event(chunk)
        if len(self._ended) == num_ended:
            self._templates.learn(event, rebuilt)
        return rebuilt

    def _chunk(self, data: bytes) -> dict[str, msgspec.Raw] | None:
        """One chunk for the client; None for one that has only usage, which is sent at the end, once."""
        chunk = self._typed(data)
        chunk.pop("kv_transfer_params", None)
        chunk |= self._own
        choices = self._choices(chunk.get("choices", _NULL))
        if self._sent is not None:
            choices = self._continued(self._sent, choices)
            chunk.pop("prompt_token_ids", None)
        chunk["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        if not choices:
            self._note_usage(chunk.pop("usage", _NULL))
            self.envelope = chunk
            return None
        if "usage" in chunk and len(self.sub.choices) < self.sub.request.sequences:
            chunk["usage"] = _NULL  # a running count of this sub-request alone would be wrong
        if self._sent is not None and self.complete:
            self.envelope = chunk | {"choices": msgspec.Raw(b"[]")}
        return chunk

    def _continued(
        self, sent: SentTokens, choices: list[dict[str, msgspec.Raw]]
    ) -> list[dict[str, msgspec.Raw]]:
        """The choices as the client's; note the ids behind them."""
        shown = []
        try:
            for choice in choices:
                read = self._dialect.read_continued(self.sub.request, choice)
                if read.ids:
                    sent.add(read.ids, has_text=read.has_text)
                shown.append(read.choice)
        except NOT_JSON as error:
            raise BadResponse(f"{self._server.address} answered token ids that cannot be read") from error
        if self.complete:
            sent.end()
        return shown

    def _typed(self, raw: bytes) -> dict[str, msgspec.Raw]:
        try:
            str(raw, "utf-8")  # strings are passed on undecoded: nothing else would notice
            response = _MEMBERS.decode(raw)
        except NOT_JSON as error:
            raise BadResponse.of_json(error, f"the answer of {self._server.address}") from error
        if "error" in response and bytes(response["error"]) != b"null":
            self._fail(agent_error(raw))
        self.has_answered = True
        return response

    def _fail(self, error: AgentError | None) -> None:
        """Raise for an error under HTTP 200. An error of the request itself would be any server's."""
        if error is None:
            raise BadResponse(f"{self._server.address} answered an error that cannot be read")
        if isinstance(error.code, int) and 400 <= error.code < 500:
            raise AgentRejected(error.code, error)
        kind = AgentBusy if error.is_busy else AgentLost
        raise kind(f"{self._server.address} failed: {error.message}", self._lost)

    def _choices(self, raw: msgspec.Raw) -> list[dict[str, msgspec.Raw]]:
        """The choices with the client's indices and finish reasons; note which have ended."""
        shown = []
        try:
            for choice in _CHOICES.decode(raw) or []:
                index = _INDEX.decode(choice.get("index", _NULL))
                if not 0 <= index < len(self.sub.choices):
                    raise IndexError(index)
                choice["index"] = msgspec.Raw(str(self.sub.choices[index]).encode())
                reason = _REASON.decode(choice.get("finish_reason", _NULL))
                if index in self._ended:
                    self._check_empty(choice)
                    continue
                if reason is not None:
                    choice["finish_reason"] = self._client_reason(reason)
                    self._ended.add(index)
                shown.append(choice)
        except (*NOT_JSON, IndexError) as error:
            raise BadResponse(f"{self._server.address} answered choices that cannot be read") from error
        return shown

    def _client_reason(self, reason: str) -> msgspec.Raw:
        shown = self._dialect.client_reason(reason)
        if shown is None:
            raise AgentLost(f"{self._server.address} ended a choice with {reason!r}", self._lost)
        return msgspec.Raw(msgspec.json.encode(shown))

    def _check_empty(self, choice: dict[str, msgspec.Raw]) -> None:
        """Raise `BadResponse` if a choice that has ended goes on. ATOM ends one twice, then without text."""
        if bytes(choice.get("text", b'""')) != b'""' or bytes(choice.get("delta", b"{}")) != b"{}":
            raise BadResponse(f"{self._server.address} went on with a choice that had ended")

    def _note_usage(self, raw: msgspec.Raw) -> None:
        try:
            usage = _USAGE.decode(raw)
        except NOT_JSON as error:
            raise BadResponse(f"{self._server.address} answered usage that cannot be read") from error
        self._usage = usage or self._usage

    @property
    def _lost(self) -> Incarnation:
        return self._server.incarnation


class EventRewriter:
    """Rewrites the events of one server's stream for the client (`EventReader`)."""

    __slots__ = (
        "_held", "_is_quick", "_on_done", "_response", "_rewrite_one", "_scanner",
        "_write", "_write_event", "done",
    )  # fmt: skip

    def __init__(
        self, response: RewrittenResponse, writer: sse.EventWriter, on_done: Callable[[], None]
    ) -> None:
        self._response = response
        self._rewrite_one = response.rewrite_one
        self._write = writer.write
        self._write_event = writer.write_event
        self._on_done = on_done
        self._scanner = sse.Scanner()
        self._held: bytes | None = None
        """What is held back from the client; None when nothing is."""
        self._is_quick = True
        """Whether a piece may take the short way: nothing is held back, nor was the last event cut off."""
        self.done = False

    async def read_first(self, read_some: Callable[[], Awaitable[bytes]]) -> bool:
        """Read until there is anything for the client, and hold it back. Returns False if nothing comes."""
        self._held = b""
        self._is_quick = False
        while not self._held and not self.done:
            piece = await read_some()
            if not piece:
                return False
            self.feed(piece)
        return True

    def release(self) -> None:
        """Hold nothing back any more."""
        held, self._held = self._held, None
        self._is_quick = self._scanner.between_events
        if held:
            self._write(held)

    def feed(self, piece: bytes) -> None:
        """See `EventReader`. Raises as `SubResponse.rewrite` does."""
        if self._is_quick:
            event = self._rewrite_one(piece)
            if event is not None:
                self._write_event(event)
                return
        if not self.done:
            self._rewrite(self._scanner.feed(piece))
            self._is_quick = self._held is None and self._scanner.between_events

    def num_held(self) -> int:
        """See `EventReader`."""
        return self._scanner.num_held + self._response.num_held

    def _rewrite(self, whole: bytes) -> None:
        shown: list[bytes] = []
        try:
            for event in sse.split(whole):
                shown.append(self._response.rewrite_event(event))
        finally:  # those before one that failed are the client's
            events = b"".join(shown)
            if self._held is not None:
                self._held += events
            elif events:
                self._write(events)
        if self._scanner.done:
            self.done = True
            self._on_done()


class _Template(NamedTuple):
    """What is around the text: `head` and `tail` at the server, `own_head` and `own_tail` for the client.

    `between`: what is at the server between the text and an id, if the event has one; then `tail` is behind
    that. A head ends with the text's first quote, and what comes next begins with its last; the client's do
    without.
    """

    head: bytes
    tail: bytes
    own_head: bytes
    own_tail: bytes
    between: bytes


class EventTemplates:
    """The quick path of a stream: events that differ from an earlier one in a single text.

    Nearly every event of a stream is its predecessor with another text. So what became of one event, parsed
    and rebuilt with care, is kept as a template: the bytes around its one text, the server's and the
    client's. An event that has the very same bytes around a valid JSON string is the client's with that
    string put in: nothing else of it needs to be read. Every other event takes the careful path.

    Why that is right: the text is the whole value of a member whose name says that only the client reads it
    (`_TEXT_MEMBER`). Within a valid JSON string every quote has a backslash before it, so in valid JSON a
    quoted name, a colon and a quote are a member and the beginning of its value, nowhere else. Another string
    in its place leaves all that the careful path reads as it was.

    A stream that another server may have to continue carries ids (`SentTokens`), which are not the client's:
    there the bytes around its text and one id are the same, and the id is noted.

    Args:
        sent: Where the ids of events are noted; None where they have none.
    """

    # Here and in what else each event touches: of hundreds of streams little stays in a CPU's caches.
    __slots__ = ("_by_head", "_latest", "_mark", "_sent")

    def __init__(self, sent: SentTokens | None = None) -> None:
        self._sent = sent
        self._by_head: dict[bytes, _Template] = {}
        self._latest: _Template | None = None
        """The one that was learned or looked up last: it fits nearly every event of one choice."""
        self._mark = b""
        """The name, colon and quote that the text of the latest template begins with."""

    def learn(self, event: bytes, rebuilt: bytes) -> None:
        """Keep what became of an event, if it has one text.

        Only for an event from which the careful path learns nothing: no end of a choice, no usage of its own.
        """
        if not event.startswith(b"data: ") or event.count(b"\n") != 2:
            return  # a comment beside it could look like a member
        theirs, ours = list(_TEXT_MEMBER.finditer(event)), list(_TEXT_MEMBER.finditer(rebuilt))
        if len(theirs) != 1 or len(ours) != 1 or theirs[0][1] != ours[0][1]:
            return
        if len(self._by_head) >= MAX_TEMPLATES:
            self._by_head.clear()
        (start, end), (own_start, own_end) = theirs[0].span(1), ours[0].span(1)
        tail, between = event[end - 1 :], b""
        if self._sent is not None:
            ids = list(_ID_MEMBER.finditer(event))
            if len(ids) != 1 or ids[0].start() < end:
                return
            between, tail = event[end - 1 : ids[0].start(1)], event[ids[0].end(1) :]
        head = event[: start + 1]
        self._mark = event[theirs[0].start() : start + 1]
        self._latest = self._by_head[head] = _Template(
            head=head, tail=tail, own_head=rebuilt[:own_start], own_tail=rebuilt[own_end:], between=between
        )

    def clear(self) -> None:
        """Forget all templates."""
        self._by_head.clear()
        self._latest = None

    def fill(self, event: bytes) -> bytes | None:
        """The client's event for a server's; None when no template fits it exactly."""
        template = self._latest
        if template is None or not event.startswith(template.head):
            template = self._by_head.get(event[: event.find(self._mark) + len(self._mark)])
            if template is None:
                return None
            self._latest = template
        head, tail, own_head, own_tail, between = template
        if not event.endswith(tail):
            return None
        start, end = len(head) - 1, len(event) - len(tail)
        token_id = b""
        if between:
            text_end = event.find(between, start + 1) + 1
            token_id = event[text_end - 1 + len(between) : end]
            if not text_end or not token_id.isdigit() or token_id.startswith(b"0"):
                return None  # id 0 itself is read with care
        else:
            text_end = end + 1
        text = event[start:text_end]
        try:
            _STRING.decode(text)
        except NOT_JSON:
            return None
        if self._sent is not None:
            self._sent.add(token_id, has_text=text != b'""')
        return own_head + text + own_tail


def as_events(raw: bytes, sub: SubRequest) -> bytes:
    """A whole response as the stream that it would have been. Raises `BadResponse`."""
    try:
        response = msgspec.json.decode(raw, type=dict[str, Any])
        choices = [dict(choice) for choice in response.pop("choices")]
    except (*NOT_JSON, LookupError, TypeError) as error:
        raise BadResponse("a prefill server's answer cannot be read") from error
    usage = response.pop("usage", None)
    if sub.request.chat:
        response["object"] = "chat.completion.chunk"
        choices = [{"delta": choice.pop("message", {}), **choice} for choice in choices]
    events = sse.event({**response, "choices": choices})
    if sub.request.include_usage:
        events += sse.event({**response, "choices": [], "usage": usage})
    return events + sse.DONE
