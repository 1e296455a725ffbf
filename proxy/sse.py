# SPDX-License-Identifier: Apache-2.0
"""Server-sent events as bytes, split at event boundaries without parsing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from kvferry.common.exceptions import NOT_JSON
from kvferry.proxy.errors import BadResponse

CONTENT_TYPE = "text/event-stream"
END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error"'
TIMING = b'"kvferry_timing"'
MAX_EVENT_BYTES = 8 * 1024 * 1024
_NO_CHOICES = re.compile(rb'"choices": ?\[\]')


class EventReader(Protocol):
    """What is done with a stream on its way to the client."""

    @property
    def done(self) -> bool:
        """Whether `[DONE]` has been passed on."""

    def feed(self, piece: bytes) -> None:
        """Read the next bytes; those after `[DONE]` are dropped."""

    def num_held(self) -> int:
        """Bytes that are kept of the stream."""


class EventWriter(Protocol):
    """Where events for the client go."""

    def write(self, events: bytes) -> None:
        """Send one or more whole events."""

    @property
    def write_event(self) -> Callable[[bytes], None]:
        """`write` for the one event of a token."""


class Scanner:
    """Splits a byte stream at event boundaries, so that only whole events are passed on.

    Input that ends with an event, which is the usual case, is passed on uncopied.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self.done = False
        """Whether `[DONE]` has been passed on."""
        self.between_events = True
        """Whether the next byte starts an event."""

    @property
    def num_held(self) -> int:
        """Bytes of an event that has not ended yet."""
        return len(self._tail)

    def feed(self, chunk: bytes) -> bytes:
        """Return the events completed by `chunk` (perhaps none), up to and including `[DONE]`.

        Raises `BadResponse` when an event exceeds `MAX_EVENT_BYTES`.
        """
        data = chunk if chunk.endswith(END_OF_EVENT) and not self._tail else self._complete(chunk)
        # JSON cannot contain a raw line break, so no text of an answer can look like this.
        end = data.find(DONE)
        if end >= 0:
            self.done = True
            data = data[: end + len(DONE)]
        self.between_events = not self._tail and not self.done
        return data

    def _complete(self, chunk: bytes) -> bytes:
        """The whole events of what was held back and `chunk`; the rest is held back.

        What was held back is not searched again, so that an event without end costs no more than its bytes.
        """
        cut = chunk.rfind(END_OF_EVENT)
        if cut >= 0:
            cut += len(END_OF_EVENT)
        else:
            cut = 1 if chunk.startswith(b"\n") and self._tail.endswith(b"\n") else 0
        data = b""
        if cut:
            data = bytes(self._tail) + chunk[:cut]
            self._tail = bytearray()
        self._tail += chunk[cut:]
        if len(self._tail) > MAX_EVENT_BYTES:
            raise BadResponse(f"an agent's event exceeds {MAX_EVENT_BYTES} bytes")
        return data


def split(events: bytes) -> Iterator[bytes]:
    """Each of whole events, with its end."""
    start = 0
    while (end := events.find(END_OF_EVENT, start)) >= 0:
        end += len(END_OF_EVENT)
        yield events[start:end]
        start = end


def data(event: bytes) -> bytes | None:
    """The data of one event; None for a comment. Raises `BadResponse` for what no engine sends.

    That is an event without data, or with more lines than that one.
    """
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[len(b"data: ") : -len(END_OF_EVENT)]
    lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
    if not lines:
        return None
    if len(lines) > 1 or not lines[0].startswith(b"data:"):
        raise BadResponse("an engine's event cannot be read")
    return lines[0].removeprefix(b"data:").removeprefix(b" ")


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


def first_error(events: bytes) -> bytes:
    """The payload of the first event that is an error. For events of which one `has_error`."""
    return data(events[events.index(ERROR_EVENT) :].partition(END_OF_EVENT)[0]) or b""


def has_empty_choices(events: bytes) -> bool:
    """Whether any event is without choices, as the one with the usage is. No JSON string can look like it."""
    return _NO_CHOICES.search(events) is not None


def has_text(events: bytes) -> bool:
    """Whether any event carries text, reasoning or a call. Parses JSON: for a stream's first events only."""
    for data in events.split(END_OF_EVENT):
        if data.startswith(b"data: {"):
            try:
                chunk = msgspec.json.decode(data[len(b"data: ") :], type=_Chunk)
            except NOT_JSON:
                continue
            if any(choice.text or choice.delta.has_text for choice in chunk.choices):
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
    reasoning_content: str | None = None
    tool_calls: tuple[msgspec.Raw, ...] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
