# SPDX-License-Identifier: Apache-2.0
"""Which links a consumer keeps; `test_plane.py` has them over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.transfer.consumer import link_pool
from kvferry.transfer.consumer.link import Source, source_of
from kvferry.transfer.consumer.link_pool import LinkPool
from kvferry.transfer.plane import RemotePrompt


class StandInLink:
    """A link whose handshake succeeds when the test says so."""

    refusal = ""

    def __init__(
        self,
        number: int,
        source: Source,
        *_: object,
        on_ready: Callable[[Any], None],
        on_lost: Callable[[Any, str, str], None],
    ) -> None:
        self.number = number
        self.source = source
        self.succeed = lambda: on_ready(self)
        self._on_lost = on_lost

    def start(self, context: object) -> None:
        pass

    def lose(self, reason: str, detail: str) -> None:
        self._on_lost(self, reason, detail)


def remote(incarnation: str, port: int) -> RemotePrompt:
    return RemotePrompt(engine_id=incarnation, host="127.0.0.1", port=port, num_tokens=1, tp_size=1)


def test_a_link_to_an_incarnation_ends_when_another_one_answers_at_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X23: even if its own connection still looks alive; links to other addresses stay."""
    lost = []
    monkeypatch.setattr(link_pool, "Link", StandInLink)
    pool = LinkPool(
        cast("Any", SimpleNamespace(cluster_key=None)),
        cast("Any", None),
        on_ready=lambda link: None,
        on_lost=lambda link, reason, _: lost.append((link.source, reason)),
    )
    pool.start(cast("Any", object()))
    old, new, elsewhere = remote("a" * 16, 1), remote("b" * 16, 1), remote("c" * 16, 2)
    made = []
    for each in (old, elsewhere, new):
        made.append(cast("Any", pool.acquire(each)))
        made[-1].succeed()
    assert lost == [(source_of(old), "incarnation")]
    assert [pool.is_usable(link) for link in made] == [False, True, True]
