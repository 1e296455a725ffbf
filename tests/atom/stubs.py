# SPDX-License-Identifier: Apache-2.0
"""Imports ATOM's own code where there is neither ROCm nor a GPU: what lies below it becomes a mock.

Mocks are the kernels and libraries of `BELOW`, ATOM's own configuration (a dataclass over its models')
and its command line. All else that is imported is ATOM's file, unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

BELOW = frozenset({"aiter", "amdsmi", "flydsl", "lmcache", "mooncake", "mori", "PIL", "triton"})
OF_ATOM = frozenset({"atom.config", "atom.model_engine.arg_utils"})
_BARE_PACKAGES = ("atom", "atom.model_engine", "atom.entrypoints", "atom.entrypoints.openai")
"""Packages whose own `__init__` would import the whole engine."""


class _Mock(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012 (as in ModuleType)

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in BELOW or fullname in OF_ATOM:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Mock(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install(root: Path) -> None:
    """Make `import atom…` import the files under `root`/atom. Call it once, before any such import."""
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(root))
    for name in _BARE_PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    atom = sys.modules["atom"]
    atom.__dict__["SamplingParams"] = importlib.import_module("atom.sampling_params").SamplingParams
