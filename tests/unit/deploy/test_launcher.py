# SPDX-License-Identifier: Apache-2.0
"""What `kvferry up` says of the processes that it starts; their logs stay bounded, and say why one ended."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from kvferry.common.child_process import ChildProcess
from kvferry.common.telemetry.logs import JsonFormatter, LogFormat, TextFormatter
from kvferry.deploy import launcher
from kvferry.deploy.launcher import Cluster, ClusterSpec, LogFile, Process, how_it_ended, reason_in
from kvferry.proxy.api.openapi import NodeList
from tests.unit.deploy.test_drain import served
from tests.unit.deploy.test_status import NODE


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogFile:
    """A log of which the first line is of another run."""
    monkeypatch.setattr(launcher, "MAX_LOG_BYTES", 20)
    path = tmp_path / "proxy.log"
    path.write_text("earlier\n")
    return LogFile(path, start=8)


def test_a_large_log_is_moved_aside_and_the_process_writes_on(log: LogFile) -> None:
    with log.path.open("a", buffering=1) as process:
        process.write("one\n")
        log.rotate()
        assert log.tail(5) == "one"
        process.write("two, and that is enough\n")
        log.rotate()
        assert log.path.read_text() == ""
        assert Path(f"{log.path}.1").read_text() == "earlier\none\ntwo, and that is enough\n"
        process.write("three\n")
    assert log.path.read_text() == "three\n"
    assert log.tail(5) == "three"


def test_a_log_is_emptied_even_where_it_cannot_be_kept(log: LogFile) -> None:
    log.path.write_text("x" * 100)
    Path(f"{log.path}.1").mkdir()
    log.rotate()
    assert log.path.read_text() == ""
    log.path.unlink()
    log.rotate()


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_reason_of_an_end_is_the_first_error_in_either_format(form: LogFormat) -> None:
    """With `json` it was the last line, whatever that was about."""
    formatter = JsonFormatter("agent") if form == "json" else TextFormatter("agent")
    lines = [
        formatter.format(logging.makeLogRecord({"levelname": level, "msg": message}))
        for level, message in (
            ("INFO", "loads"),
            ("ERROR", "no such model"),
            ("ERROR", "ends"),
            ("INFO", "x"),
        )
    ]
    assert reason_in(lines) == "no such model"
    assert reason_in([*lines[:1], "a library's own words"]) == "a library's own words"
    assert reason_in(['{"torn', "{}"]) == "{}"
    assert reason_in([]) == "its log is empty"


def test_an_exception_that_ended_a_process_is_a_reason() -> None:
    line = '{"level": "CRITICAL", "message": "uncaught exception", "exception": "Traceback\\nValueError: no"}'
    assert reason_in([line, "last"]) == "uncaught exception: ValueError: no"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "0"),
        (1, "1: 503 draining"),
        (-6, "-6: 503 draining"),
        (-9, "-9: it was killed (SIGKILL), as the kernel does when memory runs out"),
    ],
)
def test_a_process_that_was_killed_has_not_written_why(log: LogFile, status: int, said: str) -> None:
    """Its last line, of some request that went well, was given as the reason."""
    log.path.write_text("earlier\n503 draining\n")
    assert how_it_ended(status, log) == said


async def test_an_agent_that_takes_long_to_be_ready_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is returned is the name to request, not the path of the model."""
    monkeypatch.setattr(launcher, "PROGRESS_S", 0.5)
    began = asyncio.get_running_loop().time()

    async def list_nodes(_: web.Request) -> web.Response:
        state = "ready" if asyncio.get_running_loop().time() > began + 1.5 else "starting"
        node = msgspec.structs.replace(NODE, state=state, model="my-model")
        page = NodeList(
            nodes=[node], refused_pairings=[], num_refused_pairings=0, rejected_agents=[], down=[]
        )
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def urls() -> dict[str, str]:
        return {"decode-0": NODE.address}

    app = web.Application()
    app.router.add_get("/nodes", list_nodes)
    lines: list[str] = []
    cluster = Cluster(ClusterSpec(model="/models/my-model", agents=(), log_dir=tmp_path), lines.append)
    async with served(app) as url:
        child = await ChildProcess.start(
            ("-c", "import time; time.sleep(60)"),
            "proxy",
            stdout=asyncio.subprocess.PIPE,
            ends_with_us=signal.SIGTERM,
        )
        cluster.proxy = Process(child, LogFile(tmp_path / "proxy.log"), {"url": url})
        try:
            assert await cluster.wait_listed(urls, 20.0) == "my-model"
        finally:
            await cluster.proxy.stop()
    waiting = "0 of 1 agents ready, waiting for decode-0"
    assert lines[:2] == [waiting, f"{waiting} for 1 s"] and lines[-1] == "1 of 1 agents ready"
