# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.deploy.ray.child WORD…`: become `python WORD…`, which dies with its parent.

An actor cannot ask for that between fork and exec, as the launcher does: Ray's threads may hold any lock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvferry.common.child_process import die_with_parent


def main(words: Sequence[str]) -> NoReturn:
    """Does not return. Raises `ParentGone` if the parent has died already."""
    die_with_parent(os.getppid())
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
