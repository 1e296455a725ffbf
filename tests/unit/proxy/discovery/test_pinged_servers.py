# SPDX-License-Identifier: Apache-2.0
"""Servers of other engines that announce themselves, but not what they serve."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio

from kvferry.common.engine_servers import probe as health_probe
from kvferry.common.engine_servers.probe import ProbeResult, ServerLoad
from kvferry.proxy.discovery.pinged_servers import PINGED_INTERVAL_S, PingedServers
from tests.helpers.waiting import until
from tests.standins.engines import SERVERS, AtomServer, Fabric, StandInServer
from tests.unit.proxy.builders import registration
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 4}


def atom_ping(server: AtomServer) -> dict[str, Any]:
    role = "P" if server.role == "prefill" else "D"
    return {
        "type": "register", "role": role, "index": "1", "request_address": f"{server.address}/v1/completions",
        "handshake_port": server.handshake_port, "dp_size": server.dp_size, "tp_size": server.tp_size,
        "transfer_mode": "read",
    }  # fmt: skip


def moriio_ping(server: StandInServer) -> dict[str, Any]:
    return {
        "type": "P" if server.role == "prefill" else "D", "http_address": f"{server.host}:{server.port}",
        "zmq_address": server.overrides["control"], "dp_size": 1, "tp_size": 1, "transfer_mode": "READ",
    }  # fmt: skip


async def ping(stage: Stage, maps: list[dict[str, Any]]) -> None:
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(f"tcp://{stage.discovery}")
        while True:
            for each in maps:
                await dealer.send(msgpack.packb(each))
            await asyncio.sleep(0.05)
    finally:
        dealer.close()
        context.term()


async def check_served(stage: Stage, dialect: str, make_ping: Any, **settings: Any) -> None:
    fabric = Fabric()
    async with (
        SERVERS[dialect](role="prefill", fabric=fabric, **settings) as prefill,
        SERVERS[dialect](role="decode", fabric=fabric, **settings) as decode,
    ):
        pinging = asyncio.get_running_loop().create_task(ping(stage, [make_ping(prefill), make_ping(decode)]))
        try:
            async with asyncio.timeout(10):
                while (answered := await stage.ask(BODY))[0] == 503:
                    await asyncio.sleep(0.05)
            assert answered[0] == 200, answered
            assert [asked.leg for asked in (*prefill.asked, *decode.asked)] == ["prefill", "decode"]
            async with stage.http.get(f"{stage.proxy.url}/v1/models") as response:
                (model,) = (await response.json())["data"]
            assert (model["id"], model["max_model_len"]) == ("stand-in", 4096)
        finally:
            pinging.cancel()
            await asyncio.wait([pinging])
    assert not fabric.wrongs


async def test_atoms_that_ping_are_asked_for_their_model_and_served_through(start_stage: StartStage) -> None:
    """R22: the documented ping is enough. Until the model is known, nothing is routed to them."""
    await check_served(await start_stage(decode_only_fallback=False), "atom", atom_ping, head=False)


async def test_moriio_servers_that_ping_are_asked_for_their_model_and_served_through(
    start_stage: StartStage,
) -> None:
    await check_served(
        await start_stage(moriio_lease_s=60.0, decode_only_fallback=False), "vllm-moriio", moriio_ping
    )


async def test_a_server_that_answers_nothing_is_never_ready(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/sources.md#vllm-moriio: a MoRIIO ping proves only that a process lives. The log warns of it."""
    server = SERVERS["vllm-moriio"](role="prefill", fabric=Fabric())
    async with server:
        told = moriio_ping(server)
    pinging = asyncio.get_running_loop().create_task(ping(stage, [told]))
    try:
        async with asyncio.timeout(10):
            while not (nodes := (await nodes_of(stage))):
                await asyncio.sleep(0.02)
        assert [node["state"] for node in nodes] == ["starting"]
        await until(lambda: f"{server.address} pings, but is down: cannot connect" in caplog.text, 10)
        assert [each.levelname for each in caplog.records if "but is down" in each.getMessage()] == [
            "WARNING"
        ]
    finally:
        pinging.cancel()
        await asyncio.wait([pinging])


async def test_a_server_is_not_ready_after_an_internal_error_in_a_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Results of before do not count any more, and the error is logged."""
    outcomes = [ProbeResult(model="m", max_model_len=5, load=ServerLoad(), steps=None, started_at=None), None]

    async def probing(*_: object) -> ProbeResult:
        if (outcome := outcomes.pop(0)) is None:
            raise ZeroDivisionError
        return outcome

    monkeypatch.setattr(health_probe, "_probe", probing)
    info, now = registration("decode", 1), 10.0
    async with asyncio.timeout(20), aiohttp.ClientSession() as http:
        made = PingedServers(http, lambda: now)
        while made.complete(info).state != "ready":
            await asyncio.sleep(0)
        now += PINGED_INTERVAL_S
        while made.complete(info).state != "starting":
            await asyncio.sleep(0)
        await made.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_an_address_outside_the_rules_is_not_even_asked(start_stage: StartStage) -> None:
    """Otherwise anybody who can ping could have the proxy send requests anywhere."""
    stage = await start_stage(allow_address="10.0.0.0/8")
    async with AtomServer(role="prefill", fabric=Fabric()) as server:
        pinging = asyncio.get_running_loop().create_task(ping(stage, [atom_ping(server)]))
        try:
            await until(lambda: stage.metric('kvferry_proxy_rejected_pings_total{reason="address"}'), 10)
        finally:
            pinging.cancel()
            await asyncio.wait([pinging])
        assert not server.models_asked


async def nodes_of(stage: Stage) -> list[dict[str, Any]]:
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        return list((await response.json())["nodes"])
