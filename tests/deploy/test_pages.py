# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/deploy: every command is executed or parsed by a test, or the page says what it needs.

`tests/system/test_readme.py` parses the commands of `kvferry`; `test_chart` renders what Helm installs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import HELM, ROOT, render
from tests.deploy.pages import PAGES
from tests.deploy.pages import blocks as page_blocks

EXECUTED = {"kvferry"}
NEEDS = {
    "compose.md": "need Docker or Podman, and are executed by no test",
    "images.md": "Needs Docker or Podman, and a registry of images; no test executes these commands",
    "kubernetes.md": "All commands below need a cluster",
    "ray.md": "need several hosts; no test executes them as they stand",
    "systemd.md": "No test executes the commands of this page",
}
"""What a page says of commands that no test executes."""
SECURE = ("--set", "security.insecure=true")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each command; blocks of YAML and of queries are not commands."""
    lines = [line for each in blocks(page) for line in each.splitlines() if page.name != "scaling.md"]
    return [shlex.split(line) for line in lines]


def executed() -> set[tuple[str, str]]:
    """Pages and headings whose commands a test executes: those that one takes by `steps`."""
    sources = [*(ROOT / "tests" / "deploy").glob("*.py"), *(ROOT / "tests" / "system").glob("*.py")]
    calls = (re.findall(r'steps\("([\w.]+)", "([^"]+)"\)', each.read_text()) for each in sources)
    return {call for each in calls for call in each}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_no_test_executes_is_said_to_need_something(page: Path) -> None:
    left = [each for each in page_blocks(page) if (page.name, each.heading) not in executed()]
    programs = {words[0].rpartition("/")[2] for each in left for words in map(shlex.split, each.commands)}
    if page.name != "scaling.md" and programs - EXECUTED:
        before, _, _ = page.read_text().partition("```")
        assert re.sub(r"\s+", " ", before).find(NEEDS[page.name]) >= 0, programs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_of_commands_are_there(page: Path) -> None:
    for words in commands(page):
        for word in words:
            if word.startswith("deploy/"):
                assert list(ROOT.glob(word)), word


@pytest.mark.parametrize("name", ["compose", "images", "kubernetes", "ray", "systemd"])
def test_each_route_has_the_same_parts(name: str) -> None:
    """How to begin, to upgrade and to roll back, and what to do when."""
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "deploy" / f"{name}.md").read_text(), re.MULTILINE)
    assert {"Install", "Image", "Build"} & set(headings)
    assert any("pgrade" in each and "oll back" in each for each in headings)
    assert headings[-1] == "When"


@pytest.mark.skipif(not HELM.exists(), reason="no Helm here: make test-deploy gets it")
def test_values_of_the_page_about_scaling_scale(tmp_path: Path) -> None:
    [values] = [each for each in blocks(ROOT / "docs" / "deploy" / "scaling.md") if "autoscaling:" in each]
    path = tmp_path / "values.yaml"
    path.write_text(values)
    objects = render("--values", path, *SECURE)
    assert sorted(each["kind"] for each in objects if each["kind"] == "ScaledObject") == ["ScaledObject"] * 2
    assert "PodMonitor" in {each["kind"] for each in objects}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: Debian's prometheus has it")
def test_promtool_takes_the_queries_of_the_page_about_scaling(tmp_path: Path) -> None:
    [queries] = [each for each in blocks(ROOT / "docs" / "deploy" / "scaling.md") if each.startswith("sum")]
    rules = [{"record": f"query:{number}", "expr": each} for number, each in enumerate(queries.splitlines())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
