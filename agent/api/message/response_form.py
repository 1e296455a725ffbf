# SPDX-License-Identifier: Apache-2.0
"""How a model's answers are written: transformers' response template, and the syntax of its calls.

A checkpoint may ship a template (`response_template` in tokenizer_config.json). For those that ship none,
the marks in their chat template say which entry of the table here is theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvferry.agent.api.message.call_syntax import CallSyntax

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

RegionKind = Literal["content", "reasoning", "calls"]
REGION_KINDS: Mapping[str, RegionKind] = MappingProxyType(
    {
        "content": "content",
        "thinking": "reasoning",
        "reasoning": "reasoning",
        "reasoning_content": "reasoning",
        "tool_calls": "calls",
    }
)
"""What the fields of a response template are; any other is content."""
_AS_IT_IS: Mapping[str, Any] = MappingProxyType({"content": "text", "content_args": {"strip": False}})

_JSON_NAME = r'(?P<name>"(?:[^"\\]|\\.)*")'
_HERMES = CallSyntax(
    head=re.compile(rf'\s*\{{\s*"name"\s*:\s*{_JSON_NAME}\s*,\s*"arguments"\s*:\s*(?=\{{)', re.DOTALL),
    begins=r"(.|\n)*<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    between="\n",
    tokens=("<tool_call>", "</tool_call>"),
    in_object=True,
)
_LLAMA = CallSyntax(
    head=re.compile(
        rf'\s*\{{\s*"name"\s*:\s*{_JSON_NAME}\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{{)', re.DOTALL
    ),
    begins=r"[ \n]*(<\|python_tag\|>)?\{[ \n]*\"name\"",
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_arguments="}",
    arguments="parameters",
    in_object=True,
    parallel=False,
)
_MISTRAL_LIST = CallSyntax(
    head=re.compile(rf'[\s\[,]*\{{\s*"name"\s*:\s*{_JSON_NAME}\s*,\s*"arguments"\s*:\s*(?=\{{)', re.DOTALL),
    begins=r"(.|\n)*\[TOOL_CALLS\]",
    begin="[TOOL_CALLS][",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    between=", ",
    end="]",
    tokens=("[TOOL_CALLS]",),
    in_object=True,
)
_MISTRAL = CallSyntax(
    head=re.compile(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)"),
    begins=r"(.|\n)*\[TOOL_CALLS\]",
    before_name="[TOOL_CALLS]",
    after_name="[ARGS]",
    after_arguments="",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A way to write calls: what of a chat template shows it, and the field of a response template."""

    marks: tuple[str, ...]
    syntax: CallSyntax | None
    field: Mapping[str, Any]


_CALLS = (
    _Entry(
        marks=("<tool_call>", "<function="),
        syntax=None,
        field={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    ),
    _Entry(
        marks=("<tool_call>", "</tool_call>"),
        syntax=_HERMES,
        field={"open": "<tool_call>", "close": "</tool_call>", **_AS_IT_IS},
    ),
    _Entry(
        marks=("[TOOL_CALLS]", "[ARGS]"),
        syntax=_MISTRAL,
        field={"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])", **_AS_IT_IS},
    ),
    _Entry(
        marks=("[TOOL_CALLS]",),
        syntax=_MISTRAL_LIST,
        field={"open": "[TOOL_CALLS]", **_AS_IT_IS},
    ),
    _Entry(
        marks=("<|start_header_id|>", '"parameters"'),
        syntax=_LLAMA,
        field={"open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\{\s*"name")', **_AS_IT_IS},
    ),
)
"""Qwen3-Coder, Hermes with Qwen 2.5 and 3, Mistral's new and old, Llama 3.1; the first that fits is taken."""
_THINK = ("<think>", "</think>")
_ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<｜Assistant｜>",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<|assistant|>",
)
"""What an assistant's message begins after, in Qwen's prompts, Llama's, DeepSeek's, Mistral's and others."""


class ResponseForm:
    """How one model's answers are written. Immutable.

    Args:
        template: A response template.
        calls: The syntax of its calls, if it is one that is known here.
        reasoning: The marks around its reasoning, if they are known here.

    Raises:
        ValueError: transformers does not take the template.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        *,
        calls: CallSyntax | None = None,
        reasoning: tuple[str, str] | None = None,
    ) -> None:
        # Importing it takes seconds and 50 MB, which agents of other models do without.
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.calls = calls
        self.reasoning = reasoning
        self.template: ResponseTemplate = load_response_template(dict(template))
        """By which a region that is not of a known syntax becomes a value."""
        fields: dict[str, dict[str, Any]] = template["fields"]
        kinds = {REGION_KINDS.get(name, "content") for name in fields}
        self.has_reasoning = "reasoning" in kinds
        self.has_calls = "calls" in kinds
        self._marks = "\n".join(
            text for name, field in fields.items() if name != "content" for text in _strings(field)
        )
        raw = {name: _as_it_is(field) for name, field in fields.items()}
        self._regions = {
            (reasoning_too, calls_too): load_response_template(
                {**_anchor(template), "fields": _without(raw, reasoning=reasoning_too, calls=calls_too)}
            )
            for reasoning_too in (False, True)
            for calls_too in (False, True)
        }

    def regions(self, *, reasoning: bool, calls: bool) -> ResponseTemplate:
        """Return a template with content and these kinds of regions; their values are texts as they are."""
        return self._regions[reasoning, calls]

    def begun_message(self, prompt: str) -> str | None:
        """Return what a prompt has of the message to be written; None where no message begins in it."""
        ends = [match.end() for match in self.template.start_anchor_re.finditer(prompt)]
        return prompt[ends[-1] :] if ends else None

    def is_mark(self, token: str) -> bool:
        """Whether a special token is one of the marks around reasoning or in calls."""
        return token in self._marks or re.escape(token) in self._marks


def read_response_form(directory: Path, chat_template: str) -> ResponseForm | None:
    """Return the form of a checkpoint's answers; None where nothing but text is known of them.

    Raises ValueError, naming the file, for a response template that transformers does not take.
    """
    path = directory / "tokenizer_config.json"
    shipped = json.loads(path.read_text()).get("response_template") if path.is_file() else None
    if shipped is None:
        return known_form(chat_template)
    try:
        return ResponseForm(shipped)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: response_template: {error}") from error


def known_form(chat_template: str) -> ResponseForm | None:
    """Return the form that a chat template shows by its marks, if it is known here."""
    entry = next((each for each in _CALLS if all(mark in chat_template for mark in each.marks)), None)
    reasoning = _THINK if _THINK[1] in chat_template else None
    if entry is None and reasoning is None:
        return None
    fields: dict[str, Any] = {"content": dict(_AS_IT_IS)}
    if reasoning is not None:
        fields["reasoning_content"] = {"open": reasoning[0], "close": reasoning[1], **_AS_IT_IS}
    if entry is not None:
        fields["tool_calls"] = dict(entry.field)
    anchors = [anchor for anchor in _ANCHORS if anchor.rstrip() in chat_template]
    template = {"start_anchor": anchors or list(_ANCHORS), "fields": fields}
    return ResponseForm(template, calls=entry.syntax if entry else None, reasoning=reasoning)


def _anchor(template: Mapping[str, Any]) -> dict[str, Any]:
    return {name: template[name] for name in ("start_anchor", "start_anchor_pattern") if name in template}


def _as_it_is(field: Mapping[str, Any]) -> dict[str, Any]:
    """Make the field with the same begin and end whose value is its text."""
    ends = {name: field[name] for name in ("open", "open_pattern", "close", "close_pattern") if name in field}
    # Without a transform, transformers refuses named groups.
    return {**ends, **_AS_IT_IS, "repeats": True, "transform": "{content}"}


def _without(fields: Mapping[str, Any], *, reasoning: bool, calls: bool) -> dict[str, Any]:
    left_out = {*(() if reasoning else ("reasoning",)), *(() if calls else ("calls",))}
    kept = {name: field for name, field in fields.items() if REGION_KINDS.get(name) not in left_out}
    return kept or {"content": dict(_AS_IT_IS)}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
