# SPDX-License-Identifier: Apache-2.0
"""Servers of other engines as operators name them. Wrong input is refused by name (R22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.common.engine_servers.description import BadEngineServer, server_from_words, servers_from_file

FILE = """\
dialect: sglang
nodes:
  - {url: "http://10.0.0.1:30000", role: prefill, bootstrap_port: 9000, dp_size: 2}
  - {url: "http://10.0.0.2:30000/", role: decode, max_running: 64}
  - {url: "http://v:8200", role: both, dialect: vllm-nixl, model: tiny}
"""


@pytest.mark.parametrize(
    ("words", "dialect", "control"),
    [
        ("http://a:1", "vllm-nixl", ""),
        ("http://a:1", "sglang", "http://a:8998"),
        ("http://[::1]:1,bootstrap_port=5", "sglang", "http://[::1]:5"),
        ("http://a:1,kv_host=10.0.0.9", "vllm-mooncake", "http://10.0.0.9:8998"),
        (
            "http://a:1,handshake_port=6301,notify_port=6401",
            "vllm-moriio",
            "host:a,handshake:6301,notify:6401",
        ),
        ("http://a:1,handshake_port=7301", "atom", "tcp://a:7301"),
        ("http://[::1]:1", "atom", "tcp://[::1]:6301"),
    ],
)
def test_where_kv_is_reached_is_spelled_as_each_dialect_reads_it(
    words: str, dialect: str, control: str
) -> None:
    assert server_from_words(words, "prefill", dialect).control == control


def test_a_servers_own_dialect_counts_for_more() -> None:
    server = server_from_words("http://a:1,dialect=sglang,tp_size=4,max_running=8", "decode", "vllm-nixl")
    assert (server.dialect, server.tp_size, server.max_running, server.mode) == ("sglang", 4, 8, "write")


def test_a_file_names_servers_and_their_common_dialect(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yml"
    path.write_text(FILE)
    prefill, decode, both = servers_from_file(path)
    assert (prefill.role, prefill.control, prefill.dp_size) == ("prefill", "http://10.0.0.1:9000", 2)
    assert (decode.address, decode.max_running) == ("http://10.0.0.2:30000", 64)
    assert (both.role, both.dialect, both.model) == ("both", "vllm-nixl", "tiny")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nodes: [{url: 'http://a:1', role: prefill}]", "no dialect"),
        ("dialect: vllm\nnodes: []", "dialect"),
        ("nods: []", "nods"),
        ("nodes: 7", "nodes"),
        ("dialect: vllm-moriio\nnodes: [{url: 'http://a:1', role: prefill}]", "handshake_port"),
        ("dialect: atom\nnodes: [{url: 'http://a:1', role: prefill, kv_host: b}]", "kv_host"),
        ("dialect: sglang\nnodes: [{url: 'http://a:1', role: prefil}]", "role"),
        ("dialect: sglang\nnodes: [{url: 'http://a:1', role: prefill, bootstrap_prt: 5}]", "bootstrap_prt"),
        (
            "dialect: sglang\nnodes: [{url: 'http://a:1', role: prefill, bootstrap_port: '5'}]",
            "bootstrap_port",
        ),
        ("dialect: sglang\nnodes: [{url: 'http://a:1/v1', role: prefill}]", "http://a:1/v1"),
        ("dialect: sglang\nnodes: [{url: 'ftp://a', role: prefill}]", "ftp://a"),
        ("nodes: [", "nodes.yml"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "nodes.yml"
    path.write_text(text)
    with pytest.raises(BadEngineServer) as refused:
        servers_from_file(path)
    assert named in str(refused.value) and "nodes.yml" in str(refused.value)


@pytest.mark.parametrize(
    "words", ["http://a:1,x", "http://a:1,role=decode", "http://a:1,tp_size=2,tp_size=3"]
)
def test_an_option_that_has_no_place_is_refused(words: str) -> None:
    with pytest.raises(BadEngineServer):
        server_from_words(words, "prefill", "sglang")
