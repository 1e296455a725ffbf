# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers on this machine's CPU: one plain, and a pair that moves KV by NixlConnector."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL_DIR = ROOT / "deploy" / "models" / "ferry-tiny"
MODEL = "ferry-tiny"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that answers."""

    url: str

    async def sample(self, http: aiohttp.ClientSession, name: str) -> float:
        """The sum of a metric's samples over engines."""
        async with http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0] == name)


@asynccontextmanager
async def vllm_server(name: str, kv_role: str | None, log_dir: Path) -> AsyncIterator[VllmServer]:
    """Start a server and wait until it is healthy; with `kv_role`, as one half of a pair.

    Without a prefix cache, so that every request must move its KV. Raises `AssertionError` with the end of
    its log when it does not start.
    """
    port, side_channel = _free_port(), _free_port()
    words = [
        *(
            "--model",
            str(MODEL_DIR),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "4"),
        *("--enforce-eager", "--no-enable-prefix-caching"),
    ]
    if kv_role is not None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        words += ["--kv-transfer-config", json.dumps(transfer)]
    log = log_dir / f"{name}.log"
    with log.open("wb") as output:
        # The `vllm` command fails here: the distribution is not called vllm.
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *words),
            env={**os.environ, **ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    server = VllmServer(f"http://127.0.0.1:{port}")
    try:
        await _wait_healthy(server, process, log)
        yield server
    finally:
        await _stop(process)


async def _wait_healthy(server: VllmServer, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
        while True:
            assert process.returncode is None, log.read_text(errors="replace")[-4000:]
            try:
                async with http.get(f"{server.url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
