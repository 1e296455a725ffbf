# SPDX-License-Identifier: Apache-2.0
"""An agent's private directory for the sockets between its processes, removed when it ends.

A killed agent cannot clean up, so each agent removes the directories of this user's dead agents when it
starts. A directory's owner has a lock (flock) on a file in it until its process ends, however it ends; the
file gets its name only once it is locked, so a process that can lock it knows that the owner is dead. A
directory without that file is kept: it is being made, or belongs to another program.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "kvferry-"
_LOCK = "owner.lock"
_UNNAMED_LOCK = "owner.lock.new"

log = logging.getLogger(__name__)


@contextmanager
def private_run_dir() -> Iterator[Path]:
    """Remove dead agents' directories, and make one (mode 700) that exists as long as the body runs.

    Raises `OSError` where none can be made.
    """
    for stale in _remove_stale(Path(tempfile.gettempdir())):
        log.info("removed %s: its agent is dead", stale)
    run_dir = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _lock(run_dir)
    try:
        yield run_dir
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        os.close(lock)


def _lock(run_dir: Path) -> int:
    """Mark a directory as this process's until the descriptor returned is closed."""
    # Not inherited: the lock must end with this process, not with one of its children.
    lock = os.open(run_dir / _UNNAMED_LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (run_dir / _UNNAMED_LOCK).rename(run_dir / _LOCK)
    return lock


def _remove_stale(parent: Path) -> list[Path]:
    """Remove the directories whose owner is dead, and return them. Safe beside other agents that do so."""
    return [path for path in parent.glob(f"{_PREFIX}*") if _is_own_directory(path) and _remove_if_stale(path)]


def _is_own_directory(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:  # its owner has just ended
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _remove_if_stale(run_dir: Path) -> bool:
    try:
        lock = os.open(run_dir / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(run_dir, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
