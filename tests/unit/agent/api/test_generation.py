# SPDX-License-Identifier: Apache-2.0
"""A request's answer as it grows, whole or split over two agents, and its shape in OpenAI's API."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.agent.api import responses
from kvferry.agent.api.generation import Delta, Generation, GenerationRequest
from kvferry.agent.api.kv_params import Resume
from kvferry.agent.api.message.message_parser import MessageDelta, MessageFormat, call_id
from kvferry.agent.api.message.response_form import known_form
from kvferry.agent.api.text.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_offsets,
    merge_logprobs,
)
from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.errors import ApiError
from kvferry.agent.ids import AnswerId, AnswerKind
from kvferry.agent.messages.requests import (
    FinishReason,
    PromptLogprob,
    SamplingParams,
    Timing,
    Token,
    TokenLogprob,
)
from kvferry.proxy.wire.kv_params import FirstToken
from tests.standins.chat_templates import HERMES_THINK
from tests.standins.checkpoint import byte_fallback_tokenizer, byte_level_tokenizer, write_checkpoint


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(write_checkpoint(Path(directory), byte_level_tokenizer()))


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def request(kind: AnswerKind = "completion", **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", SamplingParams(seed=1, max_tokens=50))
    return GenerationRequest(
        kind=kind,
        answer_id=AnswerId("id-1"),
        created=9,
        model="m",
        prompt_ids=(1, 2, 3),
        sampling=sampling,
        **fields,
    )


def sampled(
    token_ids: list[int], logprobs: int | None, last: FinishReason | None, index: int = 0
) -> list[Token]:
    """Tokens as the engine would send them; `last` ends the choice."""
    tokens = []
    for rank, token_id in enumerate(token_ids):
        logprob = None
        if logprobs is not None:
            top = ((token_id, -0.5 * rank),) * logprobs
            logprob = TokenLogprob(logprob=-0.5 * rank, margin=float(rank), top=top)
        finish = last if rank == len(token_ids) - 1 else None
        tokens.append(Token(index=index, token_id=token_id, logprob=logprob, finish=finish))
    return tokens


def gather(deltas: list[Delta]) -> Delta:
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.add(delta)
    return whole


def run(generation: Generation, tokens: list[Token]) -> list[Delta]:
    return [delta for token in tokens for delta in generation.push([token])]


@functools.cache
def message_format(one_call: bool, begun: str) -> MessageFormat:
    form = known_form(HERMES_THINK)
    assert form is not None
    tools = ({"type": "function", "function": {"name": "f"}},)
    return MessageFormat(form=form, tools=tools, one_call=one_call, begun=begun)


MESSAGE_PIECES = [
    "<think>", "</think>", "\n\n", "<tool_call>", '{"name": "f", "arguments": {"a": "', '\\"}]', '"}}',
    "</tool_call>", "x", " <", "é",
]  # fmt: skip


def any_answer(kind: AnswerKind, data: st.DataObject) -> tuple[GenerationRequest, list[Token]]:
    """A request, and the tokens of its one choice: broken characters, stop strings, logprobs, calls."""
    vocabulary = st.one_of(
        st.integers(0, tokenizer().vocab_size - 1), st.sampled_from(ids("aa=123;the fox \U0001f980"))
    )
    token_ids = data.draw(st.lists(vocabulary, min_size=2, max_size=12))
    message = None
    if kind == "chat" and data.draw(st.booleans()):
        message = message_format(data.draw(st.booleans()), data.draw(st.sampled_from(["", "<think>\n"])))
        token_ids = ids("".join(data.draw(st.lists(st.sampled_from(MESSAGE_PIECES), min_size=2, max_size=9))))
    last = data.draw(st.sampled_from(["stop", "length"]))
    stop = tuple(data.draw(st.lists(st.sampled_from(["the", " f", "=12", "x", "\ufffd"]), max_size=3)))
    logprobs = data.draw(st.sampled_from([None, 0, 2]))
    sampling = SamplingParams(
        seed=1,
        max_tokens=len(token_ids),
        logprobs=logprobs,
        min_tokens=data.draw(st.integers(0, 3)),
        stop_token_ids=tuple(data.draw(st.sampled_from([[], token_ids[-1:]]))),
    )
    return request(kind, sampling=sampling, stop=stop, message=message), sampled(token_ids, logprobs, last)


@pytest.mark.parametrize("kind", ["completion", "chat"])
@given(data=st.data())
def test_an_answer_split_after_token_1_is_the_whole_one(kind: AnswerKind, data: st.DataObject) -> None:
    """I4: text, ids, logprobs, finish_reason and usage, stop strings and half characters included (L5)."""
    asked, tokens = any_answer(kind, data)
    alone = Generation(asked, tokenizer())
    expected = gather(run(alone, tokens))

    prefill = Generation(asked, tokenizer())
    first = responses.first_token_entry(gather(prefill.push(tokens[:1])))
    if first.finish_reason is not None:
        assert first.text == expected.text
        asked = dataclasses.replace(asked, first_tokens=(first,))
        assert Generation(asked, tokenizer()).restore() == [expected]
        return
    # What goes over HTTP is JSON.
    first = msgspec.json.decode(msgspec.json.encode(first), type=FirstToken)
    decode = Generation(dataclasses.replace(asked, first_tokens=(first,)), tokenizer())
    (shown,) = decode.restore()
    assert shown.text == first.text
    if shown.message is None:
        assert first.delta is None
    else:
        assert first.delta == {"role": "assistant", "content": None, **shown.message.body()}
    rest = run(decode, tokens[1:])
    assert all(not delta.first for delta in rest)
    assert gather([shown, *rest]) == expected
    assert decode.token_usage == alone.token_usage


@pytest.mark.parametrize("kind", ["completion", "chat"])
@given(data=st.data())
def test_a_stream_resumed_anywhere_repeats_and_loses_nothing(kind: AnswerKind, data: st.DataObject) -> None:
    """I4 across a migration: what was shown before and what is shown after make the whole answer."""
    asked, tokens = any_answer(kind, data)
    expected = gather(run(Generation(asked, tokenizer()), tokens))
    broken = Generation(asked, tokenizer())
    shown = gather(run(broken, tokens[: data.draw(st.integers(1, len(tokens)))]))
    first = responses.first_token_entry(gather(Generation(asked, tokenizer()).push(tokens[:1])))
    sent = Resume(output_ids=shown.token_ids, finish_reason=shown.finish_reason)
    resumed = Generation(dataclasses.replace(asked, first_tokens=(first,), resume=(sent,)), tokenizer())
    resumed.restore()
    assert resumed.token_usage == broken.token_usage
    rest = run(resumed, tokens[len(shown.token_ids) :])
    assert all(not delta.first for delta in rest)
    assert gather([shown, *rest]) == expected
    assert resumed.token_usage.completion_tokens == len(expected.token_ids)
    alone = Generation(asked, tokenizer())
    run(alone, tokens)
    assert resumed.token_usage == alone.token_usage


def test_a_message_streamed_is_the_whole_one() -> None:
    asked = request("chat", message=message_format(False, ""))
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tokens = sampled(ids(f"<think>why</think>\n\nSo:\n{call}\n{call}"), None, "stop")
    deltas = run(Generation(asked, tokenizer()), tokens)
    bodies = [responses.delta_event(asked, delta) for delta in deltas]
    choices = [event(body)["choices"][0] for body in bodies if body]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    joined = MessageDelta()
    for delta in deltas:
        assert delta.message is not None
        joined.add(delta.message)
    whole = responses.completion(Generation(asked, tokenizer()), [gather(deltas)], None)["choices"][0]
    function = {"name": "f", "arguments": '{"a": 1}'}
    made = [
        {"id": call_id(asked.answer_id, 0, index), "type": "function", "function": function}
        for index in (0, 1)
    ]
    expected = {"role": "assistant", "content": "So:", "reasoning_content": "why", "tool_calls": made}
    assert whole["message"] == joined.whole_body() == expected
    assert whole["finish_reason"] == "tool_calls"


def test_one_call_ends_its_choice_and_what_comes_after_it_is_not_counted() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    tokens = sampled([*ids(call), *ids("</tool_call> more")], None, None)
    generation = Generation(request("chat", message=message_format(True, "")), tokenizer())
    (delta,) = generation.push(tokens)
    assert (delta.finish_reason, delta.called, generation.finished) == ("stop", True, True)
    assert generation.token_usage.completion_tokens == len(ids(call))


def test_a_choice_that_has_ended_cannot_be_said_to_go_on() -> None:
    token_ids = ids("the fox;")
    first, sent = FirstToken(id=token_ids[0]), Resume(output_ids=token_ids)
    asked = request(stop=(";",), first_tokens=(first,), resume=(sent,))
    with pytest.raises(ApiError, match="ends within its tokens"):
        Generation(asked, tokenizer()).restore()


def test_tokens_after_a_stop_string_are_neither_shown_nor_counted() -> None:
    token_ids = ids("the fox") + ids(";") + ids("aa")
    generation = Generation(request(stop=(";",)), tokenizer())
    deltas = run(generation, sampled(token_ids, None, "length"))
    assert gather(deltas).text == "the fox"
    assert generation.choices[0].finish_reason == "stop"
    assert generation.token_usage.completion_tokens == len(ids("the fox")) + 1
    assert generation.finished


def test_tokens_after_the_end_within_one_output_are_ignored() -> None:
    token_ids = ids("a;b")
    generation = Generation(request(stop=(";",)), tokenizer())
    (delta,) = generation.push(sampled(token_ids, None, None))
    assert (delta.text, delta.finish_reason, delta.token_ids) == ("a", "stop", token_ids[:2])


def test_the_token_that_says_stop_is_counted_but_has_no_text() -> None:
    generation = Generation(request(), tokenizer())
    (delta,) = generation.push(sampled(ids("a") + ids("b"), None, "stop"))
    assert (delta.text, delta.finish_reason) == ("a", "stop")
    assert generation.token_usage.completion_tokens == 2


def test_held_text_comes_out_at_the_end() -> None:
    token_ids = ids("a\U0001f980")[:-1]
    generation = Generation(request(stop=("ab",)), tokenizer())
    assert gather(run(generation, sampled(token_ids, None, "length"))).text == "a\ufffd"


def test_choices_are_kept_apart() -> None:
    generation = Generation(request(sampling=SamplingParams(seed=1, n=2, max_tokens=9)), tokenizer())
    first, second = generation.push(
        [*sampled(ids("a"), None, "length", index=1), *sampled(ids("b"), None, None, index=0)]
    )
    assert (first.index, first.text, first.finish_reason) == (1, "a", "length")
    assert (second.index, second.text, second.finish_reason) == (0, "b", None)
    assert not generation.finished
    assert generation.push(sampled(ids("c"), None, None, index=1)) == []


def test_completion_logprobs_have_openais_shape() -> None:
    the, fox = ids("the fox")
    lows = ((fox, -1.0), (the, float("-inf")))
    tokens = [(the, TokenLogprob(logprob=-0.25)), (fox, TokenLogprob(logprob=-1.0, top=lows))]
    logprobs = completion_logprobs(tokenizer(), tokens, [10, 13])
    assert logprobs == {
        "tokens": ["the", " fox"],
        "token_logprobs": [-0.25, -1.0],
        "top_logprobs": [{"the": -0.25}, {" fox": -1.0, "the": -9999.0}],
        "text_offset": [10, 13],
    }
    json.dumps(logprobs, allow_nan=False)


def test_chat_logprobs_have_openais_shape_and_the_bytes_of_half_characters() -> None:
    half = ids("\U0001f980")[0]
    logprobs = chat_logprobs(tokenizer(), [(half, TokenLogprob(logprob=-0.5, top=((half, -0.5),)))], [0])
    entry = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0]}
    assert logprobs == {"content": [{**entry, "top_logprobs": [entry]}]}
    assert merge_logprobs(logprobs, logprobs) == {"content": logprobs["content"] * 2}
    assert merge_logprobs(None, logprobs) == merge_logprobs(logprobs, None) == logprobs


def event(raw: bytes) -> dict[str, Any]:
    assert raw.startswith(b"data: ") and raw.endswith(b"\n\n")
    body: dict[str, Any] = json.loads(raw[6:])
    return body


def test_the_first_chat_event_has_the_role_and_later_ones_do_not() -> None:
    first = event(responses.delta_event(request("chat"), Delta(0, first=True)))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    later = event(responses.delta_event(request("chat"), Delta(0, text="b", finish_reason="length")))
    assert later["choices"] == [
        {
            "index": 0,
            "delta": {"content": "b"},
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
    ]


def test_an_event_that_says_nothing_is_not_sent() -> None:
    held = Delta(0, token_ids=[5])
    assert responses.delta_event(request(), held) == b""
    asked = request(return_token_ids=True)
    assert event(responses.delta_event(asked, held))["choices"][0]["token_ids"] == [5]


def test_a_token_line_tells_every_id_even_where_there_is_nothing_to_show() -> None:
    """The relay must know all ids behind the text that it has passed on."""
    asked = request(token_lines=True, stop=("the fox",))
    the, fox, end = (*ids("the"), *ids(" fo"), *ids("!"))[-3:]
    events = [
        responses.delta_event(asked, Delta(1, token_ids=[the])),
    ]
    assert events == [b": t 1 %d\n\n" % the]
    line, data, *_ = responses.delta_event(asked, Delta(0, text="!", token_ids=[fox, end])).split(b"\n")
    assert line == b": t 0 %d,%d" % (fox, end)
    assert data.startswith(b"data: {")
    last = responses.delta_event(asked, Delta(0, token_ids=[end], finish_reason="stop"))
    assert last.startswith(b": t 0 %d stop\ndata: {" % end)


def test_margins_come_with_ids_and_logprobs_only_and_infinity_is_null() -> None:
    sampling = SamplingParams(seed=1, max_tokens=5, logprobs=0)
    delta = Delta(0, text="a", token_ids=[5], margins=[float("inf")])
    choice = event(responses.delta_event(request(sampling=sampling, return_token_ids=True), delta))[
        "choices"
    ][0]
    assert choice["margins"] == [None]
    assert "margins" not in event(responses.delta_event(request(sampling=sampling), delta))["choices"][0]


def test_the_last_event_has_usage_and_timing_as_asked() -> None:
    generation = Generation(request(include_usage=True, want_timing=True), tokenizer())
    generation.timing = Timing(pull_bytes=5)
    last = event(responses.last_event(generation))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3
    assert last["kvferry_timing"]["pull_bytes"] == 5
    assert responses.last_event(Generation(request(), tokenizer())) == b""
    for include_usage in (True, False):
        generation = Generation(request(include_usage=include_usage, token_lines=True), tokenizer())
        assert responses.last_event(generation).startswith(b": t end\n")
        assert responses.last_event(generation).endswith(b"\n\n")


def test_a_prefill_leg_says_length_for_choices_that_go_on() -> None:
    generation = Generation(request(produce="t"), tokenizer())
    deltas = generation.push(sampled(ids("a"), None, None))
    body = responses.completion(generation, deltas, {"transfer_id": "t"})
    assert body["choices"][0]["finish_reason"] == "length"
    assert responses.first_token_entry(deltas[0]).finish_reason is None
    assert body["kv_transfer_params"] == {"transfer_id": "t"}


def test_text_offsets_run_through_all_deltas_of_a_choice() -> None:
    generation = Generation(request(sampling=SamplingParams(seed=1, max_tokens=9, logprobs=0)), tokenizer())
    whole = gather(run(generation, sampled(ids("the quick brown fox"), 0, "length")))
    assert whole.logprobs is not None
    assert whole.logprobs["text_offset"] == [0, 3, 9, 15]


def finished(
    kind: AnswerKind, token_ids: list[int], last: FinishReason, **fields: Any
) -> list[dict[str, Any]]:
    """The choice of a whole answer, and of a streamed one the last chunk's."""
    asked = request(kind, **fields)
    whole = gather(run(Generation(asked, tokenizer()), sampled(token_ids, None, last)))
    deltas = run(Generation(asked, tokenizer()), sampled(token_ids, None, last))
    body = responses.completion(Generation(asked, tokenizer()), [whole], None)
    return [body["choices"][0], event(responses.delta_event(asked, deltas[-1]))["choices"][0]]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_stop_string_or_token_that_ended_a_choice_is_said(kind: AnswerKind) -> None:
    stops = SamplingParams(seed=1, max_tokens=50, stop_token_ids=(ids(";")[0],))
    for choice in finished(kind, ids("the fox;"), "stop", sampling=stops):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids(";")[0])
    for choice in finished(kind, ids("the fox; a"), "stop", stop=("x", "o")):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o")
    for last in ("stop", "length"):
        for choice in finished(kind, ids("the fox"), last):
            assert (choice["finish_reason"], choice["stop_reason"]) == (last, None)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("last", ["stop", "length"])
@pytest.mark.parametrize("before", ["", CALL])
def test_an_answer_that_ends_within_a_call_does_not_say_that_it_calls(
    last: FinishReason, before: str
) -> None:
    message = message_format(False, "")
    end = ids(";")[:1] if last == "stop" else []
    for cut in range(len("<tool_call>"), CALL.index("}") + 1):
        for choice in finished("chat", ids(before + CALL[:cut]) + end, last, message=message):
            assert choice["finish_reason"] == last, CALL[:cut]
    for choice in finished("chat", ids(before + CALL), "length", stop=("1",), message=message):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "1")
    for choice in finished("chat", [*ids(before + CALL), ids(";")[0]], "stop", message=message):
        assert choice["finish_reason"] == "tool_calls"


def test_the_first_token_of_two_agents_says_what_ended_it() -> None:
    """It may be all of the answer: then the prefill agent's entry is all that the client gets."""
    (token,) = ids(";")
    sampling = SamplingParams(seed=1, max_tokens=50, stop_token_ids=(token,))
    (delta,) = Generation(request(sampling=sampling), tokenizer()).push(sampled([token], None, "stop"))
    assert responses.first_token_entry(delta).stop_reason == token


BYTES = {0xC3: "bytes:\\xc3", 0xE6: "bytes:\\xe6", 0xF0: "bytes:\\xf0"}


def byte_ids() -> list[int]:
    every = {tokenizer().token_bytes(token_id): token_id for token_id in range(tokenizer().vocab_size)}
    return [every[bytes([byte])] for byte in BYTES]


def test_tokens_that_are_no_text_are_named_by_their_bytes() -> None:
    first, second, third = byte_ids()
    top = ((second, -0.5), (first, -1.0), (third, -2.0))
    made = completion_logprobs(tokenizer(), [(third, TokenLogprob(logprob=-2.0, top=top))], [0])
    assert made["tokens"] == ["bytes:\\xf0"]
    assert made["top_logprobs"] == [{"bytes:\\xe6": -0.5, "bytes:\\xc3": -1.0, "bytes:\\xf0": -2.0}]


def test_no_two_tokens_have_one_name() -> None:
    """Ids that only the model has are all of no text; the sampled one keeps its name."""
    padding = [tokenizer().vocab_size - 1, tokenizer().vocab_size - 2]
    top = tuple((token_id, -float(rank)) for rank, token_id in enumerate(padding))
    (shown,) = completion_logprobs(tokenizer(), [(padding[1], TokenLogprob(logprob=-1.0, top=top))], [0])[
        "top_logprobs"
    ]
    assert shown == {f"token_id:{padding[0]}": -0.0, "": -1.0}


def test_tokens_are_named_by_their_ids_if_that_is_wanted() -> None:
    the, fox = ids("the fox")
    tokens = [(the, TokenLogprob(logprob=-0.25, top=((fox, -0.1), (the, -0.25))))]
    made = completion_logprobs(tokenizer(), tokens, [0], by_id=True)
    assert (made["tokens"], list(made["top_logprobs"][0])) == (
        [f"token_id:{the}"],
        [f"token_id:{fox}", f"token_id:{the}"],
    )
    (entry,) = chat_logprobs(tokenizer(), tokens, [0], by_id=True)["content"]
    assert (entry["token"], entry["bytes"]) == (f"token_id:{the}", list(b"the"))
    sampling = SamplingParams(seed=1, max_tokens=9, logprobs=0)
    asked = request(sampling=sampling, names_by_id=True)
    (delta,) = Generation(asked, tokenizer()).push(sampled([the], 0, None))
    assert delta.logprobs is not None and delta.logprobs["tokens"] == [f"token_id:{the}"]


TOKENIZERS = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}


@functools.cache
def another(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(write_checkpoint(Path(directory), TOKENIZERS[kind]()))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    prompt=st.text("日本é🎉a =", min_size=1, max_size=8), said=st.text("日本é🎉a =", min_size=1, max_size=8)
)
def test_offsets_are_places_in_the_text(kind: str, prompt: str, said: str) -> None:
    """A token that is a piece of a character is where the character is, in the prompt as in the answer."""
    read = another(kind)
    prompt_ids = read.encode(prompt, add_special_tokens=True)
    said_ids = list(read.encode(said, add_special_tokens=False))
    sampling = SamplingParams(seed=1, max_tokens=99, logprobs=0, prompt_logprobs=0)
    asked = dataclasses.replace(request(sampling=sampling, echo=prompt), prompt_ids=prompt_ids)
    generation = Generation(asked, read)
    generation.add_prompt_logprobs([PromptLogprob(logprob=-1.0, rank=1)] * (len(prompt_ids) - 1))
    whole = gather(run(generation, sampled(said_ids, 0, "length")))
    assert whole.logprobs is not None
    offsets, size = whole.logprobs["text_offset"], len(prompt_ids)
    assert offsets == sorted(offsets)
    assert offsets[size] == len(prompt)
    for places, token_ids, start in (
        (offsets[:size], prompt_ids, 0),
        (offsets[size:], said_ids, len(prompt)),
    ):
        text = whole.text[start : start + (len(prompt) if start == 0 else len(whole.text))]
        for place, token_id in zip(places, token_ids, strict=True):
            spelled = read.token_bytes(token_id).decode(errors="ignore")
            if token_id not in read.special_ids and spelled.encode() == read.token_bytes(token_id):
                assert text.startswith(spelled.lstrip() if place == start else spelled, place - start)


def test_half_a_character_that_is_not_gone_on_with_counts_as_it_is_shown() -> None:
    """As much as U+FFFD, which the text has in its place."""
    half = ids("日")[0]
    sampling = SamplingParams(seed=1, max_tokens=9, logprobs=0)
    whole = gather(
        run(
            Generation(request(sampling=sampling), tokenizer()),
            sampled([half, *ids("a"), half, half], 0, "length"),
        )
    )
    assert whole.text == "\ufffda\ufffd\ufffd"
    assert whole.logprobs is not None and whole.logprobs["text_offset"] == [0, 1, 2, 3]


def test_special_tokens_that_are_not_shown_have_no_place() -> None:
    bos, *rest = tokenizer().encode("the fox", add_special_tokens=True)
    assert echoed_offsets(tokenizer(), [bos, *rest], "the fox") == [0, 0, 3]
    assert echoed_offsets(tokenizer(), [bos, *rest], "<|bos|>the fox") == [0, 7, 10]


@pytest.mark.parametrize("begun", ["", "<think>\n"])
@pytest.mark.parametrize("shown", [True, False])
def test_tokens_of_reasoning_are_counted(begun: str, shown: bool) -> None:
    message = dataclasses.replace(message_format(False, begun), show_reasoning=shown)
    opening, thought, closing = ids("" if begun else "<think>"), ids("why not the fox"), ids("</think>")
    answer = [*opening, *thought, *closing, *ids("the lazy dog")]
    for token_ids, count in ((answer, len(thought)), (answer[: len(opening) + 2], 2), (opening or [], 0)):
        generation = Generation(request("chat", message=message), tokenizer())
        run(generation, sampled(token_ids, None, "length"))
        assert generation.token_usage.reasoning_tokens == count
        usage = responses.usage_body(generation.token_usage)
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    held = Generation(request("chat", message=message, stop=("zzz", "the foxes")), tokenizer())
    run(held, sampled(answer, None, "length"))
    assert held.token_usage.reasoning_tokens == len(thought)


def test_a_completion_has_no_reasoning_to_count() -> None:
    generation = Generation(request(), tokenizer())
    assert "completion_tokens_details" not in responses.usage_body(generation.token_usage)
