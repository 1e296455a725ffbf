# SPDX-License-Identifier: Apache-2.0
"""The command line and the configuration file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvferry.proxy.config import ProxyConfig, parse_config


def test_the_flags_are_these() -> None:
    """The list is frozen here, so that a new flag is a decision."""
    assert {field.name for field in dataclasses.fields(ProxyConfig)} == {
        "host",
        "port",
        "workers",
        "cluster_name",
        "discovery_port",
        "prefill",
        "decode",
        "dialect",
        "nodes",
        "allow_fields",
        "max_body_bytes",
        "body_timeout_s",
        "connect_timeout_s",
        "first_byte_timeout_s",
        "idle_timeout_s",
        "total_timeout_s",
        "retries",
        "migrations",
        "prefill_policy",
        "decode_policy",
        "split_min_tokens",
        "decode_only_fallback",
        "stream_pull_min_tokens",
        "prefix_pull_min_tokens",
        "keep_turns_s",
        "canary_interval_s",
        "canary_max_share",
        "prefill_limit",
        "decode_limit",
        "queue_limit",
        "queue_timeout_s",
        "breaker_failures",
        "breaker_pause_s",
        "nixl_lease_s",
        "moriio_lease_s",
        "max_connections",
        "keepalive_s",
        "client_stall_s",
        "drain_s",
        "api_keys",
        "share_prefixes",
        "cors_origins",
        "allowed_hosts",
        "allow_address",
        "cluster_key",
        "tls_cert",
        "tls_key",
        "agent_ca",
        "ttft_objective_s",
        "tpot_objective_s",
        "model_objectives",
        "log_prompts",
        "log_level",
        "log_format",
        "otlp_endpoint",
    }


def test_defaults_and_deadlines_are_sane() -> None:
    """R32: minutes, not years."""
    config = parse_config([])
    assert (config.host, config.port, config.discovery_port) == ("127.0.0.1", 10001, 36367)
    assert config.connect_timeout_s < config.idle_timeout_s < config.first_byte_timeout_s
    assert config.first_byte_timeout_s < config.total_timeout_s <= 3600


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--prot", "1"], "--prot"),
        (["--port", "many"], "port"),
        (["--port", "70000"], "port"),
        (["--workers", "0"], "workers"),
        (["--prefill", "http://a:1"], "no dialect"),
        (["--prefill", "a:1", "--dialect", "vllm-nixl"], "a:1"),
        (["--prefill", "http://a:1,bootstrap_prt=5", "--dialect", "sglang"], "bootstrap_prt"),
        (["--decode", "http://a:1,bootstrap_port=5", "--dialect", "vllm-nixl"], "bootstrap_port"),
        (["--decode", "http://a:1,bootstrap_port=0", "--dialect", "sglang"], "bootstrap_port"),
        (["--decode", "http://a:1", "--dialect", "vllm-moriio"], "handshake_port"),
        (["--prefill", "http://a:1", "--decode", "http://a:1/", "--dialect", "vllm-nixl"], "named twice"),
        (["--dialect", "vllm"], "dialect"),
        (["--idle-timeout-s", "0"], "--idle-timeout-s"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--retries", "-1"], "retries"),
        (["--migrations", "-1"], "migrations"),
        (["--decode-policy", "random"], "--decode-policy"),
        (["--decode-limit", "0"], "--decode-limit"),
        (["--queue-limit", "-1"], "--queue-limit"),
        (["--tls-cert", "cert.pem"], "--tls-key"),
        (["--tls-key", "key.pem"], "--tls-cert"),
        (["--allow-address", "10.0.0.0/8,10.1"], "'10.1'"),
        (["--log-level", "loud"], "--log-level"),
        (["--model-objectives", "m=2"], "'m=2'"),
        (["--model-objectives", "=2/0.1"], "'=2/0.1'"),
        (["--model-objectives", "m=1/nan"], "model-objectives"),
        (["--model-objectives", "m=0/1"], "model-objectives"),
        (["--model-objectives", "m=1/1", "--model-objectives", "m=2/1"], "twice"),
        (["--config", "/nowhere.yml"], "nowhere"),
    ],
)
def test_a_wrong_flag_or_value_ends_with_2_and_its_name(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(argv)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert named in line


def test_a_file_sets_what_flags_do_not(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yml"
    file.write_text("port: 5\ndiscovery_port: 6\n")
    config = parse_config(["--config", str(file), "--port", "7"])
    assert (config.port, config.discovery_port) == (7, 6)


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R22."""
    file = tmp_path / "proxy.yml"
    file.write_text("http_prt: 5\n")
    with pytest.raises(SystemExit) as stop:
        parse_config(["--config", str(file)])
    assert stop.value.code == 2
    assert "http_prt" in capsys.readouterr().err


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ProxyConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "Deadline for a whole request, in seconds." in shown


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ProxyConfig().port = 1  # type: ignore[misc]
