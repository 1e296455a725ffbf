# SPDX-License-Identifier: Apache-2.0
"""docs/limits.md lists every bound with its default, as the code has them."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.agent.config import AgentConfig
from kvferry.proxy.config import ProxyConfig
from tests.abuse.attacks import ATTACKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"
ROW = re.compile(r"^\| (?P<bound>.+?) \| (?P<default>[^|]+) \| (?P<names>`[^|]+`) \| [^|]+ \|$", re.MULTILINE)
NAME = re.compile(r"`(?:(proxy|agent) --([a-z-]+)|([a-z_/]+)\.py::(\w+))`")
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "s": 1}
CONFIGS = {"proxy": ProxyConfig, "agent": AgentConfig}
BOUNDED = ("agent/api", "common", "proxy", "transfer/control", "transfer/producer")
"""Where strangers are listened to: what is named `MAX_…` there stands on the page."""
INTERNAL = {
    "common/engine_servers/monitor.py::MAX_FAILED_PROBES": "when a server is down",
    "common/engine_servers/atom.py::MAX_PARALLEL": "what is believed of a server",
    "common/engine_servers/probe.py::MAX_COUNT": "what is believed of a server",
    "common/yaml_file.py::MAX_FILE_BYTES": "the operator's own file",
    "common/yaml_file.py::MAX_DEPTH": "the operator's own file",
    "common/shared_options.py::MAX_PORT": "what a port may be",
    "proxy/canary/canary.py::MAX_WAITING": "the canary's own probes",
    "proxy/canary/comparison.py::MAX_LEARNT": "the canary's own probes",
    "proxy/canary/comparison.py::MAX_TOLERANCE": "the canary's own probes",
    "proxy/canary/prompts.py::MAX_PROMPT_TOKENS": "the canary's own probes",
    "proxy/canary/prompts.py::MAX_REMEMBERED": "the canary's own probes",
    "proxy/fleet/bias.py::MAX_BIAS": "the model of costs",
    "proxy/fleet/bias.py::MAX_RATIO": "the model of costs",
    "proxy/fleet/routing/costs.py::MAX_SHARE": "the model of costs",
    "proxy/exchange/exchange.py::MAX_SAVED": "the retry budget",
    "proxy/fleet/admission.py::MAX_RETRY_AFTER_S": "what clients are advised",
    "proxy/fleet/admission.py::MAX_WORK": "what a request counts as among keys",
    "proxy/fleet/circuit_breaker.py::MAX_PAUSE_S": "the pauses of a circuit breaker",
    "proxy/telemetry/collectors.py::MAX_LABELLED_AGENTS": "how many agents have labels of their own",
    "proxy/telemetry/metrics.py::MAX_MODELS": "how many models have labels of their own in metrics",
    "proxy/fleet/scaling.py::MAX_MODELS": "how many models it is said of how many agents they want",
    "proxy/fleet/scaling.py::MAX_AGENTS": "of how many agents the last capacity is remembered",
    "proxy/wire/registration.py::MAX_VERSION": "what may be the number of a version",
    "proxy/http/upstream_connection.py::MAX_BUFFERED_BYTES": "back-pressure",
    "proxy/workers/messages.py::MAX_FRAME_BYTES": "between a supervisor and its workers",
    "proxy/workers/messages.py::MAX_UNSENT_BYTES": "between a supervisor and its workers",
    "proxy/workers/supervisor.py::MAX_DEATHS": "when a supervisor ends",
    "proxy/workers/supervisor.py::MAX_MISSED": "when a worker hangs",
    "common/child_process.py::MAX_LINE_BYTES": "between our own processes",
    "common/options.py::MAX_SHOWN_CHARS": "how much of a mistake is shown to its maker",
    "agent/api/text/detokenizer.py::_MAX_HELD_IDS": "what a model may write",
    "agent/api/message/message_parser.py::_MAX_REREAD_CHARS": "what a model may write",
}


def rows() -> dict[str, tuple[str, list[tuple[str, ...]]]]:
    """The default and the names of each bound."""
    found = ROW.finditer(PAGE.read_text())
    return {match["bound"]: (match["default"], NAME.findall(match["names"])) for match in found}


def value_of(program: str, flag: str, module: str, constant: str) -> object:
    """A setting's default, or a constant."""
    if program:
        defaults = {field.name: field.default for field in fields(CONFIGS[program])}
        return defaults[flag.replace("-", "_")]
    return getattr(importlib.import_module("kvferry." + module.replace("/", ".")), constant)


def test_the_page_has_many_rows() -> None:
    text = PAGE.read_text()
    assert len(rows()) > 50
    assert len(rows()) == len(re.findall(r"^\|.*(?:::|--[a-z]).*\|$", text, re.MULTILINE))


@pytest.mark.parametrize("bound", rows())
def test_a_default_is_that_of_the_code(bound: str) -> None:
    default, names = rows()[bound]
    number, _, unit = default.partition(" ")
    assert names
    for name in names:
        assert value_of(*name) == float(number.replace(",", "")) * UNITS[unit], name


def test_every_bound_is_on_the_page() -> None:
    listed = {f"{module}.py::{constant}" for _, names in rows().values() for _, _, module, constant in names}
    found = set()
    for room in BOUNDED:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name) and re.match("_?MAX_", target.id):
                        found.add(f"{path.relative_to(ROOT).as_posix()}::{target.id}")
    assert found - listed == INTERNAL.keys(), "on the page, or internal with a reason"


def test_no_guard_against_strangers_is_an_assert() -> None:
    """D15: `python -O` leaves asserts out."""
    for room in ("common/http", "proxy/api", "proxy/http", "proxy/wire"):
        for path in (ROOT / room).rglob("*.py"):
            found = [
                node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)
            ]
            assert not found, (path, found)


def test_every_attack_is_on_its_page() -> None:
    page = (ROOT / "tests" / "abuse" / "README.md").read_text()
    listed = re.findall(r"^\| (\w+) \| (.+?) \| (full)? ?\|", page, re.MULTILINE)
    assert listed == [(each.id, each.name, "full" if each.full else "") for each in ATTACKS]
