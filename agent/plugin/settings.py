# SPDX-License-Identifier: Apache-2.0
"""What users set of the transfer plane inside another engine."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.agent.announce.options import check_name
from kvferry.agent.announce.proxy_names import check_proxy
from kvferry.common.addresses import WILDCARDS

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
MAX_PROXIES = 64
PluginBackend = Literal["cuda_ipc", "nixl", "tcp"]
"""Those of the backends (`transfer.options`) that were tried in vLLM, best first."""
PluginTransfer = Literal["auto", PluginBackend]


class NotServed(ValueError):
    """This configuration of the engine is not served; the message names the setting and what to change."""


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `kv_connector_extra_config`.

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
        verify_kv: Share of the prompts, from 0 to 1, whose KV is checksummed; a server that lends needs as
            large a share as those that fetch.
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
    transfer: PluginTransfer = "auto"
    transfer_options: str = ""
    lease_s: _Seconds = 10.0
    pull_timeout_s: _Seconds = 30.0
    hold_timeout_s: _Seconds = 120.0
    verify_kv: Share = 0.0
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
