# SPDX-License-Identifier: Apache-2.0
"""`kvferry down`: end the agents of `kvferry up --on ray`, from any node of the Ray cluster."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from kvferry.common.options import CommandParser
from kvferry.deploy.ray.fleet import RayFleet, RayUnusable, connected

DEFAULT_NAMESPACE = "kvferry"


def add_ray_arguments(parser: ArgumentParser) -> None:
    """Add the options that say which agents are meant."""
    parser.add_argument(
        "--ray-address",
        metavar="TEXT",
        help="HOST:PORT of the Ray cluster's head; by default the cluster of this host.",
    )
    parser.add_argument(
        "--ray-namespace",
        default=DEFAULT_NAMESPACE,
        metavar="TEXT",
        help=f"The Ray namespace of the agents. (default: {DEFAULT_NAMESPACE})",
    )


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry down",
        "Stop the agents that kvferry up --on ray has started, and free what they had reserved. If kvferry "
        "up still runs, it stops its proxy and exits.",
    )
    add_ray_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """End a fleet. Returns 0, also if there is none, and 1 if Ray cannot be asked."""
    options = build_parser().read(argv)
    try:
        with connected(options.ray_address, options.ray_namespace):
            fleet = RayFleet.find(options.ray_namespace)
            asyncio.run(fleet.end())
    except RayUnusable as error:
        print(f"kvferry down: {error}", file=sys.stderr)
        return 1
    for agent in fleet.agents:
        print(f"{agent.name} has ended")
    if not fleet.agents:
        print(f"no agents run in the Ray namespace {options.ray_namespace}")
    return 0
