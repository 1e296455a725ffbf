# SPDX-License-Identifier: Apache-2.0
"""Which fields of a client's reach the servers of other engines (N6)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.proxy.dialects.base import Dialect
from kvferry.proxy.dialects.catalogue import all_dialects
from kvferry.proxy.dialects.fields import (
    ATOM_FIELDS,
    SGLANG_FIELDS,
    VLLM_FIELDS,
    ClientFields,
    allowed_fields,
)
from kvferry.proxy.errors import InvalidRequest
from kvferry.proxy.ids import Endpoint
from kvferry.proxy.request import ClientRequest, parse_request
from tests.standins.engines import SERVERS, Fabric
from tests.unit.agent.api import published_fields as published
from tests.unit.proxy.conftest import Stage

ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat/completions")
DIALECTS = {
    name: dialect
    for name, dialect in all_dialects(nixl_lease_s=30.0, moriio_lease_s=60.0).items()
    if not dialect.is_native
}
OPENAI = {
    "completions": published.OPENAI_COMPLETION,
    "chat/completions": published.OPENAI_CHAT,
}
INTERNAL: dict[str, Any] = {
    "bootstrap_host": "10.0.0.1",
    "bootstrap_pair_key": "x",
    "bootstrap_port": 1,
    "bootstrap_room": 5,
    "custom_labels": {"a": "b"},
    "custom_logit_processor": "gASV",
    "custom_params": {},
    "data_parallel_rank": 5,
    "disagg_prefill_dp_rank": 5,
    "ec_transfer_params": {"do_remote_encode": True},
    "extra_body": {"priority": 1},
    "extra_key": "x",
    "input_embeds": [[0.1]],
    "input_ids": [1, 2],
    "kvferry_first_choice": 1,
    "logits_processors": ["os.system"],
    "lora_path": "/x",
    "ngram_corpus_id": "x",
    "of_the_future": 0,
    "priority": -9,
    "prompt_embeds": "AA==",
    "request_id": "x",
    "return_hidden_states": False,
    "rid": "x",
    "routed_dp_rank": 0,
    "sampling_params": {"n": 99},
    "session_id": "x",
    "session_params": {"id": "x"},
    "steer_vector_request": {},
    "stream_interval": 1000,
    "vllm_xargs": {"kv_transfer_params": "x"},
}


def ask(endpoint: Endpoint, **fields: Any) -> ClientRequest:
    asked = {"prompt": "a"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    return parse_request(endpoint, json.dumps({"model": "m", **asked, **fields}).encode())


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", INTERNAL)
def test_what_is_not_a_clients_is_refused_by_name(dialect: Dialect, endpoint: Endpoint, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        dialect.check(ask(endpoint, **{name: INTERNAL[name]}))
    assert (caught.value.status, caught.value.param) == (400, name)
    dialect.check(ask(endpoint, **{name: None}))


@pytest.mark.parametrize("name", DIALECTS)
def test_an_operator_allows_more(name: str) -> None:
    dialect = all_dialects(allow_fields=allowed_fields(["rid,priority", "x-y"]))[name]
    dialect.check(ask("completions", rid="x", priority=3))
    with pytest.raises(InvalidRequest) as caught:
        dialect.check(ask("completions", priority=3, session_id="x"))
    assert caught.value.param == "session_id"


@pytest.mark.parametrize("word", ["", "a,", "a b", "--rid", "a=1"])
def test_what_is_no_name_cannot_be_allowed(word: str) -> None:
    with pytest.raises(ValueError, match=r"allow_fields: .* is no name of a field"):
        allowed_fields([word])


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("stream_options", {"include_usage": True, "priority": 1}, "stream_options.priority"),
        ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ("chat_template_kwargs", {"enable_thinking": True, "tokenize": 1}, "chat_template_kwargs.tokenize"),
    ],
)
def test_nor_may_it_come_within_another(dialect: Dialect, name: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        dialect.check(ask("chat/completions", stream=True, **{name: value}))
    assert caught.value.param == param


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_what_clients_send_within_another_may(dialect: Dialect) -> None:
    for kwargs in ({"enable_thinking": False}, None, "no object"):  # that is the engine's to refuse
        dialect.check(ask("chat/completions", chat_template_kwargs=kwargs))
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    dialect.check(ask("completions", stream=True, stream_options=options))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("fields", [VLLM_FIELDS, SGLANG_FIELDS, ATOM_FIELDS], ids=["vLLM", "SGLang", "ATOM"])
def test_all_of_openais_fields_pass(endpoint: Endpoint, fields: ClientFields) -> None:
    assert OPENAI[endpoint] <= fields[endpoint]


def test_what_the_engines_have_beside_is_a_decision() -> None:
    """A field that an engine's next version has is in neither list until somebody has looked at it."""
    withheld = {"kv_transfer_params", "logits_processors", "priority", "request_id", "vllm_xargs"}
    for endpoint, names, more in (
        ("completions", published.VLLM_COMPLETION, {"prompt_embeds", "steer_vector_request"}),
        ("chat/completions", published.VLLM_CHAT, {"ec_transfer_params"}),
    ):
        assert names - VLLM_FIELDS[endpoint] == withheld | more
    withheld = {
        *("bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room"),
        *("custom_logit_processor", "custom_params", "data_parallel_rank", "disagg_prefill_dp_rank"),
        *("extra_key", "lora_path", "ngram_corpus_id", "priority", "return_hidden_states"),
        *("return_routed_experts", "rid", "routed_dp_rank", "routed_experts_start_len"),
        *("session_id", "session_params"),
    }
    for endpoint, names, more in (
        ("completions", published.SGLANG_COMPLETION, {"custom_labels"}),
        ("chat/completions", published.SGLANG_CHAT, {"input_ids"}),
    ):
        assert names - SGLANG_FIELDS[endpoint] == withheld | more


@pytest.mark.parametrize("dialect", ["vllm-nixl", "sglang"])
async def test_a_count_of_tokens_brings_no_template_either(stage: Stage, dialect: str) -> None:
    """`/tokenize` renders chats too: a template of the client's can take a server's time without end."""
    proxies, fabric = (stage.discovery,), Fabric()
    async with SERVERS[dialect](role="prefill", proxies=proxies, fabric=fabric, model="m") as server:
        await server.until(lambda: server.acks)
        for name in ("chat_template", "tokenizer_kwargs"):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            body["chat_template_kwargs"] = {"enable_thinking": True, name: "{{ 1 }}"}
            async with stage.http.post(f"{stage.proxy.url}/tokenize", json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, f"chat_template_kwargs.{name}")
        assert not server.asked
