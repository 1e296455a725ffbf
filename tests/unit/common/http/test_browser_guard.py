# SPDX-License-Identifier: Apache-2.0
"""Which requests a web page can have caused (N4)."""

from __future__ import annotations

import socket

import pytest

from kvferry.common.http.browser_guard import AllowedHosts, BrowserGuard

OWN = AllowedHosts(["named.example.com", ".pool.example.com"], ["Bound.example", "::1"])
GUARD = BrowserGuard(OWN, lambda path, origin: (path, origin) == ("/v1/x", b"https://chat.example"))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:10001", "10.20.0.1:80", "0.0.0.0:1", "203.0.113.9", "127.0.0.1."),
        *("[::1]", "[::1]:10001", "[2001:DB8::1]:8", "[::ffff:127.0.0.1]"),
        *("localhost", "LocalHost:10001", "localhost.", "a.localhost", "proxy", "gpu-7:8000", "my_service"),
        *("gpu-7.local", "gpu-7.internal:1", "kvferry.ns.svc.cluster.local"),
        *("bound.example", "BOUND.example.:10001", "named.example.com", "a.b.pool.example.com:1"),
        socket.gethostname(),
    ],
)
def test_what_no_page_is_called_by_is_allowed(host: str) -> None:
    assert host in OWN


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:10001", "EVIL.example.", "rebind.it", "com."),
        *("localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1.nip.io", "evil-localhost.com"),
        *("bound.example.evil.example", "xbound.example", "pool.example.com", "xpool.example.com"),
        *("notlocal.com", "evil.local.com", "1.2.3.4.5", "256.256.256.256", "127.1", "0x7f.0.0.1"),
        *("", ":10001", "[evil.example]", "[::1", "[::1]x", "::1", "[1::2::3]", "a@localhost"),
        *("localhost:80:80", "localhost/evil.example", "localhost evil.example", "localhost,evil.example"),
        *("localhost:x", "bücher.example", "\xb5"),
    ],
)
def test_any_other_host_is_refused(host: str) -> None:
    assert host not in OWN
    refused = GUARD.refusal(b"GET", b"/nodes", {b"host": host.encode("latin-1", "replace")})
    assert refused is not None and refused[0] == "host_not_allowed"


def test_an_operator_may_allow_any() -> None:
    assert "evil.example" in AllowedHosts(["*"])


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:1", "a/b", "*.example.com", "..a"])
def test_what_is_no_host_name_cannot_be_named(name: str) -> None:
    with pytest.raises(ValueError, match="is no host name"):
        AllowedHosts([name])


@pytest.mark.parametrize(
    "target", [b"http://evil.example/nodes", b"http://evil.example", b"https://evil.example:1/?a=/b"]
)
@pytest.mark.parametrize("headers", [{}, {b"host": b"127.0.0.1"}])
def test_a_target_in_absolute_form_counts_as_host(target: bytes, headers: dict[bytes, bytes]) -> None:
    """RFC 9112 §3.2.2: it overrules `Host`."""
    assert GUARD.refusal(b"GET", target, headers) is not None
    assert GUARD.refusal(b"GET", target.replace(b"evil.example", b"localhost"), headers) is None


def test_a_request_without_host_is_no_browsers() -> None:
    """HTTP/1.0, as some load balancers probe."""
    assert GUARD.refusal(b"GET", b"/health", {}) is None


LOCAL = b"127.0.0.1:10001"


@pytest.mark.parametrize(
    ("origin", "site"),
    [
        (b"http://evil.example", None),
        (b"http://evil.example", b"cross-site"),
        (b"http://127.0.0.1:3000", b"same-site"),
        (b"http://127.0.0.1:3000", None),
        (b"null", None),
        (b"null", b"cross-site"),
        (b"http://127.0.0.1:10001.evil.example", None),
        (b"", None),
        (None, b"cross-site"),
        (None, b"Same-Site"),
        (None, b"of-the-future"),
    ],
)
@pytest.mark.parametrize("hosts", [OWN, None], ids=["keyless", "with keys"])
def test_another_sites_page_changes_nothing(
    origin: bytes | None, site: bytes | None, hosts: AllowedHosts | None
) -> None:
    given = {b"host": LOCAL, b"origin": origin, b"sec-fetch-site": site}
    headers = {name: value for name, value in given.items() if value is not None}
    guard = BrowserGuard(hosts)
    for method in (b"POST", b"PUT", b"DELETE", b"PATCH"):
        refused = guard.refusal(method, b"/nodes/x/drain", headers)
        assert refused is not None and refused[0] == "cross_site"
    for method in (b"GET", b"HEAD", b"OPTIONS"):
        assert guard.refusal(method, b"/nodes/x/drain", headers) is None, "it cannot read the answer"


@pytest.mark.parametrize(
    ("origin", "site"),
    [
        (None, None),
        (b"http://127.0.0.1:10001", None),
        (b"HTTP://127.0.0.1:10001", b"same-origin"),
        (b"https://behind-tls.example", b"same-origin"),
        (None, b"none"),
    ],
)
def test_programs_and_its_own_pages_may(origin: bytes | None, site: bytes | None) -> None:
    given = {b"host": LOCAL, b"origin": origin, b"sec-fetch-site": site}
    headers = {name: value for name, value in given.items() if value is not None}
    assert GUARD.refusal(b"POST", b"/nodes/x/drain", headers) is None


def test_a_trusted_origin_may_where_it_is_trusted() -> None:
    headers = {b"host": LOCAL, b"origin": b"https://chat.example", b"sec-fetch-site": b"cross-site"}
    for target in (b"/v1/x", b"http://127.0.0.1:10001/v1/x"):
        assert GUARD.refusal(b"POST", target, headers) is None
    assert GUARD.refusal(b"POST", b"/nodes/x/drain", headers) is not None
