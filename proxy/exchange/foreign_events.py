# SPDX-License-Identifier: Apache-2.0
"""Events and whole responses of other engines' servers, rewritten for the client. Pure.

What must differ is the id, the time of creation, the choice's index and the usage, for a client's request may
be several sub-requests (`proxy.exchange.sub_requests`); what is between proxy and server is cut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import SubRequest
from kvferry.proxy.errors import NOT_JSON, AgentLost, AgentRejected, BadResponse
from kvferry.proxy.wire.messages import Incarnation, Register

_NULL = msgspec.Raw(b"null")
_FAILED = ("error", "abort")
"""Finish reasons by which an engine says that the choice has failed, with HTTP 200 (smg #2382)."""


@dataclass(frozen=True, slots=True)
class SubUsage:
    """The usage of one sub-request."""

    sub: SubRequest
    counts: dict[str, Any]


def sum_usage(usages: Sequence[SubUsage]) -> dict[str, Any]:
    """The usage of the whole response: every prompt counted once, every choice's tokens added."""
    if len(usages) == 1:
        return usages[0].counts
    added = _add([usage.counts for usage in usages])
    firsts: dict[int, dict[str, Any]] = {}
    for usage in usages:
        firsts.setdefault(usage.sub.prompt, usage.counts)
    prompts = _add(list(firsts.values()))
    added |= {name: value for name, value in prompts.items() if name.startswith("prompt_")}
    added["total_tokens"] = added.get("prompt_tokens", 0) + added.get("completion_tokens", 0)
    return added


def _add(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up dictionaries of counts, member by member; what is not a count is the first one's."""
    added: dict[str, Any] = {}
    for name, first in counts[0].items():
        values = [each.get(name) for each in counts]
        if all(isinstance(value, int) for value in values):
            added[name] = sum(value for value in values if isinstance(value, int))
        elif all(isinstance(value, dict) for value in values):
            added[name] = _add([value for value in values if isinstance(value, dict)])
        else:
            added[name] = first
    return added


class _Error(msgspec.Struct, frozen=True):
    message: str = "no reason given"
    code: int | str | None = None


class SubResponse:
    """The response of a sub-request's last server, made the client's: its id, its indices, its usage.

    Everything else passes as it came, down to the byte, but for what is between proxy and server.
    `prompt_tokens_details`, once known, overrules what the server says of cached tokens.
    """

    def __init__(self, sub: SubRequest, server: Register) -> None:
        self.sub = sub
        self.prompt_tokens_details: bytes | None = None
        self.choices: list[dict[str, msgspec.Raw]] = []
        """Of a response that is not streamed."""
        self.envelope: dict[str, msgspec.Raw] = {}
        """The members around the choices, or around a stream's usage."""
        self._server = server
        self._finished = 0
        self._usage: dict[str, Any] | None = None
        self._own = {
            "id": msgspec.Raw(msgspec.json.encode(sub.ids.answer_id)),
            "created": msgspec.Raw(msgspec.json.encode(sub.ids.created)),
        }

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return self._finished == len(self.sub.choices)

    @property
    def usage(self) -> SubUsage | None:
        """None when the server reported none."""
        if self._usage is None:
            return None
        counts = self._usage
        if self.prompt_tokens_details is not None and "prompt_tokens_details" in counts:
            counts = counts | {"prompt_tokens_details": msgspec.json.decode(self.prompt_tokens_details)}
        return SubUsage(self.sub, counts)

    def read_whole(self, raw: bytes) -> None:
        """Read a response that is not streamed. Raises `AgentLost`, `AgentRejected` or `BadResponse`."""
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
        shown = []
        for event in events.split(sse.END_OF_EVENT):
            if event.startswith(b"data: {"):
                chunk = self._chunk(event.removeprefix(b"data: "))
                if chunk is not None:
                    shown.append(sse.event(chunk))
        return b"".join(shown)

    def _chunk(self, data: bytes) -> dict[str, msgspec.Raw] | None:
        """One chunk for the client; None for one that has only usage, which is sent at the end, once."""
        chunk = self._typed(data)
        chunk.pop("kv_transfer_params", None)
        chunk |= self._own
        choices = self._choices(chunk.get("choices", _NULL))
        if not choices:
            self._note_usage(chunk.pop("usage", _NULL))
            self.envelope = chunk
            return None
        chunk["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        if "usage" in chunk and len(self.sub.choices) < self.sub.request.sequences:
            chunk["usage"] = _NULL  # a running count of this sub-request alone would be wrong
        return chunk

    def _typed(self, raw: bytes) -> dict[str, msgspec.Raw]:
        try:
            str(raw, "utf-8")  # strings are passed on undecoded: nothing else would notice
            response = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            if "error" in response and bytes(response["error"]) != b"null":
                self._fail(msgspec.json.decode(response["error"], type=_Error), response["error"])
        except NOT_JSON as error:
            raise BadResponse(f"{self._server.address} answered what cannot be read: {error}") from error
        return response

    def _fail(self, error: _Error, raw: msgspec.Raw) -> None:
        """Raise for an error under HTTP 200. An error of the request itself would be any server's."""
        if isinstance(error.code, int) and 400 <= error.code < 500:
            raise AgentRejected(error.code, "application/json", b'{"error":' + bytes(raw) + b"}", None)
        raise AgentLost(f"{self._server.address} failed: {error.message}", self._lost)

    def _choices(self, raw: msgspec.Raw) -> list[dict[str, msgspec.Raw]]:
        """The choices with the client's indices, and whether they have ended."""
        try:
            choices = msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]] | None) or []
            for choice in choices:
                index = msgspec.json.decode(choice.get("index", _NULL), type=int)
                choice["index"] = msgspec.Raw(str(self.sub.choices[index]).encode())
                reason = msgspec.json.decode(choice.get("finish_reason", _NULL), type=str | None)
                if reason in _FAILED:
                    raise AgentLost(f"{self._server.address} ended a choice with {reason!r}", self._lost)
                self._finished += reason is not None
        except (*NOT_JSON, IndexError) as error:
            raise BadResponse(f"{self._server.address} answered choices that cannot be read") from error
        return choices

    def _note_usage(self, raw: msgspec.Raw) -> None:
        try:
            usage = msgspec.json.decode(raw, type=dict[str, Any] | None)
        except NOT_JSON as error:
            raise BadResponse(f"{self._server.address} answered usage that cannot be read") from error
        self._usage = usage or self._usage

    @property
    def _lost(self) -> Incarnation:
        return Incarnation(self._server.incarnation)


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
        choices = [{**choice, "delta": choice.pop("message", {})} for choice in choices]
    events = sse.event({**response, "choices": choices})
    if sub.request.include_usage:
        events += sse.event({**response, "choices": [], "usage": usage})
    return events + sse.DONE
