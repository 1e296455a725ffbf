# SPDX-License-Identifier: Apache-2.0
"""Another engine's server as a watch sees it: `/health`, `/v1/models`, `/metrics`, and no answers."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from aiohttp import web

# As vLLM 0.32 shows it (`vllm/v1/metrics/loggers.py`), two data-parallel ranks, cut to what matters.
VLLM_METRICS = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 2.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 4.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 4.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.25
vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="40",num_cpu_blocks="None"}} 1.0
vllm:cache_config_info{{block_size="32",engine="1",num_gpu_blocks="40",num_cpu_blocks="None"}} 1.0
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="m"}} 5.0
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} 7.0
"""


@dataclass(slots=True)
class WatchedServer:
    """One server. An async context: entering listens, leaving closes every connection."""

    model: str = "m"
    max_model_len: int = 512
    health: int = 200
    hangs: bool = False
    models_status: int = 200
    metrics_hang: bool = False
    started: float = 1000.0
    metrics: str | None = VLLM_METRICS
    models: str | bytes | None = None
    """Its `/v1/models`, where that is not the usual."""
    info: str | None = None
    """Its `/kv_transfer_info`; a 404 without."""
    info_status: int = 200
    port: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    metrics_asked: asyncio.Event = field(default_factory=asyncio.Event)
    metrics_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Whoever asked for metrics that hang has gone away."""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> WatchedServer:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        if self.info is not None:
            app.router.add_get("/kv_transfer_info", self._info)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening, as a server that ends."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, _: web.Request) -> web.Response:
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _info(self, _: web.Request) -> web.Response:
        return web.Response(text=self.info, status=self.info_status)

    async def _models(self, _: web.Request) -> web.Response:
        if self.metrics_hang:  # until the other request has come, so that both are on their way
            await self.metrics_asked.wait()
        if self.models is not None:
            body = self.models if isinstance(self.models, bytes) else self.models.encode()
            return web.Response(body=body, content_type="application/json")
        if self.models_status != 200:
            return web.Response(status=self.models_status)
        model = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model, {"id": "adapter", "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics_asked.set()
        if self.metrics_hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.metrics_left.set()
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(text=self.metrics.format(started=self.started))
