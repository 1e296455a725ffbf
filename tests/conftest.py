# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before any test imports torch."""

from __future__ import annotations

import os

# Idle compute threads spin by default; on shared cores that turns milliseconds into tenths of a second.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
