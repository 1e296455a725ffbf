# SPDX-License-Identifier: Apache-2.0
"""The one line that a request leaves in the log of an agent."""

from __future__ import annotations

import asyncio
import json

import pytest
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from kvferry.agent.api.metrics import AgentMetrics
from kvferry.agent.api.request_log import CLIENT_GONE, RequestLogEntry
from kvferry.agent.errors import bad_request
from tests.unit.agent.api.test_metrics import samples


def test_a_prompt_that_is_to_be_logged_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.agent.request")
    entry = RequestLogEntry(AgentMetrics(lambda: None), "r1", None)
    entry.show_prompt(('"' + "ü" * 5000 + '"').encode())
    entry.close(200)
    (record,) = caplog.records
    assert json.loads(record.message)["prompt"] == '"' + "ü" * 2047


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (bad_request("no"), 400),
        (asyncio.CancelledError(), CLIENT_GONE),
        (GeneratorExit(), CLIENT_GONE),
        (RequestEntityTooLarge(), 413),
        (RequestTimeout(), 408),
        (RuntimeError(), 500),
    ],
)
def test_a_request_leaves_one_line_whatever_ended_it(
    failure: BaseException, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvferry.agent.request")
    metrics = AgentMetrics(lambda: None)
    entry = RequestLogEntry(metrics, "r1", "00-trace")
    with pytest.raises(type(failure)), entry.closed_on_failure():
        raise failure
    entry.close(200)  # too late: it is closed
    (record,) = caplog.records
    line = json.loads(record.message)
    assert (line["request_id"], line["traceparent"], line["status"]) == ("r1", "00-trace", status)
    assert samples(metrics)["kvferry_agent_requests_total", str(status)] == 1
