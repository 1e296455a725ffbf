# SPDX-License-Identifier: Apache-2.0
"""`kvferry status URL`: the agents that a proxy knows, their load, why some are not used, and what happened.

With `--on ray`: those that Ray runs, and on which nodes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from kvferry.common.exceptions import message_of
from kvferry.common.http.tls import BadCertificate, client_context
from kvferry.common.options import CommandParser, server_url
from kvferry.deploy.http_client import StatusFailed, client_session, fetch_nodes
from kvferry.deploy.ray.down import add_ray_arguments
from kvferry.deploy.ray.fleet import PlacedAgent, RayFleet, RayUnusable, connected
from kvferry.proxy.api.openapi import EventView, NodeList, NodeView

DEFAULT_URL = "http://127.0.0.1:10001"
WATCH_INTERVAL_S = 1.0
PIPED_COLUMNS = 240
"""How wide the table may be where no terminal sets it."""
RAY_COLUMNS = ("agent", "node", "state", "process", "starts", "address", "how its last run ended")
COLUMNS = (
    "agent",
    "address",
    "role",
    "state",
    "engine",
    "model",
    "running",
    "waiting",
    "KV used",
    "last ping",
)
MAX_EVENTS = 12
"""Most events that are shown, the latest first."""
MANY_FAILED = 0.1
"""An agent is named if at least this share of its KV transfers failed."""


def node_row(node: NodeView) -> tuple[str, ...]:
    """Return one agent's cells, as `COLUMNS` names them."""
    load = node.load
    state = node.state
    if node.breaker != "closed":
        state += f", breaker {node.breaker}"
    if node.not_paired is not None and node.not_paired != f"its state is {node.state}":
        state += f", not paired: {node.not_paired}"
    most = "" if load.max_running is None else f" of {load.max_running}"
    used = load.kv_blocks_total - load.kv_blocks_free
    share = f"{100 * used / load.kv_blocks_total:.0f} %" if load.kv_blocks_total else ""
    name = node.name or node.address.partition("//")[2]
    return (
        name, node.address, node.role, state, node.dialect, node.model,
        f"{load.running}{most}", str(load.waiting), share, f"{node.last_ping_s:.1f} s",
    )  # fmt: skip


def summary(nodes: NodeList) -> str:
    """Return the fleet in one line: how many agents are ready, what they do, how full they are."""
    ready = [node for node in nodes.nodes if node.state == "ready"]
    parts = [f"{len(ready)} of {len(nodes.nodes) + len(nodes.lost)} agents ready"]
    parts += [f"{len(nodes.lost)} lost"] if nodes.lost else []
    parts += [f"{sum(node.load.running for node in nodes.nodes)} running"]
    parts += [f"{sum(node.load.waiting for node in nodes.nodes)} waiting"]
    total, free = Counter[str](), Counter[str]()
    for node in nodes.nodes:
        total[node.role] += node.load.kv_blocks_total
        free[node.role] += node.load.kv_blocks_free
    parts += [
        f"{role} KV {100 - 100 * free[role] / total[role]:.0f} %" for role in sorted(total) if total[role]
    ]
    return ", ".join(parts)


def event_line(event: EventView) -> str:
    """Return what happened to an agent in one line."""
    who = " at ".join(word for word in (event.name, event.address) if word) or "the proxy"
    role = f" ({event.role})" if event.role else ""
    times = f", {event.count} times" if event.count > 1 else ""
    detail = f": {event.detail}" if event.detail else ""
    return f"{_age(event.age_s)} ago: {who}{role}: {event.kind.replace('_', ' ')}{times}{detail}"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def other_lines(nodes: NodeList) -> list[str]:
    """Return a line for each agent that was lost, each server that is down or rejected, each agent to which
    many KV transfers fail, and each pairing that cannot be; then what happened last.
    """
    lines = [
        f"{event.name or event.address} ({event.role}) is lost: its pings stopped {_age(event.age_s)} ago"
        for event in nodes.lost
    ]
    lines += [f"{server.address} ({server.role}) is down: {server.reason}" for server in nodes.down]
    lines += [f"{agent.address} is rejected: {agent.reason}" for agent in nodes.rejected_agents]
    lines += [line for node in nodes.nodes if (line := _failed_pulls(node))]
    lines += [f"{pair.prefill} and {pair.decode}: {pair.reason}" for pair in nodes.refused_pairings]
    hidden = nodes.num_refused_pairings - len(nodes.refused_pairings)
    lines += [f"and {hidden} more pairings that cannot be"] if hidden > 0 else []
    return [*lines, *map(event_line, nodes.events[:MAX_EVENTS])]


def _failed_pulls(node: NodeView) -> str:
    """Return how many of an agent's KV transfers failed, and why, if they are many; else an empty string."""
    failed = sum(node.failed_pulls.values())
    tried = node.pulls + failed
    if failed < MANY_FAILED * tried or not failed:
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in node.failed_pulls.items() if count)
    who = f"{node.name or node.address} ({node.role})"
    return f"{who}: {failed} of {tried} KV transfers to it failed ({reasons})"


def render(nodes: NodeList) -> RenderableType:
    """Return the agents as a table, and below it what is not used and why."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[6:] else "left", overflow="fold")
    for node in sorted(nodes.nodes, key=lambda node: (node.role, node.address)):
        table.add_row(*node_row(node))
    table.caption = "\n".join(other_lines(nodes) or ([] if nodes.nodes else ["no agents yet"])) or None
    table.caption_justify = "left"
    return table


async def show(url: str, key: str | None, ca: Path | None, watch: bool, as_json: bool) -> None:
    """Print the agents once, or until Ctrl-C. Raises `StatusFailed`, OSError and `BadCertificate`."""
    async with client_session(None if ca is None else client_context(ca), key) as http:
        nodes = await fetch_nodes(http, url)
        if as_json:
            print(json.dumps(msgspec.to_builtins(nodes), indent=2))
            return
        screen = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        screen.print(render(nodes), highlight=False, markup=False)
        while watch:
            await asyncio.sleep(WATCH_INTERVAL_S)
            nodes = await fetch_nodes(http, url)
            screen.clear()
            screen.print(render(nodes), highlight=False, markup=False)


def render_placed(agents: Sequence[PlacedAgent]) -> RenderableType:
    """Return the agents that Ray runs as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in RAY_COLUMNS:
        table.add_column(column, overflow="fold")
    for agent in agents:
        report = agent.report
        cells = ("", "", "") if report is None else (str(report.pid or ""), str(report.starts), report.url)
        table.add_row(agent.name, agent.node, agent.state, *cells, report.note if report else agent.death)
    return table


def show_on_ray(address: str | None, namespace: str, as_json: bool) -> None:
    """Print what Ray runs of a fleet. Raises `RayUnusable`."""
    with connected(address, namespace):
        fleet = RayFleet.find(namespace)
        asyncio.run(fleet.refresh())
    if as_json:
        agents = [
            {"name": agent.name, "node": agent.node, "state": agent.state, "url": agent.url}
            for agent in fleet.agents
        ]
        print(json.dumps({"agents": agents}, indent=2))
    elif fleet.agents:
        screen = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        screen.print(render_placed(fleet.agents), highlight=False, markup=False)
    else:
        print(f"no agents run in the Ray namespace {namespace}")


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry status", "List the agents of a proxy, their load, and why some are not used."
    )
    parser.add_argument(
        "url",
        nargs="?",
        type=server_url,
        default=DEFAULT_URL,
        metavar="URL",
        help=f"The proxy. (default: {DEFAULT_URL})",
    )
    parser.add_credentials("the proxy's certificate")
    parser.add_choice(
        "--on",
        ("local", "ray"),
        default="local",
        help="ray: list what runs on which node of a Ray cluster, in place of what a proxy shows.",
    )
    add_ray_arguments(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--watch", action="store_true", help="Refresh every second, until Ctrl-C.")
    shown.add_argument("--json", action="store_true", help="Print the proxy's whole answer as JSON.")
    return parser


def main(argv: Sequence[str]) -> int:
    """Show a fleet. Returns 0, or 1 if the proxy cannot be asked."""
    options = build_parser().read(argv)
    try:
        if options.on == "ray":
            show_on_ray(options.ray_address, options.ray_namespace, options.json)
            return 0
        asyncio.run(show(options.url, options.key, options.ca, options.watch, options.json))
    except (StatusFailed, RayUnusable, OSError, BadCertificate) as error:
        print(f"kvferry status: {message_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
