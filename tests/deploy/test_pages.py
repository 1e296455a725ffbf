# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/deploy: every block is executed by a test, or the page says before it what it needs.

`test_compose`, `test_images`, `test_ray` and `test_systemd` execute them, and for docs/rolling.md
`tests/system/test_steering.py`. Of what needs a cluster `test_chart` does what goes without.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import HELM, ROOT, render
from tests.deploy.pages import LACKING, PAGES, Block, blocks, scripts, steps

SECURE = ("--set", "security.insecure=true")
COMMAND = re.compile(r"`((?:curl|docker|helm|kubectl|kvferry|podman-compose|ray|systemctl) [^`]*)`")


def executed() -> set[tuple[str, str]]:
    """Pages and headings whose blocks a test executes: those that one takes by `scripts` or `steps`."""
    sources = [*(ROOT / "tests" / "deploy").glob("*.py"), *(ROOT / "tests" / "system").glob("*.py")]
    calls = (re.findall(r'(?:scripts|steps)\("([\w.]+)", "([^"]+)"\)', each.read_text()) for each in sources)
    return {call for each in calls for call in each}


def neither(page: Path) -> list[Block]:
    """The blocks that no test executes, and of which the page says no good reason."""
    return [
        each
        for each in blocks(page)
        if not any(each.needs.startswith(lacking) for lacking in LACKING)
        and ((page.name, each.heading) not in executed() or each.needs)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_executed_or_needs_what_no_test_has(page: Path) -> None:
    assert neither(page) == []
    assert len(re.findall("```", page.read_text())) == 2 * len(blocks(page))  # none of another form


@pytest.mark.parametrize(
    ("prose", "heading", "is_seen"),
    [
        ("Then:", "A new one", True),
        ("Then:", "Start", False),
        ("Then (this needs patience; no test executes it):", "Start", True),
        ("Then (this needs a cluster; no test executes it):", "A new one", False),
        ("Blocks with `kvferry` need a cluster; no test executes these.\n\n## A new one", "", False),
        ("Blocks with `helm` need a cluster; no test executes these.\n\n## A new one", "", True),
    ],
)
def test_a_new_block_is_seen(tmp_path: Path, prose: str, heading: str, is_seen: bool) -> None:
    page = tmp_path / "compose.md"
    heading = f"## {heading}\n\n" if heading else ""
    page.write_text(f"# Page\n\n{heading}{prose}\n\n```\nkvferry anything\n```\n")
    assert [each.commands for each in neither(page)] == [["kvferry anything"]] * is_seen


@pytest.mark.timeout(240)
def test_the_plans_of_the_page(tmp_path: Path) -> None:
    """With a short trace of the same form as the one that is named."""
    plans, server = scripts("sizing.md", "Splits")
    (tmp_path / "server.yaml").write_text(server)
    lines = [f"2023-11-16 18:15:{at:02}.6805900,{374 + at},{44 + at}" for at in range(60)]
    with gzip.open(tmp_path / "azure_2023_conv.csv.gz", "wt") as trace:
        trace.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", plans],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^auto ", done.stdout, flags=re.MULTILINE)) == 2, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_to_do_when_names_no_command_of_its_own(page: Path) -> None:
    """In a table nobody would see that it is not executed: the page has it in a block, which is."""
    _, _, table = page.read_text().partition("## When")
    known = [command for each in blocks(page) for command in each.commands]
    for command in COMMAND.findall(" ".join(re.findall(r"\| ([^|]*) \|$", table, flags=re.MULTILINE))):
        assert any(each.startswith(command) for each in known), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_of_commands_are_there(page: Path) -> None:
    for block in blocks(page):
        for word in re.findall(r"(?<![\w/])deploy/[\w@*./-]+", block.text):
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
    values, adapter = scripts("scaling.md", "Kubernetes")
    path = tmp_path / "values.yaml"
    path.write_text(values)
    objects = render("--values", path, *SECURE)
    assert sorted(each["kind"] for each in objects if each["kind"] == "ScaledObject") == ["ScaledObject"] * 2
    assert "PodMonitor" in {each["kind"] for each in objects}

    chosen = yaml.safe_load(values)
    del chosen["autoscaling"]["prometheus"]
    path.write_text(yaml.safe_dump(chosen))
    asked = [
        metric["external"]["metric"]["name"]
        for each in render("--values", path, *SECURE)
        if each["kind"] == "HorizontalPodAutoscaler"
        for metric in each["spec"]["metrics"]
    ]
    [rule] = yaml.safe_load(adapter)["rules"]["external"]
    assert asked == [rule["seriesQuery"]] * 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: Debian's prometheus has it")
def test_promtool_takes_the_queries_of_the_page_about_scaling(tmp_path: Path) -> None:
    """Those of the adapter too, with what it puts in place of its own words."""
    _, adapter = scripts("scaling.md", "Kubernetes")
    [rule] = yaml.safe_load(adapter)["rules"]["external"]
    queries = [*steps("scaling.md", "The signals"), rule["seriesQuery"]]
    queries.append(rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="n",role="prefill"'))
    rules = [{"record": f"query:{number}", "expr": each} for number, each in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
