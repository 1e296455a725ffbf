# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before any test imports torch, and before hypothesis draws its first example."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Idle compute threads spin by default; on shared cores that turns milliseconds into tenths of a second.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine says nothing about the code: pytest-timeout alone ends an example that never ends.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")
