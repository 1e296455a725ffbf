# SPDX-License-Identifier: Apache-2.0
"""Options of a settings class, from words, from files and as data."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest

from kvferry.agent.announce.attach import SidecarConfig
from kvferry.agent.config import AgentConfig
from kvferry.agent.plugin.launch import EngineServerOptions
from kvferry.agent.plugin.settings import PluginBackend
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.common.options import (
    GROUPS,
    as_json,
    collect,
    flag_parser,
    flag_values,
    make,
    options_of,
    parse_flags,
)
from kvferry.common.shared_options import LogOptions
from kvferry.common.yaml_file import MAX_DEPTH, MAX_FILE_BYTES, read_yaml
from kvferry.deploy.bench.config import BenchConfig
from kvferry.deploy.up import UpConfig
from kvferry.proxy.config import ProxyConfig
from kvferry.transfer.options import Backend

COMMANDS = (AgentConfig, VllmEngineConfig, SidecarConfig, ProxyConfig, BenchConfig, UpConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(LogOptions):
    """Of a command.

    Network:
        port: Where it listens, which is described
            in two lines.
        peer: Others; 100 % of them.

    Limits:
        size: How many.
        share: What part.
        form: In which form.
        is_on: Whether it does.
        folder: Where its files are.

    Logs:
        log_format: Another text than the base's.
    """

    port: int
    peer: tuple[str, ...] = ()
    size: int | None = None
    share: float = 0.5
    form: Literal["round", "square"] = "round"
    is_on: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError(f"share must be at most 1, got {self.share}")


def read(*words: str) -> Settings:
    return parse_flags(Settings, words, prog="it", description="")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        read(*words)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_each_kind_is_read_from_words() -> None:
    made = read("--port", "1", "--peer", "a", "b", "--peer=c", "--share=1e-3", "--form", "square", "--is-on")
    assert made == Settings(port=1, peer=("a", "b", "c"), share=0.001, form="square", is_on=True)
    made = read("--size=-7", "--port=1", "--is-on", "false", "--folder", "x/y", "--log-level", "debug")
    assert made == Settings(port=1, size=-7, folder=Path("x/y"), log_level="debug")


def test_data_of_one_command_makes_the_same_settings_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = collect(Settings, [["--port=1", "--peer=ä b"], {"is-on": True, "folder": "x"}], prog="it")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(as_json(values))))
    assert read("--config", "-", "--size", "3") == Settings(
        port=1, peer=("ä b",), is_on=True, folder=Path("x"), size=3
    )


def test_what_comes_later_wins_and_lists_add_up(tmp_path: Path) -> None:
    file = tmp_path / "it.yml"
    file.write_text("port: 2\nsize: 2\npeer: [b]\nis-on: true\nlog_format: json\n")
    made = read("--port", "1", "--peer", "a", "--config", str(file), "--size", "3", "--peer", "c")
    assert (made.port, made.size, made.peer, made.is_on, made.log_format) == (
        2,
        3,
        ("a", "b", "c"),
        True,
        "json",
    )


def test_one_text_stands_for_a_list_of_one(tmp_path: Path) -> None:
    file = tmp_path / "it.yml"
    file.write_text("port: 2\npeer: a:1\nsize: null\n")
    assert read("--config", str(file)) == Settings(port=2, peer=("a:1",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "x"], "it: --port: 'x' is not a whole number (see it --help)"),
        (["--port", "1.5"], "--port: '1.5' is not a whole number"),
        (["--port", ""], "--port: '' is not a whole number"),
        (["--port"], "--port: its value is missing, a whole number"),
        (["--peer"], "--peer: its value is missing, a text"),
        (["--config"], "--config: its value is missing, a file"),
        (["--port=1", "--share", "2"], "--share must be at most 1, got 2.0"),
        (["--port=1", "--form", "rund"], "--form: 'rund' is not one of round, square; did you mean round?"),
        (["--port=1", "--is-on", "maybe"], "--is-on: 'maybe' is not true or false"),
        (["--port=1", "--sise", "2"], "--sise: no such option; did you mean --size?"),
        (["--port=1", "--is_on"], "--is_on: no such option; did you mean --is-on?"),
        (["--port=1", "--po", "2"], "--po: no such option; did you mean --port?"),
        (["--port=1", "word"], "'word': every option begins with two dashes"),
        (["--port=1", "--help=x"], "-h/--help takes no value"),
        (["--port=1", "-x"], "'-x': every option begins with two dashes"),
        ([], "--port must be given"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: x\n", "--port: 'x' is not a whole number"),
        ("port: true\n", "--port: True is not a whole number"),
        ("port: [1]\n", "--port: [1] is not a whole number"),
        ("port: null\n", "--port: None is not a whole number"),
        ("peer: [1, 2]\n", "--peer: [1, 2] is not a text"),
        ("peer: {a: b}\n", "--peer: {'a': 'b'} is not a text"),
        ("is-on: perhaps\n", "--is-on: 'perhaps' is not true or false"),
        ("folder: 7\n", "--folder: 7 is not a text"),
        ("form: rund\n", "--form: 'rund' is not one of round, square; did you mean round?"),
        ("prt: 1\n", "--config: no such setting 'prt'; did you mean port?"),
        ("1: 2\n", "--config: no such setting '1'"),
        ("", "holds no settings"),
        ("port\n", "holds no settings"),
        ("- port\n", "holds no settings"),
        ("port: [\n", "is not YAML: "),
        ("port: &a 1\nsize: *a\n", "an alias (*NAME) is not allowed here"),
        ("a: " + "[" * 9000, f"more than {MAX_DEPTH} maps and lists lie within each other"),
        ("a: " + "{b: " * 9000, f"more than {MAX_DEPTH} maps and lists lie within each other"),
        ("- " * 9000, f"more than {MAX_DEPTH} maps and lists lie within each other"),
        ("port: " + "9" * 9000, "is not YAML: "),
        ("port: 2026-99-99\n", "is not YAML: "),
        ("port: !!python/object/apply:os.getpid []\n", "is not YAML: "),
        ("#" * (MAX_FILE_BYTES + 1), f"is larger than {MAX_FILE_BYTES} bytes"),
    ],
    ids=range(23),
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.yml"
    file.write_text(text)
    line = refused(capsys, "--config", str(file))
    assert said in line and len(line) < 1000


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "--config: "),
        (b"\xff", "--config: "),
        (b"[" * 100_000, "--config: "),
        (b"[1]", "holds no settings"),
    ],
)
def test_what_is_no_json_on_standard_input_is_a_mistake(
    raw: bytes, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
    assert said in refused(capsys, "--config", "-")


def test_a_file_that_is_no_text_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "it.yml"
    file.write_bytes(b"port: \xff\n")
    with pytest.raises(ValueError, match="is not YAML"):
        read_yaml(file)


def test_options_of_a_part_are_called_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for source, said in (
        (["--prt", "1"], "--agent.prt: no such option; did you mean --agent.port?"),
        (["--port", "x"], "--agent.port: 'x' is not a whole number"),
        (["--port"], "--agent.port: its value is missing, a whole number"),
        ({"prt": 1}, "--config: no such setting 'agent.prt'; did you mean port?"),
    ):
        with pytest.raises(SystemExit):
            collect(Settings, [source], prog="it", part="agent")  # type: ignore[list-item]
        assert said in capsys.readouterr().err


def test_help_shows_the_options_in_groups_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: it [OPTIONS]\n")
    places = [shown.index(f"\n{group}:\n") for group in ("Network", "Limits", "Logs")]
    assert places == sorted(places)
    words = " ".join(shown.split())
    assert "--port N Where it listens, which is described in two lines. --peer" in words
    assert "--form round|square In which form. (default: round)" in words
    assert "--is-on [true|false] Whether it does." in words
    assert "Others; 100 % of them." in words
    assert "What part. (default: 0.5)" in words and "How many. --" in words
    assert "--log-format text|json Another text than the base's." in words


def test_a_field_without_a_description_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Undescribed:
        """Of a command."""

        port: int = 1

    with pytest.raises(KeyError, match="port"):
        options_of(Undescribed)


@pytest.mark.parametrize("settings", COMMANDS)
def test_every_option_of_every_command_has_a_sentence_and_a_group(settings: type[Any]) -> None:
    options = options_of(settings)
    assert [*options] == [*dict.fromkeys(options)] and {*options} == {each.name for each in fields(settings)}
    for option in options.values():
        assert option.group in GROUPS and option.help.endswith((".", ")")), option
    flags = {
        flag
        for action in flag_parser(settings, prog="", description="")._actions
        for flag in action.option_strings
    }
    assert flags == {"-h", "--help", "--config", *flag_values(settings)}


@pytest.mark.parametrize("settings", COMMANDS)
def test_settings_survive_the_way_to_a_child(settings: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a parent may hand over as data, with their defaults."""
    if settings is SidecarConfig:
        made = SidecarConfig(attach="http://a:1", dialect="sglang", proxy=("b:2",))
    else:
        made = settings(**({"model": "m"} if "model" in options_of(settings) else {}))
    values = {field.name: getattr(made, field.name) for field in fields(settings)}
    data = json.loads(as_json(values))
    again = make(settings, collect(settings, [data], prog="it"), prog="it")
    assert again == made


def test_backends_in_vllm_are_those_of_the_catalogue() -> None:
    """In its order: auto takes the first that works."""
    tried = get_args(PluginBackend)
    assert tried == tuple(name for name in get_args(Backend) if name in tried)


def test_what_agents_of_all_engines_have_is_written_once() -> None:
    own = {"model", "engine_python", "transfer", "verify_kv", "start_timeout_s"}
    of_engine = {"engine_name", "has_off_flags", "bootstrap_port"}
    assert {*EngineServerOptions.__annotations__} == own | of_engine
    assert {*VllmEngineConfig.__annotations__} <= of_engine | {"engine"}
    assert not {*AgentConfig.__annotations__} & {"proxy", "lease_s", "port", "log_level", "tls_cert"}
