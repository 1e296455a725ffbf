# SPDX-License-Identifier: Apache-2.0
"""How a model's answers are written: transformers' response template, and the syntax of its calls.

A checkpoint may ship a template (`response_template` in tokenizer_config.json). For those that ship none,
the marks in their chat template say which entry of the table here is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvferry.agent.api.message.call_syntax import CallSyntax
from kvferry.agent.checkpoint import BadCheckpoint, read_json

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

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

_OPENING = re.compile(r"[\s\[,]*(?:\{|\Z)")
_HEAD = re.compile(
    r'[\s\[,]*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_HERMES = CallSyntax(
    head=_HEAD,
    opening=_OPENING,
    begins=r"(.|\n)*<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    between="\n",
    tokens=("<tool_call>", "</tool_call>"),
    in_object=True,
)
_LLAMA = CallSyntax(
    head=_HEAD,
    opening=_OPENING,
    begins=r"[ \n]*(<\|python_tag\|>)?\{[ \n]*\"name\"",
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_arguments="}",
    in_object=True,
    parallel=False,
)
_MISTRAL_LIST = CallSyntax(
    head=_HEAD,
    opening=_OPENING,
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
    opening=re.compile(r"\s*(?:[^\s\[{]+(?:\[[\w\[\]]*\s*)?)?\Z"),
    begins=r"(.|\n)*\[TOOL_CALLS\]",
    before_name="[TOOL_CALLS]",
    after_name="[ARGS]",
    after_arguments="",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
)


_PARAMETER_END = r"</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))"
"""The end of a value may be in it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A way to write calls: what of a chat template shows it, and the field of a response template."""

    marks: tuple[str, ...]
    syntax: CallSyntax | None
    field: Mapping[str, Any]
    body: re.Pattern[str] | None = None


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
                "tag_pattern": rf"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?{_PARAMETER_END}",
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        # Atomic: it splits parameters as `tag_pattern` does, or the tries would double with each of them.
        body=re.compile(rf"\s*(?>(?:<parameter=[^>\n]+>.*?{_PARAMETER_END}\s*)*)", re.DOTALL),
    ),
    _Entry(
        marks=("<tool_call>", "</tool_call>"),
        syntax=_HERMES,
        field={"open": "<tool_call>", "close": "</tool_call>"},
    ),
    _Entry(
        marks=("[TOOL_CALLS]", "[ARGS]"),
        syntax=_MISTRAL,
        field={"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])"},
    ),
    _Entry(
        marks=("[TOOL_CALLS]",),
        syntax=_MISTRAL_LIST,
        field={"open": "[TOOL_CALLS]"},
    ),
    _Entry(
        marks=("<|start_header_id|>", '"parameters"'),
        syntax=_LLAMA,
        field={"open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\{\s*"name")'},
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


MAX_MARK_CHARS = 1024
"""What has not become a mark by then is none: it is looked at again with each token."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The text at the begin or the end of regions. One that `is_fixed` is not longer with more text."""

    pattern: Any
    is_fixed: bool

    def find(self, text: str, at: int, *, last: bool) -> tuple[re.Match[str] | None, int]:
        """Return the first one from `at` on, if it is certain, and where text begins that may yet become one.

        With `last` no more text will come.
        """
        found = self.pattern.search(text, at, partial=not last)
        while found is not None and len(text) - found.start() > MAX_MARK_CHARS:
            begin = found.start()
            found = self.pattern.match(text, begin, begin + MAX_MARK_CHARS)
            if found is not None:
                return found, len(text)
            found = self.pattern.search(text, begin + 1, partial=not last)
        if found is None:
            return None, len(text)
        may_grow = found.end() == len(text) and not (self.is_fixed and found.start() < found.end())
        if not last and (found.partial or may_grow):
            return None, found.start()
        return found, len(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionForm:
    """A part of an answer, between marks; the part that has no `begin` is what is in no other.

    One that `is_first` can only be what the answer begins with. With `is_json` its text is JSON. It matches
    `body`, if there is one.
    """

    kind: RegionKind
    begin: Mark | None
    end: Mark | None
    is_first: bool
    is_json: bool
    body: re.Pattern[str] | None


class ResponseForm:
    """How one model's answers are written. Immutable.

    Args:
        template: A response template.
        calls: The syntax of its calls, if it is one that is known here.
        reasoning: The marks around its reasoning, if they are known here.
        body: What the text of a call must match, so that nothing of it is lost.

    Raises:
        ValueError: transformers does not take the template.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        *,
        calls: CallSyntax | None = None,
        reasoning: tuple[str, str] | None = None,
        body: re.Pattern[str] | None = None,
    ) -> None:
        # Importing it takes seconds and 50 MB, which agents of other models do without.
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.calls = calls
        self.reasoning = reasoning
        self.template: ResponseTemplate = load_response_template(dict(template))
        """By which a region that is not of a known syntax becomes a value."""
        fields: dict[str, dict[str, Any]] = template["fields"]
        self._regions = [_region(field, body) for field in self.template.fields.values()]
        kinds = {region.kind for region in self._regions}
        self.has_reasoning = "reasoning" in kinds
        self.has_calls = "calls" in kinds
        self._marks = "\n".join(
            text for name, field in fields.items() if name != "content" for text in _strings(field)
        )

    def regions(self, *, reasoning: bool, calls: bool) -> list[RegionForm]:
        """Return the regions that an answer may have, content and these kinds; what is in none is content."""
        wanted = {"content", *(("reasoning",) if reasoning else ()), *(("calls",) if calls else ())}
        return [region for region in self._regions if region.kind in wanted]

    def begun_message(self, prompt: str) -> str | None:
        """Return what a prompt has of the message to be written; None where no message begins in it."""
        ends = [match.end() for match in self.template.start_anchor_re.finditer(prompt)]
        return prompt[ends[-1] :] if ends else None

    def is_mark(self, token: str) -> bool:
        """Whether a special token is one of the marks around reasoning or in calls."""
        return token in self._marks or re.escape(token) in self._marks


def read_response_form(directory: Path, chat_template: str) -> ResponseForm | None:
    """Return the form of a checkpoint's answers; None where nothing but text is known of them.

    Raises `BadCheckpoint`, naming the file, for a response template that transformers does not take.
    """
    path = directory / "tokenizer_config.json"
    shipped = read_json(path).get("response_template") if path.is_file() else None
    if shipped is None:
        return known_form(chat_template)
    try:
        return ResponseForm(shipped)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: response_template: {error}") from error


def known_form(chat_template: str) -> ResponseForm | None:
    """Return the form that a chat template shows by its marks, if it is known here."""
    entry = next((each for each in _CALLS if all(mark in chat_template for mark in each.marks)), None)
    reasoning = _THINK if _THINK[1] in chat_template else None
    if entry is None and reasoning is None:
        return None
    fields: dict[str, Any] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = {"open": reasoning[0], "close": reasoning[1]}
    if entry is not None:
        fields["tool_calls"] = dict(entry.field)
    anchors = [anchor for anchor in _ANCHORS if anchor.rstrip() in chat_template]
    template = {"start_anchor": anchors or list(_ANCHORS), "fields": fields}
    if entry is None:
        return ResponseForm(template, reasoning=reasoning)
    return ResponseForm(template, calls=entry.syntax, reasoning=reasoning, body=entry.body)


def _region(field: ResponseTemplateField, body: re.Pattern[str] | None) -> RegionForm:
    kind = REGION_KINDS.get(field.name, "content")
    begin = field.open_re and Mark(
        field.open_re, is_fixed=bool(field.open_literals) and not field.open_literal_can_extend
    )
    end = field.close_re and Mark(
        field.close_re, is_fixed=bool(field.close_literals) and not field.close_literal_can_extend
    )
    return RegionForm(
        kind=kind,
        begin=begin,
        end=end,
        is_first=kind == "reasoning" and not field.repeats,
        is_json=field.content == "json" and "string_delims" not in field.content_args,
        body=body if kind == "calls" else None,
    )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
