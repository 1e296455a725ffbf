# SPDX-License-Identifier: Apache-2.0
"""`host:port`, formatted and validated."""

from __future__ import annotations

import pytest

from kvferry.common.addresses import check_host_port, host_port


@pytest.mark.parametrize(
    ("host", "formatted"),
    [("10.0.0.1", "10.0.0.1:80"), ("example.org", "example.org:80"), ("::1", "[::1]:80")],
)
def test_ipv6_addresses_get_brackets(host: str, formatted: str) -> None:
    assert host_port(host, 80) == formatted


@pytest.mark.parametrize("address", ["host:1", "[::1]:65535", "10.0.0.1:80", "a-b.c_d.example.:80"])
def test_host_and_port_are_valid(address: str) -> None:
    check_host_port("proxy", address)


@pytest.mark.parametrize(
    "address",
    [
        *("host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x", "host:\u0661"),
        *("tcp://host:1", "a b:1", "*:1", "[]:1", "[host:1", "a/b:1", "a..b:1"),
    ],
)
def test_anything_else_is_rejected_with_the_settings_name(address: str) -> None:
    with pytest.raises(ValueError, match=r"^proxy must be HOST:PORT"):
        check_host_port("proxy", address)
