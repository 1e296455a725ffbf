# SPDX-License-Identifier: Apache-2.0
"""Which addresses agents may advertise, and which registrations were rejected lately.

A ping makes the proxy send requests to an address of the sender's choice, and decode agents open connections
to its control address. Rules keep both within the networks that agents live in.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from kvferry.proxy.wire.registration import VERSION, OtherRegister, Register

MAX_SHOWN = 64
MAX_ADDRESS_CHARS = 200
MEMORY_S = 60.0
_NAME = re.compile(r"\.?[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
# MoRIIO's "host:IP,handshake:PORT,notify:PORT".
_MORIIO_CONTROL = re.compile(r"host:([^,]+),")


class AddressRules:
    """Which hosts may be advertised.

    Args:
        allowed: Networks, addresses and host names, separated by commas; a name that begins with a dot stands
            for all below it. Empty: any host. Names are compared as text and never resolved, so that control
            of a DNS name does not suffice to move an agent elsewhere.
        tls_only: Whether only https addresses are allowed.

    Raises:
        ValueError: names the invalid rule.
    """

    def __init__(self, allowed: str = "", *, tls_only: bool = False) -> None:
        self.tls_only = tls_only
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[str] = set()
        for rule in filter(None, map(str.strip, allowed.lower().split(","))):
            try:
                self._networks.append(ip_network(rule))
            except ValueError as error:
                # What looks like an address but is invalid must not become a name.
                if not _NAME.fullmatch(rule) or rule.replace(".", "").isdecimal():
                    raise ValueError(f"{rule!r} is not a network, address or host name: {error}") from error
                self._names.add(rule)

    def allow(self, info: Register) -> bool:
        """Return whether every host that the registration advertises may be dialled."""
        if not self._networks and not self._names:
            return True
        return all(host is not None and self._allows(host) for host in _hosts(info))

    def _allows(self, host: str) -> bool:
        try:
            address = _plain(ip_address(host))
        except ValueError:
            return any(host == name or (name[0] == "." and host.endswith(name)) for name in self._names)
        return any(address in network for network in self._networks)


def speaks_tls(info: Register) -> bool:
    """Return whether requests to the agent are encrypted."""
    return urlsplit(info.address).scheme == "https"


def _hosts(info: Register) -> Iterator[str | None]:
    """Yield the hosts in a registration, in lower case; None for an address without a readable one."""
    yield urlsplit(info.address).hostname
    moriio = _MORIIO_CONTROL.match(info.control)
    if moriio:
        yield moriio[1].lower()
    elif info.control:
        try:
            yield urlsplit(info.control).hostname
        except ValueError:
            yield None


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address within an IPv6 one that only wraps it."""
    return getattr(address, "ipv4_mapped", None) or address


class RejectReason(enum.StrEnum):
    """Why a registration is rejected; the text is shown to operators and to the agent."""

    ADDRESS = "its address or control address is outside --allow-address"
    PLAINTEXT = "its address is not https, which --agent-ca asks for"
    STALE = "a later ping of this incarnation has arrived before"
    RETIRED = "this incarnation has left, or was replaced at its address"
    FULL = "this proxy has registered as many agents as it can"
    VERSION = f"this proxy speaks version {VERSION} of pings, and not the agent's"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedAgent:
    """Rejected pings from one address for one reason: how many, and when the last one came."""

    address: str
    control: str
    role: str
    reason: RejectReason
    count: int
    at: float


class RejectedAgents:
    """The latest rejections, in bounded memory whatever is sent."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[tuple[str, RejectReason], RejectedAgent] = OrderedDict()

    def note(self, info: Register | OtherRegister, reason: RejectReason, now: float) -> None:
        """Count a rejected ping."""
        address = info.address[:MAX_ADDRESS_CHARS]
        before = self._by_kind.pop((address, reason), None)
        self._by_kind[address, reason] = RejectedAgent(
            address=address,
            control=info.control[:MAX_ADDRESS_CHARS],
            role=info.role,
            reason=reason,
            count=1 if before is None else before.count + 1,
            at=now,
        )
        if len(self._by_kind) > MAX_SHOWN:
            self._by_kind.popitem(last=False)

    def lately(self, now: float) -> tuple[RejectedAgent, ...]:
        """Return those of the last `MEMORY_S` seconds, latest first."""
        return tuple(each for each in reversed(self._by_kind.values()) if now - each.at < MEMORY_S)
