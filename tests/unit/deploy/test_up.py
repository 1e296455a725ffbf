# SPDX-License-Identifier: Apache-2.0
"""What `kvferry up` passes on to the processes that it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvferry.agent.plugin.launch import CannotStart
from kvferry.agent.sglang.launch import SglangEngineConfig
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.deploy.launcher import AgentSpec
from kvferry.deploy.up import PartOptions, UpConfig, cluster_spec, main


def test_the_form_of_logs_is_that_of_all_processes_unless_one_has_its_own() -> None:
    words = ("--proxy.log-format=text", "--decode.log-format", "text")
    spec = cluster_spec(
        UpConfig(log_format="json", otlp_endpoint="http://c:4318"), PartOptions("kvferry up", words)
    )
    prefill, decode = spec.agents
    assert spec.proxy_settings == {"log_format": "text", "otlp_endpoint": "http://c:4318"}
    for agent, log_format in ((prefill, "json"), (decode, "text")):
        assert agent.settings["otlp_endpoint"] == "http://c:4318"
        assert agent.settings["log_format"] == log_format


def test_nothing_is_passed_on_by_default() -> None:
    assert cluster_spec(UpConfig(), PartOptions("kvferry up", ())).proxy_settings == {}


@pytest.fixture
def python(tmp_path: Path) -> Callable[[int], str]:
    """Makes a Python whose environment has a served engine, and so many GPUs."""

    def make(num_gpus: int, version: str = "0.32.0") -> str:
        script = tmp_path / f"python-{num_gpus}"
        script.write_text(f"#!/bin/sh\necho '[[], \"{version}\", {num_gpus}]'\n")
        script.chmod(0o755)
        return str(script)

    return make


def servers(python: str, *words: str, **settings: Any) -> tuple[AgentSpec, ...]:
    config = UpConfig(engine="vllm", engine_python=python, **settings)
    return cluster_spec(config, PartOptions("kvferry up", words)).agents


def test_vllm_servers_get_their_options_and_vllm_its_own(
    python: Callable[[int], str], tmp_path: Path
) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("vllm: {max-model-len: 4096, enforce_eager: true, async-scheduling: false}\n")
    words = ("--config", str(file), "--vllm.dtype", "float32", "--agent.lease-s", "5", "--decode.lease-s=7")
    passed_on = PartOptions("kvferry up", words)
    config = UpConfig(engine="vllm", engine_python=python(0), model="m", both=1, log_format="json")
    agents = cluster_spec(config, passed_on).agents
    assert [agent.name for agent in agents] == ["prefill-0", "decode-0", "both-0"]
    for agent in agents:
        assert agent.module == "kvferry.agent.vllm.launch"
        assert agent.args == (
            *("--name", agent.name, "--"),
            "--max-model-len=4096",
            "--enforce-eager",
            "--no-async-scheduling",
            "--dtype",
            "float32",
        )
        made = VllmEngineConfig(model="m", role=agent.role, **agent.settings)
        assert (made.transfer, made.engine_python) == ("auto", config.engine_python)
        assert made.lease_s == (7.0 if agent.role == "decode" else 5.0)
        assert made.log_format == "json"


def test_sglang_servers_get_their_options_and_a_bootstrap_port_each(
    python: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    taken = {8999}
    monkeypatch.setattr("kvferry.deploy.up.listen_error", lambda _, port: "in use" if port in taken else None)
    file = tmp_path / "up.yaml"
    file.write_text("sglang: {page-size: 16, skip-server-warmup: true, enable-metrics: false}\n")
    passed_on = PartOptions("kvferry up", ("--config", str(file), "--decode.lease-s=7"))
    config = UpConfig(engine="sglang", engine_python=python(0, "0.5.23"), model="m", prefill=2)
    agents = cluster_spec(config, passed_on).agents
    ports = {"prefill-0": "8998", "prefill-1": "9000"}
    assert [agent.name for agent in agents] == [*ports, "decode-0"]
    for agent in agents:
        assert agent.module == "kvferry.agent.sglang.launch"
        bootstrap = ("--disaggregation-bootstrap-port", ports[agent.name]) if agent.name in ports else ()
        own = ("--page-size=16", "--skip-server-warmup")
        assert agent.args == ("--name", agent.name, "--", *bootstrap, *SglangEngineConfig.cpu_words(), *own)
        assert agent.environment["SGLANG_USE_CPU_ENGINE"] == "1"
        made = SglangEngineConfig(model="m", role=agent.role, **agent.settings)
        assert made.lease_s == (7.0 if agent.role == "decode" else 10.0)
    on_gpus = UpConfig(engine="sglang", engine_python=python(2, "0.5.23"), model="m")
    for gpu, agent in enumerate(cluster_spec(on_gpus, PartOptions("kvferry up", ())).agents):
        assert agent.environment == {"CUDA_VISIBLE_DEVICES": str(gpu)}
        assert "--device" not in agent.args


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--both", "1"], "role must be prefill or decode: SGLang has no server of both"),
        (["--on", "ray"], "engine must not be sglang with --on ray"),
        (["--vllm.dtype", "half"], "--vllm.dtype: no vLLM server is started, as --engine vllm does"),
        (["--sglang.device", "cpu"], "--sglang.device: kvferry up chooses this"),
    ],
)
def test_what_sglang_cannot_do_is_named(
    words: list[str], said: str, python: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--engine", "sglang", "--engine-python", python(0, "0.5.23"), *words])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_vllm_servers_share_the_cores(python: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for agent in servers(python(0)):
        assert agent.environment == {"OMP_NUM_THREADS": "4"}, "what is set already is left"


@pytest.mark.parametrize(
    ("num_gpus", "tp", "visible", "theirs"),
    [
        (2, 1, None, ["0", "1"]),
        (1, 1, None, ["0", "0"]),
        (4, 2, "3,5,6,7", ["3,5", "6,7"]),
        (3, 2, None, ["0,1", "0,1"]),
    ],
)
def test_each_vllm_server_has_gpus_of_its_own_if_there_are_enough(
    python: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    tp: int,
    visible: str | None,
    theirs: list[str],
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    agents = servers(python(num_gpus), tp=tp)
    assert [agent.environment for agent in agents] == [{"CUDA_VISIBLE_DEVICES": each} for each in theirs]
    assert all(agent.settings["transfer"] == "auto" for agent in agents)


def test_what_vllm_cannot_do_here_is_named(python: Callable[[int], str]) -> None:
    with pytest.raises(CannotStart, match=r"--device cuda: the PyTorch of .* sees no GPU"):
        servers(python(0), device="cuda")
    with pytest.raises(CannotStart, match=r"--device cpu: the PyTorch of .* sees 2 GPUs"):
        servers(python(2), device="cpu")
    with pytest.raises(CannotStart, match=f"{sys.executable} lacks vllm"):
        servers(sys.executable)
    for words, said in (
        (("--agent.kv-blocks", "5"), "--agent.kv-blocks: no such option"),
        (("--agent.engine-python", "x"), "--agent.engine-python: kvferry up chooses this"),
        (("--vllm.port", "5"), "--vllm.port: kvferry up chooses this"),
    ):
        with pytest.raises(SystemExit) as stop, redirect_stderr(StringIO()) as printed:
            servers(python(0), *words)
        assert stop.value.code == 2 and said in printed.getvalue()


def test_agents_of_ours_have_gpus_of_their_own_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.agent.cli._why_no_gpu", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    spec = cluster_spec(UpConfig(device="cuda", decode=2), PartOptions("kvferry up", ()))
    devices = [agent.settings["device"] for agent in spec.agents]
    assert devices == ["cuda", "cuda:1", "cuda"]


def test_what_our_agents_cannot_do_here_is_named_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvferry.agent.cli._GPU_DRIVERS", ())
    for config, said in (
        (UpConfig(device="cuda"), "kvferry up: --device cuda: "),
        (
            UpConfig(tp=3),
            "kvferry up: Qwen3ForCausalLM: num_attention_heads (8) cannot be split ",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            cluster_spec(config, PartOptions("kvferry up", ()))
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith(said)
