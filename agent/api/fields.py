# SPDX-License-Identifier: Apache-2.0
"""Body fields of OpenAI's, vLLM's and SGLang's servers that this one does not honour: harmless or refused.

A field is honoured (`openai_schema`), harmless (no answer depends on it), or refused by its name. A null
is the same as a field left out. docs/fields.md shows all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvferry.agent.errors import ApiError, bad_request

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        "custom_labels": "labels of metrics",
        "guided_decoding_backend": "llguidance constrains, whatever is named",
        "include_obfuscation": "a padding of streams that some servers add",
        "metadata": "notes of the client",
        "prompt_cache_key": "requests are routed by their prompt's beginning",
        "prompt_cache_options": "requests are routed by their prompt's beginning",
        "prompt_cache_retention": "a hint on how long to keep a prefix",
        "request_id": "`X-Request-Id` names a request",
        "rid": "`X-Request-Id` names a request",
        "safety_identifier": "it names the client's user",
        "service_tier": "there is one tier",
        "store": "nothing is stored",
        "user": "it names the client's user",
    }
)

_CONSTRAINED = "use structured_outputs"
_FUNCTIONS = "use tools and tool_choice"
_MEDIA = "only text goes in and comes out"
_ROUTING = "it belongs to SGLang's own routing and transfer"
_PLUGIN = "code and settings of plugins are not supported"
_LORA = "adapters are not supported"
_HIDDEN = "this is not reported"

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "audio": (_MEDIA, ()),
        "bootstrap_host": (_ROUTING, ()),
        "bootstrap_pair_key": (_ROUTING, ()),
        "bootstrap_port": (_ROUTING, ()),
        "bootstrap_room": (_ROUTING, ()),
        "custom_logit_processor": (_PLUGIN, ()),
        "custom_params": (_PLUGIN, ()),
        "data_parallel_rank": (_ROUTING, ()),
        "disagg_prefill_dp_rank": (_ROUTING, ()),
        "documents": ("put them into the messages", ([],)),
        "ebnf": (_CONSTRAINED, ()),
        "ec_transfer_params": (_MEDIA, ()),
        "extra_key": ("use cache_salt to keep prefixes apart", ()),
        "function_call": (_FUNCTIONS, ("none", "auto")),
        "functions": (_FUNCTIONS, ([],)),
        "images_config": (_MEDIA, ()),
        "input_ids": ("use /v1/completions for a prompt of token ids", ()),
        "json_schema": (_CONSTRAINED, ()),
        "length_penalty": ("beam search is not supported", (1, 1.0)),
        "logits_processors": (_PLUGIN, ([],)),
        "logprob_token_ids": ("use top_logprobs", ([],)),
        "lora_path": (_LORA, ()),
        "max_dynamic_patch": (_MEDIA, ()),
        "media_io_kwargs": (_MEDIA, ({},)),
        "min_dynamic_patch": (_MEDIA, ()),
        "mm_processor_kwargs": (_MEDIA, ({},)),
        "modalities": (_MEDIA, (["text"],)),
        "moderation": ("answers are not moderated", ()),
        "ngram_corpus_id": (_PLUGIN, ()),
        "no_stop_trim": ("use include_stop_str_in_output", (False,)),
        "prediction": ("predicted outputs are not supported", ()),
        "priority": ("only a proxy has priorities", (0,)),
        "prompt_embeds": ("a prompt is text or token ids", ()),
        "reasoning": ("use reasoning_effort, or chat_template_kwargs", ()),
        "regex": (_CONSTRAINED, ()),
        "repetition_detection": ("repetitions do not end an answer", ()),
        "return_assistant_tokens_mask": (_HIDDEN, (False,)),
        "return_cached_tokens_details": (_HIDDEN, (False,)),
        "return_hidden_states": (_HIDDEN, (False,)),
        "return_meta_info": (_HIDDEN, (False,)),
        "return_prompt_text": (_HIDDEN, (False,)),
        "return_prompt_token_ids": (_HIDDEN, (False,)),
        "return_routed_experts": (_HIDDEN, (False,)),
        "return_token_offsets": (_HIDDEN, (False,)),
        "routed_dp_rank": (_ROUTING, ()),
        "routed_experts_start_len": (_HIDDEN, (0,)),
        "session_id": ("a session is named by the header X-Session-Id", ()),
        "session_params": (_ROUTING, ()),
        "spaces_between_special_tokens": ("fast tokenizers have no such choice", (True,)),
        "steer_vector_request": (_PLUGIN, ()),
        "stop_regex": ("use stop", ([],)),
        "stream_reasoning": ("reasoning is streamed as it comes", (True,)),
        "suffix": ("an answer is what comes after the prompt", ("",)),
        "task": ("use chat_template_kwargs", ()),
        "thinking_token_budget": ("max_tokens limits reasoning and content together", ()),
        "truncation_side": ("the beginning of a prompt is cut off, never its end", ("left",)),
        "use_audio_in_video": (_MEDIA, (False,)),
        "use_beam_search": ("beam search is not supported", (False,)),
        "verbosity": ("say in the messages how long an answer should be", ()),
        "vllm_xargs": (_PLUGIN, ({},)),
        "web_search_options": ("there is no search", ()),
    }
)
"""Why each is refused, and the values that ask for nothing and so pass."""

_LONGEST_NEUTRAL = 64
"""Bytes of a value that is looked at: none that passes is longer."""
_NULL = msgspec.Raw(b"null")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")

FieldDecoder = msgspec.json.Decoder[Any]


def field_decoder(honoured: Collection[str]) -> FieldDecoder:
    """Make the decoder of bodies for `check_fields`, with the names that some endpoint honours.

    It stops at the first unknown field.
    """
    names = sorted({*honoured, *HARMLESS, *REFUSED})
    fields = [(name, msgspec.Raw, _NULL) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=True))


def check_fields(
    raw: bytes, decoder: FieldDecoder, honoured: Collection[str], elsewhere: Collection[str]
) -> None:
    """Refuse what would be ignored otherwise.

    Args:
        raw: The body.
        decoder: That of `field_decoder`.
        honoured: Names that this endpoint honours.
        elsewhere: Names that some endpoint honours.

    Raises:
        ApiError: 400 that names the field.
        ValueError: the body is no JSON object.
    """
    try:
        fields = decoder.decode(raw)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None:
            raise
        raise _unknown(unknown[1], honoured, elsewhere) from error
    for name, (reason, neutral) in REFUSED.items():
        value = bytes(getattr(fields, name))
        if value != bytes(_NULL) and not _is_one_of(value, neutral):
            raise bad_request(f"{name}: {reason}", name, "unsupported_field")
    for name in elsewhere:
        if name not in honoured and bytes(getattr(fields, name)) != bytes(_NULL):
            raise _unknown(name, honoured, elsewhere)


def _is_one_of(value: bytes, neutral: tuple[Any, ...]) -> bool:
    return len(value) <= _LONGEST_NEUTRAL and msgspec.json.decode(value) in neutral


def _unknown(name: str, honoured: Collection[str], elsewhere: Collection[str]) -> ApiError:
    shown = name[:_LONGEST_NEUTRAL]
    if name in elsewhere:
        return bad_request(f"{shown} is not a field of this endpoint", shown, "unknown_field")
    close = difflib.get_close_matches(shown, honoured, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return bad_request(f"{shown} is not a known field{hint}", shown, "unknown_field")
