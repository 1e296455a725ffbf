# SPDX-License-Identifier: Apache-2.0
"""Generates the pages of `docs/reference/` from the code.

`python -m tools.reference --write` (or `make reference`) brings the pages up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from kvferry.agent.announce.attach import SidecarConfig
from kvferry.agent.api.metrics import VLLM_NAMES, AgentMetrics
from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.requests import Stats
from kvferry.agent.sglang.launch import SglangEngineConfig
from kvferry.agent.vllm.launch import VllmEngineConfig
from kvferry.common.options import options_of
from kvferry.deploy import canary, completion, drain, keygen, status
from kvferry.deploy.bench.config import BenchConfig
from kvferry.deploy.cli import COMMANDS
from kvferry.deploy.doctor import command as doctor
from kvferry.deploy.plan.command import PlanConfig
from kvferry.deploy.ray import down
from kvferry.deploy.up import UpConfig
from kvferry.proxy.api.openapi import document
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.discovery.handshake_monitor import KEY_FAILURES
from kvferry.proxy.fleet.address_rules import RejectReason
from kvferry.proxy.fleet.fleet import Fleet, FleetSettings
from kvferry.proxy.telemetry.collectors import AgentCollector, FleetCollector, ScalingCollector
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Capacity
from kvferry.transfer.events import PlaneStats

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WRITTEN = "This page is written by `make reference` from the code; a test compares.\n"
SETTINGS: dict[str, tuple[type[Any], str]] = {
    "kvferry up, kvferry serve": (
        UpConfig,
        "To set an option of a process, prefix it with the name of a part: `--agent.NAME`, "
        "`--prefill.NAME`, `--decode.NAME`, `--both.NAME`, `--proxy.NAME`. With `--engine vllm`, agents "
        "have the options of `kvferry agent --engine vllm`, and `--vllm.NAME` is for vLLM itself. "
        "`kvferry serve MODEL` is "
        "`kvferry up --model MODEL --prefill 0 --decode 0 --both 1`.",
    ),
    "kvferry proxy": (ProxyConfig, ""),
    "kvferry agent": (AgentConfig, ""),
    "kvferry agent --attach URL": (SidecarConfig, "Announces a running server of another engine."),
    "kvferry agent --engine vllm": (
        VllmEngineConfig,
        "Starts a vLLM server with kvferry's connector; what follows `--` is for vLLM.",
    ),
    "kvferry agent --engine sglang": (
        SglangEngineConfig,
        "Starts an SGLang server with kvferry's transfer plug-in; what follows `--` is for SGLang.",
    ),
    "kvferry bench": (BenchConfig, "[How it measures](../bench.md)."),
    "kvferry plan": (PlanConfig, "[How to use it](../deploy/sizing.md#splits)."),
}
OPEN_LABELS = ("model_name", "agent", "backend", "version", "python")
"""Labels whose values the code does not know."""
PARSERS = {
    "kvferry status": status.build_parser,
    "kvferry down": down.build_parser,
    "kvferry canary": canary.build_parser,
    "kvferry drain": drain.build_parser,
    "kvferry keygen": keygen.build_parser,
    "kvferry doctor": doctor.build_parser,
    "kvferry completion": completion.build_parser,
}


def cli_page() -> str:
    """Return the page of every command's options."""
    lines = ["# Command line", "", WRITTEN]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| `kvferry {name}` | {what} |" for name, (_, what) in COMMANDS.items()]
    lines += [
        "",
        "`kvferry COMMAND --help` prints the same. A wrong command line exits with status 2 and one "
        "line that names the option, the value and what is expected. Commands with many options also have "
        "`--config FILE`: YAML with the same names without the leading dashes: `drain-s: 30`. Options that "
        "may be repeated are lists there. Options after it on the command line take precedence. `--config -` "
        "reads JSON from standard input.",
    ]
    for name, (settings, words) in SETTINGS.items():
        lines += ["", f"## {name}", *(["", words] if words else [])]
        lines += _settings_lines(settings)
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


def metrics_page() -> str:
    """Return the page of the metrics of proxies and agents, from their registries."""
    lines = ["# Metrics", "", WRITTEN]
    lines += [
        "`/metrics` of the proxy and of every agent, in Prometheus' text format. Names are those of "
        "vLLM's metrics if they mean the same, with `kvferry_proxy_`, `kvferry_agent_` or "
        "`kvferry_transfer_` in place of `vllm:`. Counts of different processes have different names, so "
        "that a plain sum is correct. Series exist before their first count, so that `rate` and "
        "`increase` miss nothing. Both pages also have the usual `process_…` metrics, of the process that "
        "serves the page; with `--workers`, of all of them.",
        "",
        "At the proxy `model_name` is empty for requests whose model no agent has served. At most 64 "
        "models and 128 agents have their own series. Agents' pages do not have these labels: Prometheus "
        "adds `model_name`, `role` and `name` when it finds the agents through the proxy's "
        "`/nodes/targets`. The label `agent` is an agent's `instance` there. Servers of other engines have "
        "their own pages; [vLLM's with kvferry's connector](../engines/vllm.md) also has `vllm:kvferry_…`.",
        "",
        "`kvferry_proxy_prompt_tokens_total` and `kvferry_proxy_generation_tokens_total` are the tokens to "
        "bill per model: what the answers' `usage` reports, streamed or not, however many agents and "
        "attempts were needed. If a stream breaks off or its client disconnects, the tokens that were sent "
        "are counted, and the prompt if a prefill agent has computed it. An answer that was not streamed "
        "and did not complete is not counted.",
        "",
        "`deploy/monitoring/` has [alerts](../runbook.md) and dashboards that use them.",
    ]
    for heading, families in (("Proxy", _proxy_metrics()), ("Agents", _agent_metrics())):
        lines += ["", f"## {heading}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_metric_row(family) for family in families if family.name.startswith("kvferry_")]
    lines += [
        "",
        "## Agents, by vLLM's names",
        "",
        "An agent shows these metrics a second time, named and labelled (`model_name`, `engine`) as vLLM "
        "does, so that dashboards and routers made for vLLM work with it:",
        "",
        "| vLLM | kvferry |",
        "|---|---|",
        *(
            f"| `vllm:{name}` | `kvferry_agent_{ours}` |"
            for ours, names in VLLM_NAMES.items()
            for name in names
        ),
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of each page that is generated."""
    return {
        FOLDER / "cli.md": cli_page(),
        FOLDER / "http.md": http_page(),
        FOLDER / "metrics.md": metrics_page(),
    }


@cache
def metric_helps() -> dict[str, str]:
    """Return the help text of each metric, by its name without a suffix."""
    return {family.name: family.documentation for family in chain(_proxy_metrics(), _agent_metrics())}


def _proxy_metrics() -> Iterator[Metric]:
    metrics = Metrics()
    for reason in RejectReason:
        metrics.rejected_pings.labels(reason.name.lower())
    for failure in KEY_FAILURES:
        metrics.rejected_keys.labels(failure.name.lower())
    fleet = Fleet(FleetSettings(), metrics, lambda: 0.0)
    yield from metrics.registry.collect()
    yield from FleetCollector(fleet.registry.snapshot, fleet.registry.lost, list).collect()
    yield from AgentCollector(fleet).collect()
    yield from ScalingCollector(fleet).collect()


def _agent_metrics() -> Iterator[Metric]:
    plane = PlaneStats(
        leased=0, quarantined=0, leases_ended={}, pulls=0, pull_bytes=0, pull_descriptors=0, pull_times={},
        pull_failures={}, handshakes=0, bad_frames=0,
    )  # fmt: skip
    stats = Stats(
        steps=0, running=0, waiting=0, blocks_free=0, blocks_used=0, blocks_leased=0, blocks_quarantined=0,
        blocks_total=0, preemptions=0, recomputes=0, integrity_errors=0, plane=plane,
        capacity=Capacity(step_s=0.0, sequence_s=0.0, backlog_s=0.0),
    )  # fmt: skip
    yield from AgentMetrics(lambda: stats, lambda: ["tcp"]).registry.collect()


def _metric_row(family: Metric) -> str:
    """One row; with the values of a label that are shown from the start, if the code knows them."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    values: dict[str, dict[str, None]] = {label: {} for label in getattr(family, "_labelnames", ())}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                values.setdefault(label, {})[value] = None
    labels = [
        f"`{label}`"
        + (f": {', '.join(f'`{each}`' for each in known)}" if known and label not in OPEN_LABELS else "")
        for label, known in values.items()
    ]
    return f"| `{name}` | {family.type} | {'; '.join(labels)} | {_cell(family.documentation)} |"


def _settings_lines(settings: type[Any]) -> Iterator[str]:
    """One table for each group of options."""
    group = ""
    for option in options_of(settings).values():
        if option.group != group:
            group = option.group
            yield from ("", f"### {group}", "", "| option | default | meaning |", "|---|---|---|")
        default = "required" if option.default is MISSING else _shown(option.default)
        words = option.help
        if option.expected.startswith("one of "):
            words += f" One of {', '.join(f'`{choice}`' for choice in option.choices)}."
        yield f"| `--{option.name}` | {default} | {_cell(words)} |"


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


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for page, text in pages().items():
        if sys.argv[1:] == ["--write"]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
        else:
            print(text)
