# SPDX-License-Identifier: Apache-2.0
"""The /metrics page of an agent."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvferry.agent.api.metrics import AgentMetrics
from kvferry.agent.messages.requests import Stats, Timing
from kvferry.transfer.events import PlaneStats

STATS = Stats(
    steps=11, running=2, waiting=3, blocks_free=4, blocks_used=5, blocks_leased=6, blocks_quarantined=7,
    blocks_total=22, preemptions=8, recomputes=1, integrity_errors=0,
    plane=PlaneStats(
        leased=1, quarantined=0, leases_ended={"expired": 3, "released": 4}, pulls=9, streamed_pulls=15,
        pull_bytes=10, pull_descriptors=12, pull_seconds=0.5, pull_failures={"timeout": 2},
        verify_seconds=0.25, rebuilds=14, handshakes=13, bad_frames=0, refusals={},
    ),
)  # fmt: skip


def samples(metrics: AgentMetrics) -> dict[tuple[str, ...], float]:
    page = metrics.render().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_page_shows_the_engines_last_snapshot() -> None:
    latest = [None, STATS]
    metrics = AgentMetrics(lambda: latest[-1])
    page = samples(metrics)
    assert page["kvferry_agent_num_requests_running",] == 2
    assert page["kvferry_agent_num_requests_waiting",] == 3
    states = ("free", "used", "leased", "quarantined")
    assert [page["kvferry_agent_kv_blocks", state] for state in states] == [4, 5, 6, 7]
    assert page["kvferry_transfer_bytes_total",] == 10
    assert page["kvferry_transfer_seconds_total",] == 0.5
    assert page["kvferry_transfer_verify_seconds_total",] == 0.25
    assert page["kvferry_transfer_rebuilds_total",] == 14
    assert page["kvferry_transfer_failures_total", "timeout"] == 2
    assert page["kvferry_transfer_leases_ended_total", "expired"] == 3
    assert page["kvferry_transfer_leases_ended_total", "dropped"] == 0, (
        "a cause is shown before it first occurs"
    )
    assert page["kvferry_agent_recomputes_total",] == 1
    assert page["kvferry_transfer_streamed_pulls_total",] == 15
    latest.pop()
    assert ("kvferry_agent_num_requests_running",) not in samples(metrics)


def test_two_agents_in_one_process_share_nothing() -> None:
    first, second = AgentMetrics(lambda: None), AgentMetrics(lambda: None)
    first.finished(200, None)
    assert ("kvferry_agent_requests_total", "200") not in samples(second)


def test_phases_of_a_pull_are_observed_only_where_there_was_one() -> None:
    metrics = AgentMetrics(lambda: None)
    metrics.finished(200, Timing(queue_s=1.5))
    metrics.finished(200, Timing(pull_s=2.5, backend="tcp"))
    page = samples(metrics)
    assert page["kvferry_agent_phase_seconds_sum", "queue"] == 1.5
    assert page["kvferry_agent_phase_seconds_count", "queue"] == 2
    assert page["kvferry_agent_phase_seconds_count", "pull"] == 1
    assert ("kvferry_agent_phase_seconds_count", "pull_tail") not in page
    metrics.finished(200, Timing(pull_s=2.5, pull_tail_s=0.25, pull_early_blocks=3, backend="tcp"))
    assert samples(metrics)["kvferry_agent_phase_seconds_sum", "pull_tail"] == 0.25
    assert page["kvferry_agent_requests_total", "200"] == 2
