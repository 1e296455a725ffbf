# SPDX-License-Identifier: Apache-2.0
"""Starts the plane and the connector's scheduler side once every rank is known."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.agent.announce.embedded import Announcement, Server
from kvferry.agent.ids import mint_incarnation
from kvferry.agent.plugin.plane_thread import PlaneThread, api_process
from kvferry.agent.plugin.settings import PluginSettings
from kvferry.agent.vllm.connector_scheduler import KvferryConnectorScheduler
from kvferry.agent.vllm.connector_worker import RankFacts
from kvferry.agent.vllm.identity import geometry_of, is_continuable, tokenizer_of, weights_of
from kvferry.agent.vllm.kv_groups import KvGroup
from kvferry.agent.vllm.settings import dp_index_of, dp_rank_of
from kvferry.common.curve import ClusterKey
from kvferry.proxy.wire.registration import Role
from kvferry.transfer.plane import PlaneConfig

_START_S = 60.0
_DIALECT = "vllm-kvferry"


def start_connector_scheduler(
    settings: PluginSettings,
    config: Any,
    role: Role,
    ranks: Sequence[RankFacts],
    groups: Sequence[KvGroup],
    *,
    version: str,
    free_blocks: Callable[[], int],
) -> tuple[PlaneThread, KvferryConnectorScheduler]:
    """Start the plane, and announce the server where proxies are named. Waits for the ranks.

    Args:
        config: vLLM's `VllmConfig`.
        ranks: In order of rank.
        groups: The KV-cache groups.
        version: vLLM's.

    Raises `NotServed`, TimeoutError, and what `SchedulerConnector.start` raises.
    """
    first = ranks[0]
    geometry = geometry_of(
        config,
        layers={layer for rank in ranks for layer in rank.layers},
        content=f"vllm {version} {_kernels()}",
    )
    incarnation, hosts = mint_incarnation(), {rank.host for rank in ranks}
    server = Server(
        dialect=_DIALECT,
        address=settings.advertise_url.rstrip("/"),
        host=settings.advertised_host,
        api=settings.api_address,
        name=settings.name,
        role=role,
        incarnation=incarnation,
        model=served_name(config.model_config),
        max_model_len=config.model_config.max_model_len,
        tp_size=len(ranks),
        geometry=geometry,
        weights=weights_of(config),
        tokenizer=tokenizer_of(config),
        num_blocks=first.num_blocks,
        max_running=config.scheduler_config.max_num_seqs,
        prefill_chunk=config.scheduler_config.max_num_batched_tokens,
        device=first.device,
        host_id=hosts.pop() if len(hosts) == 1 else f"several, of {incarnation}",
        dp_rank=dp_rank_of(config),
    )
    key = ClusterKey.read(Path(settings.cluster_key)) if settings.cluster_key is not None else None
    plane_config = PlaneConfig(
        incarnation=server.incarnation,
        bind_host=settings.bound_host,
        control_port=settings.control_port and settings.control_port + dp_index_of(config),
        advertise_host=settings.advertised_host,
        transfer=settings.transfer,
        lease_s=settings.lease_s,
        geometry=geometry,
        num_blocks=first.num_blocks,
        weights=server.weights,
        host_id=server.host_id,
        rank_addresses=tuple(rank.address for rank in ranks),
        verify_kv=settings.verify_kv,
        lends_prefixes=role != "prefill",
        curve_secret=None if key is None else key.secret.decode(),
    )
    plane = PlaneThread(plane_config, start_timeout_s=_START_S, parent=api_process())
    scheduler = KvferryConnectorScheduler(
        plane,
        incarnation=server.incarnation,
        host=settings.advertised_host,
        tp_size=len(ranks),
        dp_rank=server.dp_rank or 0,
        groups=groups,
        lends=role != "decode",
        fetches=role != "prefill",
        continuable=is_continuable(config),
        # A draft's KV of a token may depend on the next one.
        shares_beginnings=config.speculative_config is None,
        lease_limit_s=settings.hold_timeout_s + settings.pull_timeout_s,
        pull_timeout_s=settings.pull_timeout_s,
        hold_timeout_s=settings.hold_timeout_s,
        max_running=server.max_running,
        num_blocks=server.num_blocks,
        free_blocks=free_blocks,
    )
    if settings.proxy:
        announcement = Announcement(
            server,
            scheduler,
            free_blocks,
            proxies=settings.proxy,
            key=key,
            drain_socket=settings.drain_socket,
        )
        plane.start(announcement.run)
    else:
        plane.start()
    return plane, scheduler


def served_name(model_config: Any) -> str:
    """The name that clients ask for; the first, if there are several."""
    names = model_config.served_model_name
    return str(names if isinstance(names, str) or not names else names[0]) or str(model_config.model)


def _kernels() -> str:
    """What decides how kernels order K and V within a token, beside vLLM's version and the model."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    # vLLM's CPU kernels have an order of their own for each instruction set.
    amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"
