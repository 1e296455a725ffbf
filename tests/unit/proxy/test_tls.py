# SPDX-License-Identifier: Apache-2.0
"""https on both sides of the proxy, with certificates of the tests' own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvferry.common.http.tls import BadCertificate, client_context, server_context
from kvferry.proxy.fleet.address_rules import RejectReason
from tests.standins.agents import StandInAgent
from tests.standins.certificates import Certificate, make_certificate
from tests.unit.proxy.conftest import StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), "others")


async def test_clients_are_served_over_https_only(
    start_stage: StartStage, ours: Certificate, others: Certificate
) -> None:
    stage = await start_stage(tls_cert=ours.cert, tls_key=ours.key)
    await stage.pair()
    url = f"{stage.proxy.url}/v1/completions"
    assert url.startswith("https://")
    for stream in (False, True):
        async with stage.http.post(url, json={**BODY, "stream": stream}, ssl=ours.trust) as response:
            assert response.status == 200
            assert b"usage" in await response.read() or stream
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await stage.http.post(url, json=BODY, ssl=others.trust)
    with pytest.raises(aiohttp.ClientError):
        await stage.http.post(url.replace("https", "http"), json=BODY)


async def test_agents_are_asked_by_https_and_those_without_are_refused(
    start_stage: StartStage, ours: Certificate
) -> None:
    stage = await start_stage(agent_ca=ours.cert)
    plain = StandInAgent("decode", (stage.discovery,))
    async with plain:
        await plain.until(lambda: plain.refusals)
        assert plain.refusals[0] == RejectReason.PLAINTEXT
        prefill, decode = await stage.pair(tls=server_context(ours.cert, ours.key))
        await stage.stream(BODY)
        assert (await stage.ask(BODY))[0] == 200
        assert prefill.asked and decode.asked and not plain.asked


@pytest.mark.parametrize("defect", ["another authority", "another address"])
async def test_an_agent_that_cannot_prove_its_address_gets_no_request(
    start_stage: StartStage, ours: Certificate, tmp_path: Path, defect: str
) -> None:
    elsewhere = make_certificate(tmp_path, ip="127.0.0.1" if defect == "another authority" else "127.0.0.2")
    trusted = ours if defect == "another authority" else elsewhere
    stage = await start_stage(agent_ca=trusted.cert)
    prefill, decode = await stage.pair(tls=server_context(elsewhere.cert, elsewhere.key))
    status, answer = await stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (502, "agent_lost")
    assert not prefill.asked and not decode.asked


@pytest.mark.parametrize("defect", ["absent", "not a certificate", "key of another"])
def test_files_that_are_no_certificate_and_its_key_are_named(
    tmp_path: Path, ours: Certificate, others: Certificate, defect: str
) -> None:
    (tmp_path / "junk.crt").write_text("junk")
    junk = {"absent": tmp_path / "absent.crt", "not a certificate": tmp_path / "junk.crt"}
    cert = junk.get(defect, others.cert)
    with pytest.raises(BadCertificate, match=str(cert)):
        server_context(cert, ours.key)
    if defect in junk:
        with pytest.raises(BadCertificate, match=str(cert)):
            client_context(cert)


@pytest.mark.parametrize("package", ["proxy", "agent"])
def test_nothing_starts_without_the_configured_certificate(tmp_path: Path, package: str) -> None:
    path = str(tmp_path / "absent.pem")
    ports = {"proxy": ("--discovery-port", "0"), "agent": ("--model", "ferry-tiny", "--control-port", "0")}
    done = subprocess.run(
        [sys.executable, "-m", f"kvferry.{package}", "--port", "0", *ports[package],
         "--tls-cert", path, "--tls-key", path],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert path in done.stderr
    assert "Traceback" not in done.stderr
