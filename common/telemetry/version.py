# SPDX-License-Identifier: Apache-2.0
"""The version of kvferry that runs."""

import subprocess
from importlib.metadata import version
from pathlib import Path

VERSION = version("kvferry")
"""Read once: the file of metadata is parsed at each call."""
_ARCHIVED = "$Format:%H %cs$"
"""A commit and its date, which `git archive` writes here (.gitattributes), and so does `make release`."""
_CLONE = Path(__file__).parents[2]
_GIT_TIMEOUT_S = 10.0
_COMMIT_LENGTH = 12


def revision() -> str:
    """Return the commit, shortened, and its date; in a clone by git; empty if neither is known."""
    commit, date = _ARCHIVED.split(" ")
    if date != "%cs$":
        return f"{commit[:_COMMIT_LENGTH]}, {date}"
    # Otherwise git would find a clone around the environment that we are installed into.
    if not (_CLONE / ".git").exists():
        return ""
    git = ["git", "-C", str(_CLONE), "log", "-1", f"--abbrev={_COMMIT_LENGTH}", "--format=clone at %h, %cs"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
