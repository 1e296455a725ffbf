# SPDX-License-Identifier: Apache-2.0
"""The proxy as a running process: its sockets, its tasks, and the order in which they end."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import uvicorn

from proxy.address_rules import AddressRules
from proxy.admission import Admission
from proxy.api_keys import ApiKeys
from proxy.app import create_app
from proxy.breaker import BreakerSettings
from proxy.config import ProxyConfig
from proxy.discovery import Discovery
from proxy.drops import Drops
from proxy.exchange import Services
from proxy.history import History
from proxy.legs import Legs
from proxy.live import Live
from proxy.loads import Loads
from proxy.metrics import Metrics
from proxy.open_requests import OpenRequests
from proxy.registry import Registry
from proxy.retry_budget import RetryBudget
from proxy.router import Router, make_policy
from proxy.slots import Slots
from proxy.tls import server_context
from proxy.upstream import Upstream
from proxy.wire import ClusterKey

BACKLOG = 2048
CLIENT_KEEPALIVE_S = 75


class HttpServer(uvicorn.Server):
    """uvicorn without hands on the process's signals: those belong to `main`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers as they are."""
        yield


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy that serves, and where."""

    services: Services
    host: str
    port: int
    discovery_port: int

    @property
    def url(self) -> str:
        """Base URL for clients."""
        scheme = "http" if self.services.config.tls_cert is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


@asynccontextmanager
async def running_proxy(config: ProxyConfig) -> AsyncIterator[RunningProxy]:
    """Serve for as long as the context is open.

    Leaving it accepts nothing new, lets running requests finish for `config.drain_s`, sends the drops of
    those that it had to cut, and closes everything. Raises `OSError` when a port is taken or a file of keys
    cannot be read, and `BadKeyFile`, `BadClusterKey` or `BadCertificate` when a file is not one.
    """
    clock = asyncio.get_running_loop().time
    slots, history = Slots(), History()
    breakers = BreakerSettings(failures=config.breaker_failures, pause_s=config.breaker_pause_s)
    rules = AddressRules(config.allow_address, tls_only=config.agent_ca is not None)
    registry = Registry(slots.in_flight, breakers, rules)
    key = ClusterKey.read(config.cluster_key) if config.cluster_key is not None else None
    api_keys = ApiKeys.read(config.api_keys) if config.api_keys is not None else None
    tls = server_context(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    metrics = Metrics(lambda: registry.snapshot(clock()))
    legs = Legs()
    async with Upstream(config, legs, None if key is None else key.bearer) as upstream:
        drops = Drops(upstream, metrics)
        services = Services(
            config=config,
            registry=registry,
            router=_router(config, slots),
            slots=slots,
            admission=Admission(slots, metrics, config.queue_limit),
            retry_budget=RetryBudget(),
            upstream=upstream,
            drops=drops,
            open_requests=OpenRequests(),
            metrics=metrics,
            history=history,
            live=Live(registry, slots, metrics, history, clock),
            api_keys=api_keys,
        )
        discovery = Discovery(
            registry,
            metrics,
            proxy_id=secrets.token_hex(8),
            clock=clock,
            key=key,
            heard=services.admission.pump,
        )
        try:
            discovery_port = discovery.bind(config.host, config.discovery_port)
            with _listening_socket(config.host, config.port) as listener:
                proxy = RunningProxy(services, config.host, listener.getsockname()[1], discovery_port)
                async with asyncio.TaskGroup() as tasks:
                    listening = tasks.create_task(discovery.run())
                    watching = tasks.create_task(legs.run(registry, clock))
                    server = HttpServer(_uvicorn_config(services, tls))
                    serving = tasks.create_task(server.serve(sockets=[listener]))
                    try:
                        yield proxy
                    finally:
                        services.live.close()
                        server.should_exit = True
                        await asyncio.wait([serving])
                        await services.open_requests.cut()
                        listening.cancel()
                        watching.cancel()
        finally:
            await drops.settle()
            discovery.close()


def _router(config: ProxyConfig, slots: Slots) -> Router:
    rng = Random()
    return Router(
        make_policy(config.prefill_policy, rng),
        make_policy(config.decode_policy, rng),
        Loads(slots, {"prefill": config.prefill_limit, "decode": config.decode_limit}),
        config.split_min_tokens,
    )


def _uvicorn_config(services: Services, tls: ssl.SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        cast(Any, create_app(services)),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        timeout_graceful_shutdown=math.ceil(services.config.drain_s),
    )


@contextmanager
def _listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A listening TCP socket; IPv6 where the host is an IPv6 address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=BACKLOG) as listener:
        yield listener
