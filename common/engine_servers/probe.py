# SPDX-License-Identifier: Apache-2.0
"""Probe another engine's server: whether it is healthy, what it serves and how busy it is.

Sources: `GET /health` and `GET /v1/models` of vLLM 0.32, SGLang 0.5 and ATOM; the names of the metrics are
those of vLLM (`v1/metrics/loggers.py`), SGLang (`metrics_collector.py`) and ATOM (`metrics.py` of ffdf3bb5d).
No metric is required.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta
from prometheus_client.samples import Sample

from kvferry.common.exceptions import NOT_JSON, system_reason
from kvferry.common.json_errors import explain
from kvferry.common.telemetry import prometheus_text

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
"""With `PING_INTERVAL_S` after it still less than a node's expiry: a slow probe does not take it out."""
MAX_PAGE_BYTES = 8 * 1024 * 1024
MAX_COUNT = 2**53 - 1
"""Larger numbers are not believed: this one fits every frame, and a float holds it exactly."""
RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs", "atom:requests_running"})
WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs", "atom:requests_waiting"})
USED = frozenset({"vllm:kv_cache_usage_perc", "sglang:token_usage", "atom:kv_cache_usage_ratio"})
"""The share of the KV cache in use, 0 to 1."""
CAPACITY = frozenset({"sglang:max_total_num_tokens", "atom:kv_cache_blocks_total"})
STEPS = frozenset({"vllm:iteration_tokens_total_count"})
"""How often the engine has stepped."""
CACHE_CONFIG = "vllm:cache_config_info"
"""Has the number of KV blocks in a label."""
STARTED = "process_start_time_seconds"
_WANTED = RUNNING | WAITING | USED | CAPACITY | STEPS | {CACHE_CONFIG, STARTED}
_ANY_ERROR = range(201, 600)
_BLOCKS = re.compile(r"[0-9]{1,15}")


class EngineDown(Exception):
    """A probe has failed; the message says why.

    `refused`: no process listens there, or the server itself says that it cannot serve.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """How busy a server is, in sequences and KV blocks. `max_running` is None when unknown."""

    running: int = 0
    waiting: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    max_running: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a healthy server has reported; `steps` and `started_at` (Unix seconds) are None if it did not.

    `info`: the page of its own engine that was asked for; None where it has none.
    """

    model: str
    max_model_len: int
    load: ServerLoad
    steps: int | None
    started_at: float | None
    info: bytes | None = None


class _Model(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(min_length=1)]
    max_model_len: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[list[_Model], Meta(min_length=1)]


async def probe(
    http: aiohttp.ClientSession,
    url: str,
    model: str | None = None,
    max_running: int | None = None,
    info_path: str | None = None,
) -> ProbeResult:
    """Probe once, within `PROBE_TIMEOUT_S`. Raises `EngineDown`, and nothing else, whatever the server does.

    Args:
        model: Which of the models that it lists it is to serve; the first when None.
        max_running: Most sequences that it runs at once, which no engine reports.
        info_path: Another page to fetch (`ProbeResult.info`).
    """
    try:
        return await _probe(http, url, model, max_running, info_path)
    except EngineDown:
        raise
    except Exception as error:
        logger.exception("internal error while probing %s", url)
        raise EngineDown(f"it cannot be probed: {type(error).__name__}: {error}") from error


async def _probe(
    http: aiohttp.ClientSession, url: str, model: str | None, max_running: int | None, info_path: str | None
) -> ProbeResult:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await _get(http, url + "/health")
            models, metrics, info = await _pages(http, url, info_path)
    except TimeoutError:
        raise EngineDown(f"no response within {PROBE_TIMEOUT_S:.0f} s") from None
    except aiohttp.ClientConnectorError as error:
        raise EngineDown(f"cannot connect: {system_reason(error.os_error)}", refused=True) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineDown(f"{type(error).__name__}: {error}") from error
    found = _model(models, model)
    # Values that no such metric can have, infinite ones among them, count as not reported.
    samples = [
        sample for sample in prometheus_text.samples(metrics, _WANTED) if 0 <= sample.value <= MAX_COUNT
    ]
    return ProbeResult(
        model=found.id,
        max_model_len=found.max_model_len or 0,
        load=_load(samples, max_running),
        steps=_sum(samples, STEPS),
        started_at=next((sample.value for sample in samples if sample.name == STARTED), None),
        info=info or None,
    )


async def _pages(http: aiohttp.ClientSession, url: str, info_path: str | None) -> tuple[bytes, bytes, bytes]:
    """Fetch the models, the metrics and the engine's own page at once; empty where there is none.

    When one fails, cancel the others and raise its failure.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            models = tasks.create_task(_get(http, url + "/v1/models"))
            metrics = tasks.create_task(_get(http, url + "/metrics", absent=_ANY_ERROR))
            info = tasks.create_task(_get(http, url + info_path, absent=(404,))) if info_path else None
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return models.result(), metrics.result(), b"" if info is None else info.result()


async def _get(http: aiohttp.ClientSession, url: str, *, absent: Container[int] = ()) -> bytes:
    """Fetch a page; empty where its status is one of `absent`."""
    async with http.get(url, allow_redirects=False) as response:
        if response.status != 200:
            if response.status in absent:
                return b""
            raise EngineDown(f"{url}: HTTP {response.status}", refused=True)
        body = b""
        while len(body) < MAX_PAGE_BYTES and (part := await response.content.readany()):
            body += part
        return body


def _model(page: bytes, wanted: str | None) -> _Model:
    try:
        models = msgspec.json.decode(page, type=_Models).data
    except NOT_JSON as error:
        raise EngineDown(f"/v1/models: {explain(error, whole='it').message}", refused=True) from error
    for model in models:
        if wanted in (None, model.id):
            return model
    raise EngineDown(f"it does not serve {wanted!r}", refused=True)


def _sum(samples: Sequence[Sample], names: frozenset[str]) -> int | None:
    """Add up over the engines (data-parallel ranks) of one server; None when none reports."""
    values = [sample.value for sample in samples if sample.name in names]
    return min(MAX_COUNT, int(sum(values))) if values else None


def _load(samples: Sequence[Sample], max_running: int | None) -> ServerLoad:
    blocks = [
        int(number)
        for sample in samples
        if sample.name == CACHE_CONFIG
        if _BLOCKS.fullmatch(number := sample.labels.get("num_gpu_blocks", ""))
    ]
    total = min(MAX_COUNT, sum(blocks)) or _sum(samples, CAPACITY) or 0
    shares = [sample.value for sample in samples if sample.name in USED]
    used = min(1.0, sum(shares) / len(shares)) if shares else 0.0
    return ServerLoad(
        running=_sum(samples, RUNNING) or 0,
        waiting=_sum(samples, WAITING) or 0,
        kv_blocks_free=round(total * (1 - used)),
        kv_blocks_total=total,
        max_running=max_running,
    )
