# SPDX-License-Identifier: Apache-2.0
"""What a process that compiles clients' grammars may take of the machine."""

from __future__ import annotations

import os
import resource

NICENESS = 10
"""The model comes first."""
MAX_MEMORY_BYTES = 4 << 30
"""A grammar that takes more ends its process, and counts as too costly."""


def limit_this_process() -> None:
    """Lower this process's priority and bound its memory. Call it once: niceness adds up."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
