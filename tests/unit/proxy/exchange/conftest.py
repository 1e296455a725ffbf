# SPDX-License-Identifier: Apache-2.0
"""Tests that share proxies: most take less time than a proxy's start."""

from __future__ import annotations

import pytest

from tests.unit.proxy.conftest import StartStage


@pytest.fixture
def start_stage(borrow_stage: StartStage) -> StartStage:
    return borrow_stage
