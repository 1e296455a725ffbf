# SPDX-License-Identifier: Apache-2.0
"""The cluster of a chaos run: two prefill and two decode agents that come back where they were."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, Process
from tests.chaos.plan import ROLES, Part, Strike
from tests.standins import faults, mori_io
from tests.system.conftest import wait_ready

MODEL = "ferry-tiny"
LEASE_S = 2.0
PULL_TIMEOUT_S = 10.0
MAX_DEATH_S = 5.0
MORI_FAULT = f"stall:seconds={1.5 * LEASE_S},after=40"
BACKENDS = ("tcp", "nixl", "mori", "mooncake", "nccl")
_FIRST_PORT = 10_240
_MODULES = {"engine": faults.ENGINE, "rank": faults.RANK}


class OutlivedItself(AssertionError):
    """Processes of an agent lived on after one of them was killed (I8)."""


@contextmanager
def library(backend: str, mori_fault: str = "") -> Iterator[None]:
    """What a backend needs to work here: a stand-in, with this fault, takes the place of AMD's library."""
    if backend != "mori":
        yield
        return
    with mori_io.on_path():
        os.environ[mori_io.FAULT] = mori_fault
        yield


def make_spec(seed: int, backend: str, decode_tp: int, log_dir: Path) -> ClusterSpec:
    """Agents that lose and repeat control messages, one of each role with the prefix cache and one without.

    Reads from prefill-0 are late at first (over tcp; over mori, see `MORI_FAULT`) and decode-1 never renews,
    so that leases end while they are read.
    """
    losses = "drop=0.05,dup=0.05"
    late = ("--tcp-fault", f"delay:seconds={1.5 * LEASE_S},count=5") if backend == "tcp" else ()
    own_args = {
        "prefill-0": ("--prefix-cache", "true", "--control-fault", f"{losses},seed={seed}", *late),
        "prefill-1": ("--prefix-cache", "false", "--control-fault", f"{losses},seed={seed + 1}"),
        "decode-0": ("--prefix-cache", "true", "--control-fault", f"{losses},seed={seed + 2}"),
        "decode-1": ("--prefix-cache", "false", "--control-fault", "drop=1,only=renew"),
    }
    ports = iter(_free_ports(2 * len(own_args)))
    agents = tuple(
        AgentSpec(
            name=name,
            role=role,
            module=faults.AGENT,
            args=(
                *("--port", str(next(ports)), "--control-port", str(next(ports))),
                *("--transfer", backend, "--lease-s", str(LEASE_S), "--threads", "1"),
                *("--tp", str(decode_tp if role == "decode" else 1)),
                *("--pull-timeout-s", str(PULL_TIMEOUT_S), *own_args[name]),
            ),
        )
        for role, names in ROLES.items()
        for name in names
    )
    return ClusterSpec(model=MODEL, agents=agents, log_dir=log_dir)


def _free_ports(count: int) -> list[int]:
    """Ports that an agent keeps over its lives, so that peers meet another incarnation at a known address.

    The system lends none of them to clients, who could be there when an agent comes back.
    """
    first_lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    probes: list[socket.socket] = []
    for port in random.sample(range(_FIRST_PORT, first_lent), first_lent - _FIRST_PORT):
        with suppress(OSError):
            probes.append(socket.create_server(("127.0.0.1", port)))
        if len(probes) == count:
            break
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    assert len(ports) == count, f"of the ports {_FIRST_PORT} to {first_lent}, only {len(ports)} are free"
    return ports


async def strike(cluster: Cluster, blow: Strike) -> None:
    """Carry one strike out, to the point where the agent can serve again."""
    victims = processes(cluster.agents[blow.agent], blow.part)
    if blow.blow == "stop":
        with stopped(victims):
            await asyncio.sleep(blow.seconds)
        return
    for victim in victims:
        victim.kill()
    # Its other processes share its fate (I8); only then are its ports free.
    agent, outlived = cluster.agents[blow.agent].process, False
    try:
        await asyncio.wait_for(agent.wait(), MAX_DEATH_S)
    except TimeoutError:
        outlived = True
        agent.kill()
        await agent.wait()
    await revive(cluster, blow.agent)
    if outlived:
        raise OutlivedItself(f"{blow.agent} outlived its {blow.part} by {MAX_DEATH_S} s")


async def revive(cluster: Cluster, name: str) -> None:
    """Start a dead agent again, and wait until it can serve."""
    (spec,) = (agent for agent in cluster.spec.agents if agent.name == name)
    await wait_ready(await cluster.start_agent(spec))


def processes(agent: Process, part: Part) -> list[psutil.Process]:
    """The processes of one part of an agent; of several ranks only the last."""
    api = psutil.Process(agent.pid)
    if part == "api":
        return [api]
    children = api.children(recursive=True)
    if part == "all":
        return [api, *children]
    return [child for child in children if _MODULES[part] in child.cmdline()][-1:]


@contextmanager
def stopped(members: list[psutil.Process]) -> Iterator[None]:
    """Processes that stand still for a while."""
    for process in members:
        process.suspend()
    try:
        yield
    finally:
        for process in members:
            if process.is_running():
                process.resume()
