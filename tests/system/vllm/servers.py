# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers: plain ones, and pairs that move KV by NixlConnector or by ours.

On this machine's CPU, or with `VLLM_DEVICE=cuda` all on one NVIDIA GPU, where our connector's KV moves by
`cuda_ipc`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from tests.helpers.client import heldout
from tests.helpers.servers import children, descendants, free_port, paused, running_server

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("VLLM_ENV", ".venv-vllm") / "bin" / "python"
ON_GPU = os.environ.get("VLLM_DEVICE") == "cuda"
TRANSFER = "cuda_ipc" if ON_GPU else "tcp"
MODEL_DIR = ROOT / "deploy" / "models" / "ferry-tiny"
MODEL = "ferry-tiny"
LATE_TOKENS = (65, 320)
"""Lengths of prompts that are read late: at most 10 blocks each."""
FILLERS = 7
FILLER_BLOCKS = 30
"""Of prompts that come together before the late read, and so overwrite all of `LATE_POOL` blocks."""
LATE_POOL = FILLERS * FILLER_BLOCKS + 1
MAX_TOKENS = 1024
"""Of a prompt and its answer."""
GPU_WORDS = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "1G")
"""Attention kernels of GPUs have no float32. A server that is told its memory does not measure what is free,
which changes while others start.
"""
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


MARKS = [
    pytest.mark.full,
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: run `make test-vllm`"),
]
"""Of every module of tests with real vLLM servers."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that answers."""

    url: str
    pid: int = 0

    @contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Stop its engine's processes, and let them go on at the end. Its API server goes on throughout."""
        with paused(descendants(self.pid)):
            yield

    @contextmanager
    def ranks_stopped(self) -> Iterator[None]:
        """Stop its engine's ranks, but not the process that schedules."""
        with paused(rank for engine in children(self.pid) for rank in descendants(engine)):
            yield

    def kill(self) -> None:
        """Kill all of its processes."""
        for pid in (self.pid, *descendants(self.pid)):
            os.kill(pid, signal.SIGKILL)

    async def sample(self, http: aiohttp.ClientSession, name: str, label: str = "") -> float:
        """The sum of a metric's samples over engines; with a label, of those that have it."""
        return sum(value for line, value in await self.samples(http, name) if label in line)

    async def samples(self, http: aiohttp.ClientSession, name: str) -> list[tuple[str, float]]:
        """A metric's samples, each behind its name with labels."""
        async with http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.replace("{", " ").partition(" ")[0] == name]
        return [(labelled, float(value)) for labelled, value in found]


@asynccontextmanager
async def vllm_server(
    name: str,
    kv_role: str | None,
    log_dir: Path,
    *,
    lease_s: int | None = None,
    num_blocks: int | None = None,
    max_running: int = 4,
    tp: int = 1,
    prefix_cache: bool = False,
    transfer: str = TRANSFER,
    proxy: str | None = None,
    model: Path = MODEL_DIR,
    words: Sequence[str] = (),
    connector: Mapping[str, Any] = MappingProxyType({}),
    ports: tuple[int, int] | None = None,
) -> AsyncIterator[VllmServer]:
    """Start a server and wait until it is healthy; with `kv_role`, as one half of a pair.

    With `proxy`, where one is announced to, it moves KV by our connector and has a prefix cache; else by
    NixlConnector, and then without one, so that every request must move its KV. `words`: further flags, which
    win over those before. `connector`: further members
    of `--kv-transfer-config`, with our connector's own under `settings`. `ports`: of HTTP and of NIXL's side
    channel, for a server that is started again at its address. Raises `AssertionError` with the end of its
    log when it does not start.
    """
    port, side_channel = ports or (free_port(), free_port())
    flags = [
        *(
            "--model",
            str(model),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--tensor-parallel-size", str(tp)),
        *engine_words(max_running),
        "--enable-prefix-caching" if prefix_cache or proxy else "--no-enable-prefix-caching",
    ]
    url = f"http://127.0.0.1:{port}"
    if kv_role is not None:
        own = {} if lease_s is None else {"lease_s": lease_s}
        own |= connector.get("settings", {})
        told = nixl_connector(lease_s) if proxy is None else our_connector(url, proxy, transfer, own)
        told |= {"kv_role": kv_role, **connector}
        told.pop("settings", None)
        flags += ["--kv-transfer-config", json.dumps(told)]
    if num_blocks is not None:
        flags += ["--num-gpu-blocks-override", str(num_blocks)]
    flags += words
    log = log_dir / f"{name}.log"
    async with running_server(
        # The `vllm` command fails here: the distribution is not called vllm.
        (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags),
        {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "PYTHONPATH": f"{ROOT}/build/typing:{ROOT}",  # for connectors of tests
        },
        f"{url}/health",
        log,
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=STOP_TIMEOUT_S,
    ) as pid:
        yield VllmServer(url, pid)


async def together(
    stack: AsyncExitStack, *servers: AbstractAsyncContextManager[VllmServer]
) -> list[VllmServer]:
    """Start servers at the same time; the stack stops them."""
    async with asyncio.TaskGroup() as group:
        starting = [group.create_task(stack.enter_async_context(server)) for server in servers]
    return [server.result() for server in starting]


def late_prompts(count: int) -> list[str]:
    """Return held-out prompts that are read late."""
    least, most = LATE_TOKENS
    prompts = [prompt.prompt for prompt in heldout() if least <= prompt.prompt_tokens <= most]
    assert len(prompts) >= count
    return prompts[:count]


def fillers() -> list[dict[str, Any]]:
    """Return requests that overwrite a pool of `LATE_POOL` blocks."""
    asked = {"model": MODEL, "max_tokens": 1, "temperature": 0}
    return [{**asked, "prompt": f"{number} " * (FILLER_BLOCKS * 16)} for number in range(FILLERS)]


def engine_words(max_running: int) -> tuple[str, ...]:
    """Return the flags that all servers here have in common."""
    return (
        *(GPU_WORDS if ON_GPU else ("--dtype", "float32")),
        *("--max-model-len", str(MAX_TOKENS), "--block-size", "32", "--enforce-eager"),
        *("--max-num-seqs", str(max_running)),
        # No prompt in pieces: with a seed that ends vllm-cpu 0.32.0 ("CPU Generator does not use offset").
        *("--max-num-batched-tokens", str(MAX_TOKENS * max(max_running, 8))),
    )


def nixl_connector(lease_s: int | None) -> dict[str, Any]:
    """`--kv-transfer-config` for vLLM's own connector, but for the role."""
    settings = {} if lease_s is None else {"kv_connector_extra_config": {"kv_lease_duration": lease_s}}
    return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", **settings}


def our_connector(url: str, proxy: str, transfer: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The same for ours, at a server with that URL, with settings of its own."""
    settings = {"advertise_url": url, "proxy": [proxy], "control_port": 0, "transfer": transfer, **own}
    return {
        "kv_connector": "KvferryConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
