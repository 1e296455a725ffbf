# SPDX-License-Identifier: Apache-2.0
"""The output items of one answer of `/v1/responses`, and the stream events that report them; pure.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from kvferry.proxy.api.translations import chat
from kvferry.proxy.errors import BadResponse

MAX_HELD_BYTES = 8 * 1024 * 1024
"""Of one answer, which the last events of a stream repeat."""
_ITEM_BYTES = 1024
"""What an item counts as, beside its text."""
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}

Event = tuple[str, dict[str, Any]]
"""A name and, beside the sequence number, the fields."""


class ResponseItems:
    """The items of an answer, and the events that report them; one item is open at a time."""

    def __init__(self, key: str) -> None:
        self.items: list[dict[str, Any]] = []
        """All that have begun; the open one's text is filled in when it ends."""
        self._key = key
        self._open: str | int | None = None
        """What the open item is: `message`, `reasoning`, or a function call by its index."""
        self._num_calls = 0
        self._pieces: list[str] = []
        self._logprobs: list[Raw] = []
        """Of the open message's text."""
        self._next_logprobs: list[Raw] = []
        """Of tokens whose text is yet to come."""
        self._held = 0

    def add(self, delta: chat.ChatContent, logprobs: chat.ChatLogprobs | None) -> Iterator[Event]:
        """Add a piece of the answer; logprobs that come with reasoning are left out.

        Raises `BadResponse` for calls that are mixed up, and for more than `MAX_HELD_BYTES`.
        """
        going_on, new = delta.calls(self._open)
        for call in going_on:
            yield from self._add_to_call(call)
        if delta.thoughts:
            yield from self._add_text("reasoning", delta.thoughts)
        elif logprobs is not None and logprobs.content:
            self._hold(sum(len(bytes(each)) for each in logprobs.content))
            self._next_logprobs += logprobs.content
        if delta.content:
            yield from self._add_text("message", delta.content)
        for call in new:
            yield from self._add_to_call(call)

    def end(self, status: str) -> Iterator[Event]:
        """End the last item. An answer of nothing has one message, which is empty."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self._close(status)

    def fill(self, status: str) -> str:
        """Fill in what the open item has so far, and return its text. A call is whole or not by itself."""
        text, item = "".join(self._pieces), self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            is_whole = chat.are_arguments(text) if text else status == "completed"
            item["status"] = "completed" if is_whole else "incomplete"
        else:
            item["content"] = [self._part(text)]
        return text

    @property
    def has_cut_call(self) -> bool:
        """Whether a call that has ended is not whole."""
        return any(item["type"] == "function_call" and item["status"] == "incomplete" for item in self.items)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin_text(kind)
        self._hold(len(text))
        self._pieces.append(text)
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"], self._next_logprobs = self._next_logprobs, []
            self._logprobs += fields["logprobs"]
        yield self._event(f"response.{_PARTS[kind]}.delta", **fields)

    def _add_to_call(self, call: chat.ChatToolCall) -> Iterator[Event]:
        if self._open != call.index:
            if call.index != self._num_calls or not call.name:
                raise BadResponse("an agent's function calls are mixed up, or have no name")
            yield from self._close("completed")
            self._num_calls += 1
            call_id = call.id or f"call_{self._key}_{len(self.items)}"
            made = {"call_id": call_id, "name": call.name, "arguments": ""}
            yield self._begin(call.index, "fc", {"type": "function_call", **made})
        if call.arguments:
            self._hold(len(call.arguments))
            self._pieces.append(call.arguments)
            yield self._event("response.function_call_arguments.delta", delta=call.arguments)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        message, reasoning = {"role": "assistant"}, {"summary": list[str]()}
        item = {"type": kind, "content": [], **(message if kind == "message" else reasoning)}
        yield self._begin(kind, "msg" if kind == "message" else "rs", item)
        yield self._event("response.content_part.added", content_index=0, part=self._part(""))

    def _begin(self, kind: str | int, prefix: str, item: dict[str, Any]) -> Event:
        self._hold(_ITEM_BYTES)
        self._open, self._pieces, self._logprobs = kind, [], []
        begun = {"id": f"{prefix}_{self._key}_{len(self.items)}", "status": "in_progress", **item}
        self.items.append(begun)
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(begun)}

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        text, item = self.fill(status), self.items[-1]
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=text)
        else:
            fields: dict[str, Any] = {"content_index": 0, "text": text}
            if self._open == "message":
                fields["logprobs"] = self._logprobs
            yield self._event(f"response.{_PARTS[item['type']]}.done", **fields)
            yield self._event("response.content_part.done", content_index=0, part=self._part(text))
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}
        self._open = None

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, name: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return name, place | fields

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > MAX_HELD_BYTES:
            raise BadResponse(f"an agent's answer exceeds {MAX_HELD_BYTES} bytes")
