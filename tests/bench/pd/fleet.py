# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: two vLLM servers on GPUs, behind our proxy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from kvferry.deploy.launcher import start_process
from tests.servers import free_port, running_server

MODEL = "m"
START_S, STOP_S = 420.0, 30.0
READY_S = 60.0

System = Literal["kvferry-cuda_ipc", "kvferry-nixl", "kvferry-tcp", "nixl", "together", "plain"]
"""`kvferry-…` are pairs with our connector over that backend, `nixl` is a pair with vLLM's NixlConnector,
`together` two servers that take whole requests in turn, and `plain` one alone, without a proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all systems have in common.

    Args:
        python: vLLM's.
        model: Directory of the model.
        gpus: Those of the two servers (`CUDA_VISIBLE_DEVICES`).
        arguments: Further ones of every vLLM server.
        settings: Further settings of our connector.
        log_dir: Where the logs of all processes go.
    """

    python: str
    model: Path
    gpus: tuple[str, str]
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None
    log_dir: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A system that serves.

    Attributes:
        url: What clients ask.
        servers: The vLLM servers' URLs, the prefill's first.
        pids: Theirs.
        proxy_log: It has a line for each request; None where there is no proxy.
    """

    url: str
    servers: tuple[str, ...]
    pids: tuple[int, ...]
    proxy_log: Path | None


@asynccontextmanager
async def running(system: System, setup: Setup) -> AsyncIterator[Running]:
    """Start a system. Raises `AssertionError` with the end of a log if it does not start."""
    async with AsyncExitStack() as stack:
        if system == "plain":
            port = free_port()
            pid = await stack.enter_async_context(_vllm("plain", setup, port, setup.gpus[0], None))
            yield Running(_url(port), (_url(port),), (pid,), None)
            return
        ports = free_port(), free_port()
        words = ["--port", "0", "--discovery-port", "0"]
        if system == "nixl":
            words += ["--dialect", "vllm-nixl", "--prefill", _url(ports[0]), "--decode", _url(ports[1])]
        elif system == "together":
            words += ["--split-min-tokens", "1000000000"]
        proxy = await start_process("proxy", ("-m", "kvferry.proxy", *words), setup.log_dir)
        stack.push_async_callback(proxy.stop)
        discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
        roles = ("kv_both", "kv_both") if system == "together" else ("kv_producer", "kv_consumer")
        transfers = [
            _transfer(system, role, setup, _url(port), discovery)
            for role, port in zip(roles, ports, strict=True)
        ]
        pids = []
        # One after the other: on one GPU the second would count on memory that the first is about to take.
        for name, port, gpu, transfer in zip(
            ("prefill", "decode"), ports, setup.gpus, transfers, strict=True
        ):
            server = _vllm(f"{system}-{name}", setup, port, gpu, transfer)
            pids.append(await stack.enter_async_context(server))
        await _until_ready(proxy.url)
        yield Running(proxy.url, tuple(map(_url, ports)), tuple(pids), setup.log_dir / "proxy.log")


def _transfer(system: System, role: str, setup: Setup, url: str, discovery: str) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config`."""
    if system == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role}
    settings = {
        "advertise_url": url,
        "proxy": [discovery],
        "control_port": 0,
        "transfer": "tcp" if system == "together" else system.removeprefix("kvferry-"),
        **(setup.settings or {}),
    }
    return {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.agent.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


@asynccontextmanager
async def _vllm(
    name: str, setup: Setup, port: int, gpu: str, transfer: dict[str, Any] | None
) -> AsyncIterator[int]:
    words = [
        *(
            "--model",
            str(setup.model),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *setup.arguments,
    ]
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    async with running_server(
        (setup.python, "-m", "vllm.entrypoints.openai.api_server", *words),
        environment,
        f"{_url(port)}/health",
        setup.log_dir / f"{name}.log",
        start_timeout_s=START_S,
        stop_timeout_s=STOP_S,
    ) as pid:
        yield pid


async def _until_ready(url: str) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
