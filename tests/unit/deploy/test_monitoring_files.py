# SPDX-License-Identifier: Apache-2.0
"""Every alert has a part of the runbook and names it; the dashboards are those that the code makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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
