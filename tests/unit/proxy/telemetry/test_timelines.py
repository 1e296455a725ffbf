# SPDX-License-Identifier: Apache-2.0
"""Where requests went: bounded, whatever clients send."""

from __future__ import annotations

from kvferry.proxy.telemetry.request_log import MAX_REQUESTS, MAX_STEPS, MAX_TEXT_CHARS, ROUTED, Timelines


def test_the_latest_requests_are_remembered_and_of_one_id_the_last() -> None:
    timelines = Timelines()
    for number in range(MAX_REQUESTS):
        timelines.begin(str(number), "completions", float(number))
    again = timelines.begin("1", "chat/completions", 0.0)
    timelines.begin("another", "completions", 0.0)
    assert timelines.find("0") is None
    assert timelines.find("1") is again
    assert timelines.find("2") is not None


def test_a_page_shows_phases_attempts_and_losses_from_the_arrival_on() -> None:
    timeline = Timelines().begin("r", "completions", 100.0)
    timeline.add(100.0, "route")
    timeline.add(100.5, ROUTED, "http://p", "http://d", "t")
    timeline.add(100.5, "prefill")
    timeline.add_loss(101.0, "x" * 1000)
    timeline.add(102.0, "ended")
    assert timeline.page()["total_s"] > 0.0, "under way until it has a status"
    timeline.status = 502
    page = timeline.page()
    assert page["phases"] == [
        {"phase": "route", "start_s": 0.0, "end_s": 0.5},
        {"phase": "prefill", "start_s": 0.5, "end_s": 2.0},
    ]
    assert page["total_s"] == 2.0
    assert page["attempts"] == [
        {"at_s": 0.5, "prefill": "http://p", "decode": "http://d", "transfer_id": "t"}
    ]
    assert page["losses"] == [{"at_s": 1.0, "reason": "x" * MAX_TEXT_CHARS}]


def test_a_request_that_is_retried_without_end_is_bounded() -> None:
    timeline = Timelines().begin("r", "completions", 0.0)
    for number in range(10 * MAX_STEPS):
        timeline.add(float(number), "route")
        timeline.add(float(number), ROUTED, "p", "d", "t")
        timeline.add_loss(float(number), "lost")
    page = timeline.page()
    assert sum(len(page[name]) for name in ("phases", "attempts", "losses")) == MAX_STEPS
