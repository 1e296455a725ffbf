# SPDX-License-Identifier: Apache-2.0
"""The choices of one request as they grow: engine tokens in, deltas of text out. Pure state, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvferry.agent.api.kv_params import Resume
from kvferry.agent.api.message.message_parser import MessageDelta, MessageFormat, MessageParser
from kvferry.agent.api.text.detokenizer import Detokenizer
from kvferry.agent.api.text.logprobs import (
    RENDER_LOGPROBS,
    completion_logprobs,
    echoed_offsets,
    merge_logprobs,
    prompt_logprobs,
)
from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.errors import bad_request
from kvferry.agent.ids import AnswerId, AnswerKind
from kvferry.agent.messages.requests import (
    FailedPull,
    FinishReason,
    PrefixSource,
    PromptLogprob,
    RemoteKV,
    SamplingParams,
    Timing,
    Token,
    TokenLogprob,
)
from kvferry.proxy.wire.kv_params import FirstToken


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, validated and resolved. `produce`, `remote` and `prefix_source` are as in
    `messages.Submit`.

    `first_tokens` are those that a prefill leg has returned, one per choice; `remote_cached_tokens` is how
    much of the prompt that leg found in its prefix cache. `resume` is what a broken stream had shown of each
    choice, token 1 included. With `token_lines` every event of a stream carries its output ids, with
    `continuous_usage` its choice's token counts. With `include_stop` the text ends with what stopped it, with
    `show_special` special tokens are text. `echo` is what the text begins with, before any token. Of the
    prompt's tokens `prompt_logprobs` likeliest are reported. A stream's choices count from `first_choice`.
    With `names_by_id` log probabilities name tokens by their ids. `message` says how the answer's text is
    read as a message; without it, all of it is content.
    """

    kind: AnswerKind
    answer_id: AnswerId
    created: int
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_usage: bool = False
    return_token_ids: bool = False
    want_timing: bool = False
    produce: str | None = None
    remote: RemoteKV | None = None
    prefix_source: PrefixSource | None = None
    first_tokens: tuple[FirstToken, ...] = ()
    remote_cached_tokens: int = 0
    resume: tuple[Resume, ...] = ()
    token_lines: bool = False
    include_stop: bool = False
    show_special: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    first_choice: int = 0
    echo: str | None = None
    prompt_logprobs: int | None = None
    names_by_id: bool = False
    message: MessageFormat | None = None

    @property
    def streamed(self) -> bool:
        """Whether this is a decode leg whose first tokens come with the KV: the prefill leg shows them."""
        return self.remote is not None and self.remote.streamed

    @property
    def want_margins(self) -> bool:
        return self.return_token_ids and self.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Those of a chat's completion."""


@dataclass(slots=True)
class Delta:
    """What a choice gained: text that may be shown, and the tokens of it or of text still held back.

    `logprobs` is OpenAI's object of the request's kind. `first` marks the choice's first output token,
    `num_tokens` counts all up to and including these. `stop_reason` is the stop string or the id of the stop
    token that ended the choice. Where the text is read as a message, `message` is what
    that gained, and `called` whether it ends with calls that are whole.
    """

    index: int
    first: bool = False
    num_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    margins: list[float | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    message: MessageDelta | None = None
    called: bool = False

    def add(self, later: Delta) -> None:
        """Append the same choice's next delta."""
        self.text += later.text
        if later.message is not None:
            self.message = self.message or MessageDelta()
            self.message.add(later.message)
            self.called = later.called
        self.token_ids += later.token_ids
        self.margins += later.margins
        self.logprobs = merge_logprobs(self.logprobs, later.logprobs)
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.num_tokens = later.num_tokens


class GeneratedChoice:
    """One choice: its detokenizer, how many tokens it has, and how it ended."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._index = index
        self._detokenizer = Detokenizer(
            tokenizer,
            request.stop,
            sampling.min_tokens,
            include_stop=request.include_stop,
            show_special=request.show_special,
            shown=() if request.message is None else request.message.marks,
        )
        self._parser = (
            None if request.message is None else MessageParser(request.message, request.answer_id, index)
        )
        self._include_stop = request.include_stop
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._render = None
        if sampling.logprobs is not None:
            self._render = partial(RENDER_LOGPROBS[request.kind], tokenizer, by_id=request.names_by_id)
        self._echo = request.echo or ""
        self._echo_logprobs: dict[str, Any] | None = None
        self._begins: deque[int] = deque()
        """Where tokens begin in the text of which it is not known whether it is reasoning."""
        self.num_tokens = 0
        self.num_reasoning = 0
        self.finish_reason: FinishReason | None = None

    def begin_with(self, echo_logprobs: dict[str, Any]) -> None:
        """Show the log probabilities of the prompt before those of the first token."""
        self._echo_logprobs = echo_logprobs

    def restore(self, first: FirstToken) -> Delta:
        """Restore the state after the prefill leg's token; returns what its response showed."""
        delta = Delta(self._index, first=True, text=self._echo, logprobs=first.logprobs)
        if first.logprobs is not None:
            delta.margins.append(first.margin)
        if first.finish_reason is None:
            self._add_token(delta, first.id, None)
        else:
            # All its text was shown, and whether a stop string ended it is not in the ids alone.
            self._count(delta, first.id)
            delta.text = ""
            self._show(delta, first.text, 0, first.finish_reason, first.stop_reason)
        return delta

    def resume(self, sent: Resume) -> None:
        """Restore the state of a broken stream; after `restore`. Its tokens count, and are not shown again.

        Raises `ApiError` 400 when an unfinished choice ends with these tokens.
        """
        *before, last = sent.output_ids
        for token_id in before[1:]:
            if self.finish_reason is None:
                self._add_token(Delta(self._index), token_id, None)
        if before and self.finish_reason is None:
            self._add_token(Delta(self._index), last, sent.finish_reason)
        if self.finish_reason != sent.finish_reason or self.num_tokens != len(sent.output_ids):
            raise bad_request(f"choice {self._index} ends within its tokens", "resume")

    def push(self, tokens: Iterable[Token]) -> Delta:
        """Add new tokens, except those that the engine sent before it learned of the choice's end."""
        delta = Delta(self._index, first=self.num_tokens == 0)
        if delta.first:
            delta.text, delta.logprobs = self._echo, self._echo_logprobs
        sampled, offsets = [], []
        for token in tokens:
            if self.finish_reason is not None:
                break
            begin = self._add_token(delta, token.token_id, token.finish)
            if self._render is not None:
                assert token.logprob is not None, "the engine sent no logprobs for a request that asked"
                sampled.append((token.token_id, token.logprob))
                offsets.append(len(self._echo) + begin)
                delta.margins.append(token.logprob.margin)
        if self._render is not None and sampled:
            delta.logprobs = merge_logprobs(delta.logprobs, self._render(sampled, offsets))
        return delta

    def end_empty(self) -> Delta:
        """End a choice of which no token is wanted."""
        self.finish_reason = "length"
        return Delta(
            self._index,
            first=True,
            text=self._echo,
            logprobs=self._echo_logprobs,
            finish_reason=self.finish_reason,
        )

    def _add_token(self, delta: Delta, token_id: int, finish: FinishReason | None) -> int:
        """Add a token, with `finish` the last; returns where its text begins."""
        self._count(delta, token_id)
        text, begin = "", self._detokenizer.num_chars
        stop_reason: str | int | None = None
        if finish != "stop" or self._include_stop:  # the stop token is no part of the text
            text += self._detokenizer.push(token_id)
            begin = self._detokenizer.token_begin
        if finish is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.found is not None:
            finish, stop_reason = "stop", self._detokenizer.found
        elif finish == "stop" and token_id in self._stop_ids:
            stop_reason = token_id
        self._show(delta, text, begin, finish, stop_reason)
        return begin

    def _count(self, delta: Delta, token_id: int) -> None:
        self.num_tokens += 1
        delta.num_tokens = self.num_tokens
        delta.token_ids.append(token_id)

    def _show(
        self,
        delta: Delta,
        text: str,
        begin: int,
        finish: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        """Add text that may be shown, and read it as a message if it is one; with `finish` it is the last.

        `begin` is where that of its token begins.
        """
        delta.text += text
        if self._parser is not None:
            gained = self._parser.push(text)
            if self._parser.ended:
                finish, stop_reason = "stop", None
            if finish is not None:
                gained.add(self._parser.finish())
            delta.message = delta.message or MessageDelta()
            delta.message.add(gained)
            delta.called = finish is not None and self._parser.has_whole_calls
            self._count_reasoning(self._parser, begin)
        self.finish_reason = delta.finish_reason = finish
        delta.stop_reason = stop_reason

    def _count_reasoning(self, parser: MessageParser, begin: int) -> None:
        self._begins.append(begin)
        while self._begins and self._begins[0] < parser.num_read:
            self.num_reasoning += self._begins.popleft() in parser.reasoning


class Generation:
    """All choices of one request."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.choices = [GeneratedChoice(index, request, tokenizer) for index in range(request.sampling.n)]
        self.cached_tokens = request.remote_cached_tokens
        self.timing: Timing | None = None
        self.failed_pull: FailedPull | None = None
        self.prompt_logprobs: tuple[PromptLogprob, ...] | None = None
        """Of the prompt's second token and all after it; None where they are not known, or not wanted."""
        self._tokenizer = tokenizer

    def restore(self) -> list[Delta]:
        """Restore all choices. Returns what the prefill leg's response showed of each, if there was one.

        What a broken stream showed after that is restored too, but not returned: only streams resume.
        """
        shown = [
            choice.restore(first)
            for choice, first in zip(self.choices, self.request.first_tokens, strict=False)
        ]
        for choice, sent in zip(self.choices, self.request.resume, strict=False):
            choice.resume(sent)
        return shown

    def add_prompt_logprobs(self, logprobs: Sequence[PromptLogprob]) -> None:
        """Take the prompt's log probabilities, which come before the first tokens."""
        self.prompt_logprobs = tuple(logprobs)
        request, shown = self.request, self.request.sampling.logprobs
        if request.echo is None or shown is None:
            return
        known = [None, *(TokenLogprob(logprob=each.logprob, top=each.top[:shown]) for each in logprobs)]
        scored = list(zip(request.prompt_ids, known, strict=True))
        offsets = echoed_offsets(self._tokenizer, request.prompt_ids, request.echo)
        echoed = completion_logprobs(self._tokenizer, scored, offsets, by_id=request.names_by_id)
        for choice in self.choices:
            choice.begin_with(echoed)

    def end_empty(self) -> list[Delta]:
        """End all choices where no token is wanted. Returns a delta for each."""
        return [choice.end_empty() for choice in self.choices]

    def push(self, tokens: Sequence[Token]) -> list[Delta]:
        """Add one engine output's tokens. Returns one delta for each choice that gained any."""
        by_choice: dict[int, list[Token]] = {}
        for token in tokens:
            if self.choices[token.index].finish_reason is None:
                by_choice.setdefault(token.index, []).append(token)
        return [self.choices[index].push(mine) for index, mine in by_choice.items()]

    @property
    def shown_prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """The prompt's log probabilities as vLLM shows them; None where they are not wanted."""
        num_top = self.request.prompt_logprobs
        if num_top is None or self.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._tokenizer, self.request.prompt_ids, self.prompt_logprobs, num_top)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def token_usage(self) -> TokenUsage:
        return TokenUsage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=sum(choice.num_reasoning for choice in self.choices)
            if self.request.kind == "chat"
            else None,
        )
