# SPDX-License-Identifier: Apache-2.0
"""Follows a name by the system's resolver. Run in namespaces of its own, as root of an empty network:
`unshare --user --map-root-user --mount --net python -m tests.standins.follow_a_name`.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from kvferry.agent.announce.proxy_names import ProxyName
from tests.helpers.waiting import patient, wait_until
from tests.standins.dns_server import DnsServer

DEADLINE_S = 60.0
FOLLOWED_WITHIN_S = 5.0
"""What docs/two-proxies.md promises."""


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as directory, DnsServer(port=53) as server:
        for file, text in (
            ("resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"),
            ("nsswitch.conf", "hosts: dns\n"),
        ):
            ours = Path(directory, file)
            ours.write_text(text)
            subprocess.run(["mount", "--bind", str(ours), f"/etc/{file}"], check=True)
        server.names["proxies.test"] = ("10.0.0.1",)
        name = ProxyName("dns:proxies.test")
        until(name, {"10.0.0.1:36367"})
        server.names["proxies.test"] = ("10.0.0.1", "10.0.0.2", "fd00::3")
        until(name, {"10.0.0.1:36367", "10.0.0.2:36367", "[fd00::3]:36367"})
        server.fails = True
        asked = server.queries
        wait_until(lambda: server.queries > asked + 3, DEADLINE_S)
        assert len(name.addresses()) == 3, name.addresses()
        server.fails = False
        server.names["proxies.test"] = ("fd00::3",)
        until(name, {"[fd00::3]:36367"})
        name.close()
    print("followed")


def until(name: ProxyName, expected: set[str]) -> None:
    begun = time.monotonic()
    wait_until(lambda: set(name.addresses()) == expected, DEADLINE_S)
    took_s = time.monotonic() - begun
    print(f"after {took_s:.1f} s: {', '.join(sorted(expected))}")
    assert took_s < patient(FOLLOWED_WITHIN_S)


if __name__ == "__main__":
    main()
