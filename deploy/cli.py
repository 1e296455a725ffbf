# SPDX-License-Identifier: Apache-2.0
"""The `kvferry` command: each subcommand runs the `main` of one module with the rest of the command line."""

from __future__ import annotations

import difflib
import importlib
import sys
from importlib.metadata import version

# Modules are named, not imported: `kvferry proxy` must not pay for torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("kvferry.deploy.up", "start a proxy and its agents on this machine, until Ctrl-C"),
    "proxy": ("kvferry.proxy.__main__", "start the proxy that clients talk to"),
    "agent": ("kvferry.agent.__main__", "start one prefill or decode agent"),
    "drain": ("kvferry.deploy.drain", "let an agent finish what it has, and end"),
    "keygen": ("kvferry.deploy.keygen", "make the key that proxies and agents of one cluster share"),
    "doctor": ("kvferry.deploy.doctor", "report which KV transfer backends work here, and why others do not"),
}
VLLM_ENGINE = "kvferry.deploy.vllm_engine"
"""`kvferry agent --engine vllm`: starts a vLLM server with our connector."""
SIDECAR = "kvferry.deploy.sidecar"
"""`kvferry agent --attach`: announces a server of another engine."""


def help_text() -> str:
    commands = "\n".join(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items())
    return (
        "kvferry serves a language model with prefill and decode apart.\n\n"
        "usage: kvferry COMMAND [OPTIONS]\n\n"
        f"commands:\n{commands}\n\n"
        "kvferry COMMAND --help lists a command's options; kvferry --version prints the version."
    )


def names_vllm(words: list[str]) -> bool:
    """Whether an agent's flags ask for vLLM as its engine."""
    ours = words[: words.index("--")] if "--" in words else words
    return "--engine=vllm" in ours or ["--engine", "vllm"] in [ours[at : at + 2] for at in range(len(ours))]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 for a command line that cannot be understood."""
    words = sys.argv[1:] if argv is None else argv
    match words:
        case [] | ["-h" | "--help", *_]:
            print(help_text())
            return 0
        case ["--version", *_]:
            print(f"kvferry {version('kvferry')}")
            return 0
        case ["agent", *rest] if any(word.partition("=")[0] == "--attach" for word in rest):
            run = importlib.import_module(SIDECAR).main
            return int(run(rest))
        case ["agent", *rest] if names_vllm(rest):
            run = importlib.import_module(VLLM_ENGINE).main
            return int(run(rest))
        case [name, *rest] if name in COMMANDS:
            run = importlib.import_module(COMMANDS[name][0]).main
            return int(run(rest))
        case [name, *_]:
            known = f"; choose from {', '.join(COMMANDS)}"
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean {close[0]}?" if close else known
            print(f"kvferry: unknown command {name!r}{hint}", file=sys.stderr)
            return 2
    raise AssertionError("unreachable: the patterns above are exhaustive")


if __name__ == "__main__":
    sys.exit(main())
