# SPDX-License-Identifier: Apache-2.0
"""`--proxy dns:NAME`: links follow the addresses of a name.

The lookups of the last test are the system's own, in a network where our DNS server is the resolver.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from kvferry.agent.announce.ping import Announcer
from kvferry.agent.announce.proxy_names import (
    LOOKUP_INTERVAL_S,
    MAX_ADDRESSES,
    ProxyName,
    check_proxy,
    split_name,
)
from kvferry.proxy.wire.registration import Ack, Load, Register, decode_agent_message, encode
from tests.helpers.waiting import wait_until

DEADLINE_S = 30.0


@pytest.mark.parametrize(
    ("words", "name", "port"),
    [("dns:proxies", "proxies", 36367), ("dns:p.ns.svc.cluster.local:7", "p.ns.svc.cluster.local", 7)],
)
def test_a_name_has_a_port_or_the_usual_one(words: str, name: str, port: int) -> None:
    check_proxy(words)
    assert split_name(words) == (name, port)


@pytest.mark.parametrize(
    "words",
    [
        *("dns:", "dns::7", "dns:p:", "dns:p:0", "dns:a b", "dns:::1", "dns:a..b", "p"),
        *("http://h:10001", "https://h", "tcp://h:36367", "tcp://[::1]:36367", "dns://h:7", "a b:7"),
    ],
)
def test_what_is_no_name_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"^proxy must be"):
        check_proxy(words)


class Names:
    """Lookups whose answers the test sets; each waits until the test lets it go on."""

    def __init__(self, *addresses: str) -> None:
        self.answer: list[str] | OSError = list(addresses)
        self.done = 0
        self._may = threading.Semaphore(0)

    def __call__(self, name: str, port: int) -> list[str]:
        assert self._may.acquire(timeout=DEADLINE_S)
        self.done += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return [f"{each}:{port}" for each in self.answer]

    def look(self, times: int = 1) -> None:
        before = self.done
        for _ in range(times):
            self._may.release()
        wait_until(lambda: self.done >= before + times)


def test_an_address_is_left_with_the_second_lookup_that_lacks_it(caplog: pytest.LogCaptureFixture) -> None:
    lookup = Names("10.0.0.1", "10.0.0.2")
    name = ProxyName("dns:p:7", lookup=lookup, interval_s=0.0)
    assert name.addresses() == ()
    lookup.look()
    wait_until(lambda: set(name.addresses()) == {"10.0.0.1:7", "10.0.0.2:7"})
    lookup.answer = ["10.0.0.2", "10.0.0.3"]
    lookup.look()
    wait_until(lambda: "10.0.0.3:7" in name.addresses())
    assert "10.0.0.1:7" in name.addresses()
    lookup.look()
    wait_until(lambda: set(name.addresses()) == {"10.0.0.2:7", "10.0.0.3:7"})
    # What cannot be looked up stays, and is logged once.
    lookup.answer = OSError("no resolver")
    lookup.look(3)
    assert set(name.addresses()) == {"10.0.0.2:7", "10.0.0.3:7"}
    lookup.answer = [f"10.0.1.{index}" for index in range(MAX_ADDRESSES + 1)]
    lookup.look(2)
    wait_until(lambda: len(name.addresses()) == MAX_ADDRESSES)
    name.close()
    lookup.look()  # the one that is under way
    assert [each.message for each in caplog.records].count("dns:p:7 cannot be looked up: no resolver") == 1
    assert 2 * LOOKUP_INTERVAL_S < 5, "what docs/two-proxies.md promises"


def test_a_name_that_still_cannot_be_looked_up_is_logged_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.common.telemetry.recurring_warnings.REPEAT_S", 0.0)
    lookup = Names()
    lookup.answer = OSError("no resolver")
    name = ProxyName("dns:p:7", lookup=lookup, interval_s=0.0)
    lookup.look(3)
    wait_until(lambda: caplog.text.count("dns:p:7 cannot be looked up: no resolver") == 3)
    name.close()
    lookup.look()


class Listener:
    """A proxy's discovery socket, which acknowledges pings."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def pings(self, in_flight: int = 0) -> int:
        """How many have come since the last call."""
        for count in range(1000):
            try:
                peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            ping = decode_agent_message(frame)
            assert isinstance(ping, Register)
            ack = Ack(proxy=self.address, index=ping.index, in_flight=in_flight)
            self._socket.send_multipart([peer, encode(ack)])
        raise AssertionError("it pings without end")

    def close(self) -> None:
        self._socket.close(linger=0)


def describe(index: int) -> Register:
    load = Load(running=0, waiting=0, kv_blocks_free=1, kv_blocks_total=1, kv_blocks_leased=0)
    return Register(
        role="prefill", incarnation="abc", index=index, address="http://h:1", control="tcp://h:2",
        dialect="native", model="m", max_model_len=10, tp_size=1, dp_size=1, transfers=("tcp",),
        host_id="h", layout="l", weights="w", tokenizer="t", transfer_mode="read", version="0",
        state="ready", steps=0, load=load,
    )  # fmt: skip


async def test_links_follow_a_name_and_a_proxy_with_streams_here_is_not_left() -> None:
    answer: list[str] = []
    with zmq.Context() as context:
        old, new, fixed = (Listener(context) for _ in range(3))
        announcer = Announcer(
            ["dns:p", fixed.address],
            threading.Event(),
            describe,
            interval_s=0.02,
            lookup=lambda *_: list(answer),
        )
        for name in announcer._names:
            name._interval_s = 0.02
        pinging = asyncio.ensure_future(announcer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not fixed.pings():
                    await asyncio.sleep(0.01)
                answer[:] = [old.address]
                while not old.pings(in_flight=1):
                    await asyncio.sleep(0.01)
                answer[:] = [new.address]
                while not new.pings():
                    old.pings(in_flight=1)  # one that says nothing for long is left, whatever it has
                    await asyncio.sleep(0.01)
                for _ in range(20):  # many lookups later
                    while not old.pings(in_flight=1):
                        await asyncio.sleep(0.01)
                while old.address in announcer._connections:
                    old.pings(in_flight=0)
                    await asyncio.sleep(0.01)
                old.pings()
                for _ in range(5):
                    while not (new.pings() and fixed.pings()):
                        await asyncio.sleep(0.01)
                assert old.pings() == 0
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})
            announcer.close()
            for each in (old, new, fixed):
                each.close()


async def test_a_lookup_without_end_holds_up_no_ping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.agent.announce.proxy_names.LOOKUP_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    def hang(name: str, port: int) -> list[str]:
        go_on.wait(DEADLINE_S)
        return []

    with zmq.Context() as context:
        fixed = Listener(context)
        announcer = Announcer(
            ["dns:p", fixed.address], threading.Event(), describe, interval_s=0.02, lookup=hang
        )
        pinging = asyncio.ensure_future(announcer.run())
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(5):
                while not fixed.pings():
                    await asyncio.sleep(0.01)
            while "dns:p no answer from the resolver" not in caplog.messages:
                await asyncio.sleep(0.01)
        pinging.cancel()
        await asyncio.wait({pinging})
        announcer.close()
        go_on.set()
        fixed.close()


@pytest.mark.timeout(120)
def test_by_the_systems_resolver_in_a_network_of_its_own() -> None:
    """Joined and left within five seconds as the name changes, IPv6 too; while DNS fails nothing changes."""
    apart = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    try:
        possible = subprocess.run([*apart, "true"], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this machine allows no user namespaces (unshare --user --net)")
    done = subprocess.run(
        [*apart, sys.executable, "-m", "tests.standins.follow_a_name"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "followed"
