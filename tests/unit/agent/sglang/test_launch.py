# SPDX-License-Identifier: Apache-2.0
"""What `kvferry agent --engine sglang` starts. How it is started is `unit/agent/vllm/test_launch.py`'s."""

from __future__ import annotations

import sys

import pytest

from kvferry.agent.plugin.launch import CannotStart
from kvferry.agent.sglang.launch import SglangEngineConfig
from kvferry.agent.sglang.settings import read_settings
from kvferry.deploy.cli import main


def test_options_go_to_sglang_or_to_the_plane() -> None:
    config = SglangEngineConfig(
        model="m",
        role="decode",
        port=30000,
        tp=2,
        proxy=("127.0.0.1:1", "dns:proxies"),
        lease_s=2.5,
        verify_kv=0.05,
        name="one",
    )
    words = config.command(["--page-size", "16"], "")
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    told = " ".join(words)
    assert "--model-path m --host 127.0.0.1 --port 30000 --tp-size 2" in told
    assert "--disaggregation-mode decode --disaggregation-transfer-backend kvferry" in told
    assert told.endswith("--page-size 16")
    environ = config.environment("/run/drain")
    settings = read_settings(environ, host="127.0.0.1", port=30000, own_ip="10.0.0.1")
    assert settings.proxy == config.proxy
    assert (settings.lease_s, settings.name, settings.drain_socket) == (2.5, "one", "/run/drain")
    assert settings.verify_kv == 0.05
    assert settings.advertise_url == "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("options", "named"),
    [({"role": "both"}, "SGLang has no server of both"), ({"transfer": "cuda_ipc"}, "never tried")],
)
def test_what_cannot_be_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SglangEngineConfig(model="m", **options)


def test_an_environment_without_sglang_is_named() -> None:
    with pytest.raises(CannotStart, match=r"lacks sglang.*: install SGLang there"):
        SglangEngineConfig.inspect(sys.executable)


def test_the_command_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["agent", "--engine", "sglang", "--help"])
    assert "Start a server of SGLang with kvferry's plane inside" in capsys.readouterr().out.replace(
        "\n", " "
    )
