# SPDX-License-Identifier: Apache-2.0
"""What `kvferry up` passes on to the processes that it starts."""

from __future__ import annotations

from kvferry.deploy.up import PassedOn, UpConfig, cluster_spec


def test_the_form_of_logs_is_that_of_all_processes_unless_one_has_its_own() -> None:
    words = ("--proxy.log-format=text", "--decode.log-format", "text")
    spec = cluster_spec(
        UpConfig(log_format="json", otlp_endpoint="http://c:4318"), PassedOn("kvferry up", words)
    )
    prefill, decode = spec.agents
    assert spec.proxy_args == ("--log-format=json", "--otlp-endpoint=http://c:4318", "--log-format=text")
    assert prefill.args[-2:] == ("--log-format=json", "--otlp-endpoint=http://c:4318")
    assert decode.args[-4:] == (*prefill.args[-2:], "--log-format", "text")


def test_nothing_is_passed_on_by_default() -> None:
    assert cluster_spec(UpConfig(), PassedOn("kvferry up", ())).proxy_args == ()
