# SPDX-License-Identifier: Apache-2.0
"""What an engine has done since it started, as pings report it to proxies."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict

import msgspec

from kvferry.proxy.wire.registration import (
    MAX_LINKS,
    MAX_REASONS,
    PULL_BUCKETS,
    Incarnation,
    LinkUse,
    WorkReport,
)
from kvferry.transfer.events import PullDone, PullFailed

_MAX_PRODUCERS = 1024


class WorkCounts:
    """Counts prompts and pulls, in bounded memory."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._recomputes = 0
        self._pull_bytes = 0
        self._pulls = [0] * (len(PULL_BUCKETS) + 1)
        self._failures: Counter[str] = Counter()
        self._links: OrderedDict[str, LinkUse] = OrderedDict()
        """By producer, the last used last."""

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that is computed here, but for what the prefix cache has."""
        self._prompt_tokens += tokens
        self._cached_tokens += cached

    def recompute(self) -> None:
        """Count a prompt that is computed here because its KV could not be pulled."""
        self._recomputes += 1

    def pull_done(self, producer: str, event: PullDone) -> None:
        """Count a pull that was proven right."""
        self._pull_bytes += event.nbytes
        self._pulls[bisect_left(PULL_BUCKETS, event.pull_s)] += 1
        link = self._removed(producer)
        self._links[producer] = msgspec.structs.replace(
            link,
            backend=event.backend,
            pulls=link.pulls + 1,
            nbytes=link.nbytes + event.nbytes,
            seconds=link.seconds + event.pull_s,
            tail_s=(link.tail_s or 0.0) + event.tail_s,
        )

    def pull_failed(self, producer: str, event: PullFailed) -> None:
        """Count a pull that failed."""
        reason = event.reason if event.reason in self._failures or self._has_place else "other"
        self._failures[reason] += 1
        link = self._removed(producer)
        self._links[producer] = msgspec.structs.replace(link, failures=link.failures + 1)

    def work(self, leases_expired: int) -> WorkReport:
        """Return all counts. `leases_expired`: leases on our KV that ended without their reader's release."""
        last = list(self._links.values())[-MAX_LINKS:]
        return WorkReport(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            recomputes=self._recomputes,
            leases_expired=leases_expired,
            pull_bytes=self._pull_bytes,
            pulls=tuple(self._pulls),
            failures=dict(self._failures),
            links=tuple(last),
        )

    @property
    def _has_place(self) -> bool:
        return len(self._failures) < MAX_REASONS - 1

    def _removed(self, producer: str) -> LinkUse:
        """Take out what is known of a producer; the one that was used longest ago makes room."""
        link = self._links.pop(producer, None)
        if link is None:
            link = LinkUse(producer=Incarnation(producer))
            if len(self._links) >= _MAX_PRODUCERS:
                self._links.popitem(last=False)
        return link
