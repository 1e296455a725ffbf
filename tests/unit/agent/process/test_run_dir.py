# SPDX-License-Identifier: Apache-2.0
"""An agent's private directory: gone with its agent, and with the next one at the latest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.agent.process.run_dir import private_run_dir

OWNER = (
    "import sys\n"
    "from kvferry.agent.process.run_dir import private_run_dir\n"
    "with private_run_dir() as path:\n"
    "    print(path, flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories are made, here and in child processes."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a directory, until its standard input is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_private_and_goes_with_its_agent(parent: Path) -> None:
    with private_run_dir() as path:
        assert path.parent == parent and path.stat().st_mode & 0o777 == 0o700
    assert not list(parent.iterdir())


def test_what_a_killed_agent_left_goes_when_the_next_one_starts(parent: Path) -> None:
    with owner() as (process, left):
        (left / "from-engine").touch()
        process.kill()
        process.wait()
        assert left.exists()
        with private_run_dir() as path:
            assert list(parent.iterdir()) == [path]


def test_what_a_living_agent_has_stays() -> None:
    with owner() as (_, theirs), private_run_dir() as ours:
        with private_run_dir():
            assert (theirs / "owner.lock").exists() and (ours / "owner.lock").exists()
        assert theirs.exists() and ours.exists()


def test_the_lock_is_the_owners_alone() -> None:
    """A child that outlives the owner for a moment does not keep the directory."""
    with private_run_dir() as path:
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.exists() and descriptor.resolve().parent == path:
                assert not os.get_inheritable(int(descriptor.name))


def test_what_is_not_an_agents_is_left_alone(parent: Path) -> None:
    """One that is being made has no lock yet; a name alone is no proof, least of all a link's."""
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (parent / "kvferry-made").mkdir()
    (parent / "kvferry-file").touch()
    (parent / "kvferry-link").symlink_to(elsewhere)
    before = sorted(parent.rglob("*"))
    with private_run_dir():
        pass
    assert sorted(parent.rglob("*")) == before


def test_agents_that_start_together_leave_each_other_alone(parent: Path) -> None:
    """However they meet: every one keeps its own, and what is stale is gone once."""
    failures: list[BaseException] = []

    def start_and_end() -> None:
        try:
            for _ in range(50):
                with private_run_dir() as path:
                    assert (path / "owner.lock").exists()
        except BaseException as error:
            failures.append(error)
            raise

    with owner() as (process, left):
        process.kill()
        process.wait()
        threads = [threading.Thread(target=start_and_end) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and not left.exists()
    assert not list(parent.iterdir())
