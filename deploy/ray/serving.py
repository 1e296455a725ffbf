# SPDX-License-Identifier: Apache-2.0
"""The course of `kvferry up --on ray`: the proxy on this host, the agents where Ray places them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from kvferry.agent.config import START_TIMEOUT_S
from kvferry.common.addresses import WILDCARDS, host_port
from kvferry.deploy.launcher import Cluster, ClusterSpec, LaunchError
from kvferry.deploy.ray.agent_actor import AgentOrder
from kvferry.deploy.ray.fleet import RayFleet, node_addresses, nodes_that_could_take, own_address


async def serve_on_ray(
    spec: ClusterSpec,
    namespace: str,
    bundle: Mapping[str, float],
    show: Callable[[str], None],
    keep_status_line: Callable[[Cluster], Coroutine[Any, Any, None]],
) -> None:
    """Serve until cancelled, or until `kvferry down` has ended all agents; then end what was started.

    `show` is called with what happens; `keep_status_line` runs beside, once all agents are ready.

    Raises `LaunchError` if it does not start. We are connected to Ray.
    """
    if RayFleet.find(namespace).agents:
        raise LaunchError(
            f"agents run in the Ray namespace {namespace} already: kvferry down ends them, and "
            "--ray-namespace takes another one"
        )
    host = _proxy_host(spec.host)
    fleet = RayFleet()
    async with Cluster(replace(spec, agents=()), show) as cluster:
        proxy = host_port(host, cluster.proxy.listening["discovery_port"])
        try:
            nodes: list[str] | list[None] = nodes_that_could_take(bundle) or [None]
            for agent in spec.agents:
                # The death of a node should not take all agents of a role.
                node = nodes[int(agent.name.rpartition("-")[2]) % len(nodes)]
                order = AgentOrder(agent=agent, model=spec.model, proxy=proxy)
                fleet.place(namespace, order, bundle, node)
            longest_s = max(agent.listening_timeout_s for agent in spec.agents)
            model = await _wait_ready(cluster, fleet, max(START_TIMEOUT_S, longest_s))
            for placed in fleet.agents:
                show(placed.describe())
            show(
                f"serving {model} at {cluster.url}/v1; logs in {spec.log_dir}; "
                "Ctrl-C, or kvferry down, ends it"
            )
            async with asyncio.TaskGroup() as tasks:
                beside = [cluster.keep_running(), keep_status_line(cluster)]
                kept = [tasks.create_task(each) for each in beside]
                await fleet.watch(spec.log_dir, show)
                for task in kept:
                    task.cancel()
            show("all agents were ended: the proxy ends too")
        finally:
            await fleet.end()


async def _wait_ready(cluster: Cluster, fleet: RayFleet, timeout_s: float) -> str:
    async def urls() -> Mapping[str, str]:
        await fleet.refresh(cluster.spec.log_dir)
        fleet.check_started()
        return {agent.name: agent.url for agent in fleet.agents}

    try:
        return await cluster.wait_listed(urls, timeout_s)
    except LaunchError as error:
        waiting = [agent.describe() for agent in fleet.agents if agent.report is None]
        raise LaunchError("; ".join([str(error), *waiting])) from error


def _proxy_host(host: str) -> str:
    """Return where agents find the proxy, which binds `host`.

    Raises `LaunchError` if that is this machine alone, and there are nodes elsewhere.
    """
    if host in WILDCARDS:
        return own_address()
    elsewhere = [node for node in node_addresses() if not _is_loopback(node)]
    if _is_loopback(host) and elsewhere:
        raise LaunchError(
            f"--host {host}: agents on {', '.join(elsewhere[:3])} cannot find the proxy there; "
            f"give --host {own_address()}, or 0.0.0.0"
        )
    return host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
