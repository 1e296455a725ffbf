# SPDX-License-Identifier: Apache-2.0
"""Events that differ from an earlier one in a single text: the quick path of another engine's stream. Pure.

Nearly every event of a stream is its predecessor with another text. So what became of one event, parsed and
rebuilt with care (`proxy.exchange.foreign_events`), is kept as a template: the bytes around its one text, the
server's and the client's. An event that has the very same bytes around a valid JSON string is the client's
with that string put in: nothing else of it needs to be read. Every other event takes the careful path.

Why that is right: the text is the whole value of a member whose name says that only the client reads it
(`_TEXT_MEMBER`). Within a valid JSON string every quote has a backslash before it, so in valid JSON a quoted
name, a colon and a quote are a member and the beginning of its value, nowhere else. Another string in its
place leaves all that the careful path reads as it was.

A stream that another server may have to continue carries ids (`SentTokens`), which are not the client's:
there the bytes around its text and one id are the same, and the id is noted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from kvferry.proxy.errors import NOT_JSON
from kvferry.proxy.exchange.resume import SentTokens

MAX_TEMPLATES = 256
"""Of one stream, which has one per choice and kind of text at a time. Beyond it they are learned anew."""

_TEXT_MEMBER = re.compile(
    rb'"(?:text|content|reasoning_content|reasoning|arguments)": ?("(?:[^"\\]|\\.)*")', re.DOTALL
)
_ID_MEMBER = re.compile(rb'"token_ids": ?\[(\d+)\]')
_STRING = msgspec.json.Decoder(str)


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
    """The templates of one stream.

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
