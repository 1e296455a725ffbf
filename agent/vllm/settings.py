# SPDX-License-Identifier: Apache-2.0
"""The connector's settings (`kv_connector_extra_config`), and which configurations of vLLM it serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.agent.announce.options import check_name
from kvferry.agent.announce.proxy_names import check_proxy
from kvferry.common.addresses import WILDCARDS
from kvferry.proxy.wire.registration import Role
from kvferry.transfer.net import CannotBind, check_can_bind

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_OLDEST, _NEWEST = (0, 24), (0, 33)
_HYBRIDS_SINCE = (0, 30)
_OF_SEVERAL_ENGINES = re.compile(r"_dp\d+$")
"""What vLLM appends to the engine_id of each data-parallel engine, the first too."""
MAX_PROXIES = 64
VllmBackend = Literal["cuda_ipc", "nixl", "tcp"]
"""Those of the backends (`transfer.options`) that were tried in vLLM, best first."""
VllmTransfer = Literal["auto", VllmBackend]


class NotServed(ValueError):
    """This configuration of vLLM is not served; the message names the setting and what to change."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`.

    Args:
        advertise_url: URL at which proxies reach this server's API; needed with `proxy`.
        advertise_host: Host at which other engines reach this one; when not given, that of `advertise_url`,
            or where that is another host, this host's address as vLLM finds it.
        bind_host: Address that the transfer plane binds; `advertise_host` when not given.
        control_port: Port of the control channel, which each data-parallel rank adds its number to; 0 lets
            the OS choose.
        proxy: Discovery addresses of the proxies to announce to: HOST:PORT, or dns:NAME[:PORT] for every
            address of a name, which is looked up again and again.
        name: Name of this server on operators' pages; its address when not given.
        transfer: Transfer backend; auto opens all that work here, and two servers use the best of them that
            works between them.
        transfer_options: Options of backends, BACKEND.NAME=VALUE separated by commas.
        lease_s: Seconds without a renewal after which a lease expires and its blocks are freed.
        pull_timeout_s: Deadline for pulling one prompt's KV, from when there is room for it.
        hold_timeout_s: How long a lease is renewed for a request that waits for room.
        cluster_key: File made by `kvferry keygen`, the same as the proxies'.
        drain_socket: Unix socket of the process that has started the server: it asks there for a drain, and
            hears there when the server has drained.
    """

    advertise_url: str = ""
    advertise_host: str = ""
    bind_host: str = ""
    control_port: Annotated[int, Meta(ge=0, le=65535)] = 6301
    proxy: Annotated[tuple[str, ...], Meta(max_length=MAX_PROXIES)] = ()
    name: str = ""
    transfer: VllmTransfer = "auto"
    transfer_options: str = ""
    lease_s: _Seconds = 10.0
    pull_timeout_s: _Seconds = 30.0
    hold_timeout_s: _Seconds = 120.0
    cluster_key: str | None = None
    drain_socket: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        for proxy in self.proxy:
            check_proxy(proxy)
        if self.proxy and not self.advertise_url:
            raise ValueError("advertise_url is needed with proxy: a connector does not know the API's port")
        url = urlsplit(self.advertise_url)
        if self.advertise_url and (url.scheme not in ("http", "https") or not url.hostname or not url.port):
            raise ValueError(f"advertise_url must be http(s)://HOST:PORT, got {self.advertise_url!r}")
        if self.proxy and (url.hostname in WILDCARDS or self.advertised_host in WILDCARDS):
            raise ValueError(
                f"advertise_host is needed: peers cannot dial {url.hostname or self.advertised_host}"
            )

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or urlsplit(self.advertise_url).hostname or "127.0.0.1"

    @property
    def bound_host(self) -> str:
        return self.bind_host or self.advertised_host

    @property
    def api_address(self) -> tuple[str, int]:
        """Host and port of `advertise_url`, which must be given."""
        url = urlsplit(self.advertise_url)
        return url.hostname or "", url.port or 0


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """Raises `NotServed` for what is unknown or invalid."""
    try:
        return msgspec.convert(extra, ConnectorSettings)
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


def with_own_host(settings: ConnectorSettings, parallel: Any, get_ip: Callable[[], str]) -> ConnectorSettings:
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
    if release_of(version) < _HYBRIDS_SINCE and getattr(model, "is_hybrid", False):
        raise NotServed(f"{model.model} keeps states (a hybrid model), which is served from vLLM 0.30 on")
