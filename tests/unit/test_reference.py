# SPDX-License-Identifier: Apache-2.0
"""The generated pages are those that the code makes, and every error code has advice."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from kvferry.common.json_errors import ProblemCode
from kvferry.deploy.cli import COMMANDS
from kvferry.proxy import errors
from tools import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPERATIONS = DOCS / "operations.md"
CODE = {"ApiError": 1, "bad_request": 2, "unavailable": 0, "failed": 2, "_fail": 2}
"""Where the error code stands among the arguments; the last two are the engine's."""


def proxy_codes() -> set[str]:
    classes = [errors.ProxyError]
    for each in classes:
        classes += each.__subclasses__()
    return {each.code for each in classes if each.__module__.startswith("kvferry.")}


def agent_codes() -> set[str]:
    """Return the codes that agents' calls name as literals, and what `bad_request` takes by itself."""
    codes = {"invalid_value", *get_args(ProblemCode)}
    for path in (ROOT / "agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            at = CODE.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
            if at is None:
                continue
            named = [word.value for word in node.keywords if word.arg == "code"]
            for value in (*node.args[at : at + 1], *named):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    codes.add(value.value)
    return codes


def advised(heading: str) -> set[str]:
    """Return the codes in the first column of the table below a heading."""
    _, _, section = OPERATIONS.read_text().partition(f"### {heading}\n")
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {code for row in rows for code in re.findall("`(.*?)`", row)}


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_a_generated_page_is_up_to_date(page: Path) -> None:
    assert page.read_text() == reference.pages()[page], "run make reference"


def test_every_option_is_on_the_page() -> None:
    page = reference.cli_page()
    for name in COMMANDS:
        assert f"| `kvferry {name}` |" in page
        assert re.search(rf"^## .*kvferry {name}\b", page, re.MULTILINE), name
    assert "| `--lease-s` |" in page


def test_every_error_code_of_the_proxy_has_advice() -> None:
    others = {"supervisor_unavailable", "host_not_allowed", "cross_site"}
    assert advised("From the proxy") == proxy_codes() | others


def test_every_error_code_of_an_agent_has_advice() -> None:
    assert advised("From an agent") == agent_codes()


def nav(entries: list[dict[str, Any]]) -> set[str]:
    """Return the pages of a navigation, with those of its sections."""
    pages: set[str] = set()
    for entry in entries:
        for value in entry.values():
            pages |= {value} if isinstance(value, str) else nav(value)
    return pages


def test_every_page_can_be_found() -> None:
    """By the navigation and by llms.txt, or by a link of another page."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert listed <= pages
    assert set(re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "llms.txt").read_text())) == listed
    linked = {
        (page.parent / target).resolve()
        for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text())
    }
    assert {page for page in pages - listed if DOCS / page not in linked} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` builds it."""
    target = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "tools/site.yml"]
    done = subprocess.run(
        [*words, "--site-dir", str(target)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_site_is_searched_and_read_without_the_internet(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {"concepts/leases/", "operations/"} <= {entry["location"] for entry in found}
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(?:https?:)?//", page.read_text()), (
            page
        )


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    for page in site.rglob("index.html"):
        for target in re.findall(r'href="(?!#|\w+:)([^"#?]+)', page.read_text()):
            path = site / target[1:] if target.startswith("/") else page.parent / target
            assert path.exists(), (page, target)


def test_blocks_of_code_are_blocks_on_the_site(site: Path) -> None:
    """Those of a numbered step as well, whose lines would else be one."""
    for source in DOCS.rglob("*.md"):
        folder = source.relative_to(DOCS).with_suffix("")
        page = site / (folder.parent if folder.name in ("index", "README") else folder) / "index.html"
        fences = re.findall(r"^ *```", source.read_text(), re.MULTILINE)
        assert len(re.findall(r"<pre\b", page.read_text())) == len(fences) / 2, source


def test_no_page_needs_what_only_one_builder_has() -> None:
    """Others than MkDocs have neither its themes nor its hooks; no site has files from outside `docs`.

    The plugin `search` is built into MkDocs and zensical.
    """
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert not {"theme", "hooks"} & settings.keys()
    assert settings["plugins"] == ["search"]
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).resolve().is_relative_to(DOCS), (page, target)
