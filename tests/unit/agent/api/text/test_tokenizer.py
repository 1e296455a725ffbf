# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and the chat template, next to what transformers does with the same files."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from kvferry.agent.api.text.chat_template import ChatTemplate, TemplateRefused
from kvferry.agent.api.text.tokenizer import TextTooLong, Tokenizer
from tests.standins.checkpoint import (
    ASSISTANT,
    BOS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("byte-level"), byte_level_tokenizer())


def test_special_tokens_are_added_to_plain_text_but_not_twice_to_chat_text(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    bos = tokenizer.encode("", add_special_tokens=True)
    assert len(bos) == 1
    assert tokenizer.encode("fox", add_special_tokens=True)[:1] == bos
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render([{"role": "user", "content": "fox"}])
    assert text == f"{BOS}<|user|>fox{ASSISTANT}"
    assert tokenizer.encode(text, add_special_tokens=False).count(bos[0]) == 1


def test_token_bytes_of_a_text_join_to_its_utf8(directory: Path, tmp_path: Path) -> None:
    text = "naïve 日本語 \U0001f980\n\x00"
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    fallback = Tokenizer(write_checkpoint(tmp_path, byte_fallback_tokenizer()))
    ids = fallback.encode(text, add_special_tokens=False)
    assert b"".join(map(fallback.token_bytes, ids)) == b" " + text.encode()


def test_other_threads_run_while_a_text_is_encoded(directory: Path) -> None:
    """D2: `encode` of the library holds the interpreter's lock, and with it the event loop, to the end."""
    tokenizer, text = Tokenizer(directory), "the quick brown fox " * 20_000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,), kwargs={"add_special_tokens": True})
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_a_text_of_too_many_tokens_is_not_turned_into_ids(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    assert len(tokenizer.encode("fox" * 5, add_special_tokens=False, max_tokens=15)) <= 15
    with pytest.raises(TextTooLong) as error:
        tokenizer.encode("é" * 50, add_special_tokens=False, max_tokens=20)
    assert error.value.num_tokens > 20


def test_the_longest_token_bounds_a_text_unless_texts_may_shrink(directory: Path, tmp_path: Path) -> None:
    byte_level = Tokenizer(directory)
    assert byte_level.max_token_bytes == len("<|assistant|>")
    assert Tokenizer(write_checkpoint(tmp_path / "a", byte_fallback_tokenizer())).max_token_bytes == 13
    shrinking = byte_level_tokenizer()
    shrinking.normalizer = normalizers.NFC()
    assert Tokenizer(write_checkpoint(tmp_path / "b", shrinking)).max_token_bytes == 4 * 13
    for number, normalizer in enumerate(
        (normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("  ", " "))
    ):
        shrinking.normalizer = normalizer
        made = Tokenizer(write_checkpoint(tmp_path / f"{number}", shrinking))
        assert made.max_token_bytes is None
    greedy = byte_level_tokenizer()
    greedy.add_tokens([AddedToken("<x>", rstrip=True)])
    assert Tokenizer(write_checkpoint(tmp_path / "greedy", greedy)).max_token_bytes is None
    partial = byte_level_tokenizer()
    partial.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    assert Tokenizer(write_checkpoint(tmp_path / "partial", partial)).max_token_bytes is None


def test_ids_beyond_the_tokenizer_are_empty_text(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    assert tokenizer.token_text(tokenizer.vocab_size - 1) == ""


def test_the_fingerprint_follows_every_tokenizer_file(directory: Path, tmp_path: Path) -> None:
    copy = write_checkpoint(tmp_path, byte_level_tokenizer())
    assert Tokenizer(copy).fingerprint == Tokenizer(directory).fingerprint
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer(copy).fingerprint != Tokenizer(directory).fingerprint


def test_a_template_file_and_named_templates_are_found(directory: Path, tmp_path: Path) -> None:
    copy = write_checkpoint(tmp_path, byte_level_tokenizer())
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named {{ eos_token }}"},
    ]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    template = Tokenizer(copy).chat_template
    assert template is not None and template.render([]) == "named <|end|>"
    (copy / "chat_template.jinja").write_text("file")
    template = Tokenizer(copy).chat_template
    assert template is not None and template.render([]) == "file"


def test_no_template_is_none(tmp_path: Path) -> None:
    assert Tokenizer(write_checkpoint(tmp_path, byte_level_tokenizer(), None)).chat_template is None


def test_templates_render_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index0 > 1 %}{% break %}{% endif %}\n"
        "    {{- message.role + ': ' + message | tojson }}\n"
        "  {% if true %}\n"
        "  kept\n"
        "  {% endif %}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "b"}, {"role": "x"}]
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(messages) == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ raise_exception('a' * 100000) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0]['no'].such }}",
        "{{ 'a'.index('b') }}",
        "{{ messages[0].tool_calls | tojson }}",
    ],
)
def test_what_a_template_cannot_render_is_refused(source: str) -> None:
    """The sandbox holds, and no template error becomes HTTP 500."""
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    message = {"role": "user", "content": "a", "tool_calls": deep}
    with pytest.raises(TemplateRefused) as caught:
        ChatTemplate(source, {}).render([message])
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "end", "end"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", " a b ", " a b "),
        ("{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}", " a b ", "a b"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}</s>", "", ""),
    ],
)
def test_a_message_is_continued_right_after_its_content(source: str, content: str, expected: str) -> None:
    """The content may occur again in what the template puts behind it."""
    messages = [{"role": "assistant", "content": content}]
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == expected


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    with pytest.raises(TemplateRefused, match="final message"):
        ChatTemplate("{{ messages | length }}", {}).render(
            [{"role": "assistant", "content": "a"}], continue_final_message=True
        )
