# SPDX-License-Identifier: Apache-2.0
"""Every alert has a part of the runbook and names it; the dashboards are those that the code makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tools import dashboards

ROOT = Path(__file__).parents[3]


def test_every_alert_names_its_part_of_the_runbook() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        annotations = rule["annotations"]
        assert annotations["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert annotations["summary"] and rule["labels"]["severity"] in ("critical", "warning")
    parts = re.findall(r"^### (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sorted(parts) == sorted({rule["alert"] for rule in alerts})


@pytest.mark.parametrize("path", dashboards.dashboards(), ids=lambda path: path.name)
def test_a_dashboard_is_up_to_date(path: Path) -> None:
    assert path.read_text() == dashboards.dashboards()[path], "run make dashboards"


@pytest.mark.parametrize("path", dashboards.dashboards(), ids=lambda path: path.name)
def test_grafanas_own_schema_has_all_of_a_dashboard(path: Path) -> None:
    """Read by Grafana's SDK, which drops what its schema of 11.6 does not have, and written again."""
    assert list(dropped(json.loads(path.read_text()))) == []


def test_what_the_schema_does_not_have_is_noticed() -> None:
    board = json.loads((dashboards.FOLDER / "grafana-fleet.json").read_text())
    index, chart = next(
        (index, each) for index, each in enumerate(board["panels"]) if each["type"] == "timeseries"
    )
    chart["options"]["legned"] = {}
    chart["targets"][0]["exprr"] = "up"
    board["titel"] = ""
    panel = f"panels.{index}"
    assert set(dropped(board)) == {"titel", f"{panel}.options.legned", f"{panel}.targets.0.exprr"}


def dropped(board: Any) -> Iterator[str]:
    """The paths of what is not, or not the same, after Grafana's SDK has read and written it."""
    register_default_plugins()
    return differences(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board))), ())


def differences(ours: Any, theirs: Any, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from differences(value, theirs.get(key, ...), (*path, key))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (value, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(value, other, (*path, str(index)))
    elif ours != theirs:
        yield ".".join(path)
