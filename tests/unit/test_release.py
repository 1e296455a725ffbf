# SPDX-License-Identifier: Apache-2.0
"""What `make release` relies on: one version everywhere, a commit in archives, and archives without times."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml

from tests.unit.test_packages import PROJECT, ROOT
from tools.release import make_reproducible

VERSION = PROJECT["version"]
CHART = ROOT / "deploy" / "helm" / "kvferry"


def test_every_place_names_the_same_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"]["tag"] == VERSION
    assert re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION
    page = (ROOT / "docs" / "releasing.md").read_text()
    assert {*re.findall(r"(?:kvferry[-:]|v)(\d+\.\d+\.\d+)", page)} == {VERSION}
    assert f"localhost/kvferry:{VERSION}" in (ROOT / "deploy" / "compose" / "compose.yaml").read_text()


def test_an_archive_names_its_commit_and_what_is_copied_from_a_clone_names_none(tmp_path: Path) -> None:
    """`git archive` writes it into the module, by .gitattributes."""
    name = "common/telemetry/version.py"
    code = f"import runpy; print(runpy.run_path({name!r})['revision']())"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text((ROOT / name).read_text())

    def printed() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    assert printed() == ""
    git = ["git", "-C", ROOT]
    archive = subprocess.run([*git, "archive", "HEAD", name], capture_output=True, check=True, timeout=60)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path, filter="data")
    form = ["log", "-1", "--abbrev=12", "--format=%h, %cs"]
    head = subprocess.run([*git, *form], capture_output=True, text=True, check=True, timeout=60)
    assert printed() == head.stdout.strip() != ""


def test_archives_of_the_same_files_are_made_equal(tmp_path: Path) -> None:
    """Whoever made them, in whatever order and when."""

    def archived(name: str, order: list[str], time_s: float, mode: int, owner: str) -> bytes:
        path = tmp_path / name
        with tarfile.open(path, "w:gz") as files:
            for each in order:
                member = tarfile.TarInfo(each)
                member.size, member.mtime, member.mode, member.uname = len(each), time_s, mode, owner
                files.addfile(member, io.BytesIO(each.encode()))
        make_reproducible(path, 1_700_000_000)
        return path.read_bytes()

    one = archived("one.tar.gz", ["a", "b"], 1.25, 0o600, "me")
    assert one == archived("other.tar.gz", ["b", "a"], 2.5, 0o664, "you")
    assert one != archived("program.tar.gz", ["a", "b"], 1.25, 0o700, "me")
    with tarfile.open(tmp_path / "one.tar.gz") as files:
        assert [(each.name, each.mtime, each.mode) for each in files] == [
            ("a", 1_700_000_000, 0o644),
            ("b", 1_700_000_000, 0o644),
        ]
        file = files.extractfile("b")
        assert file is not None and file.read() == b"b"
