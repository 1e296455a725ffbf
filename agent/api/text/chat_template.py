# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's chat template: messages to the text of a prompt.

The environment is the one that templates are written for: that of `apply_chat_template` in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REASON_CHARS = 1024
"""How much is shown of why a template raised, which may quote a message."""
_END_MARK = "KVFERRY_CONTINUES_HERE "
"""Put behind the content that is to be continued: the content itself may occur again in what follows it. The
space shows whether the template strips contents."""
_RESERVED = frozenset({"add_generation_prompt", "continue_final_message", "documents", "messages", "tools"})
"""Variables that have fields of their own."""


class TemplateRefused(ValueError):
    """The template cannot render these messages; the error's message says why."""


class UnreadVariable(TemplateRefused):
    """The template does not read the variable `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the chat template does not read {name}")
        self.name = name


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise TemplateRefused(f"the chat template is wrong: {error}") from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self._variables

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable that has no field of its own."""
        return variable in self._variables and variable not in _RESERVED

    def replaced(self, source: str) -> ChatTemplate:
        """Return another template with the same special tokens. Raises TemplateRefused if it is none."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of the whole prompt, up to where the assistant's message begins.

        It already holds every special token, so it must be encoded without adding them again.

        Args:
            messages: The conversation.
            tools: What the model may call, for a template that `reads_tools`.
            variables: What else the template reads, by name.
            add_generation_prompt: Whether the text ends with the beginning of an assistant's message.
            continue_final_message: Whether it ends within the last message, right after its content.

        Raises:
            UnreadVariable: the template does not read one of `variables`.
            TemplateRefused: the template raised, or does not show the content that is to be continued; or the
                messages lack what it reads.
        """
        given = dict(variables or {})
        if unread := sorted(name for name in given if not self.reads(name)):
            raise UnreadVariable(unread[0])
        try:
            text = self._template.render(
                messages=_marked(messages) if continue_final_message else messages,
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                **{**self._special_tokens, **given},
            )
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            reason = str(error)[:MAX_REASON_CHARS]
            raise TemplateRefused(f"the chat template refused the messages: {reason}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put `_END_MARK` behind the last message's content."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{_END_MARK}"}]


def _cut_at_mark(text: str) -> str:
    """Cut a rendered conversation at `_END_MARK`; where the template strips the content, strip it too."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TemplateRefused("the chat template does not show the final message, so it cannot be continued")
    kept = text[:end]
    return kept if text.startswith(_END_MARK, end) else kept.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would reach the model.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
