# SPDX-License-Identifier: Apache-2.0
"""The image for CPUs, built once for all tests that run it."""

from __future__ import annotations

import pytest

from tests.deploy.chart import TOOLS
from tests.deploy.containers import Containers, missing
from tests.deploy.image import build

FOLDER = TOOLS / "containers"


@pytest.fixture(scope="session")
def containers() -> Containers:
    """Skips the test where no container can run."""
    if missing():
        pytest.skip(missing())
    return Containers(FOLDER)


@pytest.fixture(scope="session")
def image(containers: Containers) -> str:
    """Its last step has run `kvferry doctor`."""
    return build(containers, FOLDER)
