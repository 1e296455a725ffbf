# SPDX-License-Identifier: Apache-2.0
"""Where the stand-in for `mori` lies: put this folder on the path, and `import mori.io` finds it.

It has the public surface and the semantics of ROCm's MORI-IO (docs/sources.md#mori-io),
and moves host memory between processes with `process_vm_readv`: a one-sided read that needs nothing of the
owner.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FAULT = "MORI_STANDIN_FAULT"
"""Environment variable with the stand-in's faults; see `mori.io.faults`."""


@contextmanager
def on_path() -> Iterator[None]:
    """Make the stand-in importable here and in child processes, and forget it again afterwards.

    What the environment holds for the library is put back too: the backend writes its options there.
    """
    before = _environment()
    inherited = before.get("PYTHONPATH")
    sys.path.insert(0, str(FOLDER))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *([inherited] if inherited else [])])
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in _environment():
            del os.environ[name]
        os.environ.update(before)
        for name in [name for name in sys.modules if name == "mori" or name.startswith("mori.")]:
            del sys.modules[name]
        importlib.invalidate_caches()


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name == "PYTHONPATH" or name.startswith("MORI_")
    }
