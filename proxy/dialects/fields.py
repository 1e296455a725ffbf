# SPDX-License-Identifier: Apache-2.0
"""The fields of a request that a client may send to servers of other engines, one catalogue per engine.

Those of OpenAI's API, and the engine's own that say how to sample, how to render a prompt, and how to write
the answer. An engine reads more from a body: ranks, rooms and ids by which its servers find each other,
priorities, sessions, adapters, code. Those are a router's or an operator's, so what is not listed is refused.

Sources: docs/sources.md#vllm, docs/sources.md#sglang and docs/sources.md#atom.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvferry.proxy.errors import InvalidRequest
from kvferry.proxy.ids import Endpoint

ClientFields = Mapping[Endpoint, frozenset[str]]

_OPENAI = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens metadata model n presence_penalty
    response_format seed service_tier stop store stream stream_options temperature top_p user
"""
_OPENAI_COMPLETION = "prompt suffix"
_OPENAI_CHAT = """
    audio function_call functions max_completion_tokens messages modalities moderation parallel_tool_calls
    prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
    safety_identifier tool_choice tools top_logprobs verbosity web_search_options
"""
_EVERYWHERE = """
    cache_salt ignore_eos kvferry_timing min_p min_tokens prompt_logprobs repetition_penalty return_token_ids
    skip_special_tokens stop_token_ids top_k use_beam_search
"""


def _client_fields(both: str, completion: str, chat: str) -> ClientFields:
    shared = f"{_OPENAI} {_EVERYWHERE} {both}"
    return MappingProxyType(
        {
            "completions": frozenset(f"{shared} {_OPENAI_COMPLETION} {completion}".split()),
            "chat/completions": frozenset(f"{shared} {_OPENAI_CHAT} {chat}".split()),
        }
    )


VLLM_FIELDS = _client_fields(
    """
    add_special_tokens allowed_token_ids guided_choice guided_decoding_backend guided_grammar guided_json
    guided_regex guided_whitespace_pattern include_stop_str_in_output length_penalty repetition_detection
    return_tokens_as_token_ids spaces_between_special_tokens structured_outputs truncate_prompt_tokens
    """,
    "",
    """
    add_generation_prompt bad_words chat_template chat_template_kwargs continue_final_message documents
    include_reasoning logprob_token_ids media_io_kwargs mm_processor_kwargs return_assistant_tokens_mask
    return_prompt_text return_token_offsets thinking_token_budget truncation_side
    """,
)
SGLANG_FIELDS = _client_fields(
    "ebnf images_config no_stop_trim regex return_cached_tokens_details stop_regex",
    "json_schema",
    """
    chat_template_kwargs continue_final_message max_dynamic_patch min_dynamic_patch reasoning
    return_meta_info return_prompt_token_ids separate_reasoning stream_reasoning task use_audio_in_video
    """,
)
ATOM_FIELDS = _client_fields("", "", "chat_template_kwargs")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NULL = b"null"
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_VARIABLES = frozenset({"chat_template", "conversation", "tokenize", "tokenizer_kwargs"})
"""Members of `chat_template_kwargs` that are no template's variables: they replace what a server renders."""


def allowed_fields(words: Iterable[str]) -> frozenset[str]:
    """Further fields that an operator allows; each word is a name, or several with commas between them.

    Raises ValueError for what is no name.
    """
    names = frozenset(name for word in words for name in word.split(","))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"allow_fields: {name!r} is no name of a field")
    return names


def check_fields(body: Mapping[str, Any], listed: frozenset[str], allowed: frozenset[str]) -> None:
    """Raise `InvalidRequest` for a field, also one in another, that is neither listed nor `allowed`.

    The values of `body` are JSON.
    """
    for name, value in body.items():
        if name not in listed and name not in allowed and bytes(value) != _NULL:
            message = f"{name} is not passed on to these servers; --allow-fields of the proxy may allow it"
            raise InvalidRequest(message, param=name)
    check_template_variables(body)


def check_template_variables(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for what an engine would take for more than a variable of its chat template."""
    kwargs = bytes(body.get("chat_template_kwargs", _NULL))
    if kwargs.startswith(b"{"):
        for name in _NO_VARIABLES & _MEMBERS.decode(kwargs).keys():
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} is not a variable of a template", param=param)
