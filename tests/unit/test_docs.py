# SPDX-License-Identifier: Apache-2.0
"""The pages say what the code says: links, anchors, and names of files and tests lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from kvferry.proxy.wire.registration import Ack, Bye, Capacity, LinkUse, Load, Register, Rejected, WorkReport
from kvferry.transfer.control.messages import Request, Response
from tools import lifecycles, module_tree

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "common", "deploy", "proxy", "transfer")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
TEST = re.compile(r"`((?:unit|system|contract|chaos|model|fuzz)/[\w/]+\.py)?(?:::(\w+)…?)?`")
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("deploy/**/*.md"),
    *ROOT.glob("tests/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
]


def tracked(*suffixes: str) -> list[Path]:
    """Return the files of the repository with one of these endings."""
    folders = ("agent", "common", "deploy", "proxy", "transfer", "tests", "benchmarks", "tools", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return [*found, *ROOT.glob("*.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page have."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), (page, target)
            assert not anchor or anchor in anchors(path), (page, target)


def test_cited_pages_and_anchors_exist() -> None:
    """Code cites pages of `docs`, with an anchor, and nothing outside the repository."""
    for path in tracked(".py", ".json", ".md", ".yml"):
        text = path.read_text()
        for name, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", text):
            assert (ROOT / name).exists(), (path, name)
            assert not anchor or anchor in anchors(ROOT / name), (path, name, anchor)
        if path != Path(__file__):
            assert not re.search(
                r"\breference/(?!cli\.|http\.|metrics\.)[\w-]+\.md|(?<![/\w])(measured|vllm-sglang)\.md", text
            ), path


def test_files_named_on_pages_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:proxy|agent|common|transfer|deploy|tests|benchmarks|tools|docs)/[\w/.-]+)`",
            page.read_text(),
        ):
            assert (ROOT / name).exists() or "DATE" in name, (page, name)


def test_tests_named_on_pages_exist() -> None:
    """A test is named by its path below `tests/`, then by its function, which `…` may cut short.

    `::function` alone is one of the file that was named last.
    """
    named = 0
    for page in PAGES:
        file = ""
        for path, function in TEST.findall(page.read_text()):
            if not path and not function:
                continue
            file = path or file
            assert (ROOT / "tests" / file).exists(), (page, file)
            assert f"def {function}" in (ROOT / "tests" / file).read_text(), (page, file, function)
            named += 1
    assert named > 100


def test_the_lifecycles_are_those_of_the_code() -> None:
    """`make lifecycles` brings the page and its images up to date."""
    page = lifecycles.PAGE.read_text()
    assert lifecycles.with_section(page) == page
    texts = lifecycles.texts()
    for path in (ROOT / "docs").rglob("*.md"):
        assert lifecycles.with_texts(path.read_text(), texts) == path.read_text(), path
    assert not lifecycles.outdated()
    images = [lifecycles.image(name) for _, name in lifecycles.tables()]
    assert sorted(images) == sorted(lifecycles.IMAGES.iterdir())


def test_diagrams_are_images() -> None:
    """A block in a diagram's language is a picture on few sites: without plugins it is text."""
    for page in PAGES:
        assert "```mermaid" not in page.read_text(), page


def test_every_table_of_transitions_is_found_and_whole() -> None:
    found = list(lifecycles.tables())
    assert len(found) > 6
    for path, name in found:
        table = lifecycles.load(path, name)
        assert {state for followers in table.values() for state in followers} <= table.keys(), (path, name)


def defined() -> set[str]:
    """Return every name that the product defines: classes, functions, fields and constants."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def section(title: str) -> str:
    """Return the part of docs/architecture.md below a heading, up to the next one of its level."""
    return re.split(r"^## ", ARCHITECTURE.read_text().partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_names_of_the_glossary_are_in_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section("Glossary"), flags=re.MULTILINE)[1:]
    assert [word for word, _ in rows] == sorted((word for word, _ in rows), key=str.casefold)
    names = {name for _, meaning in rows for name in re.findall(r"`([A-Za-z_]\w*)`", meaning)}
    assert len(names) > 40
    assert not names - defined()


def test_functions_of_the_steps_are_in_the_code() -> None:
    """They are given as `path::Class.method`."""
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.py)::([\w.]+)`", ARCHITECTURE.read_text())
    for path, name in named:
        tree: ast.AST = ast.parse((ROOT / path).read_text())
        for part in name.split("."):
            found = [
                node
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == part
            ]
            assert found, (path, name)
            tree = found[0]


def test_the_tree_is_that_of_the_disk() -> None:
    """`make reference` brings it up to date."""
    page = ARCHITECTURE.read_text()
    assert module_tree.with_section(page) == page


def test_every_module_has_a_caption() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert module_tree.caption(path), path


def test_messages_on_the_page_have_the_fields_of_the_code() -> None:
    pings = section("Discovery")
    for struct in (Register, Load, WorkReport, LinkUse, Capacity, Bye, Ack, Rejected):
        for field in struct.__struct_fields__:
            assert f'"{field}"' in pings, (struct, field)
    frames = section("Control channel")
    for struct in get_args(Request) + get_args(Response):
        assert re.search(rf"\b{struct.__struct_config__.tag}\b", frames), struct
        for field in struct.__struct_fields__:
            assert re.search(rf"\b{field}\b", frames), (struct, field)


def test_metrics_named_on_pages_are_in_the_code() -> None:
    code = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    for page in PAGES:
        for name in re.findall(r"`(?:kvferry_)([a-z_]+[a-z])\b", page.read_text()):
            family = re.sub("_(total|sum|count|bucket)$", "", name)
            assert re.search(rf"\b(kvferry_)?{family}\b", code), (page, name)


def test_the_folders_of_tests_are_explained() -> None:
    """In CONTRIBUTING; and unit tests lie in the rooms of what they test."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in (ROOT / "tests").iterdir():
        if folder.is_dir() and any(path.suffix != ".pyc" for path in folder.rglob("*") if path.is_file()):
            assert f"`tests/{folder.name}/`" in text, folder
    for path in (ROOT / "tests" / "unit").rglob("test_*.py"):
        room = path.parent.relative_to(ROOT / "tests" / "unit")
        assert (ROOT / room).is_dir(), path
