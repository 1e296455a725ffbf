# SPDX-License-Identifier: Apache-2.0
"""How much of the proxy a request passes through does not grow: the limits are what it is now."""

from __future__ import annotations

import pytest

from benchmarks.request_trip import measure

MOST = {
    "streamed request": {"files": 33, "functions": 289},
    "whole request": {"files": 32, "functions": 251},
    "ping": {"files": 7, "functions": 26},
}
"""Wanted: 20 files and 150 functions for a request."""


@pytest.mark.timeout(120)
async def test_a_request_passes_through_no_more_than_it_did() -> None:
    rows = {name: trip.row() for name, trip in (await measure()).items()}
    for name, most in MOST.items():
        assert {unit: rows[name][unit] for unit in most if rows[name][unit] > most[unit]} == {}, name
