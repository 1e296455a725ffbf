# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's chat template: messages to the text of a prompt.

The environment is the one that templates are written for: that of `apply_chat_template` in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefused(ValueError):
    """The template cannot render these messages; the error's message says why."""


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of the whole prompt, up to where the assistant's message begins.

        It already holds every special token, so it must be encoded without adding them again.

        Raises:
            TemplateRefused: the template raised, or the messages lack what it reads.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which would reach the model.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
