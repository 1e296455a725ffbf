# SPDX-License-Identifier: Apache-2.0
"""The agents of `kvferry up --on ray`, as they are seen from outside: placed, watched, ended.

Each agent has a placement group and an actor, which outlive the process that made them: if `kvferry up` is
killed its agents go on, and `kvferry down` ends them. This module can be imported without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvferry.common.addresses import check_host_port
from kvferry.deploy.launcher import STOP_GRACE_S, LaunchError, LogFile
from kvferry.deploy.ray.agent_actor import AgentActor, AgentOrder, AgentReport, SupervisionState

CALL_TIMEOUT_S = 5.0
END_TIMEOUT_S = STOP_GRACE_S + 10.0
POLL_INTERVAL_S = 1.0
MAX_RESTARTS = -1
"""Ray's word for as often as it takes."""
NAMED_RESOURCES = ("CPU", "GPU", "memory")
"""Those for which Ray's actors have an option of their own."""


class RayUnusable(RuntimeError):
    """There is no Ray cluster, or it does not let us in; the message says why, in one line."""


@contextlib.contextmanager
def connected(address: str | None, namespace: str) -> Iterator[None]:
    """Be a driver of a Ray cluster: of that which this host belongs to when no address is given.

    Raises `RayUnusable`. Call it in the main thread, outside of an event loop.
    """
    _check_reachable(address or os.environ.get("RAY_ADDRESS", "auto"))
    try:
        import ray
    except ModuleNotFoundError:
        raise RayUnusable("this needs the extra ray: in a clone of kvferry, pip install '.[ray]'") from None
    try:
        ray.init(
            address=address or "auto",
            namespace=namespace,
            log_to_driver=False,
            # Its warnings are about detached actors in placement groups, which is what we want.
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise RayUnusable(f"no Ray cluster at {address or 'this host'}: {last_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `RayUnusable` unless `address` is auto, or HOST:PORT and open: Ray would try without end."""
    if address == "auto":
        return
    try:
        check_host_port("ray_address", address)
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CALL_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise RayUnusable(f"no Ray cluster at {address}: {error}") from error


def own_address() -> str:
    """Return the address of this host that Ray's nodes know it by."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def node_addresses() -> list[str]:
    """Return the addresses of the nodes that live."""
    import ray

    return sorted({str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]})


def nodes_that_could_take(bundle: Mapping[str, float]) -> list[str]:
    """Return the ids of nodes that live and have these resources, be they in use or not; in a fixed order."""
    import ray

    return [
        str(node["NodeID"])
        for node in sorted(ray.nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())
    ]


def last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, where what was raised stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@dataclass(slots=True)
class PlacedAgent:
    """One agent: the actor that runs it, and what that reported last."""

    name: str
    actor: Any
    group: Any
    report: AgentReport | None = None
    is_answering: bool = False
    death: str = ""
    """Why its actor is gone for good: `kvferry down`, or it could not be constructed."""

    @property
    def url(self) -> str:
        """Where it listens; empty while it does not, or is not known to."""
        return self.report.url if self.report is not None and self.is_answering else ""

    @property
    def node(self) -> str:
        """The address of its node; empty before it has one."""
        return "" if self.report is None else self.report.node

    @property
    def state(self) -> str:
        """What it is doing, in a few words."""
        if self.death:
            return "ended"
        if self.report is None:
            return "waiting for a node with room for it"
        return self.report.state.value if self.is_answering else "not answering"

    def describe(self) -> str:
        """Return in one line what it is doing, and where."""
        where = f" on {self.node}" if self.node else ""
        if self.url:
            assert self.report is not None
            return f"{self.name} is running{where}: process {self.report.pid}, {self.url}"
        reason = self.death or (self.report.note if self.report is not None and self.is_answering else "")
        return f"{self.name}{where} is {self.state}{reason and f': {reason}'}"

    async def refresh(self) -> list[str]:
        """Ask its actor. Returns what was added to the agent's log since."""
        from ray.exceptions import ActorDiedError, RayError

        before = self.report
        if self.actor is None:
            self.death = "it has no actor"
            return []
        after = 0 if before is None else before.last_line
        try:
            answer = await asyncio.wait_for(self.actor.report.remote(after), CALL_TIMEOUT_S)
        except ActorDiedError as error:
            self.death = last_line(error)
        except (TimeoutError, RayError):
            self.is_answering = False
        else:
            self.report, self.is_answering = msgspec.json.decode(answer, type=AgentReport), True
            if before is None or before.actor_run == self.report.actor_run:
                return self.report.lines
            # Its lines are numbered anew: they are asked for next time.
            self.report = msgspec.structs.replace(self.report, lines=[], last_line=0)
        return []

    async def end(self) -> None:
        """End the agent, its actor and its placement group. One that does not answer is killed."""
        import ray
        from ray.exceptions import RayError
        from ray.util import remove_placement_group

        if self.is_answering:
            with contextlib.suppress(TimeoutError, RayError):
                await asyncio.wait_for(self.actor.stop.remote(), END_TIMEOUT_S)
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        remove_placement_group(self.group)


@dataclass(slots=True)
class RayFleet:
    """The agents of one namespace."""

    agents: list[PlacedAgent] = field(default_factory=list)

    @classmethod
    def find(cls, namespace: str) -> RayFleet:
        """Return the agents that run in a namespace, which is the one that we are connected to."""
        import ray
        from ray.util import get_placement_group, placement_group_table

        found = []
        for group in placement_group_table().values():
            fleet, _, name = str(group["name"]).partition("/")
            if fleet == namespace and group["state"] != "REMOVED":
                try:
                    actor = ray.get_actor(name)
                except ValueError:
                    actor = None
                found.append(PlacedAgent(name, actor, get_placement_group(group["name"])))
        return cls(sorted(found, key=lambda agent: agent.name))

    def place(
        self, namespace: str, order: AgentOrder, bundle: Mapping[str, float], preferred_node: str | None
    ) -> None:
        """Reserve a bundle of resources on one node, and have an actor run an agent there.

        Returns at once; the agent starts when a node has room for it, be it the preferred one or another.
        """
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        name = order.agent.name
        group = placement_group(
            [dict(bundle)],
            strategy="STRICT_PACK",
            name=f"{namespace}/{name}",
            lifetime="detached",
            # Experimental in Ray, which uses it for its own servers.
            _soft_target_node_id=preferred_node,
        )
        others = {resource: amount for resource, amount in bundle.items() if resource not in NAMED_RESOURCES}
        actor_class = ray.remote(AgentActor).options(
            name=name,
            lifetime="detached",
            max_restarts=MAX_RESTARTS,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        self.agents.append(PlacedAgent(name, actor_class.remote(msgspec.json.encode(order)), group))

    async def refresh(self, log_dir: Path | None = None) -> None:
        """Ask every actor, and add what the agents logged to a file for each in `log_dir`."""
        logged = await asyncio.gather(*(agent.refresh() for agent in self.agents))
        if log_dir is not None:
            for agent, lines in zip(self.agents, logged, strict=True):
                if lines:
                    LogFile(log_dir / f"{agent.name}.log").append(lines)

    def check_started(self) -> None:
        """Raise `LaunchError` if an agent has ended, or did not start, before all were ready."""
        for agent in self.agents:
            report = agent.report
            if agent.death:
                raise LaunchError(f"{agent.name}: {agent.death}")
            if report is not None and (report.state is SupervisionState.PAUSED or report.starts > 1):
                raise LaunchError(f"{agent.name} on {report.node} {report.note}")

    async def watch(self, log_dir: Path, progress: Callable[[str], None]) -> None:
        """Report what happens to the agents. Returns when all of them were ended, as by `kvferry down`."""
        last: dict[str, str] = {agent.name: agent.describe() for agent in self.agents}
        while not all(agent.death for agent in self.agents):
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.refresh(log_dir)
            for agent in self.agents:
                if (words := agent.describe()) != last[agent.name]:
                    progress(words)
                    last[agent.name] = words

    async def end(self) -> None:
        """End all agents at once."""
        await self.refresh()
        await asyncio.gather(*(agent.end() for agent in self.agents))


def bundle_of(tp: int, device: str | None, resources: Sequence[str]) -> dict[str, float]:
    """Return what an agent takes of its node: a CPU and, with device cuda, a GPU per rank.

    `resources`: more, or another number of CPUs, as NAME=AMOUNT. Raises ValueError.
    """
    bundle = {"CPU": float(tp), **({"GPU": float(tp)} if device == "cuda" else {})}
    for resource in resources:
        found = re.fullmatch(r"([\w:.-]+)=(\d+(?:\.\d+)?)", resource)
        if found is None or float(found[2]) == 0:
            raise ValueError(f"ray_resources must be NAME=AMOUNT with an amount above 0, got {resource!r}")
        if found[1] == "GPU":
            raise ValueError("ray_resources: an agent takes one GPU for each of its tp ranks")
        bundle[found[1]] = float(found[2])
    return bundle
