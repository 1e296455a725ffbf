# SPDX-License-Identifier: Apache-2.0
"""Server-sent events as bytes, split at event boundaries without parsing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.proxy.errors import NOT_JSON, BadResponse

CONTENT_TYPE = "text/event-stream"
END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error"'
TIMING = b'"kvferry_timing"'
MAX_EVENT_BYTES = 8 * 1024 * 1024


class Scanner:
    """Splits a byte stream at event boundaries, so that only whole events are passed on.

    Input that ends with an event, which is the usual case, is passed on uncopied.
    """

    def __init__(self) -> None:
        self._tail = b""
        self.done = False
        """Whether `[DONE]` has been passed on."""

    @property
    def between_events(self) -> bool:
        """Whether the next byte starts an event."""
        return not self._tail and not self.done

    def feed(self, chunk: bytes) -> bytes:
        """Return the events completed by `chunk` (perhaps none), up to and including `[DONE]`.

        Raises `BadResponse` when an event exceeds `MAX_EVENT_BYTES`.
        """
        data = self._tail + chunk if self._tail else chunk
        if data.endswith(END_OF_EVENT):
            self._tail = b""
        else:
            cut = data.rfind(END_OF_EVENT)
            cut = cut + len(END_OF_EVENT) if cut >= 0 else 0
            data, self._tail = data[:cut], data[cut:]
            if len(self._tail) > MAX_EVENT_BYTES:
                raise BadResponse(f"an agent's event exceeds {MAX_EVENT_BYTES} bytes")
        # JSON cannot contain a raw line break, so no text of an answer can look like this.
        end = data.find(DONE)
        if end < 0:
            return data
        self.done = True
        return data[: end + len(DONE)]


def event(payload: Any) -> bytes:
    """Encode one event from a JSON value, or from bytes that are JSON."""
    data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return b"data: " + data + END_OF_EVENT


def count(events: bytes) -> int:
    """The number of events in whole events."""
    return events.count(END_OF_EVENT)


def has_error(events: bytes) -> bool:
    """Whether any event is an error. A JSON string cannot contain these quotes unescaped."""
    return ERROR_EVENT in events


def has_text(events: bytes) -> bool:
    """Whether any event carries text. Parses JSON, so it is for a stream's first events only."""
    for data in events.split(END_OF_EVENT):
        if data.startswith(b"data: {"):
            try:
                chunk = msgspec.json.decode(data[len(b"data: ") :], type=_Chunk)
            except NOT_JSON:
                continue
            if any(choice.text or choice.delta.content for choice in chunk.choices):
                return True
    return False


def with_leg_times(events: bytes, seconds: Mapping[str, float]) -> bytes:
    """Add `legs_s`, the time of each leg, to the event that carries the agent's `kvferry_timing`, if any."""
    if TIMING not in events:
        return events
    return b"".join(
        _with_leg_times(data, seconds) if TIMING in data else data + END_OF_EVENT
        for data in events.removesuffix(END_OF_EVENT).split(END_OF_EVENT)
    )


def _with_leg_times(data: bytes, seconds: Mapping[str, float]) -> bytes:
    try:
        body = msgspec.json.decode(data.removeprefix(b"data: "), type=dict[str, Any])
    except NOT_JSON:
        return data + END_OF_EVENT
    timing = body.get("kvferry_timing")
    if isinstance(timing, dict):
        timing["legs_s"] = {name: round(spent, 6) for name, spent in seconds.items()}
    return event(body)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
