# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before any test imports torch, and before hypothesis draws its first example."""

from __future__ import annotations

import gc
import os
from importlib.metadata import distributions

import pytest
from hypothesis import HealthCheck, settings

# Idle compute threads spin by default; on shared cores that turns milliseconds into tenths of a second.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine says nothing about the code: pytest-timeout alone ends an example that never ends.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")

# Importing all modules makes a million objects and no garbage: looking for some takes a quarter of a worker's
# time, and later collections need not look there again.
gc.disable()


def pytest_report_header() -> str:
    return f"torch: {next((each.version for each in distributions(name='torch')), 'none')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files marked `long` come first: one that a worker begins last leaves the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
