# SPDX-License-Identifier: Apache-2.0
"""The masks that requests want: whose turn it is, and what each request may cost.

Requests share the processor by start-time fair queueing (Goyal et al., SIGCOMM 1996): the next mask is that
of the request which has had the least, so cheap grammars never wait for more than one mask of a costly one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.agent.grammar.compiler import BadGrammar, GrammarCompiler, Matcher, NoMask
from kvferry.agent.messages.masks import Mask, MaskWanted, NoMaskFor, RequestOver, ToMasks

MAX_REQUEST_CPU_S = 2.0
"""What a request's grammar may take to compile, and its masks before they count by number."""
MAX_MASK_CPU_S = 0.005
"""What each of its masks adds to that: ten times what schemas take with a vocabulary of 100,000 tokens."""
_TOO_COSTLY = "the masks of this grammar take too much processor time"


@dataclass(slots=True)
class _ChoiceState:
    """One choice's tokens, and its matcher, which can be made of them again."""

    ids: list[int] = field(default_factory=list)
    matcher: Matcher | None = None


@dataclass(slots=True)
class _Request:
    """One request's grammar, what it has cost, and the masks that it waits for."""

    grammar: str
    choices: dict[int, _ChoiceState] = field(default_factory=dict)
    wanted: deque[MaskWanted] = field(default_factory=deque)
    begins_at: float = 0.0
    """Its turn, in the queue's virtual time."""
    cpu_s: float = 0.0
    num_masks: int = 0

    @property
    def is_too_costly(self) -> bool:
        return self.cpu_s > MAX_REQUEST_CPU_S + MAX_MASK_CPU_S * self.num_masks


class MaskQueue:
    """Computes masks, one at a time."""

    def __init__(self, compiler: GrammarCompiler, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._compiler = compiler
        self._cpu_s = cpu_s
        self._requests: dict[int, _Request] = {}
        self._virtual_s = 0.0

    def handle(self, message: ToMasks) -> None:
        """Queue a mask, or forget a request."""
        if isinstance(message, RequestOver):
            self._requests.pop(message.key, None)
            return
        request = self._requests.setdefault(message.key, _Request(message.grammar))
        if not request.wanted:
            request.begins_at = max(request.begins_at, self._virtual_s)
        request.wanted.append(message)

    def next(self) -> MaskWanted | None:
        """Take the mask whose turn it is; None if none is wanted."""
        waiting = [request for request in self._requests.values() if request.wanted]
        if not waiting:
            return None
        request = min(waiting, key=lambda each: each.begins_at)
        self._virtual_s = request.begins_at
        return request.wanted.popleft()

    def compute(self, wanted: MaskWanted) -> Mask | NoMaskFor:
        """Compute a mask that was taken, unless its request has cost too much."""
        request = self._requests[wanted.key]
        began = self._cpu_s()
        answer = self._mask_or_failure(request, wanted)
        spent = self._cpu_s() - began
        request.cpu_s += spent
        request.begins_at += spent
        request.num_masks += 1
        if isinstance(answer, Mask) and request.is_too_costly:
            answer = NoMaskFor(ticket=wanted.ticket, failure="grammar_too_costly", message=_TOO_COSTLY)
        if isinstance(answer, NoMaskFor):
            request.wanted.clear()
        return answer

    def drop_compiled(self) -> None:
        """Free all that was compiled; it is compiled again when it is next used."""
        self._compiler.clear()
        for request in self._requests.values():
            for choice in request.choices.values():
                choice.matcher = None

    def _mask_or_failure(self, request: _Request, wanted: MaskWanted) -> Mask | NoMaskFor:
        try:
            return Mask(ticket=wanted.ticket, bits=self._mask(request, wanted))
        except BadGrammar as error:
            return NoMaskFor(ticket=wanted.ticket, failure="invalid_grammar", message=str(error))
        except NoMask as error:
            return NoMaskFor(ticket=wanted.ticket, failure=error.failure, message=str(error))

    def _mask(self, request: _Request, wanted: MaskWanted) -> bytes:
        choice = request.choices.setdefault(wanted.choice, _ChoiceState())
        choice.ids += wanted.ids
        if choice.matcher is None:
            matcher = self._begin(request, choice)
        else:
            matcher = choice.matcher
            matcher.add(wanted.ids)
        try:
            return matcher.mask()
        except NoMask:
            # It may be another one of the same grammar that met a limit, for all that share the lexer.
            self._compiler.discard(matcher)
        matcher = self._begin(request, choice)
        try:
            return matcher.mask()
        except NoMask:
            self._compiler.discard(matcher)
            raise

    def _begin(self, request: _Request, choice: _ChoiceState) -> Matcher:
        choice.matcher = self._compiler.matcher(request.grammar)
        choice.matcher.add(choice.ids)
        return choice.matcher
