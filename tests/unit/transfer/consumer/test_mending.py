# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvferry.transfer.consumer.mending import Mending


def test_an_idle_backend_is_mended_at_once_and_asked_for_once() -> None:
    mending = Mending(30.0)
    mending.ask(1.0, "mori")
    mending.ask(1.5, "mori")
    assert mending.take_due(2.0, ()) == ["mori"]
    assert not mending
    assert mending.take_due(99.0, ()) == []


def test_reads_under_way_may_end_first_but_not_for_ever() -> None:
    mending = Mending(30.0)
    mending.ask(1.0, "mori")
    assert mending.take_due(30.9, {"mori", "tcp"}) == []
    assert mending.take_due(31.0, {"mori"}) == ["mori"]


def test_what_breaks_again_at_once_does_not_end_everybody_elses_reads_each_time() -> None:
    mending = Mending(30.0)
    mending.ask(1.0, "mori")
    mending.take_due(1.0, ())
    mending.ask(2.0, "mori")
    assert mending.take_due(30.9, ()) == []
    assert mending.take_due(31.0, ()) == ["mori"]
