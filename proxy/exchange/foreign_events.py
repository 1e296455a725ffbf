# SPDX-License-Identifier: Apache-2.0
"""Events and whole responses of other engines' servers, rewritten for the client. Pure.

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
read again: `EventTemplates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import Dialect, SubRequest
from kvferry.proxy.errors import NOT_JSON, AgentError, AgentLost, AgentRejected, BadResponse, agent_error
from kvferry.proxy.exchange.event_templates import EventTemplates
from kvferry.proxy.exchange.resume import SentTokens
from kvferry.proxy.exchange.sub_requests import add_counts
from kvferry.proxy.wire.registration import Incarnation, Register

_NULL = msgspec.Raw(b"null")
# Made once: with each call msgspec would look at the type anew, which takes longer than to decode.
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_INDEX = msgspec.json.Decoder(int)
_REASON = msgspec.json.Decoder(str | None)
_USAGE = msgspec.json.Decoder(dict[str, Any] | None)


class SubUsage(msgspec.Struct, frozen=True):
    """The usage of one sub-request."""

    sub: SubRequest
    counts: dict[str, Any]


def sum_usage(usages: Sequence[SubUsage]) -> dict[str, Any]:
    """The usage of the whole response: every prompt counted once, every choice's tokens added."""
    if len(usages) == 1:
        return usages[0].counts
    added = add_counts([usage.counts for usage in usages])
    firsts: dict[int, dict[str, Any]] = {}
    for usage in usages:
        firsts.setdefault(usage.sub.prompt, usage.counts)
    prompts = add_counts(list(firsts.values()))
    added |= {name: value for name, value in prompts.items() if name.startswith("prompt_")}
    added["total_tokens"] = added.get("prompt_tokens", 0) + added.get("completion_tokens", 0)
    return added


class SubResponse:
    """The response of a sub-request's last server, made the client's: id, indices, finish reasons, usage.

    Everything else passes as it came, down to the byte, but for what is between proxy and server.
    `prompt_tokens_details`, once known, overrules what the server says of cached tokens.

    Args:
        sent: What the client has of a stream that this server goes on with, its prompt being longer by that;
            None for a response that is this server's from its beginning.
    """

    def __init__(
        self, sub: SubRequest, server: Register, dialect: Dialect, sent: SentTokens | None = None
    ) -> None:
        self.sub = sub
        self.prompt_tokens_details: bytes | None = None
        self.choices: list[dict[str, msgspec.Raw]] = []
        """Of a response that is not streamed."""
        self.size = 0
        """Its bytes, likewise."""
        self.envelope: dict[str, msgspec.Raw] = {}
        """The members around the choices, or around a stream's usage."""
        self._server = server
        self._dialect = dialect
        self._ended: set[int] = set()
        """The server's indices of choices that have ended."""
        self.has_begun = False
        """Whether the server has answered anything but an error."""
        self._sent = sent
        self._num_before = 0 if sent is None else sent.count
        self._templates = EventTemplates(sent)
        self.rewrite_one = self._templates.fill
        """`rewrite` for what may be one event with nothing but text: the quick path; None if it is not."""
        self._usage: dict[str, Any] | None = None
        self._own = {
            "id": msgspec.Raw(msgspec.json.encode(sub.ids.answer_id)),
            "created": msgspec.Raw(msgspec.json.encode(sub.ids.created)),
        }
        if sent is not None and sub.request.chat:
            self._own["object"] = msgspec.Raw(b'"chat.completion.chunk"')

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._ended) == len(self.sub.choices)

    @property
    def num_held(self) -> int:
        """Bytes that are kept of a stream."""
        return 0 if self._sent is None else self._sent.num_held

    @property
    def usage(self) -> SubUsage | None:
        """None when the server reported none."""
        if self._usage is None:
            return None
        counts = self._usage
        if self._num_before:
            counts = counts | {
                "prompt_tokens": counts.get("prompt_tokens", 0) - self._num_before,
                "completion_tokens": counts.get("completion_tokens", 0) + self._num_before,
            }
        if self.prompt_tokens_details is not None and "prompt_tokens_details" in counts:
            counts = counts | {"prompt_tokens_details": msgspec.json.decode(self.prompt_tokens_details)}
        return SubUsage(self.sub, counts)

    def read_whole(self, raw: bytes) -> None:
        """Read a response that is not streamed. Raises `AgentLost`, `AgentRejected` or `BadResponse`."""
        self.size = len(raw)
        response = self._typed(raw)
        self.choices = self._choices(response.pop("choices", _NULL))
        if not self.complete:
            raise BadResponse(f"{self._server.address} answered without ending every choice")
        self._note_usage(response.pop("usage", _NULL))
        response.pop("kv_transfer_params", None)
        self.envelope = response | self._own

    def rewrite(self, events: bytes) -> bytes:
        """Rewrite whole events of a stream for the client; maybe nothing is left of them.

        Raises `AgentLost`, `AgentRejected` or `BadResponse`.
        """
        return b"".join(map(self.rewrite_event, sse.split(events)))

    def rewrite_event(self, event: bytes) -> bytes:
        """`rewrite` for one event."""
        rewritten = self._templates.fill(event)
        return self._rebuild(event) if rewritten is None else rewritten

    def assume_usage(self, usage: dict[str, Any]) -> None:
        """Take this for what a server that was lost after the end of every choice would have reported."""
        self._usage, self._num_before = usage, 0

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
        sent.has_ended = self.complete
        return shown

    def _typed(self, raw: bytes) -> dict[str, msgspec.Raw]:
        try:
            str(raw, "utf-8")  # strings are passed on undecoded: nothing else would notice
            response = _MEMBERS.decode(raw)
        except NOT_JSON as error:
            raise BadResponse(f"{self._server.address} answered what cannot be read: {error}") from error
        if "error" in response and bytes(response["error"]) != b"null":
            self._fail(agent_error(raw))
        self.has_begun = True
        return response

    def _fail(self, error: AgentError | None) -> None:
        """Raise for an error under HTTP 200. An error of the request itself would be any server's."""
        if error is None:
            raise BadResponse(f"{self._server.address} answered an error that cannot be read")
        if isinstance(error.code, int) and 400 <= error.code < 500:
            raise AgentRejected(error.code, error)
        raise AgentLost(f"{self._server.address} failed: {error.message}", self._lost)

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


def merge(responses: Sequence[SubResponse]) -> bytes:
    """The client's response, not streamed."""
    whole: dict[str, Any] = dict(responses[0].envelope)
    whole["choices"] = [choice for response in responses for choice in response.choices]
    whole["usage"] = _usage_of(responses)
    return msgspec.json.encode(whole)


def closing_events(responses: Sequence[SubResponse]) -> bytes:
    """The end of the client's stream: usage, if the servers sent any, and `[DONE]`."""
    usage = _usage_of(responses)
    if usage is None:
        return sse.DONE
    return sse.event({**responses[0].envelope, "usage": usage}) + sse.DONE


def _usage_of(responses: Sequence[SubResponse]) -> dict[str, Any] | None:
    usages = [usage for response in responses if (usage := response.usage) is not None]
    return sum_usage(usages) if usages else None


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
