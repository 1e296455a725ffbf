# SPDX-License-Identifier: Apache-2.0
"""The composition root: wires the proxy's parts, and owns its sockets, tasks, and their order at the end."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from quart import Quart

from kvferry.common.http.browser_guard import AllowedHosts, BrowserGuard
from kvferry.common.http.server import HttpServer, ServerBounds
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.tracing import FLUSH_TIMEOUT_S, open_tracing
from kvferry.proxy.api.auth import ApiKeys
from kvferry.proxy.api.completions import Completions
from kvferry.proxy.api.dashboard import DashboardFeed
from kvferry.proxy.api.operator.commands import OperatorApi
from kvferry.proxy.api.tokenizing import TokenizerRelay
from kvferry.proxy.api.translations.messages import connection_error
from kvferry.proxy.app import create_app
from kvferry.proxy.canary.canary import Canary
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.dialects.catalogue import all_dialects
from kvferry.proxy.dialects.fields import allowed_fields
from kvferry.proxy.discovery.discovery import Discovery
from kvferry.proxy.exchange.attempt import AttemptContext
from kvferry.proxy.exchange.exchange import Exchange, ExchangeContext, ExchangeSettings, RetryBudget
from kvferry.proxy.exchange.kv_lifetime import ExpiryCounts, KvDrops, KvEndpointCache
from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.http.client_connection import ClientConnection
from kvferry.proxy.http.cors import CorsPolicy
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.settings import (
    Keys,
    base_url,
    discovery_settings,
    fleet_settings,
    listening_socket,
    metrics_of,
    pool_settings,
    proxy_facts,
)
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.collectors import AgentCollector, FleetCollector, ScalingCollector
from kvferry.proxy.telemetry.history import FailureLog, History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Timelines
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, PULL_BUCKETS

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Tracing

CLIENT_KEEPALIVE_S = 75
LAST_REQUEST_S = 1.0
"""For a request that a client has sent while it did not know that the proxy ends."""
SETTLE_S = NODE_EXPIRY_S
"""An agent that has not announced itself by then does not live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What serves the clients of one process."""

    config: ProxyConfig
    fleet: Fleet
    upstream: UpstreamPool
    drops: KvDrops
    metrics: Metrics
    failures: FailureLog
    timelines: Timelines
    views: OperatorApi
    dashboard: DashboardFeed
    api_keys: ApiKeys | None
    browser_guard: BrowserGuard
    tracing: Tracing | None
    exchanges: ExchangeContext
    canary: Canary

    def create_app(self) -> Quart:
        """Wire the application; it must not outlive `upstream`."""
        config = self.config
        return create_app(
            completions=self._completions(),
            views=self.views,
            dashboard=self.dashboard,
            tokenizers=TokenizerRelay(self.fleet, self.upstream),
            canary=self.canary,
            api_keys=self.api_keys,
            browser_guard=self.browser_guard,
            cors=CorsPolicy(config.cors_origins) if config.cors_origins else None,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=config.body_timeout_s,
            client_stall_s=config.client_stall_s,
        )

    def _completions(self) -> Completions:
        config = self.config
        return Completions(
            new_exchange=partial(Exchange, self.exchanges),
            max_model_len=self.fleet.max_model_len,
            share_prefixes=config.share_prefixes,
            keep_turns_s=config.keep_turns_s,
            metrics=self.metrics,
            failures=self.failures,
            timelines=self.timelines,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=config.body_timeout_s,
            log_prompts=config.log_prompts,
            tracing=self.tracing,
        )


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy of one process that serves, and where."""

    services: Services
    fleet: Fleet
    port: int
    discovery_port: int

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return base_url(self.services.config, self.port)


@asynccontextmanager
async def running_proxy(
    config: ProxyConfig, stop: StopRequest | None = None, settle_s: float = 0.0
) -> AsyncIterator[RunningProxy]:
    """Serve for as long as the context is open. For the first `settle_s` requests wait for agents to come.

    Leaving it accepts nothing new, lets running requests finish, for as long as `stop` says (`config.drain_s`
    without one), sends the drops of those that it had to cut, and closes everything. Raises `OSError` when a
    port is taken or a file cannot be read, and `BadKeyFile`, `BadClusterKey`, `BadCertificate` or
    `BadEngineServer` when a file is not one.
    """
    keys, stop = Keys.read(config), stop or StopRequest(config.drain_s)
    with listening_socket(config.host, config.port) as listener:
        async with (
            _open_proxy(config, keys, stop, settle_s) as (services, discovery_port),
            serving(services, keys, listener, stop),
        ):
            yield RunningProxy(services, services.fleet, listener.getsockname()[1], discovery_port)


def asgi_app(config: ProxyConfig) -> Quart:
    """The proxy for another ASGI server, whose options take the place of `host`, `port` and TLS: the
    application's lifespan opens and closes it. Requests wait for agents as long as `SETTLE_S` says.
    """
    app = Quart(__name__, static_folder=None)

    @app.while_serving
    async def proxy() -> AsyncGenerator[None, None]:
        stop = StopRequest(config.drain_s)
        async with _open_proxy(config, Keys.read(config), stop, SETTLE_S) as (services, _):
            app.asgi_app = services.create_app().asgi_app  # type: ignore[method-assign]
            yield

    return app


@asynccontextmanager
async def _open_proxy(
    config: ProxyConfig, keys: Keys, stop: StopRequest, settle_s: float
) -> AsyncIterator[tuple[Services, int]]:
    """Open all of a proxy but its HTTP server; also return the port of discovery."""
    clock = asyncio.get_running_loop().time
    metrics, history = metrics_of(config), History(PULL_BUCKETS)
    failures, timelines = FailureLog(), Timelines()
    fleet = Fleet(fleet_settings(config), metrics, clock, clock() + settle_s)
    agents = AgentReports(clock)
    fleet.registry.subscribe(agents.note)
    discovery = Discovery(discovery_settings(config, keys), fleet.registry, metrics, clock)
    views = OperatorApi(
        fleet,
        metrics,
        history,
        failures,
        timelines,
        agents,
        discovery.down,
        proxy_facts(config, lambda: discovery.port),
    )
    metrics.add_collector(FleetCollector(fleet.registry.snapshot, fleet.registry.lost, discovery.down))
    metrics.add_collector(AgentCollector(fleet))
    metrics.add_collector(ScalingCollector(fleet))
    async with (
        discovery.running(fleet.slots.in_flight) as discovery_port,
        history.recording(lambda: metrics.totals().plus(agents.totals()), metrics.model_totals),
        open_services(config, keys, fleet, metrics, failures, timelines, views, stop) as services,
    ):
        yield services, discovery_port


@asynccontextmanager
async def open_services(
    config: ProxyConfig,
    keys: Keys,
    fleet: Fleet,
    metrics: Metrics,
    failures: FailureLog,
    timelines: Timelines,
    views: OperatorApi,
    stop: StopRequest,
) -> AsyncIterator[Services]:
    """Open what serves the clients of a process, but for its HTTP server; `fleet` must outlive it.

    Leaving it sends the drops of requests that were cut, for as long as `stop` says.
    """
    async with UpstreamPool(pool_settings(config, keys.cluster)) as upstream:
        hosts = AllowedHosts(config.allowed_hosts, [config.host]) if keys.clients is None else None
        drops = KvDrops(upstream, metrics)
        exchanges = _exchange_context(config, fleet, upstream, drops, metrics)
        services = Services(
            config=config,
            fleet=fleet,
            upstream=upstream,
            drops=drops,
            metrics=metrics,
            failures=failures,
            timelines=timelines,
            views=views,
            dashboard=DashboardFeed(views),
            api_keys=keys.clients,
            browser_guard=BrowserGuard(hosts, CorsPolicy(config.cors_origins).allows),
            tracing=open_tracing(config.otlp_endpoint, {"service.name": "kvferry-proxy"}),
            exchanges=exchanges,
            canary=Canary(exchanges, metrics, config.canary_interval_s, config.canary_max_share),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = [
                    tasks.create_task(upstream.hang_detector.run(fleet.registry, fleet.clock)),
                    tasks.create_task(services.canary.run()),
                ]
                try:
                    yield services
                finally:
                    services.dashboard.close()
                    for task in watching:
                        task.cancel()
        finally:
            await services.drops.settle()
            if services.tracing is not None:
                await services.tracing.close(FLUSH_TIMEOUT_S, stop.at_once)


def _exchange_context(
    config: ProxyConfig, fleet: Fleet, upstream: UpstreamPool, drops: KvDrops, metrics: Metrics
) -> ExchangeContext:
    return ExchangeContext(
        settings=ExchangeSettings(
            queue_timeout_s=config.queue_timeout_s,
            first_byte_timeout_s=config.first_byte_timeout_s,
            total_timeout_s=config.total_timeout_s,
            retries=config.retries,
            migrations=config.migrations,
        ),
        fleet=fleet,
        retry_budget=RetryBudget(),
        attempts=AttemptContext(
            upstream=upstream,
            drops=drops,
            dialects=all_dialects(
                nixl_lease_s=config.nixl_lease_s,
                moriio_lease_s=config.moriio_lease_s,
                keep_turns_s=config.keep_turns_s or 0.0,
                allow_fields=allowed_fields(config.allow_fields),
            ),
            kv_endpoints=KvEndpointCache(),
            expiry_counts=ExpiryCounts(upstream),
            metrics=metrics,
        ),
    )


@asynccontextmanager
async def serving(
    services: Services, keys: Keys, listener: socket.socket, stop: StopRequest
) -> AsyncIterator[None]:
    """Serve clients on `listener` while the context is open; leaving it ends as `running_proxy` says."""
    server = HttpServer(_uvicorn_config(services, keys.tls))
    async with asyncio.TaskGroup() as tasks:
        clients = tasks.create_task(server.serve(sockets=[listener]))
        ending_at_once = tasks.create_task(_force_stop(server, stop))
        try:
            yield
        finally:
            services.dashboard.close()
            server.config.timeout_graceful_shutdown = math.ceil(stop.limit_s)
            server.should_exit = True
            await asyncio.wait([clients])
            ending_at_once.cancel()
            await server.cancel_requests()


async def _force_stop(server: HttpServer, stop: StopRequest) -> None:
    """Cut what is still running, once `stop` is to be obeyed at once."""
    await stop.at_once.wait()
    server.force_exit = True
    await server.cancel_requests()


def _uvicorn_config(services: Services, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = services.config
    return uvicorn.Config(
        cast(Any, services.create_app().asgi_app),  # `Entry`
        http=cast(
            Any,
            partial(
                ClientConnection,
                head_s=config.body_timeout_s,
                bounds=ServerBounds(),
                last_request_s=LAST_REQUEST_S,
                browser_guard=services.browser_guard,
                error_body=connection_error,
                stall_s=config.client_stall_s,
            ),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
