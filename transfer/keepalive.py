# SPDX-License-Identifier: Apache-2.0
"""When a connection whose peer says nothing at all is given up.

A host that vanished does not say so. Left to itself, TCP gives its connections up after a quarter of an hour
if there is something to send, and never if there is not.
"""

from __future__ import annotations

INTERVAL_S = 10
"""How long a connection may be silent before it is probed, and the time between two probes."""
PROBES = 3
LIMIT_MS = (PROBES + 1) * INTERVAL_S * 1000
"""When it is given up."""
