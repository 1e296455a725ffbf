# SPDX-License-Identifier: Apache-2.0
"""The fields that the published request types of vLLM and SGLang have, and those of OpenAI's client.

Of vLLM: `entrypoints/openai/{completion,chat_completion}/protocol.py`, with the `guided_*` fields and
`logits_processors` of earlier releases; of SGLang: `srt/entrypoints/openai/protocol.py`; both as of November
2026. Of OpenAI: the parameter types of the installed `openai` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_type_hints

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

_VLLM = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens allowed_token_ids prompt_logprobs echo add_special_tokens response_format
    structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern logits_processors priority request_id return_tokens_as_token_ids
    return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection
"""
VLLM_COMPLETION = frozenset(f"{_VLLM} prompt suffix best_of prompt_embeds steer_vector_request".split())
VLLM_CHAT = frozenset(
    f"""{_VLLM} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    thinking_token_budget include_reasoning parallel_tool_calls truncation_side logprob_token_ids bad_words
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_token_offsets return_prompt_text return_assistant_tokens_mask
    ec_transfer_params""".split()
)
_SGLANG = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty
    stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params
    response_format custom_params custom_logit_processor images_config bootstrap_host bootstrap_port
    bootstrap_room bootstrap_pair_key routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key
    cache_salt ngram_corpus_id priority
"""
SGLANG_COMPLETION = frozenset(f"{_SGLANG} prompt best_of echo suffix json_schema custom_labels".split())
SGLANG_CHAT = frozenset(
    f"""{_SGLANG} messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls
    return_prompt_token_ids return_meta_info reasoning_effort reasoning task continue_final_message
    separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
    use_audio_in_video input_ids""".split()
)
OPENAI_COMPLETION = frozenset(get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {
    "stream"
}
OPENAI_CHAT = frozenset(get_type_hints(chat_create_params.CompletionCreateParamsBase)) | {"stream"}

COMPLETION: Mapping[str, frozenset[str]] = {
    "vLLM": VLLM_COMPLETION,
    "SGLang": SGLANG_COMPLETION,
    "OpenAI": OPENAI_COMPLETION,
}
CHAT: Mapping[str, frozenset[str]] = {"vLLM": VLLM_CHAT, "SGLang": SGLANG_CHAT, "OpenAI": OPENAI_CHAT}
