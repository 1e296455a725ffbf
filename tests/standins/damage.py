# SPDX-License-Identifier: Apache-2.0
"""What `damaging_connector` does to KV: the file that `SWITCH` names has a word of `Damage`, and mostly the
number of a KV-cache group. It is read again for each prompt.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path

SWITCH = "KVFERRY_TEST_DAMAGE"
"""An environment variable. Without it every proof is denied, and all groups are overwritten."""


class Damage(enum.Enum):
    NONE = "none"
    DENY = "deny"
    """Pages are overwritten, and the proof is denied."""
    OVERWRITE = "overwrite"
    """Pages are overwritten after the proof: the control."""
    BELIEVE = "believe"
    """What was not proven is taken for proven: the control of a late reader."""
    DRAFT = "draft"
    """Pages of the last layer alone, which is a draft model's, are overwritten after the proof."""
    HOLE = "hole"
    """The first block that the decode server needs is not lent."""


def damage() -> tuple[Damage, int | None]:
    """What goes wrong now, and in which group; None: in all."""
    if SWITCH not in os.environ:
        return Damage.DENY, None
    how, _, group = Path(os.environ[SWITCH]).read_text().partition(" ")
    return Damage(how), int(group) if group else None
