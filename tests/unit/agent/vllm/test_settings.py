# SPDX-License-Identifier: Apache-2.0
"""Settings are checked once, and a configuration that is not served is refused by the name of its setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.vllm.identity import is_continuable
from kvferry.agent.vllm.settings import check_served, dp_rank_of, read_settings, role_of, with_own_host
from tests.unit.agent.vllm.configs import vllm_config


@pytest.mark.parametrize("version", ["0.24.0", "0.29.0", "0.32.0+cpu", "0.33.1"])
def test_what_is_served_passes(version: str) -> None:
    check_served(version, vllm_config())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NotServed, match=named):
        check_served("0.32.0", vllm_config(**changes))


@pytest.mark.parametrize("version", ["0.23.1", "0.34.0", "1.0", "unknown"])
def test_a_version_that_is_not_served_is_named_with_those_that_are(version: str) -> None:
    with pytest.raises(NotServed, match=rf"{version} is outside of the served range 0\.24–0\.33"):
        check_served(version, vllm_config())


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_parallel_size": 2},
        {"nnodes": 2},
        {"data_parallel_size": 2},
        {"data_parallel_index": 1, "engine_id": "a_dp1"},
        {"use_mla": True},
        {"cache_dtype": "fp8_e4m3"},
        {"speculative_config": object()},
        {"is_hybrid": True},
    ],
)
def test_what_large_models_are_run_with_is_served(changes: dict[str, Any]) -> None:
    check_served("0.32.0", vllm_config(**changes))


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, None),
        ({"data_parallel_size": 2, "engine_id": "a_dp0"}, 0),
        # A dense model's, whose engines have data_parallel_size 1: the second, and each by its engine_id.
        ({"engine_id": "a_dp0"}, 0),
        ({"data_parallel_index": 1}, 1),
        ({"data_parallel_index": 12, "engine_id": "a_dp12", "data_parallel_rank_local": 4}, 12),
        # With hybrid or external load balancing each API has some ranks of its own.
        (
            {
                "data_parallel_index": 12,
                "engine_id": "a_dp12",
                "data_parallel_rank_local": 4,
                "local_engines_only": True,
            },
            4,
        ),
        ({"data_parallel_size": 2, "data_parallel_index": 1, "local_engines_only": True}, 0),
    ],
    ids=str,
)
def test_a_rank_is_what_the_api_calls_it(changes: dict[str, Any], rank: int | None) -> None:
    assert dp_rank_of(vllm_config(**changes)) == rank


def test_a_model_with_states_is_served_from_030_on() -> None:
    """Before, vLLM cannot be told that a load failed."""
    check_served("0.30.0", vllm_config(is_hybrid=True))
    with pytest.raises(NotServed, match=r"m keeps states.* from vLLM 0\.30 on"):
        check_served("0.29.0", vllm_config(is_hybrid=True))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"leases": 3}, "leases"),
        ({"lease_s": 0}, "lease_s"),
        ({"control_port": 65536}, "control_port"),
        ({"transfer": "telepathy"}, "telepathy"),
        ({"proxy": ["h:1"]}, "advertise_url"),
        ({"advertise_url": "10.0.0.1:8000"}, "advertise_url"),
        ({"advertise_url": "http://0.0.0.0:8000", "proxy": ["h:1"]}, "cannot dial 0.0.0.0"),
        (
            {"advertise_url": "http://10.0.0.1:8000", "advertise_host": "::", "proxy": ["h:1"]},
            "advertise_host is needed",
        ),
        ({"advertise_url": "http://10.0.0.1"}, "advertise_url"),
        ({"advertise_url": "http://10.0.0.1:99999"}, "advertise_url|[Pp]ort"),
    ],
    ids=str,
)
def test_a_setting_that_is_unknown_or_invalid_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(NotServed, match=f"kv_connector_extra_config.*({named})"):
        read_settings(extra)


def test_addresses_follow_from_the_url() -> None:
    settings = read_settings({"advertise_url": "http://10.0.0.1:8000", "proxy": ["h:1"]})
    assert (settings.advertised_host, settings.bound_host) == ("10.0.0.1", "10.0.0.1")
    assert settings.api_address == ("10.0.0.1", 8000)
    assert read_settings({}).bound_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("extra", "changes", "host"),
    [
        ({"advertise_url": "http://127.0.0.1:1"}, {}, "127.0.0.1"),
        # Of ranks on another host than the API's.
        ({"advertise_url": "http://192.0.2.1:1"}, {}, "10.0.0.2"),
        ({"advertise_url": "http://192.0.2.1:1", "advertise_host": "192.0.2.7"}, {}, "192.0.2.7"),
        ({"advertise_url": "http://192.0.2.1:1", "bind_host": "0.0.0.0"}, {}, "192.0.2.1"),
        ({}, {"node_rank_within_dp": 1}, "10.0.0.2"),
        ({}, {}, "127.0.0.1"),
    ],
    ids=str,
)
def test_a_host_that_is_not_the_apis_is_found(
    extra: dict[str, Any], changes: dict[str, Any], host: str
) -> None:
    parallel = vllm_config(**changes).parallel_config
    assert with_own_host(read_settings(extra), parallel, lambda: "10.0.0.2").advertised_host == host


def test_a_role_is_that_of_vllm() -> None:
    roles = [role_of(each) for each in ("kv_producer", "kv_consumer", "kv_both")]
    assert roles == ["prefill", "decode", "both"]
    with pytest.raises(NotServed, match="kv_role"):
        role_of("kv_other")


def test_what_an_answer_depends_on_beside_its_ids_is_told() -> None:
    def served(defaults: dict[str, Any] | None = None, model_type: str = "qwen3", **parts: Any) -> Any:
        model = SimpleNamespace(
            get_diff_sampling_param=lambda: defaults or {}, hf_config=SimpleNamespace(model_type=model_type)
        )
        return SimpleNamespace(model_config=model, **parts)

    assert is_continuable(served())
    assert is_continuable(served({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}))
    parsers = [SimpleNamespace(reasoning_parser=name) for name in ("", "qwen3")]
    assert is_continuable(served(structured_outputs_config=parsers[0], reasoning_config=None))
    assert not is_continuable(served(structured_outputs_config=parsers[1]))
    assert not is_continuable(served(reasoning_config=parsers[1]))
    assert not is_continuable(served({"max_tokens": 2048}))
    assert not is_continuable(served({"presence_penalty": 1.5}))
    assert not is_continuable(served(model_type="gpt_oss"))
