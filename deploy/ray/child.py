# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.deploy.ray.child PARENT WORD…`: become `python WORD…`, which dies with process PARENT.

An actor cannot ask for that between fork and exec, as the launcher does: Ray's threads may hold any lock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvferry.common.child_process import die_with_parent


def main(words: Sequence[str]) -> NoReturn:
    """Does not return. Raises `ParentGone` if PARENT has died already."""
    parent, *rest = words
    die_with_parent(int(parent))
    os.execv(sys.executable, [sys.executable, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
