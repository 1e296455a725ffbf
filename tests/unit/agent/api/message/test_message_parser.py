# SPDX-License-Identifier: Apache-2.0
"""An answer's text as a message: what chat templates write is read again, however the text is cut."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.agent.api.message.message_parser import MessageDelta, MessageFormat, MessageParser, call_id
from kvferry.agent.api.message.response_form import ResponseForm, known_form
from kvferry.agent.api.text.chat_template import ChatTemplate
from kvferry.agent.ids import AnswerId
from tests.standins import chat_templates

ANSWER = AnswerId("id-1")
QUESTION = [{"role": "user", "content": "What is <think>, and </think>?"}]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}, when={"type": "object"}),
    tool("now"),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'São "Paulo} {\\n}', "days": 3},
    {"city": "]}</tool", "when": {"from": [1, 2, {"x": None}], "to": "\\"}},
    {},
]
MARKS = (
    'a "q" </tool_call> } {\n é 🎉 日本 <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> '
    "[TOOL_CALLS]now[ARGS]{} [TOOL_CALLS][] <think>x</think> </parameter> <parameter=days> </function>"
)
"""What a coding model writes that was asked about calls of tools."""


@dataclass(frozen=True)
class Model:
    template: str
    end: str
    several: bool = True
    reasons: bool = False
    leaves_reasoning_out: bool = False


MODELS: Mapping[str, Model] = {
    "hermes": Model(chat_templates.HERMES, "<|im_end|>\n"),
    "hermes that thinks": Model(chat_templates.HERMES_THINK, "<|im_end|>\n", reasons=True),
    "llama": Model(chat_templates.LLAMA, "<|eot_id|>", several=False),
    "mistral, a list": Model(chat_templates.MISTRAL_LIST, "</s>"),
    "mistral": Model(chat_templates.MISTRAL, "</s>"),
    "xml": Model(chat_templates.XML, "<|im_end|>\n"),
}


@functools.cache
def form(template: str) -> ResponseForm:
    found = known_form(template)
    assert found is not None
    return found


def written(model: Model, message: Mapping[str, Any]) -> tuple[str, str]:
    """Return a prompt, and the answer after it with which the template shows a message."""
    template = ChatTemplate(model.template, SPECIAL_TOKENS)
    prompt = template.render(QUESTION, tools=TOOLS)
    whole = template.render(
        [*QUESTION, {"role": "assistant", **message}], tools=TOOLS, add_generation_prompt=False
    )
    # Where tools are shown before the last message, which is another one now, the prompt is a different one.
    begin = whole.rfind(prompt[-12:]) + 12 if not whole.startswith(prompt) else len(prompt)
    return prompt, whole[begin:].removesuffix(model.end)


def parse(wanted: MessageFormat, pieces: Sequence[str]) -> MessageDelta:
    parser, whole = MessageParser(wanted, ANSWER, 0), MessageDelta()
    for piece in pieces:
        if not parser.ended:
            whole.add(parser.push(piece))
    whole.add(parser.finish())
    return whole


def parsed(wanted: MessageFormat, pieces: Sequence[str]) -> tuple[MessageParser, MessageDelta]:
    """Return the parser too, after the end."""
    parser, whole = MessageParser(wanted, ANSWER, 0), MessageDelta()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish())
    return parser, whole


def wanted_for(model: Model, prompt: str = "", **fields: Any) -> MessageFormat:
    begun = form(model.template).begun_message(prompt)
    if prompt:
        assert begun is not None
    return MessageFormat(form=form(model.template), begun=begun or "", tools=TOOLS, **fields)


def calls_of(arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ["get_weather" if given else "now" for given in arguments]
    return [
        {"id": call_id(ANSWER, 0, index), "type": "function", "function": {"name": name, "arguments": given}}
        for index, (name, given) in enumerate(zip(names, arguments, strict=True))
    ]


@pytest.mark.parametrize("name", MODELS)
def test_what_the_template_writes_is_read_again(name: str) -> None:
    model = MODELS[name]
    marks = [{"city": MARKS.replace("<parameter=days>", "") if name == "xml" else MARKS, "days": 3}]
    for arguments in (ARGUMENTS if model.several else ARGUMENTS[:1], ARGUMENTS[:1], ARGUMENTS[2:], marks):
        calls = calls_of(arguments)
        message = {"content": "", "tool_calls": calls} | (
            {"reasoning_content": "Let me\n\nsee"} if model.reasons else {}
        )
        prompt, text = written(model, message)
        whole = parse(wanted_for(model, prompt), [text]).whole_body()
        assert parse(wanted_for(model, prompt), list(text)).whole_body() == whole
        read = [
            {**each, "function": {**each["function"], "arguments": json.loads(each["function"]["arguments"])}}
            for each in whole["tool_calls"]
        ]
        assert read == calls
        assert whole["content"] is None
        assert whole.get("reasoning_content") == message.get("reasoning_content")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("content", ["Hello.", " a { b\n", "<b>no</b> [call] <tool", ""])
def test_an_answer_without_calls_is_its_text(name: str, content: str) -> None:
    whole = parse(wanted_for(MODELS[name]), [content])
    assert whole.whole_body() == {"role": "assistant", "content": content}


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_a_mark_within_a_string_is_text(name: str, data: st.DataObject) -> None:
    pieces = [
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]{",
        "</think>",
        "<think>",
        '"',
        "\\",
        "}",
        "\n",
        "é",
    ]
    if name == "xml":
        pieces = [*pieces, "</parameter>", "</function>"]
    said = "x" + "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8))) + "x"
    assume(name != "xml" or not re.search(r"</function>\s*</tool_call>", said))
    text = written(MODELS[name], {"content": "", "tool_calls": calls_of([{"city": said}])})[1]
    whole = parse(wanted_for(MODELS[name]), list(text))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
        ("get_weather", {"city": said})
    ]
    assert whole.content == whole.reasoning == ""


def test_an_end_within_a_string_ends_nothing_whatever_the_order_of_members() -> None:
    text = '{"arguments": {"city": "</tool_call> \\"} <tool_call>"}, "name": "get_weather"}'
    text = f"<tool_call>{text}</tool_call> So."
    whole = parse(wanted_for(MODELS["hermes"]), list(text))
    assert [call.arguments for call in whole.calls] == ['{"city": "</tool_call> \\"} <tool_call>"}']
    assert whole.content == "So."


ANY_NAME = {
    '{"name": "now", "parameters": {"id": 42}}': '{"id": 42}',
    '{"name": "now", "arguments": {"id":42}}': '{"id":42}',
    '{"parameters": {"id":42}, "name": "now"}': '{"id":42}',
    '{"name": "now", "id": "abc", "arguments": {"id": 42}}': '{"id": 42}',
    '{"name": "now", "arguments": "{\\"id\\": 42}"}': '{"id": 42}',
    '{"name": "now"}': "{}",
    '{"name": "now", "arguments": null}': "{}",
    '{"type": "function", "name": "now"}': "{}",
}
"""Calls as models write them that were trained on several ways, and their arguments."""
NO_CALLS = (
    '{"name": "now", "args": {"id": 42}}',
    '{"name": "now", "input": {"id": 42}}',
    '{"name": "now", "id": 42, "city": "Oslo"}',
    '{"name": "now", "arguments": [42]}',
    '{"name": "now", "arguments": "id 42"}',
    '{"city": "x", "parameters": {"id": 1}, "arguments": {}, "name": "now"}',
    '{"type": "function", "function": {"name": "now", "arguments": {"id": 42}}}',
    '{"name": "now", "arguments": {"id": "\\ud800"}, "x": {"arguments": 1}}',
)
"""What gives something that no call would pass on."""
AROUND = {
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "mistral, a list": "[TOOL_CALLS][{}]",
    "llama": "{}",
}


@pytest.mark.parametrize("name", AROUND)
def test_arguments_are_those_that_the_model_gave_or_the_text_is_content(name: str) -> None:
    wanted = wanted_for(MODELS[name])
    for text, arguments in ANY_NAME.items():
        if name == "llama" and not text.startswith('{"name"'):
            continue
        text = AROUND[name].replace("{}", text)
        for pieces in ([text], list(text)):
            whole = parse(wanted, pieces)
            assert [(call.name, call.arguments) for call in whole.calls] == [("now", arguments)], text
            assert whole.content == ""
    for text in NO_CALLS:
        text = AROUND[name].replace("{}", text)
        for pieces in ([text], list(text)):
            parser, whole = parsed(wanted, pieces)
            assert not parser.has_whole_calls, text
            assert whole.content == text or whole.calls, text


@pytest.mark.parametrize("end", ["", ",", ', "id": "x"', "\n"])
def test_an_object_without_its_last_brace_swallows_nothing_after_it(end: str) -> None:
    """Nothing but JSON can be in it, so the mark ends it: text and calls after it were lost."""
    second = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'
    for first, is_whole in (('{"a": "<b>"}', True), ('{"a": 1', False)):
        text = f'<tool_call>\n{{"name": "now", "arguments": {first}{end}\n</tool_call>\nSo.\n{second}'
        for pieces in ([text], list(text)):
            parser, whole = parsed(wanted_for(MODELS["hermes"]), pieces)
            assert [call.name for call in whole.calls] == ["now", "get_weather"], text
            assert whole.calls[0].arguments.startswith(first)
            assert (whole.content, parser.has_whole_calls) == ("So.", is_whole), text


@pytest.mark.parametrize("name", AROUND)
def test_what_is_given_beside_the_arguments_is_not_lost(name: str) -> None:
    """A call that leaves it out has not called; an id, a type and null say nothing that is lost."""
    for members, is_whole in (
        ('"arguments": {}, "city": "Oslo"', False),
        ('"parameters": {"id": 1}, "days": 3', False),
        ('"arguments": {"id": 1}, "parameters": null', True),
        ('"arguments": {"id": 1}, "id": "\\"parameters\\":", "type": "function"', True),
        ('"arguments": null, "parameters": {"id": 1}', True),
    ):
        text = AROUND[name].replace("{}", f'{{"name": "now", {members}}}')
        for pieces in ([text], list(text)):
            parser, whole = parsed(wanted_for(MODELS[name]), pieces)
            assert parser.has_whole_calls == is_whole, text
            assert whole.calls or whole.content == text


@pytest.mark.parametrize("value", ["    return x\n        # no more\n", "\n\n", " ", "\ta", "a\n", "\na", ""])
def test_xml_keeps_the_space_of_a_value(value: str) -> None:
    """One line break at each side of it is the template's. Edits of code lost their indent."""
    text = written(MODELS["xml"], {"content": "", "tool_calls": calls_of([{"city": value, "days": 3}])})[1]
    (call,) = parse(wanted_for(MODELS["xml"]), list(text)).calls
    assert json.loads(call.arguments) == {"city": value, "days": 3}


def test_xml_that_is_not_of_parameters_is_content() -> None:
    wanted = wanted_for(MODELS["xml"])
    for body in ('{"city": "Oslo"}', "<parameter=city>\nOslo\n</parameter>\nand 3 days", "city=Oslo"):
        text = f"<tool_call>\n<function=get_weather>\n{body}\n</function>\n</tool_call>"
        assert parse(wanted, list(text)) == parse(wanted, [text]) == MessageDelta(content=text)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_that_ends_within_a_call_has_not_called(name: str) -> None:
    """Cut anywhere: what is called is whole, and what was not shown as a call is content."""
    model = MODELS[name]
    arguments = ARGUMENTS if model.several else ARGUMENTS[:1]
    text = written(model, {"content": "", "tool_calls": calls_of(arguments)})[1]
    opening, closing = CALL_SPANS[name]
    begins = [match.end() for match in re.finditer(opening, text)]
    ends, at = [], 0
    for given_arguments in arguments:
        end = closing or json.dumps(given_arguments, ensure_ascii=False)
        at = text.index(end, at) + len(end)
        ends.append(at)
    for cut in range(len(text) + 1):
        parser, whole = parsed(wanted_for(model), [text[:cut]])
        num_whole = sum(end <= cut for end in ends)
        is_within = sum(begin <= cut for begin in begins) > num_whole
        assert parser.has_whole_calls == (num_whole > 0 and not is_within), text[:cut]
        calls = [call for call in whole.calls if is_json(call.arguments)]
        assert len(calls) == num_whole and len(whole.calls) <= num_whole + 1
        shown = whole.content + "".join(call.arguments for call in whole.calls)
        assert all(word in shown for word in ("Paulo", "from") if word in text[:cut])


CALL_SPANS = {
    "hermes": ("<tool_call>", ""),
    "hermes that thinks": ("<tool_call>", ""),
    "llama": (r'(?=\{"name")', ""),
    "mistral, a list": (r'\[TOOL_CALLS\]|(?<=, )\{(?="name")', ""),
    "mistral": (r"\[TOOL_CALLS\]", ""),
    "xml": (r"<tool_call>\n<function=\w+>", "</tool_call>"),
}
"""A pattern of what a call begins with, and what it ends with if that is not the end of its arguments."""


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "arguments", ['{"a": 1,}', '{"a": NaN}', "{'a': 1}", '{"a": "x\ny"}', '{}, "parameters": {}']
)
def test_a_call_whose_arguments_are_no_json_has_not_called(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    parser, _ = parsed(wanted_for(MODELS["hermes"]), list(text))
    assert not parser.has_whole_calls


def test_what_comes_after_calls_is_content() -> None:
    for name, text, content in (
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>\nSo.', "So."),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} now\n</tool_call> So.', "now\n So."),
        ("mistral, a list", '[TOOL_CALLS][{"name": "now", "arguments": {}}]\nSo.', "So."),
        ("mistral, a list", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "x", "arguments": {}}]',
         '{"name": "x", "arguments": {}}]'),
        ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
         '{"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{} So.", "So."),
    ):  # fmt: skip
        for pieces in ([text], list(text)):
            whole = parse(wanted_for(MODELS[name]), pieces)
            assert (len(whole.calls), whole.content) == (1, content), text


def test_a_mark_in_content_hides_no_call_after_it() -> None:
    text = 'Write "<tool_call>", then a call:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parser, whole = parsed(wanted_for(MODELS["hermes"]), list(text))
    assert whole.content == 'Write "<tool_call>", then a call:'
    assert parser.has_whole_calls and len(whole.calls) == 1
    shown = MessageParser(wanted_for(MODELS["hermes"]), ANSWER, 0).push(text[:30])
    assert shown.content == text[:30].rstrip()


@pytest.mark.parametrize("text", [
    "Write `<think>x</think>` around it.",
    "<think>\nHm.\n</think>\n\nWrite <think>x</think>.",
    "<think>\nHm.\n</think>\n\n<think>x</think>",
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<think>x</think>',
])  # fmt: skip
def test_reasoning_is_what_the_message_begins_with(text: str) -> None:
    for pieces in ([text], list(text)):
        whole = parse(wanted_for(MODELS["hermes that thinks"]), pieces)
        assert "<think>x</think>" in whole.content
        assert whole.reasoning == ("Hm." if "Hm." in text else "")


def test_a_message_that_the_prompt_has_begun_reasons_no_more() -> None:
    """Nor is the space at the end of the prompt shown again."""
    wanted = replace(wanted_for(MODELS["hermes that thinks"]), begun="It is ")
    assert parse(wanted, list("<think>x</think>")) == MessageDelta(content="<think>x</think>")
    wanted = replace(wanted, begun="<think>\nIt is ")
    assert parse(wanted, list("x</think>")) == MessageDelta(reasoning="x")


BROKEN = [
    "Hm.\n<tool_call>\nnot JSON\n</tool_call>\nWell.\n",
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "argum',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call> after',
]
TEXTS = [
    (chat_templates.HERMES_THINK, "<think>\nSo\n\nI call.\n</think>\n\nHere:\n\n" + written(
        MODELS["hermes"], {"content": "", "tool_calls": calls_of(ARGUMENTS)})[1] + "\n\nDone. \n"),
    (chat_templates.HERMES_THINK, '<tool_call>{"arguments": {"city": "x"}, "name": "now"}</tool_call>'),
    *((chat_templates.HERMES, text) for text in BROKEN),
    *((model.template, written(model, {"content": "", "tool_calls": calls_of(ARGUMENTS[:1])})[1])
      for model in MODELS.values()),
    (chat_templates.LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}'),
    (chat_templates.LLAMA, '{"name": "Bob", "age": 3}'),
    (chat_templates.ALWAYS_THINK, "It is\n</think>\n\nfour. \n"),
]  # fmt: skip


@given(st.data())
def test_pieces_of_any_length_are_the_whole_and_show_what_the_text_so_far_says(data: st.DataObject) -> None:
    template, text = data.draw(st.sampled_from(TEXTS))
    begun = "<think>\n" if template is chat_templates.ALWAYS_THINK else ""
    tools = () if template is chat_templates.ALWAYS_THINK else TOOLS
    one_call = data.draw(st.booleans())
    wanted = MessageFormat(form=form(template), begun=begun, tools=tools, one_call=one_call)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    by_char = parse(wanted, list(text))
    assert parse(wanted, pieces) == by_char == parse(wanted, [text])

    # Going on after any of it is going on from there: nothing is lost, and nothing shown again.
    at = data.draw(st.integers(0, len(text)))
    shown, parser = MessageDelta(), MessageParser(wanted, ANSWER, 0)
    for char in text[:at]:
        if not parser.ended:
            shown.add(parser.push(char))
    resumed = MessageParser(wanted, ANSWER, 0)
    assert resumed.push(text[:at]) == shown
    for char in text[at:]:
        if not resumed.ended:
            shown.add(resumed.push(char))
    shown.add(resumed.finish())
    assert shown == by_char


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(text: str) -> None:
    assert parse(wanted_for(MODELS["hermes"]), list(text)) == MessageDelta(content=text)


def test_a_call_that_is_cut_off_keeps_what_was_shown() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    (call,) = parse(wanted_for(MODELS["hermes"]), list(text)).calls
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Par')


def test_arguments_come_piece_by_piece_as_the_model_wrote_them() -> None:
    parser = MessageParser(wanted_for(MODELS["hermes"]), ANSWER, 2)
    deltas = [
        parser.push(piece)
        for piece in ('<tool_call>\n{"name": "now",', ' "arguments": {"a":', " [1,", " 2]}}\n")
    ]
    identity = call_id(ANSWER, 2, 0)
    begin = {
        "index": 0,
        "id": identity,
        "type": "function",
        "function": {"name": "now", "arguments": '{"a":'},
    }
    assert [delta.body() for delta in deltas] == [
        {},
        {"tool_calls": [begin]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " [1,"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 2]}"}}]},
    ]


def test_ids_of_calls_are_nine_letters_and_follow_from_the_answer() -> None:
    made = [
        call_id(AnswerId(answer), choice, index) for answer in "ab" for choice in (0, 1) for index in (0, 1)
    ]
    assert len(set(made)) == 8
    assert all(len(each) == 9 and each.isalnum() for each in made)
    assert made[0] == call_id(AnswerId("a"), 0, 0)


def test_one_call_ends_the_message() -> None:
    for model in ("hermes", "mistral, a list", "mistral"):
        text = written(MODELS[model], {"content": "", "tool_calls": calls_of(ARGUMENTS)})[1]
        parser = MessageParser(wanted_for(MODELS[model], one_call=True), ANSWER, 0)
        read = ""
        while not parser.ended:
            parser.push(text[len(read)])
            read += text[len(read)]
        assert len(read) < len(text) // 2
        assert parse(wanted_for(MODELS[model], one_call=True), list(text)).calls[1:] == []


def test_reasoning_is_content_or_left_out_as_it_was_asked_for() -> None:
    text = "<think>\nWhy?\n</think>\n\nSo."
    wanted = replace(wanted_for(MODELS["hermes that thinks"]), tools=())
    assert parse(wanted, list(text)) == MessageDelta(content="So.", reasoning="Why?")
    assert parse(replace(wanted, show_reasoning=False), list(text)) == MessageDelta(content="So.")
    assert parse(replace(wanted, reasoning=False), list(text)) == MessageDelta(content=text)


def test_without_tools_calls_are_content() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    wanted = replace(wanted_for(MODELS["hermes"]), tools=())
    assert parse(wanted, list(text)) == MessageDelta(content=text)


def test_the_prompt_may_have_begun_the_message() -> None:
    model = Model(chat_templates.ALWAYS_THINK, "<｜end▁of▁sentence｜>")
    prompt = ChatTemplate(model.template, SPECIAL_TOKENS).render(QUESTION)
    wanted = replace(wanted_for(model, prompt), tools=())
    assert parse(wanted, list("Two\n</think>\n\nfour")) == MessageDelta(content="four", reasoning="Two")
    quiet = ChatTemplate(chat_templates.HERMES_THINK, {}).render(
        QUESTION, variables={"enable_thinking": False}
    )
    wanted = wanted_for(MODELS["hermes that thinks"], quiet)
    assert parse(wanted, ["four"]) == MessageDelta(content="four")
    assert form(model.template).begun_message("no message") is None


SHIPPED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
    },
}


def test_a_response_template_of_the_checkpoint_is_followed() -> None:
    wanted = MessageFormat(form=ResponseForm(SHIPPED), tools=TOOLS)
    call = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
    text = f"<|channel>thought\nSo.<channel|>{call}{call.replace('get_weather', 'nothing')}"
    for pieces in ([text], list(text)):
        whole = parse(wanted, pieces)
        assert whole.reasoning == "So."
        assert whole.content == call.replace("get_weather", "nothing")
        (found,) = whole.calls
        assert (found.name, json.loads(found.arguments)) == ("get_weather", {"city": "Oslo", "days": 2})
    broken = "<|tool_call>call:now{a:<tool_call|>"
    assert parse(wanted, list(broken)) == MessageDelta(content=broken)
    marks = ["<|tool_call>", '<|"|>', "<channel|>", "<turn|>", "<bos>"]
    assert [wanted.form.is_mark(mark) for mark in marks] == [True, True, True, False, False]


def test_values_that_are_no_json_have_the_types_of_the_tools_schema() -> None:
    text = written(MODELS["xml"], {"content": "", "tool_calls": calls_of(ARGUMENTS[:1])})[1]
    (call,) = parse(wanted_for(MODELS["xml"]), list(text)).calls
    assert json.loads(call.arguments) == ARGUMENTS[0]


def test_a_model_of_which_nothing_is_known_has_no_form() -> None:
    assert known_form("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    with pytest.raises(ValueError, match="start_anchor"):
        ResponseForm({"fields": {"content": {}}})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{" * 8000,
        "<tool_call>{" * 8000 + "}" * 8000,
        '<tool_call>{"a": "' * 8000,
        '<tool_call>{"arguments": {"a": [' + "[1]," * 40_000,
        '<tool_call>{"name": "now", "arguments": {"a": [' + "[1]," * 40_000,
        "<tool_call>" * 10_000,
    ],
)
def test_no_text_costs_the_square_of_its_length(text: str) -> None:
    """It is read on the event loop, where other answers wait; a second would be thousands of tokens."""
    began = time.process_time()
    whole = parse(wanted_for(MODELS["hermes"]), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert time.process_time() - began < 5
    assert whole.calls or whole.content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", " "),
        ("llama", "\n{ "),
        ("llama", "<|python_tag|>{ "),
        ("xml", "<tool_call> "),
        ("xml", "<tool_call>\n<function=a"),
        ("xml", "<tool_call>\n<function=now>\n</function> "),
        ("mistral", "[TOOL_CALLS] "),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a"),
        ("mistral, a list", "[TOOL_CALLS][ "),
        ("hermes", "<tool_call> "),
    ],
)
def test_what_may_yet_become_a_mark_costs_no_square(name: str, text: str) -> None:
    """A client that allows space alone made each token of a long answer cost 4 ms, in each choice."""
    text += text[-1] * 40_000
    for pieces in ([text], [text[at : at + 4] for at in range(0, len(text), 4)]):
        began = time.process_time()
        assert parse(wanted_for(MODELS[name]), pieces) == MessageDelta(content=text)
        assert time.process_time() - began < 3


@pytest.mark.parametrize("length", [900, 1000, 1010, 1020, 1023, 1024, 1025, 1100])
def test_how_long_a_mark_may_be_does_not_depend_on_the_pieces(length: int) -> None:
    for name, text in (
        ("llama", " " * length + '{"name": "now", "parameters": {}}'),
        ("llama", "{" + " " * length + '"name": "now", "parameters": {}}'),
        ("xml", "<tool_call>" + " " * length + "<function=now></function></tool_call>"),
        ("xml", "<tool_call><function=now></function>" + " " * length + "</tool_call> So."),
    ):
        whole = parse(wanted_for(MODELS[name]), [text])
        for pieces in (list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
            assert parse(wanted_for(MODELS[name]), pieces) == whole, name
        assert len(whole.calls) == (length < 1000) or length in range(1000, 1025)


def test_a_long_call_that_is_no_json_costs_no_square_either() -> None:
    body = "<parameter=city>\n" + "x </func " * 20_000 + "\n</parameter>"
    text = f"<tool_call>\n<function=get_weather>\n{body}\n</function>\n</tool_call>"
    began = time.process_time()
    whole = parse(wanted_for(MODELS["xml"]), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert time.process_time() - began < 5
    assert len(whole.calls) == 1


@pytest.mark.parametrize("junk", ["junk", "<parameter=days>", "</parameter>x", "<parameter=days>\n3"])
def test_many_parameters_and_what_is_none_cost_no_power_of_their_number(junk: str) -> None:
    """Thirty took minutes, on the event loop: one answer stopped all the others of an agent."""
    for count in (22, 2000):
        body = "<parameter=city>\nx\n</parameter>\n" * count + junk
        text = f"<tool_call>\n<function=get_weather>\n{body}\n</function>\n</tool_call>"
        began = time.process_time()
        assert parse(wanted_for(MODELS["xml"]), [text]) == MessageDelta(content=text)
        assert time.process_time() - began < 1


def test_a_second_call_in_the_same_piece_is_not_looked_at() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}} {"name": "now", "arguments": {"a": tru}}'
    for pieces in ([call], list(call)):
        parser = MessageParser(wanted_for(MODELS["hermes"], one_call=True), ANSWER, 0)
        for piece in pieces:
            if not parser.ended:
                parser.push(piece)
        assert parser.has_whole_calls
