# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers on this machine's CPU: plain ones, and pairs whose KV our transfer plane moves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from tests.helpers.servers import descendants, free_port, paused, running_server

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("SGLANG_ENV", ".venv-sglang") / "bin" / "python"
MODEL_DIR = ROOT / "deploy" / "models" / "ferry-tiny"
MODEL = "ferry-tiny"
NUM_TOKENS = 8192
"""Of a server's KV."""
NOWHERE = "2.2.2.2"
"""SGLang's name for a bootstrap server of prompts whose KV comes from nowhere, or goes there."""
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
ARCHITECTURES = {"qwen3", "deepseek_v2"}
"""SGLang's modules of the models of these tests: it imports all 250 at each start, unless told not to."""
_OTHERS = {path.stem for path in PYTHON.parents[1].glob("lib/*/site-packages/sglang/srt/models/*.py")}
ENVIRONMENT = {
    "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(_OTHERS - ARCHITECTURES)),
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Else each probe of an idle server's health is a request.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "UCX_NET_DEVICES": "lo",
}
WORDS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", str(NUM_TOKENS), "--max-running-requests", "8"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--disable-cuda-graph", "--sleep-on-idle"),
    *("--grammar-backend", "xgrammar", "--sampling-backend", "pytorch"),
)

MARKS = [
    pytest.mark.full,
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not installed: run `make test-sglang`"),
]
"""Of every module of tests with real SGLang servers."""


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A server that answers."""

    url: str
    pid: int
    log: Path
    bootstrap_port: int = 0
    """Of a prefill server, where decode servers find its ranks."""

    @property
    def schedulers(self) -> list[int]:
        """The processes of its ranks."""
        return self.processes("sglang::scheduler")

    def processes(self, title: str) -> list[int]:
        """Those started by it that have this in their command line."""
        return [pid for pid in descendants(self.pid) if title.encode() in _title(pid)]

    @contextmanager
    def schedulers_stopped(self) -> Iterator[None]:
        """Stop its ranks, and let them go on at the end. Its API goes on throughout."""
        with paused(self.schedulers):
            yield

    async def load(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """What `/v1/loads` says of the only data-parallel rank."""
        async with http.get(f"{self.url}/v1/loads?include=all") as response:
            told = await response.json()
        [load] = told["loads"]
        return dict(load)


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@asynccontextmanager
async def sglang_server(
    name: str,
    role: str | None,
    log_dir: Path,
    *,
    backend: str = "kvferry",
    proxy: str | None = None,
    transfer: str = "tcp",
    tp: int = 1,
    model: Path = MODEL_DIR,
    words: Sequence[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
    ports: tuple[int, int] | None = None,
) -> AsyncIterator[SglangServer]:
    """Start a server and wait until it is healthy; with a role, as one half of a pair that uses our plane and
    announces itself to a proxy, or that uses another of SGLang's transfer backends.

    `words`: further flags. `settings`: further environment. `ports`: of HTTP and of the bootstrap server, for
    a server that is started again at its address. Raises `AssertionError` with the end of its log when it
    does not start.
    """
    port, bootstrap_port = ports or (free_port(), free_port())
    url = f"http://127.0.0.1:{port}"
    flags = [*("--model-path", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1")]
    flags += ["--port", str(port), "--tp-size", str(tp), *WORDS]
    environment = {**os.environ, **ENVIRONMENT}
    if tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    if role is not None:
        flags += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
        flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        environment["KVFERRY_TRANSFER"] = transfer
        if proxy is not None:
            environment["KVFERRY_PROXY"] = proxy
    if role == "decode":
        flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    log = log_dir / f"{name}.log"
    async with running_server(
        (str(PYTHON), "-m", "sglang.launch_server", *flags, *words),
        {**environment, **settings},
        f"{url}/health",
        log,
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=STOP_TIMEOUT_S,
    ) as pid:
        yield SglangServer(url, pid, log, bootstrap_port)
