# SPDX-License-Identifier: Apache-2.0
"""A host whose link goes down closes no connection; its clients get answers, or errors, all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.helpers.waiting import patient
from tests.standins import network
from tests.system.link_down import CLIENTS, Request

MAX_WAIT_S = 10.0
TYPED = {
    "answered",
    "agent_lost",
    "agent_timeout",
    "no_agent",
    "overloaded",
    "stream_broken",
    "suspect_request",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("prefill_hosts", [1, 2])
def test_no_client_waits_long_for_a_host_whose_link_is_down(prefill_hosts: int) -> None:
    """W1. Of two hosts, the other one answers; without another, the decode agent does."""
    if not network.can_be_made():
        pytest.skip("this machine lets its users make no network namespaces")
    done = subprocess.run(
        [*network.APART, sys.executable, "-m", "tests.system.link_down", str(prefill_hosts)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    requests = msgspec.json.decode(done.stdout, type=list[Request])
    longest = sorted(requests, key=lambda request: request.waited_s, reverse=True)[:CLIENTS]
    assert longest[0].waited_s < patient(MAX_WAIT_S), longest
    assert {request.end for request in requests} <= TYPED
    in_flight = [request for request in requests if request.began < 0 < request.ended]
    assert len(in_flight) == CLIENTS, "the link went down under every client"
    later = {request.end for request in requests if request.began > MAX_WAIT_S}
    assert later == {"answered"}, "requests are served without that host"
