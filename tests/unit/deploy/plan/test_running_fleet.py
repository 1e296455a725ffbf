# SPDX-License-Identifier: Apache-2.0
"""The servers of a plan, as a proxy's agents have measured themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvferry.deploy.plan.command import PlanConfig, main, servers_of
from kvferry.deploy.plan.running_fleet import fetch_agents, server_model
from kvferry.deploy.plan.simulation import ServerModel
from kvferry.proxy.api.openapi import NodeList, NodeView, NodeWorkView
from tests.unit.deploy.test_status import LOAD, NODE, NODES, serving

WORK = NodeWorkView(
    token_s=0.01, step_s=0.01, sequence_s=0.002, answer_tokens=9.0, pull_s=0.003, prefill_share=0.5,
    decode_share=0.1, prompt_step_s=0.02, prompt_token_s=0.001,
)  # fmt: skip
AGENT = replace(NODE, state="ready", work=WORK, prefill_chunk=256, load=LOAD)


def page(*agents: NodeView) -> bytes:
    return msgspec.json.encode(replace(NODES, nodes=list(agents)))


def test_a_server_is_the_mean_of_the_agents() -> None:
    slower = replace(
        AGENT, work=replace(WORK, prompt_token_s=0.003), load=replace(LOAD, max_running=4, kv_blocks_total=0)
    )
    starting = replace(AGENT, work=None)
    assert server_model([AGENT, slower, starting]) == ServerModel(
        token_s=pytest.approx(0.002), step_s=0.01, prompt_step_s=0.02, sequence_s=0.002, chunk=256,
        batch_tokens=1024, kv_tokens=80 * 16, max_running=4, pull_s=0.003, pull_token_s=0.0,
    )  # fmt: skip
    others = server_model([replace(AGENT, dialect="vllm-kvferry", prefill_chunk=2048)])
    assert (others.chunk, others.batch_tokens, others.kv_tokens) == (2048, None, 80 * 16)


def test_who_does_more_of_a_work_counts_for_more_in_what_it_takes() -> None:
    prefill = replace(WORK, prefill_share=0.6, decode_share=0.0, prompt_token_s=0.003, step_s=0.09)
    decode = replace(WORK, prefill_share=0.2, decode_share=0.9, prompt_token_s=0.001, step_s=0.01)
    idle = replace(WORK, prefill_share=0.0, decode_share=0.0, prompt_token_s=5.0, step_s=5.0)
    model = server_model([replace(AGENT, work=work) for work in (prefill, decode, idle)])
    assert (model.token_s, model.step_s) == (pytest.approx(0.0025), pytest.approx(0.01))


def test_a_fleet_that_has_pulled_nothing_is_not_taken_to_pull_for_nothing() -> None:
    model = server_model([replace(AGENT, work=replace(WORK, pull_s=0.0))])
    assert (model.pull_s, model.pull_token_s) == (ServerModel().pull_s, ServerModel().pull_token_s)


@pytest.mark.parametrize("missing", ["prompt_token_s", "step_s"])
def test_what_nobody_has_measured_is_said(missing: str) -> None:
    with pytest.raises(ValueError, match="send the fleet some requests first"):
        server_model([replace(AGENT, work=replace(WORK, **{missing: None})), replace(AGENT, work=None)])


async def test_agents_that_are_ready_are_taken_of_one_model() -> None:
    other = replace(AGENT, model="other")
    async with serving(b"200 OK", page(AGENT, replace(AGENT, state="draining"), other)) as url:
        assert await fetch_agents(url, None, None, "m") == [AGENT]
        with pytest.raises(ValueError, match=r"name one by --model \(m, other\)"):
            await fetch_agents(url, None, None, None)
        with pytest.raises(ValueError, match="no agent that is ready for none"):
            await fetch_agents(url, None, None, "none")
    async with serving(b"200 OK", page(AGENT, AGENT)) as url:
        assert await fetch_agents(url, None, None, None) == [AGENT] * 2


async def test_a_file_goes_before_what_agents_measured(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("leg-s: 0.5\nchunk: 128\n")
    async with serving(b"200 OK", page(AGENT, AGENT)) as url:
        config = PlanConfig(proxy=url, server=path)
        number, model = await asyncio.to_thread(servers_of, config)
        more, _ = await asyncio.to_thread(servers_of, PlanConfig(proxy=url, servers=5))
    assert (number, more) == (2, 5)
    assert (model.leg_s, model.chunk, model.sequence_s) == (0.5, 128, 0.002)


async def test_a_proxy_that_is_none_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(b"404 Not Found", b"") as url:
        assert await asyncio.to_thread(main, ["--proxy", url]) == 1
    assert "is not a kvferry proxy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--proxy", "ftp://host"])
    assert "proxy must be http" in capsys.readouterr().err


def test_a_page_of_an_older_proxy_has_no_work() -> None:
    old = msgspec.json.decode(page(AGENT).replace(b'"work":', b'"other":'), type=NodeList)
    with pytest.raises(ValueError, match="no agent has measured"):
        server_model(old.nodes)
