# SPDX-License-Identifier: Apache-2.0
"""A consumer's links: at most one usable link per producer, made when it is first needed."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Set

import zmq

from kvferry.transfer.consumer.link import Link, LinkState, Source, source_of
from kvferry.transfer.plane import PlaneConfig, RemotePrompt
from kvferry.transfer.ranks.group import RankGroup

MAX_REFUSALS = 64
"""Producers remembered because they refused us for good."""


class LinkPool:
    """Makes, finds and closes links.

    A *retired* link is used for no further transfer and lives until its last one has left it. `on_ready` and
    `on_lost` are those of `Link`; when `on_lost` is called, the link is no longer in the pool.
    """

    def __init__(
        self,
        config: PlaneConfig,
        ranks: RankGroup,
        *,
        on_ready: Callable[[Link], None],
        on_lost: Callable[[Link, str, str], None],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._key = config.cluster_key
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._usable: dict[Source, Link] = {}
        self._by_number: dict[int, Link] = {}
        """Every link that is open, retired ones included."""
        self._numbers = itertools.count(1)
        self._refused: OrderedDict[Source, str] = OrderedDict()

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Allow links to be made."""
        self._context = context

    def close(self) -> None:
        """Close every link, without a call of `on_lost`."""
        for link in list(self._by_number.values()):
            link.close()
        self._by_number.clear()
        self._usable.clear()

    @property
    def refusals(self) -> dict[str, str]:
        """Why some producers can never be used, by incarnation."""
        return {source.engine_id: why for source, why in self._refused.items()}

    def get(self, number: int) -> Link | None:
        """Return an open link by its number."""
        return self._by_number.get(number)

    def over(self, transfer: str) -> list[Link]:
        """Return the open links over one backend."""
        return [link for link in self._by_number.values() if link.transfer == transfer]

    def refusal(self, remote: RemotePrompt) -> str:
        """Return why this producer can never be used; empty as far as is known."""
        return self._refused.get(source_of(remote), "")

    def acquire(self, remote: RemotePrompt) -> Link | None:
        """Return the usable link to a producer, made now if there is none; None if it refused us for good."""
        source = source_of(remote)
        link = self._usable.get(source)
        if link is not None or source in self._refused:
            return link
        if self._context is None:
            raise RuntimeError("not started")
        number = next(self._numbers)
        link = Link(
            number,
            source,
            self._config,
            self._ranks,
            self._key,
            on_ready=self._ready,
            on_lost=self._lost,
        )
        link.start(self._context)
        self._usable[source] = link
        self._by_number[number] = link
        return link

    def is_usable(self, link: Link) -> bool:
        """Whether the link is neither retired nor lost."""
        return self._usable.get(link.source) is link

    def retire(self, link: Link) -> None:
        """Use the link for no further transfer."""
        if self.is_usable(link):
            del self._usable[link.source]

    def close_retired(self, link: Link) -> None:
        """Close a link that no transfer uses, if it is retired."""
        if not self.is_usable(link):
            self._by_number.pop(link.number, None)
            link.close()

    def check_integrity(self, used: Set[int]) -> None:
        """Raises AssertionError on an inconsistency. `used` are the numbers of links that transfers use."""
        for source, link in self._usable.items():
            assert link.state is not LinkState.LOST, f"link to {source} is lost but kept"
        usable = {link.number for link in self._usable.values()}
        assert self._by_number.keys() <= used | usable, "a retired link that nothing uses"
        assert self._ranks.connecting <= len(self._by_number), "ranks connect a link that is closed"

    def _ready(self, link: Link) -> None:
        for other in list(self._usable.values()):
            if other.source.address == link.source.address and other is not link:
                other.lose("incarnation", f"{link.source} is there now")
        self._on_ready(link)

    def _lost(self, link: Link, reason: str, detail: str) -> None:
        self.retire(link)
        self._by_number.pop(link.number, None)
        if link.refusal:
            self._refused[link.source] = link.refusal
            while len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)
        self._on_lost(link, reason, detail)
