# SPDX-License-Identifier: Apache-2.0
"""Imports run one way between packages and between rooms, and the proxy never pays for torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "common": {"common"},
    "transfer": {"transfer", "common"},
    "proxy": {"proxy", "common"},
    "agent": {"agent", "common", "transfer", "proxy.wire"},
    "deploy": {"deploy", "agent", "common", "transfer", "proxy"},
}
Graph = Mapping[str, Set[str]]


def _rooms() -> dict[str, set[str]]:
    """Return, for each room, the rooms of its package that it may import.

    A room is a folder, or a module where a module is named. What has no line of its own in `agent` and
    `transfer` belongs to the room of that name, at the bottom of the package.
    """
    ground = {"proxy.ids", "proxy.objectives", "proxy.wire", "proxy.telemetry"}
    errors = {*ground, "proxy.errors"}
    texts = {*errors, "proxy.sse", "proxy.request"}
    fleet = {*texts, "proxy.fleet"}
    # Above the fleet, unlike the rest of its room.
    records = {"proxy.telemetry.request_log", "proxy.telemetry.collectors"}
    exchange = {*fleet, *records, "proxy.http", "proxy.dialects", "proxy.exchange"}
    canary = {"proxy.canary", "proxy.canary.pair_record"}
    parts = {
        *exchange,
        *canary,
        "proxy.api",
        "proxy.api.operator",
        "proxy.api.translations",
        "proxy.discovery",
    }
    rooms = {
        "common": set(),
        "common.telemetry": {"common"},
        "common.http": {"common", "common.telemetry"},
        "common.shared_options": {"common", "common.telemetry"},
        "common.engine_servers": {"common", "common.telemetry"},
        **{room: set() for room in ground},
        "proxy.telemetry": {"proxy.objectives", "proxy.wire"},
        "proxy.errors": ground,
        "proxy.sse": errors,
        "proxy.request": {*errors, "proxy.sse"},
        "proxy.http": {*errors, "proxy.sse"},
        "proxy.dialects": texts,
        "proxy.fleet": fleet,
        "proxy.telemetry.request_log": fleet,
        "proxy.telemetry.collectors": fleet,
        "proxy.discovery": {*fleet, "proxy.dialects"},
        "proxy.exchange": exchange,
        "proxy.canary.pair_record": set(),
        "proxy.canary": {*exchange, "proxy.canary.pair_record"},
        "proxy.api": {*exchange, "proxy.api.operator", "proxy.api.translations", "proxy.canary.pair_record"},
        "proxy.api.operator": {*fleet, *records},
        "proxy.api.translations": texts,
        "proxy.config": parts,
        "proxy.settings": {*parts, "proxy.config"},
        "proxy.app": parts,
        "proxy.server": {*parts, "proxy.app", "proxy.config", "proxy.settings"},
        "proxy.workers": {*parts, "proxy.config", "proxy.settings"},
        "proxy.workers.worker": {*parts, "proxy.config", "proxy.settings", "proxy.server", "proxy.workers"},
        "proxy.__main__": {*parts, "proxy.config", "proxy.server", "proxy.workers"},
        "agent": set(),
        "agent.process": {"agent"},
        "agent.announce": {"agent"},
        "agent.config": {"agent", "agent.announce"},
        # The processes of an agent: they share what they send each other and nothing else.
        "agent.messages.masks": {"agent", "agent.config"},
        "agent.grammar": {"agent", "agent.messages.masks"},
        "agent.messages.requests": {"agent"},
        "agent.messages.steps": {"agent", "agent.config", "agent.messages.requests"},
        "agent.worker": {
            *("agent", "agent.config", "agent.process"),
            *("agent.messages.steps", "agent.messages.requests"),
        },
        "agent.engine": {
            *("agent", "agent.announce", "agent.config", "agent.process"),
            *("agent.messages.steps", "agent.messages.requests", "agent.messages.masks"),
        },
        "agent.api": {
            *("agent", "agent.announce", "agent.config", "agent.process"),
            *("agent.messages.requests", "agent.grammar"),
        },
        "agent.plugin": {"agent", "agent.announce", "agent.config", "agent.process"},
        "agent.sglang": {"agent", "agent.announce", "agent.config", "agent.plugin", "agent.process"},
        "agent.vllm": {"agent", "agent.announce", "agent.config", "agent.plugin", "agent.process"},
        "agent.cli": {"agent", "agent.config", "agent.announce", "agent.api", "agent.process"},
        "agent.__main__": {"agent.cli"},
        "transfer": set(),
        "transfer.control": {"transfer"},
        "transfer.ranks": {"transfer", "transfer.control"},
        "transfer.producer": {"transfer", "transfer.control", "transfer.ranks"},
        "transfer.consumer": {"transfer", "transfer.control", "transfer.ranks"},
        "transfer.connector": {
            "transfer",
            *(f"transfer.{room}" for room in ("ranks", "producer", "consumer")),
        },
        "transfer.backends": set(),
        "transfer.backends.common": {"transfer"},
        "deploy": set(),
    }
    for folder in (ROOT / "transfer" / "backends").iterdir():
        if folder.name != "common" and (folder / "__init__.py").exists():
            rooms[f"transfer.backends.{folder.name}"] = {"transfer", "transfer.backends.common"}
    return {room: others - {room} for room, others in rooms.items()}


ROOMS = _rooms()
BACKENDS = "transfer.backends"
MOST_MODULES = {"proxy": 12, "agent": 12, "common": 13, "transfer": 13}
"""In one folder of a package."""
MOST_FLOORS = {"rooms": 10, "modules": 12}
"""How long a chain of imports may be in `proxy/`, counted in rooms and in modules."""


def imported(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, wherever in the file, without their `kvferry.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    roots = {name.partition(".")[0] for name in names}
    assert not roots & {*ALLOWED, "tests", "benchmarks", "tools"}, (
        f"{path}: nothing of ours is installed under that name"
    )
    return {name.removeprefix("kvferry.") for name in names if name.startswith("kvferry.")}


def modules() -> dict[str, Path]:
    """Return the file of each of our modules and packages, by its name without `kvferry.`."""
    found = {}
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph() -> dict[str, set[str]]:
    """Return the modules of ours that each of them imports."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = {_longest(name, files) for name in imported(path)} - {module}
    return graph


def _longest(name: str, known: Mapping[str, object]) -> str:
    """Return the longest dotted prefix of `name` that is known. Raises `LookupError` if none is."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:end])) in known:
            return prefix
    raise LookupError(f"{name}: not in the table of rooms")


def wrong_arrows(graph: Graph, rooms: Graph) -> dict[tuple[str, str], list[str]]:
    """Return the imports from a room into one that it may not import, by that pair of rooms."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            rising = _longest(module, rooms), _longest(other, rooms)
            same_package = module.partition(".")[0] == other.partition(".")[0]
            if same_package and rising[0] != rising[1] and rising[1] not in rooms[rising[0]]:
                wrong.setdefault(rising, []).append(f"{module} → {other}")
    return wrong


def depth(graph: Graph) -> int:
    """Return the number of modules in the longest chain of imports. Raises `CycleError` for a circle."""
    floors: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():
        floors[module] = 1 + max((floors[other] for other in graph.get(module, ())), default=0)
    return max(floors.values())


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            assert any(name == fine or name.startswith(f"{fine}.") for fine in ALLOWED[package]), (path, name)


def test_rooms_are_imported_one_way() -> None:
    """The table has no circle, and every import between two rooms of a package is in it."""
    TopologicalSorter(ROOMS).prepare()
    assert not wrong_arrows(import_graph(), ROOMS)


@pytest.mark.parametrize(
    ("arrow", "rooms"),
    [
        ("proxy.exchange.x → proxy.api.y", ("proxy.exchange", "proxy.api")),
        ("proxy.fleet.x → proxy.http.y", ("proxy.fleet", "proxy.http")),
        ("proxy.discovery.x → proxy.exchange.y", ("proxy.discovery", "proxy.exchange")),
        ("proxy.wire.x → proxy.errors", ("proxy.wire", "proxy.errors")),
        ("common.x → common.http.y", ("common", "common.http")),
        ("proxy.api.x → proxy.config", ("proxy.api", "proxy.config")),
        ("proxy.server → proxy.workers.y", ("proxy.server", "proxy.workers")),
        ("agent.api.x → agent.engine.scheduler", ("agent.api", "agent.engine")),
        ("agent.engine.x → agent.worker.rank", ("agent.engine", "agent.worker")),
        ("agent.worker.x → agent.api.text.y", ("agent.worker", "agent.api")),
        ("agent.errors → agent.process.y", ("agent", "agent.process")),
        ("transfer.layout → transfer.ranks.y", ("transfer", "transfer.ranks")),
        ("transfer.consumer.x → transfer.producer.y", ("transfer.consumer", "transfer.producer")),
        ("transfer.backends.tcp.x → transfer.backends.nccl.y", (f"{BACKENDS}.tcp", f"{BACKENDS}.nccl")),
        ("transfer.backends.common.x → transfer.backends.tcp.y", (f"{BACKENDS}.common", f"{BACKENDS}.tcp")),
        ("transfer.backends.tcp.x → transfer.control.y", (f"{BACKENDS}.tcp", "transfer.control")),
    ],
)  # fmt: skip
def test_an_import_against_the_rule_is_seen(arrow: str, rooms: tuple[str, str]) -> None:
    module, _, other = arrow.partition(" → ")
    assert wrong_arrows({module: {other}}, ROOMS) == {rooms: [arrow]}


@pytest.mark.parametrize(
    "arrow",
    [
        "proxy.__main__ → proxy.workers.y",
        "proxy.api.x → proxy.exchange.y",
        "proxy.exchange.x → proxy.exchange.y",
        "agent.api.x → agent.messages.requests",
        "agent.messages.steps → agent.messages.requests",
        "agent.api.text.x → agent.errors",
        "transfer.connector → transfer.consumer.y",
        "transfer.backends.tcp.x → transfer.backends.common.y",
        "transfer.events → transfer.ids",
        "agent.engine.x → transfer.connector",
    ],
)
def test_an_import_by_the_rule_passes(arrow: str) -> None:
    module, _, other = arrow.partition(" → ")
    assert not wrong_arrows({module: {other}}, ROOMS)


def test_vllm_is_imported_by_what_vllm_loads_alone() -> None:
    """Everything else of ours runs, and is tested, without it."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for package in ALLOWED
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    }
    assert importers == {f"agent/vllm/{name}.py" for name in ("__init__", "connector", "stats")}


def test_a_module_of_no_room_is_seen() -> None:
    with pytest.raises(LookupError, match="attic"):
        wrong_arrows({"proxy.attic": {"proxy.errors"}}, ROOMS)


def test_no_folder_is_crowded() -> None:
    crowded = {
        folder.relative_to(ROOT).as_posix(): number
        for package, most in MOST_MODULES.items()
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}
        if (number := len([path for path in folder.glob("*.py") if path.name != "__init__.py"])) > most
    }
    assert not crowded


def by_rooms(graph: Graph, rooms: Graph) -> dict[str, set[str]]:
    """Return the imports between rooms that the imports between modules make."""
    arrows: dict[str, set[str]] = {}
    for module, others in graph.items():
        room = _longest(module, rooms)
        arrows.setdefault(room, set()).update({_longest(other, rooms) for other in others} - {room})
    return arrows


def test_the_proxy_is_not_a_tower(record_property: Callable[[str, object], None]) -> None:
    modules = {
        module: {other for other in others if other.startswith("proxy.")}
        for module, others in import_graph().items()
        if module.startswith("proxy.")
    }
    for kind, graph in {"rooms": by_rooms(modules, ROOMS), "modules": modules}.items():
        record_property(f"floors of proxy/ in {kind}", depth(graph))
        assert depth(graph) <= MOST_FLOORS[kind], kind


def test_the_depth_is_that_of_the_longest_chain() -> None:
    assert depth({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3
    with pytest.raises(CycleError):
        depth({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize(
    "module",
    [
        "kvferry.proxy.app",
        "kvferry.proxy.__main__",
        "kvferry.agent.cli",
        "kvferry.agent.engine.process",
        "kvferry.deploy.cli",
        "kvferry.agent.announce.attach",
    ],
)
def test_torch_stays_out(module: str) -> None:
    """Only ranks import torch and transformers: everything else must start fast and stay small."""
    code = (
        f"import sys, importlib; importlib.import_module({module!r}); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_proxy_imports_nothing_of_the_others() -> None:
    code = (
        "import sys, kvferry.proxy.app; "
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('kvferry.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "['common', 'proxy']"


def test_every_package_is_installed() -> None:
    """A folder that `pyproject.toml` does not list is missing from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {folder: name for name, folder in setuptools["package-dir"].items()}
    folders = {path.parent.relative_to(ROOT) for top in ALLOWED for path in (ROOT / top).rglob("__init__.py")}
    installed = [names.get(str(folder), ".".join(("kvferry", *folder.parts))) for folder in folders]
    assert sorted(setuptools["packages"]) == sorted(installed)


def test_every_source_file_has_a_licence_line() -> None:
    """R8."""
    for package in (*ALLOWED, "tests", "benchmarks", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stat().st_size:
                assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().splitlines()[0], path
