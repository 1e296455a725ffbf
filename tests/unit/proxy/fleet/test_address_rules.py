# SPDX-License-Identifier: Apache-2.0
"""Which addresses agents may have."""

from __future__ import annotations

import pytest

from kvferry.proxy.fleet.address_rules import AddressRules, speaks_tls
from tests.unit.proxy.builders import registration

RULES = "10.0.0.0/8, 192.168.7.7, 2001:db8::/32, agent-7.example, .pool.example"


def allows(rules: str, address: str, control: str) -> bool:
    return AddressRules(rules).allow(registration("decode", 1, address=address, control=control))


@pytest.mark.parametrize(
    "host",
    ["10.1.2.3", "192.168.7.7", "[2001:db8::1]", "[::ffff:10.1.2.3]", "agent-7.example", "AGENT-7.EXAMPLE",
     "a.pool.example", "b.a.pool.example"],
)  # fmt: skip
def test_hosts_within_the_rules_are_fine(host: str) -> None:
    assert allows(RULES, f"http://{host}:8000", f"tcp://{host}:6301")


@pytest.mark.parametrize(
    "host",
    ["11.0.0.1", "192.168.7.8", "127.0.0.1", "localhost", "[::1]", "[2001:db9::1]", "[::ffff:11.0.0.1]",
     # Other spellings of addresses are names to us, and so are refused whatever they would resolve to.
     "10.1", "0x0a.1.2.3", "167837955", "0127.0.0.1",
     "pool.example", "evilpool.example", "agent-7.example.evil", "xagent-7.example", "10.0.0.1.evil"],
)  # fmt: skip
def test_a_rogue_address_is_refused_wherever_it_stands(host: str) -> None:
    assert not allows(RULES, f"http://{host}:8000", "tcp://10.0.0.1:6301")
    assert not allows(RULES, "http://10.0.0.1:8000", f"tcp://{host}:6301")
    assert not allows(RULES, "http://10.0.0.1:8000", f"host:{host.strip('[]')},handshake:1,notify:2")


@pytest.mark.parametrize("control", ["6301", "tcp://", "tcp://[", "10.0.0.1:6301", "ipc:///tmp/x"])
def test_a_control_address_in_which_no_host_can_be_seen_is_refused(control: str) -> None:
    assert not allows(RULES, "http://10.0.0.1:8000", control)
    assert allows("", "http://10.0.0.1:8000", control), "but not where nothing is asked for"


def test_an_engine_without_a_control_channel_has_no_address_there() -> None:
    assert allows(RULES, "http://10.0.0.1:8000", "")


@pytest.mark.parametrize(
    "rules", ["10.0.0.5/8", "10.0.0", "10.0.0.256", "http://h", "h:1", "a b", "*", "10.0.0.0/8,-"]
)
def test_a_rule_that_is_none_is_named(rules: str) -> None:
    """A typing error must not leave a network out, nor let everything in."""
    with pytest.raises(ValueError, match="is not a network, address or host name"):
        AddressRules(rules)


def test_only_https_is_encrypted() -> None:
    assert speaks_tls(registration("decode", 1, address="https://h:1"))
    assert not speaks_tls(registration("decode", 1, address="http://h:1"))
