# SPDX-License-Identifier: Apache-2.0
"""The bounded worlds that are explored: each in a form for CI, and in a long one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tests.model.world import Bounds

_ALONE = Bounds(requests=1, readers=1, pulls=((0, 0),), renewals=0)
_MIDWAY = (
    *("register 0", "register 1", "ready 0", "ready 1", "open 0", "open 1"),
    *("deliver open 0#0", "deliver open 1#0", "deliver grant 0#0", "deliver grant 1#0"),
)
"""Both prompts are leased and both readers' ranks are reading."""

SHORT: Mapping[str, Bounds] = MappingProxyType(
    {
        "one reader, one fault, time": replace(_ALONE, faults=1, time=2),
        "one reader, two faults": replace(_ALONE, faults=2, time=0),
        "one reader, renewals": replace(_ALONE, faults=0, renewals=1, time=3),
        "one reader that verifies": replace(_ALONE, verify=True, faults=1, time=1),
        "one reader that may have all blocks early": replace(_ALONE, whole=True, faults=1, time=1),
        "a loan": replace(_ALONE, lent=True, faults=2, time=2),
        "a loan that is asked for first": replace(_ALONE, lent=True, asked=True, faults=2, time=2),
        "a loan that two readers ask for": Bounds(
            requests=1, pulls=((0, 0), (1, 0)), lent=True, faults=1, renewals=0, time=1, depth=11
        ),
        "two ranks": replace(_ALONE, ranks=2, faults=1, time=0, depth=15),
        "two readers of one request": Bounds(
            requests=1, pulls=((0, 0), (1, 0)), faults=1, renewals=1, time=1, depth=9
        ),
        "two requests, two readers": Bounds(pulls=((0, 0), (1, 1), (1, 0)), faults=1, time=1, depth=6),
        "two requests, two readers, midway": Bounds(
            pulls=((0, 0), (1, 1)), faults=2, renewals=0, time=2, begin=_MIDWAY, depth=6
        ),
        "a short memory": Bounds(faults=0, renewals=0, time=2, memory=1, staged=1, depth=11),
    }
)

LONG: Mapping[str, Bounds] = MappingProxyType(
    {
        "one reader, one fault, time": replace(_ALONE, faults=1, renewals=1, time=3),
        "one reader, three faults": replace(_ALONE, faults=3, time=0),
        "one reader, two faults, time": replace(_ALONE, faults=2, renewals=1, time=3, depth=13),
        "one reader that verifies, two faults": replace(_ALONE, verify=True, faults=2, time=1),
        "one reader that may have all blocks early": replace(
            _ALONE, verify=True, whole=True, faults=2, time=1, depth=18
        ),
        "two ranks": replace(_ALONE, ranks=2, faults=1, time=0),
        "two ranks, three faults": replace(_ALONE, ranks=2, faults=3, time=0, depth=14),
        "two readers of one request": Bounds(
            requests=1, pulls=((0, 0), (1, 0)), faults=1, renewals=1, time=2, depth=12
        ),
        "two requests, two readers": Bounds(pulls=((0, 0), (1, 1), (1, 0)), faults=3, time=3, depth=7),
        "two requests, two readers, midway": Bounds(
            pulls=((0, 0), (1, 1)), faults=3, renewals=1, time=3, begin=_MIDWAY, depth=8
        ),
        "a short memory": Bounds(faults=1, renewals=0, time=2, memory=1, staged=1, depth=11),
    }
)
