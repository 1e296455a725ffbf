# SPDX-License-Identifier: Apache-2.0
"""What `kvferry up --on ray` settles before it asks Ray, and how an agent's log reaches it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.deploy import launcher
from kvferry.deploy.ray.agent_actor import RelayedLog
from kvferry.deploy.ray.fleet import RayFleet, bundle_of
from kvferry.deploy.up import PartOptions, UpConfig, cluster_spec


def test_an_agent_takes_a_cpu_and_a_gpu_per_rank() -> None:
    assert bundle_of(8, "cuda", ()) == {"CPU": 8, "GPU": 8}
    assert bundle_of(2, "cpu", ()) == {"CPU": 2}
    assert bundle_of(2, "cuda", ("CPU=12", "memory=1000", "rack:a=0.5")) == {
        "CPU": 12,
        "GPU": 2,
        "memory": 1000,
        "rack:a": 0.5,
    }


@pytest.mark.parametrize("resource", ["slot", "=1", "slot=", "slot=0", "slot=-1", "slot=inf", "GPU=1"])
def test_a_wrong_resource_is_refused(resource: str) -> None:
    with pytest.raises(ValueError, match=r"^ray_resources"):
        UpConfig(on="ray", ray_resources=(resource,))


@pytest.mark.parametrize(
    "options", [{"ray_address": "a:1"}, {"ray_resources": ("slot=1",)}, {"ray_namespace": "other"}]
)
def test_options_of_ray_are_refused_without_it(options: dict[str, str]) -> None:
    UpConfig(on="ray", **options)
    with pytest.raises(ValueError, match="--on ray"):
        UpConfig(**options)


def test_the_model_and_files_need_not_be_here() -> None:
    """They must be on the nodes; options are checked here all the same."""
    words = ("--agent.cluster-key", "/not/here", "--decode.kv-blocks", "77")
    config = UpConfig(on="ray", model="/not/here/either", tp=2, ray_resources=("CPU=8",))
    prefill, decode = cluster_spec(config, PartOptions("kvferry up", words)).agents
    assert (prefill.settings["threads"], prefill.settings["cluster_key"]) == (4, "/not/here")
    assert decode.settings["kv_blocks"] == 77
    with pytest.raises(SystemExit):
        cluster_spec(config, PartOptions("kvferry up", ("--agent.kv-blocks", "none")))


def test_lines_of_a_log_are_given_once_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.deploy.ray.agent_actor.MAX_KEPT_LINES", 5)
    monkeypatch.setattr("kvferry.deploy.ray.agent_actor.MAX_REPORTED_LINES", 3)
    log = RelayedLog()
    assert log.after(0) == ([], 0)
    for number in range(1, 8):
        log.add(f"line {number}")
    assert log.after(0) == (["line 3", "line 4", "line 5"], 5)
    assert log.after(5) == (["line 6", "line 7"], 7)
    assert log.after(7) == ([], 7)
    assert log.tail(2) == "line 6\nline 7"
    log.begin_run()
    assert log.tail(2) == ""
    log.add("line 8")
    assert log.tail(2) == "line 8"


async def test_a_pipe_is_read_to_its_end_whatever_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    pipe, log = asyncio.StreamReader(limit=64), RelayedLog()
    relaying = asyncio.ensure_future(log.relay(pipe))
    for part in (b"one\n", b"x" * 200 + b"\n", b"\xff\n", b"two"):
        pipe.feed_data(part)
        await asyncio.sleep(0)
    pipe.feed_eof()
    await asyncio.wait_for(relaying, 20)
    assert log.tail(9).splitlines() == ["one", "(a line that is too long is left out)", "\ufffd", "two"]
    assert capsys.readouterr().err.splitlines() == log.tail(9).splitlines()


class Chatty:
    """In place of an agent's actor: it logs a line whenever it is asked."""

    name = "decode-0"

    async def refresh(self) -> list[str]:
        return ["x" * 30]


async def test_the_files_of_agents_elsewhere_stay_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "MAX_LOG_BYTES", 100)
    fleet = RayFleet()
    fleet.agents.append(cast(Any, Chatty()))
    for _ in range(10):
        await fleet.refresh(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-0.log", "decode-0.log.1"]
    assert all(path.stat().st_size <= 124 for path in tmp_path.iterdir())
