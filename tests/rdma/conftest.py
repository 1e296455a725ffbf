# SPDX-License-Identifier: Apache-2.0
"""These tests run in the machine that `make test-rdma` boots, and nowhere else."""

from __future__ import annotations

import os

import pytest

INSIDE = "KVFERRY_TEST_RDMA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs the machine of make test-rdma")
    for item in items:
        if "tests/rdma/" in item.nodeid and INSIDE not in os.environ:
            item.add_marker(skip)
