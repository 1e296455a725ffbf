# SPDX-License-Identifier: Apache-2.0
"""Generates `docs/reference/cli.md` and `docs/reference/http.md` from the code.

`python -m tools.reference --write` (or `make reference`) brings the pages up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from kvferry.agent.config import AgentConfig
from kvferry.deploy import doctor, drain, keygen, status
from kvferry.deploy.cli import COMMANDS
from kvferry.deploy.sidecar import SidecarConfig
from kvferry.deploy.up import UpConfig
from kvferry.deploy.vllm_engine import VllmEngineConfig
from kvferry.proxy.api.openapi import document
from kvferry.proxy.config import ProxyConfig

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WRITTEN = "This page is written by `make reference` from the code; a test compares.\n"
SETTINGS: dict[str, tuple[type[Any], str]] = {
    "kvferry up, kvferry serve": (
        UpConfig,
        "Any option of the processes can be given behind the name of a part: `--agent.NAME`, "
        "`--prefill.NAME`, `--decode.NAME`, `--both.NAME`, `--proxy.NAME`. `kvferry serve MODEL` is "
        "`kvferry up --model MODEL --prefill 0 --decode 0 --both 1`.",
    ),
    "kvferry proxy": (ProxyConfig, ""),
    "kvferry agent": (AgentConfig, ""),
    "kvferry agent --attach URL": (SidecarConfig, "Announces a running server of another engine."),
    "kvferry agent --engine vllm": (
        VllmEngineConfig,
        "Starts a vLLM server with our connector; what follows `--` is for vLLM.",
    ),
}
PARSERS = {
    "kvferry status": status.build_parser,
    "kvferry drain": drain.build_parser,
    "kvferry keygen": keygen.build_parser,
    "kvferry doctor": doctor.build_parser,
}


def cli_page() -> str:
    """Return the page of every command's options."""
    lines = ["# Command line", "", WRITTEN]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| `kvferry {name}` | {what} |" for name, (_, what) in COMMANDS.items()]
    lines += [
        "",
        "`kvferry COMMAND --help` prints the same. A wrong command line ends with status 2 and one line that "
        "names the option, the value and what would be right. Commands with many options also take "
        "`--config FILE`: YAML with the same names, dashes written as underscores (`kvferry up` takes both). "
        "Options that may be repeated are lists there.",
    ]
    for name, (settings, words) in SETTINGS.items():
        lines += ["", f"## {name}", "", *([words, ""] if words else [])]
        lines += ["| option | default | meaning |", "|---|---|---|", *_settings_rows(settings)]
    for name, build in PARSERS.items():
        parser = build()
        lines += ["", f"## {name}", "", parser.description or "", ""]
        lines += ["| argument | default | meaning |", "|---|---|---|", *_parser_rows(parser)]
    return "\n".join(lines) + "\n"


def http_page() -> str:
    """Return the page of the proxy's endpoints, from its OpenAPI document."""
    made = document("0")
    lines = ["# HTTP endpoints of the proxy", "", WRITTEN]
    lines += [
        "`GET /openapi.json` is the same for programs, with the types of every body. [The proxy's HTTP "
        "API](../api.md) explains headers, timing and retries, [Fields](../fields.md) the members of a "
        "request, [Operations](../operations.md#errors-and-what-to-do) the error codes.",
        "",
        "| endpoint | what it does | body | answers |",
        "|---|---|---|---|",
    ]
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            if not isinstance(operation, dict) or "responses" not in operation:
                continue
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
            row = [f"`{method.upper()} {path}`", operation.get("summary", ""), f"`{name}`" if name else ""]
            lines.append(f"| {' | '.join([*map(_cell, row), ', '.join(operation['responses'])])} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of each page that is generated."""
    return {FOLDER / "cli.md": cli_page(), FOLDER / "http.md": http_page()}


def _settings_rows(settings: type[Any]) -> Iterator[str]:
    types = get_type_hints(settings)
    described = {
        param.arg_name: param.description for param in docstring_parser.parse(settings.__doc__ or "").params
    }
    for field in fields(settings):
        default = "required" if field.default is MISSING else _shown(field.default)
        choices = _choices(types[field.name])
        words = " ".join((described.get(field.name) or "").split())
        if choices:
            words += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        yield f"| `--{field.name.replace('_', '-')}` | {default} | {_cell(words)} |"


def _parser_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.dest == "help":
            continue
        name = ", ".join(action.option_strings) or action.dest.upper()
        required = not action.option_strings and action.nargs != "?"
        default = "required" if required else _shown(action.default)
        yield f"| `{name}` | {default} | {_cell((action.help or '').replace('%%', '%'))} |"


def _shown(value: object) -> str:
    if value is False:
        return "off"
    if value == sys.executable:
        return "its own"
    return "" if value is None or value in ((), "") else f"`{value}`"


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        return [choice for each in get_args(kind) for choice in _choices(each)]
    return []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for page, text in pages().items():
        if sys.argv[1:] == ["--write"]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
        else:
            print(text)
