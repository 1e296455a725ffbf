# SPDX-License-Identifier: Apache-2.0
"""The `kvferry` command: its help, for a person who has not installed everything yet, and what it takes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from kvferry.agent.announce.attach import SidecarConfig
from kvferry.agent.config import AgentConfig
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.common.options import options_of
from kvferry.deploy.bench.config import BenchConfig
from kvferry.deploy.cli import COMMANDS, main, missing_of
from kvferry.deploy.plan.command import PlanConfig
from kvferry.deploy.up import UpConfig
from kvferry.proxy.config import ProxyConfig

ROOT = Path(__file__).parents[3]
SETTINGS = (AgentConfig, SidecarConfig, VllmEngineConfig, UpConfig, ProxyConfig, BenchConfig, PlanConfig)
VARIANTS = (
    *((name,) for name in COMMANDS),
    ("agent", "--attach", "http://a:1"),
    ("agent", "--engine", "vllm"),
    ("agent", "--engine", "auto"),
)
WITHOUT = """
import importlib.metadata, sys
from kvferry.deploy import cli
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
cli.missing_of = lambda extra: ["torch"]
sys.exit(cli.main({words!r}))
"""


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status: object = main([*words, "--help"])
    except SystemExit as stop:
        status = stop.code
    assert status == 0
    return capsys.readouterr().out


def modules_of_the_extra() -> set[str]:
    """What the extra `agent` brings and nothing else does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["agent"]}
    return {name.replace("-", "_") for name in names} - {"jinja2"}  # which Quart brings


@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_help_needs_no_extra(words: tuple[str, ...]) -> None:
    code = WITHOUT.format(modules=modules_of_the_extra(), words=[*words, "--help"])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: kvferry {words[0]}")


NOT_IN_SGLANG = {"argcomplete", "httptools", "quart", "werkzeug"}
"""What SGLang 0.5.23 does not bring, if kvferry is installed there with --no-deps."""


LACKS = "kvferry {} needs the package {}, which is not installed here: in a clone of kvferry, pip install {}"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["doctor"], 0, "SGLang: "),
        (["agent", "--engine", "sglang", "--help"], 0, "usage: kvferry agent"),
        (["proxy"], 2, LACKS.format("proxy", "httptools", ".")),
        (["completion", "bash"], 2, LACKS.format("completion", "argcomplete", ".")),
        (["agent", "--model", "ferry-tiny"], 2, LACKS.format("agent", "werkzeug", "'.[agent]'")),
    ],
)
def test_in_an_engines_environment_a_command_works_or_names_what_it_needs(
    words: list[str], status: int, says: str
) -> None:
    code = WITHOUT.format(modules=NOT_IN_SGLANG, words=words).replace('["torch"]', "[]")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status and says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [(), *VARIANTS], ids=" ".join)
def test_without_any_package_every_command_names_one(words: tuple[str, ...]) -> None:
    code = WITHOUT.format(modules={"msgspec"}, words=list(words))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    command = " ".join(["kvferry", *words[:1]])
    assert done.stderr.startswith(f"{command} needs the package msgspec, which is not installed here")
    assert len(done.stderr.splitlines()) == 1
    assert ("pip install" in done.stderr) is (words[1:] == ())


@pytest.mark.parametrize("name", ["serve", "up"])
def test_what_the_proxy_lacks_is_named_before_it_is_started(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvferry.deploy.cli.missing_of", lambda extra: [] if extra else ["httptools"])
    assert main([name]) == 2
    assert capsys.readouterr().err == LACKS.format(name, "httptools", "'.[agent]'") + "\n"


def test_what_is_not_installed_is_told_by_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.deploy.cli._is_installed", lambda name: False)
    assert "httptools" in missing_of("") and "torch" not in missing_of("")
    assert "torch" in missing_of("agent") and "httptools" not in missing_of("agent")


@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_help_has_one_style(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Names as on the command line, what stands for values in capitals, the options not in the usage line."""
    text = help_of(words, capsys)
    assert re.match(rf"usage: kvferry {words[0]}( \[?[A-Z.]+\]?| (\w+\|)+\w+)* \[OPTIONS\]\n", text)
    assert text.count("Show this help message.") == 1
    assert not re.search(r"positional arguments|^options:|--[a-z-]+ [A-Z]+_", text, re.MULTILINE)
    fields = {name for settings in SETTINGS for name in options_of(settings) if "_" in name}
    named = set(re.findall(r"(?<![\w.-])[a-z]+_[a-z_]+(?![\w]|\.[a-z])", " ".join(text.split())))
    assert not named & fields


@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_help_is_in_the_words_of_the_field(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without terms of the code, such as legs; processes stop or exit, and do not end."""
    text = help_of(words, capsys)
    assert not re.findall(r"\b(?:likewise|legs?(?!-)|apart|together|asked|anew|ended|knows)\b", text)


def test_serve_describes_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(("serve",), capsys).split())
    assert text.startswith("usage: kvferry serve [MODEL] [OPTIONS] Serve a model on this machine")
    for number in ("Number of prefill agents. (default: 0)", "that both prefill and decode. (default: 1)"):
        assert number in text
    assert "Number of prefill agents. (default: 1)" in " ".join(help_of(("up",), capsys).split())


@pytest.mark.parametrize("word", ["version", "-v", "-V", "--version"])
def test_the_version_has_the_usual_names(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert re.fullmatch(
        rf"kvferry {version('kvferry')}( \(.*, 20\d\d-\d\d-\d\d\))?\n", capsys.readouterr().out
    )


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in (["help"], ["--help"], ["-h"], []):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and all(name in texts[0] for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["help", "drain"])
    assert capsys.readouterr().out == help_of(("drain",), capsys)
    assert main(["help", "drian"]) == 2
    assert "did you mean drain?" in capsys.readouterr().err


def test_what_follows_two_dashes_asks_for_no_help_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for vLLM."""
    monkeypatch.setattr("kvferry.deploy.cli.missing_of", lambda extra: ["torch"])
    assert main(["agent", "--model", "m", "--", "--help"]) == 2


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvferry.deploy.cli._named", lambda entry_point: interrupted)
    assert main(["drain", "http://127.0.0.1:9"]) == 130
