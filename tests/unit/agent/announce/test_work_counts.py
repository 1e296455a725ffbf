# SPDX-License-Identifier: Apache-2.0
"""What an engine has done, as pings report it."""

from __future__ import annotations

import msgspec

from kvferry.agent.announce.work_counts import WorkCounts
from kvferry.proxy.wire.registration import MAX_LINKS, MAX_REASONS, PULL_BUCKETS, WorkReport
from kvferry.transfer.events import PullDone, PullFailed


def done(pull_s: float, nbytes: int = 100) -> PullDone:
    return PullDone(
        transfer_id="t", backend="tcp", nbytes=nbytes, descriptors=1, wait_s=9.0, pull_s=pull_s, tail_s=0.25
    )


def failed(reason: str) -> PullFailed:
    return PullFailed(transfer_id="t", reason=reason, quiescent=True)


def test_pulls_are_counted_by_time_and_by_producer() -> None:
    counts = WorkCounts()
    counts.pull_done("p", done(0.001))
    counts.pull_done("p", done(0.0011))
    counts.pull_done("q", done(1000.0))
    counts.pull_failed("p", failed("deadline"))
    counts.prompt(100, 60)
    counts.recompute()
    work = counts.work(leases_expired=2)
    assert work.pulls == (1, 1, *[0] * (len(PULL_BUCKETS) - 2), 1)
    assert (work.pull_bytes, work.failures, work.recomputes) == (300, {"deadline": 1}, 1)
    assert (work.prompt_tokens, work.cached_tokens, work.leases_expired) == (100, 60, 2)
    of_q, of_p = work.links
    assert (of_p.producer, of_p.pulls, of_p.failures, of_p.nbytes, of_p.backend) == ("p", 2, 1, 200, "tcp")
    assert (of_q.producer, of_q.pulls) == ("q", 1)
    assert (of_p.tail_s, of_q.tail_s) == (0.5, 0.25)


def test_a_report_is_one_that_proxies_accept_whatever_happened() -> None:
    counts = WorkCounts()
    for number in range(5000):
        counts.pull_done(str(number), done(0.01))
        counts.pull_failed(str(number), failed(f"reason-{number}"))
    work = counts.work(0)
    assert msgspec.convert(msgspec.to_builtins(work), WorkReport) == work
    assert (len(work.links), len(work.failures)) == (MAX_LINKS, MAX_REASONS)
    assert work.links[-1].producer == "4999"
    assert sum(work.failures.values()) == 5000
