# SPDX-License-Identifier: Apache-2.0
"""Options that agents of all engines have: to whom they are announced, and where they serve."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.agent.announce.proxy_names import check_proxy
from kvferry.common.addresses import WILDCARDS, check_dialable
from kvferry.common.options import check_files
from kvferry.common.roles import Role
from kvferry.common.shared_options import check_not_negative, check_ports

MAX_NAME_CHARS = 64


def check_name(name: str) -> None:
    """Raise ValueError for an agent's name that pages could not show."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(f"name must be at most {MAX_NAME_CHARS} printable characters, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class AnnounceOptions:
    """To which proxies a server is announced, and as what.

    Network:
        role: Whether this server prefills, decodes, or both.
        proxy: Discovery addresses of the proxies to register with: HOST:PORT, or dns:NAME[:PORT] for every
            address of a name, which is looked up repeatedly.

    Timeouts:
        drain_s: Seconds after SIGTERM in which running requests may finish and leased KV may be read; after
            Ctrl-C 3 at most, and after a second signal none.

    Security:
        cluster_key: File made by `kvferry keygen`, the same as its proxies'; with it, only they are served.
    """

    role: Role = "both"
    proxy: tuple[str, ...] = ()
    drain_s: float = 60.0
    cluster_key: str | None = None

    def check_announcement(self) -> None:
        """Raise ValueError that names the wrong option."""
        check_not_negative(drain_s=self.drain_s)
        for address in self.proxy:
            check_proxy(address)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(AnnounceOptions):
    """Where a server listens, and what it is called.

    Model:
        served_model_name: Name of the model in requests. Default: the model's own.

    Network:
        name: Name of this server on operators' pages, of at most 64 characters. Default: its address.
        host: Address that the HTTP server and the control channel bind.
        port: HTTP port; 0 lets the OS choose.
        advertise_host: Host that peers and proxies connect to. Default: the bound host.
    """

    served_model_name: str | None = None
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_host: str | None = None

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.host

    def check_server(self) -> None:
        """Raise ValueError that names the wrong option."""
        self.check_announcement()
        check_name(self.name)
        check_ports(port=self.port)
        if self.advertised_host not in WILDCARDS:
            try:
                check_dialable(self.advertised_host)
            except ValueError:
                name = "host" if self.advertise_host is None else "advertise_host"
                raise ValueError(
                    f"{name} must be a name or an address, got {self.advertised_host!r}"
                ) from None

    def check_reachable(self) -> None:
        """Raise ValueError unless what is announced can be dialled, and the key be read."""
        check_files(self, ("cluster_key",))
        if self.proxy and self.advertised_host in WILDCARDS:
            raise ValueError(f"advertise_host is needed when host is {self.host!r}, which peers cannot dial")
