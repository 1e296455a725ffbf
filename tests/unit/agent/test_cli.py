# SPDX-License-Identifier: Apache-2.0
"""The command line of an agent. Wrong input ends at once, with status 2 and a message that names it (R22)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.agent.cli import build_parser, parse_config, run
from kvferry.agent.config import BUNDLED_MODELS, AgentConfig
from kvferry.transfer.engine import candidates
from tests.standins.checkpoint import byte_level_tokenizer, write_checkpoint, write_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", byte_level_tokenizer()))


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_flags_are_spelled_with_dashes_and_proxy_may_repeat(model: str) -> None:
    config = parse_config(
        [
            "--model",
            model,
            "--kv-blocks",
            "32",
            "--prefix-cache",
            "false",
            "--proxy",
            "a:1",
            "--proxy",
            "[::1]:2",
        ]
    )
    assert (config.kv_blocks, config.prefix_cache, config.proxy) == (32, False, ("a:1", "[::1]:2"))
    assert config.model_name == "tiny"


def test_a_bare_command_line_keeps_every_default(model: str) -> None:
    config = parse_config(["--model", model])
    assert config.role == "both"
    assert config.proxy == ()
    assert config.lease_s == 10.0
    assert config.verify_kv is False


def test_a_switch_is_turned_on_by_its_name_alone(model: str) -> None:
    assert parse_config(["--verify-kv", "--model", model]).verify_kv is True
    assert parse_config(["--model", model, "--verify-kv", "false"]).verify_kv is False


def test_a_yaml_file_sets_options_and_flags_after_it_win(model: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(f"model: {model}\nkv_blocks: 9\nproxy: [a:1, b:2]\nrole: decode\n")
    config = parse_config(["--config", str(path), "--kv-blocks", "10"])
    assert (config.kv_blocks, config.proxy, config.role) == (10, ("a:1", "b:2"), "decode")


def test_an_unknown_key_of_the_file_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R22: ATOM's documents said `http_prt` where its code read `http_port`."""
    path = tmp_path / "agent.yaml"
    path.write_text(f"model: {model}\nhttp_prt: 8000\n")
    assert "http_prt" in refused(["--config", str(path)], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--prot", "1"], "--prot"),
        (["--role", "worker"], "role"),
        (["--tp", "many"], "tp"),
        (["--tp", "0"], "tp"),
        (["--port", "70000"], "port"),
        (["--prefill-chunk", "17"], "--prefill-chunk"),
        (["--proxy", "nowhere"], "nowhere"),
        (["--proxy", "host:0"], "host:0"),
        (["--host", "0.0.0.0", "--proxy", "a:1"], "--advertise-host"),
        (["--transfer", "pigeon"], "transfer"),
        (["--device", "cuda:"], "device"),
        (["--device", "tpu"], "device"),
    ],
)
def test_a_wrong_flag_or_value_is_named(
    argv: list[str], named: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(["--model", model, *argv], capsys)


@pytest.mark.parametrize(("device", "first"), [("cpu", None), ("cuda", 0), ("cuda:3", 3)])
def test_an_agent_s_ranks_may_begin_at_any_gpu(device: str, first: int | None, model: str) -> None:
    assert AgentConfig(model=model, device=device).first_gpu == first


def test_a_model_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such-model" in refused(["--model", "no-such-model"], capsys)
    assert "model" in refused([], capsys)


def test_a_directory_that_is_no_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "config.json" in refused(["--model", str(tmp_path)], capsys)


def test_a_model_of_the_hugging_face_cache_is_found_by_its_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients ask for it by that name. The snapshot is that of `refs/main`; half a download is refused."""
    cached = tmp_path / "models--Somebody--Tiny-1B"
    shutil.copytree(model, cached / "snapshots" / ("b" * 40))
    shutil.copytree(model, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = parse_config(["--model", "Somebody/Tiny-1B"])
    assert Path(config.model) == cached / "snapshots" / ("a" * 40)
    assert config.model_name == "Somebody/Tiny-1B"
    (cached / "snapshots" / ("a" * 40) / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(["--model", "Somebody/Tiny-1B"], capsys)


def test_a_bundled_model_is_found_by_its_name() -> None:
    config = parse_config(["--model", "ferry-tiny"])
    assert Path(config.model) == BUNDLED_MODELS / "ferry-tiny"
    assert config.model_name == "ferry-tiny"


def test_no_new_options() -> None:
    """House rule 22: a flag is a promise; adding one is a decision."""
    flags = {option for action in build_parser()._actions for option in action.option_strings}
    assert flags == {
        "-h", "--help", "--config",
        "--model", "--engine", "--role", "--served-model-name", "--name", "--host", "--port",
        "--advertise-host", "--allowed-hosts", "--control-port",
        "--proxy", "--device", "--dtype", "--load-format", "--tp", "--max-model-len", "--block-size",
        "--kv-blocks", "--max-num-seqs", "--prefill-chunk", "--max-batch-tokens", "--prefix-cache",
        "--transfer", "--transfer-options", "--verify-kv", "--lease-s", "--pull-timeout-s",
        "--on-pull-failure", "--threads", "--max-body-bytes", "--log-prompts", "--log-level", "--cluster-key",
        "--log-format", "--otlp-endpoint", "--tls-cert", "--tls-key", "--self-check", "--generation-config",
        "--trust-request-chat-template", "--drain-s",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--tcp-fault", "--control-fault"])
def test_faults_of_tests_are_unknown(flag: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are injected by `tests.standins.faults`."""
    assert flag in refused(["--model", model, flag, "drop=1"], capsys)


def test_help_describes_every_option_in_a_sentence() -> None:
    for action in build_parser()._actions:
        assert action.help, action.option_strings


def test_the_module_exits_with_2_and_imports_no_torch() -> None:
    code = (
        "import sys; from kvferry.agent.__main__ import main\n"
        "try:\n    main(['--nonsense', '1'])\n"
        "finally:\n    assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"nonsense" in done.stderr


def test_every_backend_can_be_asked_for(model: str) -> None:
    for name in ("auto", *candidates("auto")):
        assert parse_config(["--model", model, "--transfer", name]).transfer == name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            "DeepseekV3ForCausalLM is not supported: its multi-head",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized (fp8)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type 'longrope'"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of type 'mamba'"),
    ],
)
def test_a_model_that_would_be_wrong_ends_the_start_in_one_line(
    changes: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any port is open: nothing says that it listens."""
    directory = write_checkpoint(tmp_path / "m", byte_level_tokenizer())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    said = refused(["--model", str(directory), "--port", "0"], capsys)
    assert said.count("\n") == 1
    assert why in said
    assert "serve it with vLLM" in said


def test_architectures_that_were_never_split_run_on_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / "m", byte_level_tokenizer())
    for name in ("GPT2LMHeadModel", "OfTheFutureForCausalLM"):
        (directory / "config.json").write_text(json.dumps({"architectures": [name], "vocab_size": 400}))
        assert f"{name} is not supported" in refused(["--model", str(directory), "--tp", "2"], capsys)


def test_ranks_that_cannot_share_a_model_are_told_how_many_can(capsys: pytest.CaptureFixture[str]) -> None:
    """It is no fault of the model's: another engine would not do it either."""
    said = refused(["--model", "ferry-tiny", "--tp", "3"], capsys)
    assert "Qwen3ForCausalLM: num_attention_heads (8) cannot be split evenly over 3 ranks; " in said
    assert "--tp may be 1, 2, 4" in said and "vLLM" not in said and said.count("\n") == 1


def _shards(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _replace(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return spoil


def _cut(num_bytes: int) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        write_weights(path, 5000)
        path.write_bytes(path.read_bytes()[:num_bytes])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "named", "why"),
    [
        (_cut(4000), "model.safetensors", "it has 4000 bytes, and its header says 5"),
        (_cut(40), "model.safetensors", "it is cut off, or no safetensors file"),
        (_cut(3), "model.safetensors", "it is cut off, or no safetensors file"),
        (_cut(0), "model.safetensors", "it is empty"),
        (_replace("model.safetensors", b"<!DOCTYPE html>" * 99), "model.safetensors", "no safetensors file"),
        (
            _replace("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "model.safetensors",
            "no safetensors file",
        ),
        (lambda at: (at / "model.safetensors").unlink(), "has neither", "model.safetensors.index.json"),
        (_shards, "model-00002-of-00002.safetensors", "it is missing, and model.safetensors.index.json"),
        (_replace("model.safetensors.index.json", b'{"weight_map": '), "index.json", "is not JSON"),
        (_replace("model.safetensors.index.json", b"{}"), "index.json", "names no files"),
        (_replace("config.json", b'{"a": '), "config.json", "is not JSON"),
        (_replace("config.json", b""), "config.json", "is empty"),
        (_replace("config.json", b"[]"), "config.json", "must hold an object"),
        (_replace("config.json", b"\xff\xfe"), "config.json", "is not JSON"),
        (_replace("generation_config.json", b"{"), "generation_config.json", "is not JSON"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_named_before_it_is_loaded(
    spoil: Callable[[Path], None], named: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / "m", byte_level_tokenizer())
    spoil(directory)
    said = refused(["--model", str(directory)], capsys)
    assert named in said and why in said and said.count("\n") == 1
    assert "vLLM" not in said
    if "safetensors" in named:
        assert "download the model again" in said


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": '])
def test_a_tokenizer_that_cannot_be_read_ends_the_start_in_one_line(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / "m", byte_level_tokenizer())
    (directory / name).write_bytes(content)
    assert run(["--model", str(directory), "--port", "0", "--control-port", "0"], "no.such.module") == 1
    said = capsys.readouterr().err
    assert f" ERROR api cannot start: {directory / name} is " in said and said.count("\n") == 1


def test_a_gpu_that_is_not_there_is_missed_at_once(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for build in ("2.13.0+cpu", "2.13.0+cu130"):
        monkeypatch.setattr("kvferry.agent.cli.version", lambda _, build=build: build)
        monkeypatch.setattr("kvferry.agent.cli._GPU_DRIVERS", ("no-such-driver",))
        said = refused(["--model", model, "--device", "cuda"], capsys)
        why = f"torch {build} is a build without" if "+cpu" in build else "none of no-such-driver is in /dev"
        assert "--device cuda: " in said and why in said and said.count("\n") == 1
    monkeypatch.setattr("kvferry.agent.cli._GPU_DRIVERS", ("null",))
    assert parse_config(["--model", model, "--device", "cuda:1"]).first_gpu == 1


def test_a_generation_config_out_of_range_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / "m", byte_level_tokenizer())
    (directory / "generation_config.json").write_text('{"top_p": 7}')
    assert "generation_config.json" in refused(["--model", str(directory)], capsys)
    assert (
        parse_config(["--model", str(directory), "--generation-config", "none"]).generation_config == "none"
    )
