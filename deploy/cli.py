# SPDX-License-Identifier: Apache-2.0
"""The `kvferry` command: each subcommand runs the `main` of one module with the rest of the command line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from typing import Any

# Entry points are named, not imported: `kvferry proxy` must not pay for torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": (
        "kvferry.deploy.up:serve",
        "serve a model on this machine: a proxy and one agent that both prefills and decodes",
    ),
    "up": ("kvferry.deploy.up:main", "start a proxy and its agents, on this machine or by Ray, until Ctrl-C"),
    "proxy": ("kvferry.proxy.__main__:main", "start the proxy that clients talk to"),
    "agent": ("kvferry.agent.__main__:main", "start one prefill or decode agent"),
    "status": (
        "kvferry.deploy.status:main",
        "list the agents of a proxy, why some are not used, and what happened",
    ),
    "bench": (
        "kvferry.deploy.bench.command:main",
        "send a load to servers and compare their latencies and goodput",
    ),
    "canary": (
        "kvferry.deploy.canary:main",
        "compare the answers of pairs with those of one server",
    ),
    "plan": (
        "kvferry.deploy.plan.command:main",
        "predict how splits of servers, and a choice for each request, would handle a load",
    ),
    "down": ("kvferry.deploy.ray.down:main", "stop the agents that kvferry up --on ray has started"),
    "drain": ("kvferry.deploy.drain:main", "let an agent finish its requests, and stop"),
    "keygen": ("kvferry.deploy.keygen:main", "make the key that proxies and agents of one cluster share"),
    "doctor": (
        "kvferry.deploy.doctor.command:main",
        "report devices, models, ports and transfer backends here, and whether peers can be reached",
    ),
    "completion": (
        "kvferry.deploy.completion:main",
        "print the script with which bash, zsh or fish completes commands and options",
    ),
}
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
NEED_AGENT = frozenset({"agent", "doctor", "serve", "up"})
"""Commands that run what the extra `agent` brings."""
AGENT_EXTRA = "'.[agent]'"
ENGINES = {"vllm": "kvferry.agent.vllm.launch:main", "sglang": "kvferry.agent.sglang.launch:main"}
"""`kvferry agent --engine vllm` and so on: starts another engine's server with our transfer plane inside."""
CHOSEN_ENGINE = "kvferry.agent.vllm.launch:with_chosen_engine"
"""`kvferry agent --engine auto`: returns the words with one of the engines in its place."""
SIDECAR = "kvferry.agent.announce.attach:main"
"""`kvferry agent --attach`: announces a server of another engine."""
COMPLETER = "kvferry.deploy.completion:complete"
"""What a shell runs that completes a command line, which it has put into environment variables."""


def help_text() -> str:
    commands = "\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items())
    return (
        "kvferry serves language models with prefill/decode disaggregation.\n\n"
        "usage: kvferry COMMAND [OPTIONS]\n\n"
        f"commands:\n{commands}\n\n"
        "kvferry COMMAND --help lists a command's options; kvferry --version prints the version."
    )


def missing_of(extra: str) -> list[str]:
    """Return the distributions of one of kvferry's extras that are not installed; "": of kvferry itself."""
    names = []
    for requirement in requires("kvferry") or []:
        needed = re.fullmatch(r"([\w.-]+).*?(?:\bextra == ['\"](\w+)['\"].*)?", requirement)
        if needed and needed[1] != "kvferry" and (needed[2] or "") == extra:
            names.append(needed[1])
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 for a command line that cannot be understood, or where
    a package is not installed.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except ModuleNotFoundError as error:  # installed with --no-deps, into an engine's environment
        package = (error.name or "").partition(".")[0]
        if package in ("", "kvferry"):
            raise
        print(_needs_package(words, package), file=sys.stderr)
        return 2


def _needs_package(words: Sequence[str], package: str) -> str:
    name = next((word for word in words[:1] if word in COMMANDS), "")
    needs = f"{f'kvferry {name}'.strip()} needs the package {package}, which is not installed here"
    if name == "agent" and any(word.startswith(("--attach", "--engine")) for word in words):
        return needs  # an extra would change the packages of the engine in this environment
    return f"{needs}: in a clone of kvferry, pip install {AGENT_EXTRA if name in NEED_AGENT else '.'}"


def _dispatch(words: list[str]) -> int:
    # Not at the top: the packages that it imports may be missing too.
    from kvferry.common.options import did_you_mean, take_option

    if "_ARGCOMPLETE" in os.environ:
        return _run(COMPLETER, [*COMMANDS])
    match words:
        case [] | ["-h" | "--help", *_]:
            print(help_text())
            return 0
        case ["help"]:
            return main(["--help"])
        case ["help", name, *_]:
            return main([name, "--help"])
        case ["--version" | "-V" | "-v" | "version", *_]:
            print(_version_text())
            return 0
        case ["agent", *rest] if any(word.partition("=")[0] == "--attach" for word in rest):
            return _run(SIDECAR, rest)
        case ["agent", *rest] if (engine := take_option(rest, "--engine")[0]) in ENGINES:
            return _run(ENGINES[engine], rest)
        case ["agent", *rest] if take_option(rest, "--engine")[0] == "auto" and not _asks_for_help(rest):
            return main(["agent", *_named(CHOSEN_ENGINE)(rest)])
        case [name, *rest] if name in NEED_AGENT and not _asks_for_help(rest) and missing_of("agent"):
            how = f"in a clone of kvferry, pip install {AGENT_EXTRA}"
            print(f"kvferry {name} needs the extra agent: {how}", file=sys.stderr)
            return 2
        case ["serve" | "up", *rest] if not _asks_for_help(rest) and (lacking := missing_of("")):
            print(_needs_package(words, lacking[0]), file=sys.stderr)  # else it is in the proxy's log
            return 2
        case [name, *rest] if name in COMMANDS:
            return _run(COMMANDS[name][0], rest)
        case [name, *_]:
            hint = did_you_mean(name, COMMANDS) or f"; choose from {', '.join(COMMANDS)}"
            print(f"kvferry: unknown command {name!r}{hint}", file=sys.stderr)
            return 2
    raise AssertionError("unreachable: the patterns above are exhaustive")


def _version_text() -> str:
    # Not at the top: every command would parse the metadata.
    from kvferry.common.telemetry.version import VERSION, revision

    found = revision()
    return f"kvferry {VERSION} ({found})" if found else f"kvferry {VERSION}"


def _asks_for_help(words: Sequence[str]) -> bool:
    own = words[: words.index("--")] if "--" in words else words
    return "--help" in own or "-h" in own


def _run(entry_point: str, words: list[str]) -> int:
    try:
        return int(_named(entry_point)(words))
    except KeyboardInterrupt:  # of a command that has nothing to finish
        return INTERRUPTED


def _named(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
