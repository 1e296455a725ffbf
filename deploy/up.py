# SPDX-License-Identifier: Apache-2.0
"""`kvferry up`: run a proxy and its agents on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, LaunchError, Role
from kvferry.proxy.wire.flags import parse_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """The options of `kvferry up`.

    Args:
        model: Checkpoint directory, or the name of a bundled model.
        prefill: Number of prefill agents.
        decode: Number of decode agents.
        tp: Tensor-parallel ranks of every agent.
        transfer: KV transfer backend; auto takes the best that works between two agents.
        device: Where the model runs.
        host: Address that everything binds.
        port: HTTP port of the proxy.
        discovery_port: Port at which agents announce themselves to the proxy.
        log_dir: Folder for one log file per process.
    """

    model: str = "ferry-tiny"
    prefill: int = 1
    decode: int = 1
    tp: int = 1
    transfer: Literal["auto", "mori", "cuda_ipc", "nixl", "mooncake", "nccl", "tcp"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    host: str = "127.0.0.1"
    port: int = 10001
    discovery_port: int = 36367
    log_dir: Path = Path("logs")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def cluster_spec(config: UpConfig) -> ClusterSpec:
    """Return the processes to start. Cores are divided evenly among all ranks."""
    ranks = (config.prefill + config.decode) * config.tp
    threads = max(1, (os.cpu_count() or 1) // ranks)
    args = (
        "--tp", str(config.tp), "--transfer", config.transfer,
        "--device", config.device, "--threads", str(threads),
    )  # fmt: skip
    counts: tuple[tuple[Role, int], ...] = (("prefill", config.prefill), ("decode", config.decode))
    agents = tuple(
        AgentSpec(name=f"{role}-{index}", role=role, args=args)
        for role, count in counts
        for index in range(count)
    )
    return ClusterSpec(
        model=config.model,
        agents=agents,
        log_dir=config.log_dir,
        host=config.host,
        port=config.port,
        discovery_port=config.discovery_port,
    )


async def run(config: UpConfig, console: Console) -> int:
    """Run the cluster until a signal (returns 0) or until one of its processes ends (returns 1)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.ensure_future(stop.wait())
    serving = asyncio.ensure_future(_serve(config, console))
    try:
        await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        return 0
    except LaunchError as error:
        console.print(f"[red]kvferry up:[/red] {error}", highlight=False)
        return 1
    finally:
        stopped.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, LaunchError):
            await serving


async def _serve(config: UpConfig, console: Console) -> None:
    async with Cluster(cluster_spec(config)) as cluster:
        await cluster.wait_ready(progress=lambda words: console.print(words, highlight=False))
        console.print(f"serving {config.model} at {cluster.url}/v1; logs in {config.log_dir}; Ctrl-C ends it")
        await cluster.wait_for_death()


def main(argv: list[str]) -> int:
    """Entry point of `kvferry up`; returns the exit status."""
    config = parse_flags(
        UpConfig, argv, prog="kvferry up", description="Start a proxy and its agents on this machine."
    )
    return asyncio.run(run(config, Console()))
