# SPDX-License-Identifier: Apache-2.0
"""Registrations and snapshots for tests of the pure rooms."""

from __future__ import annotations

from typing import Any

from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.routing.router import Decision, Router, Turns
from kvferry.proxy.fleet.routing.routing_request import NO_AGENTS, Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import Node, NodeState, NoPair, Snapshot
from kvferry.proxy.wire.registration import Incarnation, Load, Register, Role


def load(running: int = 0, **fields: Any) -> Load:
    values = {"waiting": 0, "kv_blocks_free": 1000, "kv_blocks_total": 1000, "kv_blocks_leased": 0}
    return Load(running=running, **(values | fields))


def registration(role: Role, port: int, **fields: Any) -> Register:
    """A ready agent at `port`; its incarnation is made of the port unless given."""
    values: dict[str, Any] = {
        "role": role,
        "incarnation": f"{port:016x}",
        "index": 1,
        "address": f"http://10.0.0.1:{port}",
        "control": f"tcp://10.0.0.1:{port + 1000}",
        "dialect": "native",
        "model": "m",
        "max_model_len": 100,
        "tp_size": 1,
        "dp_size": 1,
        "transfers": ("tcp",),
        "host_id": "h",
        "layout": "l",
        "weights": "w",
        "tokenizer": "t",
        "transfer_mode": "read",
        "version": "0",
        "state": "ready",
        "steps": 0,
        "load": load(),
    }
    return Register(**(values | fields))


def snapshot(*infos: Register, state: NodeState = NodeState.READY) -> Snapshot:
    return Snapshot.of((Node(info, state, 0.0) for info in infos), (info.model for info in infos))


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRegistry(Registry):
    """A registry whose time tests set: `registry.at(1.0).register(…)`."""

    def __init__(self, **fields: Any) -> None:
        self.time = Clock()
        super().__init__(self.time, **fields)

    def at(self, now: float) -> TimedRegistry:
        self.time.now = now
        return self


class AppliedRouter(Router):
    """A router whose decisions are acted on at once."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.turns = Turns()

    def route(
        self,
        agents: Snapshot,
        request: RoutingRequest,
        exclude: frozenset[Incarnation] = NO_AGENTS,
        *,
        apart: bool = False,
        decode_only: bool = False,
        now: float = 0.0,
    ) -> Pair | NoPair:
        chosen = self.choose(
            agents, request, self.turns, exclude, apart=apart, decode_only=decode_only, now=now
        )
        if not isinstance(chosen, Decision):
            return chosen
        self.apply(chosen, request, self.turns, agents.models)
        return chosen.pair
