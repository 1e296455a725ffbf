# SPDX-License-Identifier: Apache-2.0
"""What each part gets of the proxy's options: settings, keys, certificates and the socket for clients."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvferry.common.addresses import WILDCARDS, host_port
from kvferry.common.curve import ClusterKey
from kvferry.common.engine_servers.description import StaticNode, check_distinct, servers_from_file
from kvferry.common.http.tls import server_context
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.api.auth import ApiKeys
from kvferry.proxy.api.operator.pages import ProxyFacts
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.discovery.discovery import DiscoverySettings
from kvferry.proxy.fleet.address_rules import AddressRules
from kvferry.proxy.fleet.circuit_breaker import BreakerSettings
from kvferry.proxy.fleet.fleet import FleetSettings
from kvferry.proxy.http.pool import PoolSettings
from kvferry.proxy.telemetry.metrics import Metrics

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and certificates; read once, before any socket is bound."""

    cluster: ClusterKey | None
    clients: ApiKeys | None
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, config: ProxyConfig) -> Keys:
        """Read the files. Raises `OSError`, `BadKeyFile`, `BadClusterKey` or `BadCertificate`."""
        return cls(
            tls=server_context(config.tls_cert, config.tls_key)
            if config.tls_cert and config.tls_key
            else None,
            cluster=ClusterKey.read(config.cluster_key) if config.cluster_key is not None else None,
            clients=ApiKeys.read(config.api_keys) if config.api_keys is not None else None,
        )


@contextmanager
def listening_socket(host: str, port: int, *, shared: bool = False) -> Iterator[socket.socket]:
    """Open a listening TCP socket; IPv6 where the host is an IPv6 address.

    With `shared`, other processes of this user may listen on the same port, and the kernel spreads
    connections over them. Raises `OSError` that names host and port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        reason = str(error.strerror).partition(" (while ")[0]  # the address follows, as a tuple
        raise OSError(f"cannot listen on {host_port(host, port)}: {reason}") from error
    with listener:
        # What it accepts inherits it. asyncio sets it only where the socket names its protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def base_url(config: ProxyConfig, port: int) -> str:
    """Return the URL of the proxy that listens on `port`."""
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{host_port(config.host, port)}"


def metrics_of(config: ProxyConfig) -> Metrics:
    """Return the metrics of a process that serves requests, with nothing counted yet."""
    return Metrics(config.objectives())


def proxy_facts(config: ProxyConfig, discovery_port: Callable[[], int]) -> Callable[[], ProxyFacts]:
    """Return what gives the facts about this proxy for the operator's page, which asks every second."""
    facts = ProxyFacts(
        cluster_name=config.cluster_name,
        machine=socket.gethostname(),
        version=VERSION,
        discovery_host="" if config.host in WILDCARDS else config.host,
        has_cluster_key=config.cluster_key is not None,
    )
    return lambda: replace(facts, discovery_port=discovery_port())


def fleet_settings(config: ProxyConfig) -> FleetSettings:
    """Return the fleet's settings."""
    return FleetSettings(
        rules=AddressRules(config.allow_address, tls_only=config.agent_ca is not None),
        breakers=BreakerSettings(failures=config.breaker_failures, pause_s=config.breaker_pause_s),
        prefill_policy=config.prefill_policy,
        decode_policy=config.decode_policy,
        prefill_limit=config.prefill_limit,
        decode_limit=config.decode_limit,
        split_min_tokens=None if config.split_min_tokens == "auto" else config.split_min_tokens,
        stream_pull_min_tokens=config.stream_pull_min_tokens,
        prefix_pull_min_tokens=config.prefix_pull_min_tokens,
        keeps_turns=config.keep_turns_s is not None,
        decode_only_fallback=config.decode_only_fallback,
        queue_limit=config.queue_limit,
        objectives=config.objectives(),
    )


def discovery_settings(config: ProxyConfig, keys: Keys) -> DiscoverySettings:
    """Return discovery's settings. Raises `OSError` and `BadEngineServer`."""
    return DiscoverySettings(
        host=config.host,
        port=config.discovery_port,
        servers=_named_servers(config),
        cluster_key=keys.cluster,
        agent_ca=config.agent_ca,
    )


def _named_servers(config: ProxyConfig) -> tuple[StaticNode, ...]:
    """The servers that flags and the file of nodes name."""
    servers = config.named_servers()
    if config.nodes is not None:
        servers += servers_from_file(config.nodes)
    check_distinct(servers)
    return servers


def pool_settings(config: ProxyConfig, cluster_key: ClusterKey | None) -> PoolSettings:
    """Return the settings of the connections to agents."""
    return PoolSettings(
        max_connections=config.max_connections,
        connect_timeout_s=config.connect_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        keepalive_s=config.keepalive_s,
        agent_ca=config.agent_ca,
        bearer=None if cluster_key is None else cluster_key.bearer,
    )
