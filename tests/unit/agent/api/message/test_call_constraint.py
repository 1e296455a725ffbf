# SPDX-License-Identifier: Apache-2.0
"""The grammars of constrained calls, as llguidance holds tokens to them, and the fields that ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.agent.api.grammar.constraint import MAX_GRAMMAR_BYTES
from kvferry.agent.api.message.call_constraint import call_constraint
from kvferry.agent.api.message.call_syntax import MAX_FORCED_CALLS
from kvferry.agent.api.message.message_parser import MessageFormat
from kvferry.agent.api.message.response_form import ResponseForm, known_form
from kvferry.agent.api.message.tools import MAX_SCHEMA_DEPTH, ToolUse
from kvferry.agent.api.openai_schema import ChatBody, decode_body
from kvferry.agent.errors import MAX_MESSAGE_CHARS, ApiError
from kvferry.agent.grammar.compiler import GrammarCompiler
from tests.standins import chat_templates

EOS = "<|im_end|>"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ARGUMENTS = '{"a": 7, "b": "x"}'
CALLS: dict[str, tuple[str, str, str]] = {
    chat_templates.HERMES: ("", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "\n"),
    chat_templates.LLAMA: ("", '{"name": "NAME", "parameters": ARGS}', ""),
    chat_templates.MISTRAL_LIST: ("[TOOL_CALLS][", '{"name": "NAME", "arguments": ARGS}', ", "),
    chat_templates.MISTRAL: ("", "[TOOL_CALLS]NAME[ARGS]ARGS", ""),
}


class Setup:
    """A byte-level tokenizer, whose marks are tokens or not, and what llguidance makes of grammars for it."""

    def __init__(self, directory: Path, *, special: bool | None) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
        if special is not None:
            self._tokenizer.add_tokens([AddedToken(mark, special=special) for mark in MARKS])
        self._tokenizer.save(str(directory / "tokenizer.json"))
        self.token_ids = {
            token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._compiler = GrammarCompiler(directory, eos_ids=[self.token_ids[EOS]])

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a whole answer is as the grammar wants it."""
        matcher = self._compiler.matcher(grammar)
        for token_id in [*self._tokenizer.encode(text).ids, self.token_ids[EOS]]:
            if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
                return False
            matcher.add([token_id])
        return True


@pytest.fixture(params=[None, False, True], ids=["spelled", "tokens", "special tokens"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    yield Setup(tmp_path, special=request.param)


NAMED_G = {"type": "function", "function": {"name": "g"}}


def use(choice: Any = "required", *, parallel: bool = True, tools: Any = None) -> ToolUse:
    given = tools or [function("f", SCHEMA), function("g")]
    body = decode_body(
        json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "a"}],
                "tools": given,
                "tool_choice": choice,
                "parallel_tool_calls": parallel,
            }
        ).encode(),
        ChatBody,
    )
    return body.tool_use


def function(name: str, schema: Any = None) -> dict[str, Any]:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **parameters}}


def wanted(template: str, begun: str = "") -> MessageFormat:
    form = known_form(template)
    assert form is not None
    return MessageFormat(form=form, begun=begun)


@pytest.mark.parametrize("template", CALLS, ids=["hermes", "llama", "mistral list", "mistral"])
def test_an_answer_is_calls_as_the_model_writes_them(setup: Setup, template: str) -> None:
    begin, call, between = CALLS[template]
    end = "]" if begin else ""
    f, g = (
        call.replace("NAME", "f").replace("ARGS", ARGUMENTS),
        call.replace("NAME", "g").replace("ARGS", "{}"),
    )
    if "[ARGS]" in call:
        f, g = f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", "[TOOL_CALLS]g[ARGS]{}"
    is_llama = template is chat_templates.LLAMA

    def allowed(asked: ToolUse, *calls: str) -> bool:
        grammar = call_constraint(asked, wanted(template), setup.token_ids).grammar
        return setup.allows(grammar, begin + between.join(calls) + end)

    assert allowed(use(), f) and allowed(use(), g)
    assert allowed(use(), f, g, f) is not is_llama
    assert not allowed(use(parallel=False), f, g)
    assert not allowed(use(), *[g] * (MAX_FORCED_CALLS + 1))
    named = use(NAMED_G)
    assert allowed(named, g) and not allowed(named, f) and not allowed(named, g, g)
    assert not allowed(use(), f.replace("7", '"7"'))
    assert not allowed(use(), f.replace(', "b": "x"', ""))
    assert not allowed(use(), "No.")


def test_a_model_may_reason_first_unless_the_prompt_has_done_so(setup: Setup) -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'

    def allowed(text: str, begun: str = "") -> bool:
        asked = call_constraint(use(), wanted(chat_templates.HERMES_THINK, begun), setup.token_ids)
        return setup.allows(asked.grammar, text)

    thought = "<think>\nWhy < not?\n</think>\n\n"
    assert allowed(thought + call) and allowed(call)
    assert not allowed(thought) and not allowed(thought + "Well. " + call)
    assert allowed(f"Why not?\n</think>\n\n{call}", "<think>\n")
    assert not allowed(call, "<think>\n")
    assert allowed(call, "<think>\n\n</think>\n\n")
    assert not allowed(thought + call, "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", CALLS, ids=["hermes", "llama", "mistral list", "mistral"])
def test_strict_arguments_are_valid_where_the_model_may_choose(setup: Setup, template: str) -> None:
    begin, call, _ = CALLS[template]
    end = "]" if begin else ""
    strict = function("f", SCHEMA)
    strict["function"]["strict"] = True
    asked = use("auto", tools=[strict, function("g", SCHEMA)])
    grammar = call_constraint(asked, wanted(template), setup.token_ids).grammar

    def allowed(name: str, arguments: str, content: str = "") -> bool:
        written = (
            call.replace("ARGS]", "ARGS\0").replace("ARGS", arguments, 1) if "[ARGS]" not in call else ""
        )
        written = written or f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        return setup.allows(grammar, content + begin + written.replace("NAME", name).replace("\0", "]") + end)

    assert setup.allows(grammar, "No { call.\n") and setup.allows(grammar, "")
    assert allowed("f", ARGUMENTS)
    assert not allowed("f", "{}")
    assert allowed("g", "{}") and allowed("g", '{"c": [1]}')
    if template is not chat_templates.LLAMA:
        assert allowed("f", ARGUMENTS, "Well:\n")
        assert not allowed("f", "{}", "Well:\n")


def test_what_cannot_be_forced_is_refused() -> None:
    with pytest.raises(ApiError, match="as this model writes") as caught:
        call_constraint(use(), wanted(chat_templates.XML), {})
    assert caught.value.code == "no_forced_calls"
    with pytest.raises(ApiError, match="schemas"):
        long = function("f", {"const": "a" * MAX_GRAMMAR_BYTES})
        call_constraint(use(tools=[long]), wanted(chat_templates.HERMES), {})
    shipped = {"start_anchor": "a", "fields": {"tool_calls": {"open": "b"}, "content": {}}}
    with pytest.raises(ApiError, match="as this model writes"):
        call_constraint(use(), MessageFormat(form=ResponseForm(shipped)), {})


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function("f")] * 2}, "tools"),
        ({"tools": [function(f"f{number}") for number in range(129)]}, "tools"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("f", [1])]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [function("f", nested(MAX_SCHEMA_DEPTH))]}, "tools"),
        ({"tools": [function("f", {"const": "a" * 300_000})]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [function("f")], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [function("f")], "tool_choice": NAMED_G}, "tool_choice"),
        ({"tools": [function("f")], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [function("f")], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ApiError) as caught:
        decode_body(json.dumps(body).encode(), ChatBody)
    assert (caught.value.status, caught.value.param) == (400, param), caught.value.message


@pytest.mark.parametrize(
    "choice", ["a" * 1_000_000, {"type": "function", "function": {"name": "a" * 1_000_000}}]
)
def test_a_long_tool_choice_is_not_repeated_whole(choice: object) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [function("f")]}
    with pytest.raises(ApiError) as caught:
        decode_body(json.dumps(body | {"tool_choice": choice}).encode(), ChatBody)
    assert len(json.dumps(caught.value.body())) < 2 * MAX_MESSAGE_CHARS


def test_tools_that_may_not_be_called_are_left_out() -> None:
    assert use("none").tools == ()
    assert [tool.shown()["function"]["name"] for tool in use("auto").tools] == ["f", "g"]
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
    (shown,) = use("auto", tools=[strict]).tools
    assert shown.shown() == function("f", SCHEMA)
    deep = function("f", nested(MAX_SCHEMA_DEPTH - 1))
    assert use("auto", tools=[deep]).tools
