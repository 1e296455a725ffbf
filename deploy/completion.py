# SPDX-License-Identifier: Apache-2.0
"""Shell completion of `kvferry`, by argcomplete.

`kvferry completion SHELL` prints what the shell evaluates once. From then on the shell runs `kvferry` with
the line so far in environment variables whenever TAB is pressed, and gets the words that may follow.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import argcomplete
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from kvferry.common.options import CommandParser, flag_values, take_option

SHELLS = ("bash", "zsh", "fish")
SETTINGS = {
    "serve": "kvferry.deploy.up:UpConfig",
    "up": "kvferry.deploy.up:UpConfig",
    "proxy": "kvferry.proxy.config:ProxyConfig",
    "agent": "kvferry.agent.config:AgentConfig",
    "bench": "kvferry.deploy.bench.config:BenchConfig",
    "plan": "kvferry.deploy.plan.command:PlanConfig",
}
"""Commands whose flags are the fields of a settings class: named, not imported, as TAB must be quick."""
PARSERS = {
    "status": "kvferry.deploy.status:build_parser",
    "canary": "kvferry.deploy.canary:build_parser",
    "down": "kvferry.deploy.ray.down:build_parser",
    "drain": "kvferry.deploy.drain:build_parser",
    "keygen": "kvferry.deploy.keygen:build_parser",
    "doctor": "kvferry.deploy.doctor.command:build_parser",
    "completion": "kvferry.deploy.completion:build_parser",
}
SIDECAR = "kvferry.agent.announce.attach:SidecarConfig"
ENGINES = {
    "vllm": "kvferry.agent.vllm.launch:VllmEngineConfig",
    "sglang": "kvferry.agent.sglang.launch:SglangEngineConfig",
}
"""What has the flags of agents with `--attach`, and with `--engine`."""


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry completion",
        "Print the script with which a shell completes kvferry's commands and options. In ~/.bashrc: "
        'eval "$(kvferry completion bash)"; in ~/.zshrc, after compinit: eval "$(kvferry completion zsh)"; '
        "for fish: kvferry completion fish > ~/.config/fish/completions/kvferry.fish",
    )
    parser.add_choice("shell", SHELLS, help="Bash, zsh or fish.")
    return parser


def main(argv: Sequence[str]) -> int:
    """Entry point of `kvferry completion`."""
    shell = build_parser().read(argv).shell
    print(shellcode(["kvferry"], shell=shell), end="")
    return 0


def complete(commands: Sequence[str]) -> int:
    """Write the words that may follow where the cursor is, and exit with status 0."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    _, _, _, words, _ = split_line(line, point)
    if len(words) > 1 and words[1] in commands:
        os.environ["_ARGCOMPLETE"] = "2"  # the command is no word of its own options
        parser = parser_of(words[1], words[2:])
    else:
        parser = argparse.ArgumentParser("kvferry")
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=commands)
    argcomplete.autocomplete(parser)
    return 0


def parser_of(command: str, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows the options of a command and their values, for completion alone.

    `words` are those that follow the command. Without the extra that the command needs it knows no option.
    """
    try:
        if command in PARSERS:
            parser: argparse.ArgumentParser = _named(PARSERS[command])()
            return parser
        parser = argparse.ArgumentParser(f"kvferry {command}")
        _add_flags(parser, _flags_of(command, words))
    except ImportError:
        return argparse.ArgumentParser(f"kvferry {command}")
    if command in ("serve", "bench"):
        parser.add_argument("words", nargs="*")
    return parser


def _flags_of(command: str, words: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    flags = {"--config": ()} | flag_values(_named(SETTINGS[command]))
    agent = ENGINES.get(take_option(words, "--engine")[0] or "", SETTINGS["agent"])
    if command == "agent":
        if any(word.partition("=")[0] == "--attach" for word in words):
            return flag_values(_named(SIDECAR)) | {"--config": ()}
        return flag_values(_named(agent)) | {"--config": (), "--attach": ()}
    if command in ("serve", "up"):
        for part, chosen in _named("kvferry.deploy.up:CHOSEN").items():
            if part in ENGINES:
                continue  # only the engine knows its options
            of_part = flag_values(_named(SETTINGS["proxy"] if part == "proxy" else agent))
            flags |= {
                f"--{part}.{flag.removeprefix('--')}": values
                for flag, values in of_part.items()
                if flag.removeprefix("--") not in chosen
            }
    return flags


def _add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, tuple[str, ...]]) -> None:
    for flag, values in flags.items():
        parser.add_argument(flag, choices=values or None)


def _named(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)
