# SPDX-License-Identifier: Apache-2.0
"""The connector's settings (`kv_connector_extra_config`), and which configurations of vLLM it serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.agent.plugin.settings import NotServed, PluginSettings
from kvferry.proxy.wire.registration import Role
from kvferry.transfer.net import CannotBind, check_can_bind

_OLDEST, _NEWEST = (0, 24), (0, 33)
HYBRIDS_SINCE = (0, 30)
_OF_SEVERAL_ENGINES = re.compile(r"_dp\d+$")
"""What vLLM appends to the engine_id of each data-parallel engine, the first too."""


def read_settings(extra: dict[str, Any]) -> PluginSettings:
    """Raises `NotServed` for what is unknown or invalid."""
    try:
        return msgspec.convert(extra, PluginSettings)
    except msgspec.ValidationError as error:
        raise NotServed(f"kv_connector_extra_config: {error}") from error


def role_of(kv_role: str) -> Role:
    """vLLM's `kv_role` as our role. Raises `NotServed`."""
    roles: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
    if kv_role not in roles:
        raise NotServed(f"kv_role must be one of {', '.join(roles)}, got {kv_role!r}")
    return roles[kv_role]


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor number of a version of vLLM."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def check_version(version: str) -> None:
    """Raise `NotServed` for a version of vLLM that is not served."""
    release = release_of(version)
    if not _OLDEST <= release <= _NEWEST:
        served = "–".join(".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise NotServed(f"vLLM {version} is outside of the served range {served}")


def dp_index_of(config: Any) -> int:
    """The number of this engine among the data-parallel ranks of all hosts (`config`: `VllmConfig`)."""
    return int(getattr(config.parallel_config, "data_parallel_index", 0))


def dp_rank_of(config: Any) -> int | None:
    """The number by which the API of this engine (`config` is its `VllmConfig`) knows it among its
    data-parallel ranks, as `X-data-parallel-rank` says it; None where there is but one.
    """
    parallel, engine_id = config.parallel_config, str(config.kv_transfer_config.engine_id)
    index = dp_index_of(config)
    # In the engines of a dense model vLLM sets data_parallel_size back to 1: only the other two are left.
    if parallel.data_parallel_size == 1 and not index and not _OF_SEVERAL_ENGINES.search(engine_id):
        return None
    if getattr(parallel, "local_engines_only", False):  # hybrid or external load balancing
        return int(parallel.data_parallel_rank_local or 0)
    return index


def is_remote(parallel: Any) -> bool:
    """Whether this rank is on another node than its engine's process (`parallel`: `ParallelConfig`)."""
    return int(getattr(parallel, "node_rank_within_dp", 0)) > 0


def with_own_host(settings: PluginSettings, parallel: Any, get_ip: Callable[[], str]) -> PluginSettings:
    """The settings with an `advertise_host` that is this host's, where the API is on another.

    Args:
        get_ip: Returns the address by which vLLM's processes reach this host.
    """
    if settings.advertise_host or settings.bind_host:
        return settings
    if settings.advertise_url:
        try:
            check_can_bind("the transfer plane", settings.advertised_host, 0)
        except CannotBind:
            return msgspec.structs.replace(settings, advertise_host=get_ip())
    elif is_remote(parallel):
        return msgspec.structs.replace(settings, advertise_host=get_ip())
    return settings


def check_served(version: str, config: Any) -> None:
    """Raise `NotServed` for a configuration (`VllmConfig`) under which a request could go wrong, or that was
    never tried.
    """
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    check_version(version)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise NotServed(f"{name} must be 1, got {getattr(parallel, name)}")
    if str(getattr(parallel, "distributed_executor_backend", "")) == "ray":
        raise NotServed("distributed_executor_backend must not be ray: it was never tried; use --nnodes")
    if getattr(model, "enable_sleep_mode", False):
        raise NotServed("enable_sleep_mode is not served: KV of other weights must not be proven right")
    if getattr(cache, "calculate_kv_scales", False):
        raise NotServed("calculate_kv_scales is not served: two servers would not agree on them")
    if release_of(version) < HYBRIDS_SINCE and getattr(model, "is_hybrid", False):
        raise NotServed(f"{model.model} keeps states (a hybrid model), which is served from vLLM 0.30 on")
