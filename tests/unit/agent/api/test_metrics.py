# SPDX-License-Identifier: Apache-2.0
"""The /metrics page of an agent."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.agent.api.metrics import VLLM_NAMES, AgentMetrics
from kvferry.agent.messages.requests import Stats, Timing
from kvferry.proxy.wire.registration import Capacity
from kvferry.transfer.control.messages import GoneReason
from kvferry.transfer.events import NO_FAULT, PULL_FAILURE_REASONS, PlaneStats, PullTimes

CONSUMER = Path(__file__).parents[4] / "transfer" / "consumer"

PULL_TIMES = PullTimes()
PULL_TIMES.add(0.1)
PULL_TIMES.add(0.4)
STATS = Stats(
    steps=11, running=2, waiting=3, blocks_free=4, blocks_used=5, blocks_leased=6, blocks_quarantined=7,
    blocks_total=22, preemptions=8, recomputes=1, integrity_errors=0,
    plane=PlaneStats(
        leased=1, quarantined=0, leases_ended={"expired": 3, "released": 4}, pulls=9, streamed_pulls=15,
        pull_bytes=10, pull_descriptors=12, pull_times={"tcp": PULL_TIMES}, pull_failures={"deadline": 2},
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
    metrics = AgentMetrics(lambda: latest[-1], lambda: ["nixl", "tcp"])
    page = samples(metrics)
    assert page["kvferry_agent_num_requests_running",] == 2
    assert page["kvferry_agent_num_requests_waiting",] == 3
    states = ("free", "used", "leased", "quarantined")
    assert [page["kvferry_agent_kv_blocks", state] for state in states] == [4, 5, 6, 7]
    assert page["kvferry_transfer_bytes_total",] == 10
    assert page["kvferry_transfer_pull_seconds_sum", "tcp"] == 0.5
    assert page["kvferry_transfer_pull_seconds_bucket", "tcp", "0.1"] == 1
    assert page["kvferry_transfer_pull_seconds_bucket", "tcp", "0.5"] == 2
    assert page["kvferry_transfer_pull_seconds_count", "tcp"] == 2
    assert page["kvferry_transfer_pull_seconds_count", "nixl"] == 0, "shown before its first pull"
    assert page["kvferry_transfer_verify_seconds_total",] == 0.25
    assert page["kvferry_transfer_rebuilds_total",] == 14
    assert page["kvferry_transfer_failures_total", "deadline"] == 2
    assert page["kvferry_transfer_failures_total", "checksum"] == 0, (
        "a reason is shown before it first occurs"
    )
    assert page["kvferry_transfer_leases_ended_total", "expired"] == 3
    assert page["kvferry_transfer_leases_ended_total", "dropped"] == 0, (
        "a cause is shown before it first occurs"
    )
    assert page["kvferry_agent_recomputes_total",] == 1
    assert page["kvferry_transfer_streamed_pulls_total",] == 15
    latest.pop()
    assert ("kvferry_agent_num_requests_running",) not in samples(metrics)


def test_what_vllm_counts_too_has_its_name_and_labels_besides() -> None:
    """Dashboards and routers that are made for vLLM find what they look for."""
    metrics = AgentMetrics(lambda: STATS, model="m")
    metrics.prompt_done(30, 20)
    metrics.generation_tokens = 7
    metrics.choices_ended("stop", 2)
    metrics.finished(200, Timing(queue_s=1.5))
    families = {each.name: each for each in text_string_to_metric_families(metrics.render().decode())}
    shown = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if family.name.startswith("vllm:") and sample.labels.get("finished_reason", "stop") == "stop"
    }
    assert shown["vllm:num_requests_running"] == 2
    assert shown["vllm:num_requests_waiting"] == 3
    assert shown["vllm:kv_cache_usage_perc"] == pytest.approx(1 - 4 / 22)
    assert shown["vllm:prompt_tokens_total"] == shown["vllm:prefix_cache_queries_total"] == 30
    assert shown["vllm:prefix_cache_hits_total"] == 20
    assert shown["vllm:generation_tokens_total"] == 7
    assert shown["vllm:num_preemptions_total"] == 8
    assert shown["vllm:request_success_total"] == 2
    assert shown["vllm:request_queue_time_seconds_sum"] == 1.5
    assert shown["vllm:request_prompt_tokens_count"] == 1
    for name, family in families.items():
        if name.startswith("vllm:"):
            assert {sample.labels["model_name"] for sample in family.samples} == {"m"}, name
    ours = {f"kvferry_agent_{name}" for name in VLLM_NAMES}
    assert ours <= families.keys(), "none is missing from our own"
    vllms = {f"vllm:{name}" for names in VLLM_NAMES.values() for name in names}
    assert {name for name in families if name.startswith("vllm:")} == vllms


def test_what_the_engine_has_not_measured_yet_is_absent() -> None:
    late = ("prefill_backlog_seconds", "full_step_seconds")
    stats = msgspec.structs.replace(STATS, capacity=Capacity(prefill_s=1.5, slots=8))
    page = samples(AgentMetrics(lambda: stats))
    assert page["kvferry_agent_prefill_seconds_total",] == 1.5
    assert page["kvferry_agent_decode_slots",] == 8
    assert not [name for name in late if (f"kvferry_agent_{name}",) in page]
    measured = Capacity(slots=8, step_s=0.25, sequence_s=0.5, backlog_s=3.0)
    stats = msgspec.structs.replace(STATS, capacity=measured)
    page = samples(AgentMetrics(lambda: stats))
    assert [page[f"kvferry_agent_{name}",] for name in late] == [3.0, 4.25]


def test_two_agents_in_one_process_share_nothing() -> None:
    first, second = AgentMetrics(lambda: None), AgentMetrics(lambda: None)
    first.finished(200, None)
    assert samples(first)["kvferry_agent_requests_total", "200"] == 1
    assert samples(second)["kvferry_agent_requests_total", "200"] == 0


def test_phases_of_a_pull_are_observed_only_where_there_was_one() -> None:
    metrics = AgentMetrics(lambda: None)
    metrics.finished(200, Timing(queue_s=1.5))
    metrics.finished(200, Timing(pull_s=2.5, backend="tcp"))
    page = samples(metrics)
    assert page["kvferry_agent_phase_seconds_sum", "queue"] == 1.5
    assert page["kvferry_agent_phase_seconds_count", "queue"] == 2
    assert page["kvferry_agent_phase_seconds_count", "pull"] == 1
    assert page["kvferry_agent_phase_seconds_count", "pull_tail"] == 0
    assert page["kvferry_agent_phase_seconds_count", "prefill"] == 0, "no leg had one"
    assert page["kvferry_agent_phase_seconds_count", "first_step"] == 0
    metrics.finished(200, Timing(pull_s=2.5, pull_tail_s=0.25, pull_early_blocks=3, backend="tcp"))
    assert samples(metrics)["kvferry_agent_phase_seconds_sum", "pull_tail"] == 0.25
    assert page["kvferry_agent_requests_total", "200"] == 2


def test_the_process_is_on_the_page() -> None:
    page = samples(AgentMetrics(lambda: None))
    assert page["process_resident_memory_bytes",] > 0
    assert page["kvferry_agent_build_info", platform.python_version(), version("kvferry")] == 1


def test_whose_word_a_failure_reason_is() -> None:
    """Every word that the plane may give is shown from the start."""
    lease_reasons = {f"lease_{reason}" for reason in get_args(GoneReason)}
    shown = {reason for reason in PULL_FAILURE_REASONS if reason.startswith("lease_")}
    assert lease_reasons - {*NO_FAULT} == shown
    code = "".join(path.read_text() for path in CONSUMER.glob("*.py"))
    given = set(re.findall(r'(?:lose|lost|fail|_failed)\("(\w+)"', code))
    given |= {"deadline", "read_failed", "checksum", "mismatch"}
    given -= {*NO_FAULT}
    assert given == {reason for reason in PULL_FAILURE_REASONS if not reason.startswith("lease_")}
