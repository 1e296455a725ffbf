# SPDX-License-Identifier: Apache-2.0
"""The methods of vLLM's connector interface, version by version: names, parameters, which must be there.

`python -m tests.unit.agent.vllm.hooks WHEEL…` reads them out of vLLM's wheels, of which nothing is run, and
puts them into `hooks.json`; `test_hooks.py` compares our connector with them.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

import msgspec

RECORDED = Path(__file__).with_name("hooks.json")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CLASS = "KVConnectorBase_V1"


class Hook(msgspec.Struct, frozen=True):
    """One method. `kind` is what it is decorated as, if it is; `parameters` are without `self`."""

    parameters: tuple[str, ...]
    kind: str = ""
    abstract: bool = False


def hooks_of(source: str, name: str) -> dict[str, Hook]:
    """The methods that a class defines in the source of its module."""
    (found,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {node.name: _hook(node) for node in found.body if isinstance(node, ast.FunctionDef)}


def recorded() -> dict[str, dict[str, Hook]]:
    """Per version."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, dict[str, Hook]])


def _hook(node: ast.FunctionDef) -> Hook:
    decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    kinds = decorators & {"classmethod", "staticmethod", "property"}
    return Hook(tuple(names[1:]), "".join(kinds), "abstractmethod" in decorators)


def main(wheels: list[str]) -> None:
    """Record the wheels' versions, besides those that are recorded."""
    versions = recorded() if RECORDED.exists() else {}
    for wheel in wheels:
        version = Path(wheel).name.split("-")[1].partition("+")[0]
        with zipfile.ZipFile(wheel) as archive:
            versions[version] = hooks_of(archive.read(BASE).decode(), CLASS)
    lines = [
        f"{json.dumps(version)}: " + msgspec.json.encode(hooks).decode()
        for version, hooks in sorted(versions.items())
    ]
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
