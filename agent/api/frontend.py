# SPDX-License-Identifier: Apache-2.0
"""Serves one request: body → prompt ids → engine → text → response or stream events.

1. The body is already typed and checked (`openai_schema`); `_prepare` encodes the prompt and resolves limits.
2. `Submit` goes to the engine; its outputs come back one by one (`EngineClient`, `EngineStream`).
3. `Generation` turns tokens into deltas of text; a stop string found there ends the choice in the engine.
4. Deltas become one response, or an event each (`responses`).

A prefill leg (docs/architecture.md#one-request) asks for one token per choice and returns where the prompt's
KV is pinned; a decode leg continues from those tokens. A streamed one, which was sent together with its
prefill leg, gets them with the KV, as its engine's first output; the prefill leg shows them. To resume a
stream that broke elsewhere, a decode leg begins with all the tokens which that stream had shown, and shows
what comes after them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvferry.agent.announce.membership import Membership
from kvferry.agent.api import responses
from kvferry.agent.api.engine_client import EngineClient, EngineStream
from kvferry.agent.api.generation import Delta, Generation, GenerationRequest
from kvferry.agent.api.grammar.checker import GrammarChecker
from kvferry.agent.api.kv_params import KVTransferParams, prefill_response_params
from kvferry.agent.api.message.call_constraint import call_constraint
from kvferry.agent.api.message.message_parser import MessageFormat
from kvferry.agent.api.message.response_form import ResponseForm
from kvferry.agent.api.openai_schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    SamplingDefaults,
    TokenizeBody,
    chat_messages,
    check_chat_size,
    check_context,
    check_resumed,
    check_token_ids,
    completion_prompt,
    decode_body,
    sampling_params,
    text_too_long,
    truncated,
)
from kvferry.agent.api.request_log import RequestLogEntry
from kvferry.agent.api.text.chat_template import TemplateRefused, UnreadVariable
from kvferry.agent.api.text.text_pool import text_pool
from kvferry.agent.api.text.tokenizer import TextTooLong, Tokenizer
from kvferry.agent.config import AgentConfig
from kvferry.agent.errors import ApiError, bad_request, unavailable
from kvferry.agent.ids import AnswerId, AnswerKind, RequestId, mint_answer_id, mint_seed
from kvferry.agent.messages.requests import Output, Submit

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 1800.0
# After the last choice's stop string, the engine sends one more message, which carries the timing.
_LAST_OUTPUT_TIMEOUT_S = 5.0
# Longer texts, and chats of more messages, are worked on beside the event loop.
_INLINE_BYTES = 4096
_INLINE_MESSAGES = 16
_TAIL_TOKENS = 64
"""Tokens at a prompt's end, where nearly every one has the beginning of the assistant's message."""
_BYTES_PER_ID = 4
"""About how many bytes of JSON a token id takes."""
_INLINE_BODY_BYTES = 64 * 1024
"""Larger bodies are decoded there too: 8 MiB take up to 50 ms."""

_Body = TypeVar("_Body", bound=GenerationBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIds:
    """A request's own id, and what a proxy minted for its response."""

    request_id: RequestId
    answer_id: AnswerId | None = None
    created: int | None = None


class Frontend:
    """Serves requests with one tokenizer and one engine."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: Tokenizer,
        engine: EngineClient,
        membership: Membership,
        defaults: SamplingDefaults,
        grammars: GrammarChecker,
        form: ResponseForm | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._engine = engine
        self._membership = membership
        self._grammars = grammars
        self._form = form
        """How the model's answers are written; None where they are text and nothing else."""
        self._marks = frozenset(
            token_id
            for token, token_id in tokenizer.added_ids.items()
            if form is not None and token_id in tokenizer.special_ids and form.is_mark(token)
        )
        self._texts = text_pool()

    async def decode(self, raw: bytes, body_type: type[_Body], max_model_len: int | None) -> _Body:
        """Type and check one body, a large one beside the event loop. Raises `ApiError`."""
        if len(raw) <= _INLINE_BODY_BYTES:
            return decode_body(raw, body_type, max_model_len)
        return await self._texts.run(len(raw), partial(decode_body, raw, body_type, max_model_len))

    async def complete(
        self, body: GenerationBody, ids: RequestIds, entry: RequestLogEntry
    ) -> tuple[dict[str, Any], str]:
        """Return the body of the whole response, and its `Server-Timing` header. Raises `ApiError`."""
        async with self._generation(body, ids, entry) as (generation, stream):
            wholes = {delta.index: delta for delta in generation.restore()}
            leased = False
            async for output in self._outputs(generation, stream):
                for delta in self._push(generation, stream, output, entry):
                    if delta.index in wholes:
                        wholes[delta.index].add(delta)
                    else:
                        wholes[delta.index] = delta
                leased = leased or output.leased
            choices = [wholes[index] for index in sorted(wholes)]
            kv_params = self._transfer_params(generation, choices) if leased else None
            timing = responses.server_timing(generation.timing) if generation.timing else ""
            entry.close(200)
            return responses.completion(generation, choices, kv_params), timing

    async def events(
        self, body: GenerationBody, ids: RequestIds, entry: RequestLogEntry
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, `[DONE]` included.

        Raises `ApiError` before the first event only; a later failure is an event of its own.
        """
        begun = False
        with entry.closed_on_failure():
            try:
                async with self._generation(body, ids, entry) as (generation, stream):
                    generation.restore()
                    hides_first = generation.request.streamed
                    async for output in self._outputs(generation, stream):
                        deltas = self._push(generation, stream, output, entry)
                        if hides_first and deltas:
                            events, hides_first = responses.first_tokens_event(deltas), False
                        else:
                            events = b"".join(
                                responses.delta_event(generation.request, delta) for delta in deltas
                            )
                        if events:
                            begun = True
                            yield events
                    yield responses.last_event(generation) + responses.DONE_EVENT
                    entry.close(200)
            except ApiError as error:
                if not begun:
                    raise
                entry.close(error.status, error.code)
                yield responses.sse_event(error.body()) + responses.DONE_EVENT

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Return the body that answers /tokenize. Raises `ApiError`."""
        self._check_ready()
        self._check_model(body.model)
        chat = body.chat(self._config.model_name)
        if chat is not None:
            ids = await self._encode_prompt(chat)
        else:
            text = body.prompt or ""
            special = body.add_special_tokens is not False
            encode = partial(self._tokenizer.encode, text, add_special_tokens=special)
            size = len(text.encode(errors="replace"))
            ids = encode() if size <= _INLINE_BYTES else await self._texts.run(size, encode)
        strings = self._tokenizer.tokens(ids) if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self._max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Return the body that answers /detokenize. Raises `ApiError`."""
        self._check_ready()
        self._check_model(body.model)
        check_token_ids(tuple(body.tokens), self._tokenizer.vocab_size, "tokens")
        return {"prompt": await self._decode(body.tokens, show_special=True)}

    async def _decode(self, ids: Sequence[int], *, show_special: bool) -> str:
        decode = partial(self._tokenizer.decode, list(ids), show_special)
        size = _BYTES_PER_ID * len(ids)
        return decode() if size <= _INLINE_BYTES else await self._texts.run(size, decode)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != (served := self._config.model_name):
            message = f"this agent does not serve the model {model!r}, but {served!r}"
            raise ApiError(404, "model_not_found", message, "model")

    def drop(self, transfer_id: str) -> None:
        """Unpin the blocks of a prefill leg whose reader will not come. Idempotent. Raises `ApiError`."""
        self._check_ready()
        self._engine.drop_transfer(transfer_id)

    @asynccontextmanager
    async def _generation(
        self, body: GenerationBody, ids: RequestIds, entry: RequestLogEntry
    ) -> AsyncIterator[tuple[Generation, EngineStream]]:
        """Submit a request; leaving before its end aborts it in the engine."""
        self._check_ready()
        request = await self._prepare(body, ids)
        generation = Generation(request, self._tokenizer)
        kv = body.kv_transfer_params
        leg = "prefill" if request.produce else "decode" if request.remote else "whole"
        entry.follow(generation, leg, kv.transfer_id if kv else None)
        submit = Submit(
            request_id=self._engine.engine_id(ids.request_id),
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            timeout_s=REQUEST_TIMEOUT_S,
            produce=request.produce,
            remote=request.remote,
            prefix_source=request.prefix_source,
            resumed=kv.resumed_choices(request.resume) if kv and request.remote else (),
            cache_salt=request.cache_salt,
        )
        async with self._engine.submit(submit) as stream:
            yield generation, stream

    async def _outputs(self, generation: Generation, stream: EngineStream) -> AsyncIterator[Output]:
        """Yield the engine's outputs up to and including the last one."""
        while True:
            try:
                output = await stream.next(_LAST_OUTPUT_TIMEOUT_S if generation.finished else None)
            except ApiError as error:
                generation.failed_pull = stream.failed_pull
                if not generation.finished:
                    raise
                log.warning("a request has all its tokens, but not the engine's last message: %s", error)
                return
            yield output
            if output.done:
                return

    def _push(
        self, generation: Generation, stream: EngineStream, output: Output, entry: RequestLogEntry
    ) -> list[Delta]:
        """Advance the choices by one output, and stop those in the engine that a stop string ended."""
        ended_by_engine = {token.index for token in output.tokens if token.finish is not None}
        sampling = generation.request.sampling
        if sampling.prompt_logprobs is not None and generation.prompt_logprobs is None:
            generation.add_prompt_logprobs(output.prompt_logprobs)
        deltas = generation.push(output.tokens) if sampling.max_tokens else generation.end_empty()
        for delta in deltas:
            if delta.finish_reason is not None and delta.index not in ended_by_engine:
                stream.stop_choice(delta.index)
        if generation.request.remote is None or generation.request.streamed:
            generation.cached_tokens = max(generation.cached_tokens, output.cached_tokens)
        if output.timing is not None:
            generation.timing, generation.failed_pull = output.timing, output.timing.failed_pull
        entry.count(deltas)
        return deltas

    def _transfer_params(self, generation: Generation, choices: list[Delta]) -> dict[str, Any] | None:
        """Return the params of a prefill response; None, with the blocks unpinned, if no choice continues."""
        request, ready = generation.request, self._engine.ready
        assert request.produce is not None and ready is not None
        if generation.finished:  # a stop string ended what the engine would have continued
            self._engine.drop_transfer(request.produce)
            return None
        return prefill_response_params(
            transfer_id=request.produce,
            incarnation=ready.incarnation,
            host=self._config.advertised_host,
            port=ready.control_port,
            tp_size=self._config.tp,
            cached_tokens=generation.cached_tokens,
            first_tokens=[responses.first_token_entry(choice) for choice in choices],
            prompt_ids=request.prompt_ids,
        )

    def _check_ready(self) -> None:
        """While draining, requests that were on their way still come; `EngineClient.refuse` ends that."""
        if self._engine.ready is None:
            raise unavailable(self._membership.state, f"this agent is {self._membership.state}")

    async def _prepare(self, body: GenerationBody, ids: RequestIds) -> GenerationRequest:
        self._check_model(body.model)
        kv = self._leg_params(body.kv_transfer_params)
        max_model_len = self._max_model_len
        if kv is not None and kv.prompt_token_ids is not None:
            check_context(len(kv.prompt_token_ids), None, max_model_len)
            prompt_ids = tuple(kv.prompt_token_ids)
        else:
            prompt_ids = await self._encode_prompt(body)
        check_token_ids(prompt_ids, self._tokenizer.vocab_size, "prompt")
        message = await self._message_format(body, prompt_ids) if isinstance(body, ChatBody) else None
        constraint = body.constraint()
        if isinstance(body, ChatBody) and body.tool_use.constrains:
            assert message is not None
            constraint = call_constraint(body.tool_use, message, self._tokenizer.added_ids)
        if constraint is not None:
            await self._grammars.check(constraint)
        sampling = sampling_params(
            body,
            prompt_len=len(prompt_ids),
            max_model_len=max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            seed=mint_seed(),
            defaults=self._defaults,
            bad_words=self._tokenizer.encode_bad_words(body.bad_words or ()),
            grammar="" if constraint is None else constraint.grammar,
        )
        check_resumed(
            body.resume or [], max_tokens=sampling.max_tokens, vocab_size=self._tokenizer.vocab_size
        )
        kind: AnswerKind = "chat" if isinstance(body, ChatBody) else "completion"
        return GenerationRequest(
            kind=kind,
            answer_id=ids.answer_id or mint_answer_id(kind, ids.request_id),
            created=int(time.time()) if ids.created is None else ids.created,
            model=body.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=body.stop_strings,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
            want_timing=bool(body.kvferry_timing),
            produce=kv.transfer_id if kv and kv.do_remote_decode else None,
            remote=kv.remote(len(prompt_ids)) if kv and kv.do_remote_prefill else None,
            prefix_source=kv.prefix_source.source() if kv and kv.prefix_source else None,
            first_tokens=tuple(kv.first_tokens or ()) if kv else (),
            remote_cached_tokens=(kv.remote_cached_tokens or 0) if kv else 0,
            resume=tuple(body.resume or ()),
            token_lines=bool(body.kvferry_token_lines),
            include_stop=bool(body.include_stop_str_in_output),
            show_special=body.skip_special_tokens is False,
            continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
            cache_salt=body.cache_salt or "",
            first_choice=body.kvferry_first_choice or 0,
            echo=await self._echoed(body, prompt_ids) if body.echo else None,
            prompt_logprobs=body.prompt_logprobs,
            names_by_id=bool(body.return_tokens_as_token_ids),
            message=message,
        )

    async def _message_format(self, body: ChatBody, prompt_ids: tuple[int, ...]) -> MessageFormat | None:
        """Return how the text of an answer is read as a message; None where all of it is content.

        Raises `ApiError` 400 for tools that this model cannot be given, or calls of which are not known.
        """
        form, tools = self._form, body.tool_use.tools
        if tools and (form is None or not form.has_calls):
            raise bad_request("tools: how this model writes calls is not known", "tools", "no_tools")
        # A constrained answer is what it was asked to be.
        reasoning = body.separate_reasoning is not False and not body.is_constrained
        if form is None or not (tools or (reasoning and form.has_reasoning)):
            return None
        return MessageFormat(
            form=form,
            begun=await self._begun_message(form, prompt_ids),
            marks=self._marks,
            tools=tuple(tool.shown() for tool in tools),
            one_call=body.tool_use.one_call,
            reasoning=reasoning,
            show_reasoning=body.include_reasoning is not False,
        )

    async def _begun_message(self, form: ResponseForm, prompt_ids: tuple[int, ...]) -> str:
        """Return what the prompt has of the assistant's message: it follows from the ids, on every agent."""
        begun = form.begun_message(await self._decode(prompt_ids[-_TAIL_TOKENS:], show_special=True))
        if begun is None and len(prompt_ids) > _TAIL_TOKENS:  # a long message may be continued
            begun = form.begun_message(await self._decode(prompt_ids, show_special=True))
        return begun or ""

    async def _echoed(self, body: GenerationBody, prompt_ids: tuple[int, ...]) -> str:
        """Return the prompt's text: the client's own, or that of its ids, if it gave ids or has them cut."""
        assert isinstance(body, CompletionBody)
        prompt = completion_prompt(body, self._max_model_len)
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return await self._decode(prompt_ids, show_special=body.skip_special_tokens is False)

    @property
    def _max_model_len(self) -> int:
        assert self._engine.ready is not None
        return self._engine.ready.max_model_len

    def _leg_params(self, kv: KVTransferParams | None) -> KVTransferParams | None:
        """Return None for a whole request. Raises `ApiError` for a leg that the role does not serve."""
        if kv is None or not (kv.do_remote_decode or kv.do_remote_prefill):
            return None
        refused = "decode" if kv.do_remote_decode else "prefill"
        if self._config.role == refused:
            raise bad_request(f"this agent's role is {refused}", "kv_transfer_params", "wrong_role")
        return kv

    async def _encode_prompt(self, body: GenerationBody) -> tuple[int, ...]:
        """Return the prompt's ids. What cannot fit the context is refused by its size, before any work."""
        max_model_len = self._max_model_len
        longest = self._tokenizer.max_token_bytes
        max_bytes = None if longest is None else longest * max_model_len
        encode = partial(self._encode, body, max_bytes=max_bytes, max_model_len=max_model_len)
        if isinstance(body, ChatBody):
            size = check_chat_size(body, max_model_len, max_bytes)
            # The template writes the special tokens itself; adding them again would double them.

            def work() -> tuple[int, ...]:
                return encode(self._render(body), "messages", add_special_tokens=False)

            inline = size <= _INLINE_BYTES and len(body.messages) <= _INLINE_MESSAGES
            return work() if inline and body.chat_template is None else await self._texts.run(size, work)
        assert isinstance(body, CompletionBody)
        prompt = completion_prompt(body, max_model_len)
        if isinstance(prompt, tuple):
            return truncated(prompt, body.truncate_prompt_tokens, max_model_len)
        if not prompt:
            raise bad_request("the prompt is empty", "prompt")
        size = len(prompt.encode(errors="replace"))
        if max_bytes is not None and size > max_bytes:
            raise text_too_long(max_model_len, size, "prompt")
        if size <= _INLINE_BYTES:
            return encode(prompt, "prompt", add_special_tokens=True)
        return await self._texts.run(size, partial(encode, prompt, "prompt", add_special_tokens=True))

    def _encode(
        self,
        body: GenerationBody,
        text: str,
        param: str,
        *,
        add_special_tokens: bool,
        max_bytes: int | None,
        max_model_len: int,
    ) -> tuple[int, ...]:
        """Encode a prompt as the body wants it; `add_special_tokens` holds where it does not say."""
        size = len(text.encode(errors="replace"))
        if max_bytes is not None and size > max_bytes:
            raise text_too_long(max_model_len, size, param)
        if body.add_special_tokens is not None:
            add_special_tokens = body.add_special_tokens
        keep = body.truncate_prompt_tokens
        try:
            prompt_ids = self._tokenizer.encode(
                text,
                add_special_tokens=add_special_tokens,
                max_tokens=max_model_len if keep is None else None,
            )
        except TextTooLong as error:
            check_context(error.num_tokens, None, max_model_len)
            raise
        return truncated(prompt_ids, keep, max_model_len)

    def _render(self, body: ChatBody) -> str:
        template = self._tokenizer.chat_template
        if body.chat_template is not None and not self._config.trust_request_chat_template:
            message = "chat_template is only for agents with --trust-request-chat-template"
            raise bad_request(message, "chat_template", "unsupported_field")
        if template is None:
            raise bad_request("this model has no chat template", "messages", "no_chat_template")
        tools = [tool.shown() for tool in body.tool_use.tools]
        continues = bool(body.continue_final_message)
        try:
            if body.chat_template is not None:
                template = template.replaced(body.chat_template)
            variables = dict(body.chat_template_kwargs or {})
            is_hint = "reasoning_effort" in (body.kvferry_hints or ())
            if body.reasoning_effort is not None and not (is_hint and not template.reads("reasoning_effort")):
                variables["reasoning_effort"] = body.reasoning_effort
            if tools and not template.reads_tools:
                raise bad_request("tools: this model's chat template has no tools", "tools", "no_tools")
            return template.render(
                chat_messages(body),
                tools=tools,
                variables=variables,
                add_generation_prompt=not continues
                if body.add_generation_prompt is None
                else body.add_generation_prompt,
                continue_final_message=continues,
            )
        except UnreadVariable as error:
            is_field = error.name == "reasoning_effort" and body.reasoning_effort is not None
            raise bad_request(str(error), error.name if is_field else "chat_template_kwargs") from error
        except TemplateRefused as error:
            raise bad_request(str(error), "messages") from error
