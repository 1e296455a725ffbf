# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import select
import time

from kvferry.transfer.backends.common.wakeups import Timer


def test_a_timer_is_silent_until_its_time_and_after_it_was_set_to_none() -> None:
    timer = Timer()
    try:
        assert not select.select([timer], [], [], 0)[0]
        timer.set(time.monotonic() + 3600)
        assert not select.select([timer], [], [], 0)[0]
        at = time.monotonic() + 0.02
        timer.set(at)
        assert select.select([timer], [], [], 10.0)[0]
        assert time.monotonic() >= at
        timer.set(None)
        assert not select.select([timer], [], [], 0)[0]
    finally:
        timer.close()
