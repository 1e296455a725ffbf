# SPDX-License-Identifier: Apache-2.0
"""Whatever is answered is taken back as history, over every API: a conversation never dies of an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.agent.api.message.message_parser import MessageDelta, MessageFormat, MessageParser
from kvferry.agent.api.message.response_form import known_form
from kvferry.agent.api.openai_schema import ChatBody, chat_messages, decode_body
from kvferry.agent.api.text.chat_template import ChatTemplate
from kvferry.agent.ids import AnswerId
from kvferry.proxy import sse
from kvferry.proxy.api.translations.messages import MessagesRewriter
from kvferry.proxy.api.translations.responses import ResponsesRewriter
from tests.standins import chat_templates

TEMPLATES = {
    "hermes": chat_templates.HERMES_THINK,
    "llama": chat_templates.LLAMA,
    "mistral, a list": chat_templates.MISTRAL_LIST,
    "mistral": chat_templates.MISTRAL,
    "xml": chat_templates.XML,
    "always thinks": chat_templates.ALWAYS_THINK,
}
TURNS = (
    "{%- for message in messages if message.role != 'system' %}"
    "{%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{%- endif %}{%- endfor %}"
)
"""As Mistral's and Gemma's templates insist."""
PIECES = [
    "<think>", "</think>", "\n\n", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"a": "x',
    '"}', "}", '\\"', "[TOOL_CALLS]", "now[ARGS]", '{"name": "now", "parameters": {}}', "[", "]", ", ", "é",
    "<function=now>", "<parameter=a>", "</parameter>", "</function>", "Well. ", '{"a": 1e999}', "\\ud800",
    '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', '[TOOL_CALLS]now[ARGS]{"a": 1}',
]  # fmt: skip
USER = {"role": "user", "content": "Now?"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TURNS + TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def answer(name: str, text: str, finish: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The chat that an agent answers with this text, and the choices of the chunks of its stream."""
    form = known_form(TEMPLATES[name])
    assert form is not None
    tools = (TOOL,) if form.has_calls else ()
    parser = MessageParser(MessageFormat(form=form, tools=tools), AnswerId("a"), 0)
    whole, deltas = MessageDelta(), []
    for piece in [text[at : at + 5] for at in range(0, len(text), 5)]:
        deltas.append(parser.push(piece))
    deltas.append(parser.finish())
    chunks = [{"index": 0, "delta": delta.body(), "finish_reason": None} for delta in deltas]
    for delta in deltas:
        whole.add(delta)
    reason = "tool_calls" if parser.has_whole_calls and finish == "stop" else finish
    chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
    choice = {"index": 0, "message": whole.whole_body(), "finish_reason": reason}
    return {"id": "chatcmpl-1", "model": "m", "created": 1, "choices": [choice]}, chunks


def assert_taken(name: str, raw: bytes) -> list[dict[str, Any]]:
    """A chat's body is taken, and its messages are rendered. Returns them."""
    body = decode_body(raw, ChatBody)
    messages = chat_messages(body)
    template(name).render(messages, tools=[TOOL] if template(name).reads_tools else [])
    return messages


def results(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call_id, "content": "12:00"} for call_id, _ in calls]


answers = given(
    name=st.sampled_from(list(TEMPLATES)),
    text=st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
    finish=st.sampled_from(["stop", "length"]),
)


@settings(max_examples=300)
@answers
def test_over_chats(name: str, text: str, finish: str) -> None:
    whole, _ = answer(name, text, finish)
    message = whole["choices"][0]["message"]
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()]
    history = [USER, message, *results(calls), *([] if calls else [USER])]
    asked = {"model": "m", "messages": history, "tools": [TOOL]}
    taken = assert_taken(name, json.dumps(asked).encode())
    assert taken[1]["role"] == "assistant"


@settings(max_examples=300)
@example(name="llama", text='{"name": "now", "arguments": {"a": 1e999}', finish="stop")
@answers
def test_over_messages(name: str, text: str, finish: str) -> None:
    whole, chunks = answer(name, text, finish)
    head = {"model": "m", "max_tokens": 5, "tools": [{"name": "now", "input_schema": {"type": "object"}}]}
    content = json.loads(MessagesRewriter().whole(json.dumps(whole).encode()))["content"]
    for blocks in (content, streamed_blocks(chunks)):
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        said = [{"type": "tool_result", "tool_use_id": each, "content": "12:00"} for each in used]
        turn = {"role": "user", "content": said or "Go on."}
        body = {**head, "messages": [USER, {"role": "assistant", "content": blocks}, turn]}
        assert_taken(name, MessagesRewriter().chat_request(json.dumps(body).encode()))


def streamed_blocks(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Anthropic's client makes of the stream: of a call that was cut off the input that it can read."""
    rewriter = MessagesRewriter()
    events = [sse.event(json.dumps({"id": "chatcmpl-1", "choices": [each]}).encode()) for each in chunks]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for line in b"".join(rewriter.events(event) for event in [*events, sse.DONE]).decode().splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event.get("type") == "content_block_delta":
            texts[-1] += next(value for key, value in event["delta"].items() if key != "type")
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            try:  # a number that is read as infinity could not be sent back by any client
                block["input"] = msgspec.json.decode(text)
            except msgspec.DecodeError:
                block["input"] = {}
        else:
            block[block["type"]] = text
    return blocks


@settings(max_examples=300)
@answers
def test_over_responses(name: str, text: str, finish: str) -> None:
    whole, chunks = answer(name, text, finish)
    head = {"model": "m", "tools": [{"type": "function", "name": "now", "parameters": {"type": "object"}}]}
    rewriter = ResponsesRewriter()
    rewriter.chat_request(json.dumps({**head, "input": "Now?"}).encode())
    output = json.loads(rewriter.whole(json.dumps(whole).encode()))["output"]
    rewriter = ResponsesRewriter()
    rewriter.chat_request(json.dumps({**head, "input": "Now?", "stream": True}).encode())
    events = [
        sse.event(json.dumps({"id": "chatcmpl-1", "model": "m", "created": 1, "choices": [each]}).encode())
        for each in chunks
    ]
    stream = b"".join(rewriter.events(event) for event in [*events, sse.DONE]).decode()
    last = json.loads(stream.strip().rpartition("data: ")[2])
    assert {item["type"] for item in last["response"]["output"]} == {item["type"] for item in output}
    for items in (output, last["response"]["output"]):
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        told = [{"type": "function_call_output", "call_id": each, "output": "12:00"} for each in calls]
        body = {**head, "input": [USER, *items, *told, *([] if told else [USER])]}
        assert_taken(name, ResponsesRewriter().chat_request(json.dumps(body).encode()))


@pytest.mark.parametrize(
    "text", ["", "<think>\nonly thinking", '<tool_call>\n{"name": "now", "arguments": {"a": ']
)
def test_answers_that_were_cut_at_once(text: str) -> None:
    for check in (test_over_chats, test_over_messages, test_over_responses):
        inner: Any = check
        inner.hypothesis.inner_test(name="hermes", text=text, finish="length")


def test_a_call_and_the_text_after_it_may_come_in_one_delta() -> None:
    for check in (test_over_chats, test_over_messages, test_over_responses):
        inner: Any = check
        text = '[TOOL_CALLS]now[ARGS]{"a": 1}{"name": "now", "arguments": '
        inner.hypothesis.inner_test(name="mistral", text=text, finish="stop")
