# SPDX-License-Identifier: Apache-2.0
"""A server of another engine that does not announce itself, as an operator names it.

On a command line it is `URL[,OPTION=VALUE…]`, in a YAML file a map with the same options:

    dialect: vllm-nixl            # of all nodes that name none
    nodes:
      - {url: "http://10.0.0.1:8200", role: prefill}
      - {url: "http://10.0.0.2:8200", role: decode, max_running: 64}

Unknown options and those that mean nothing to the dialect are rejected by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.common.addresses import bracketed, check_dialable, host_port
from kvferry.common.engine_servers import atom
from kvferry.common.roles import Role, TransferMode
from kvferry.common.yaml_file import read_yaml

EngineDialect = Literal["vllm-kvferry", "vllm-nixl", "vllm-moriio", "vllm-mooncake", "sglang", "atom"]

BOOTSTRAP_PORT = 8998
"""The default of SGLang's and of Mooncake's bootstrap server."""
_OPTIONS: dict[EngineDialect, frozenset[str]] = {
    "vllm-kvferry": frozenset(),
    "vllm-nixl": frozenset(),
    "vllm-moriio": frozenset({"kv_host", "handshake_port", "notify_port", "transfer_mode"}),
    "vllm-mooncake": frozenset({"kv_host", "bootstrap_port"}),
    "sglang": frozenset({"kv_host", "bootstrap_port"}),
    "atom": frozenset({"handshake_port", "transfer_mode"}),
}
_NEEDED: dict[EngineDialect, frozenset[str]] = {
    "vllm-kvferry": frozenset(),
    "vllm-nixl": frozenset(),
    "vllm-moriio": frozenset({"handshake_port", "notify_port"}),
    "vllm-mooncake": frozenset(),
    "sglang": frozenset(),
    "atom": frozenset(),
}
_FOR_SOME = frozenset[str]().union(*_OPTIONS.values())
_WRITERS: frozenset[EngineDialect] = frozenset({"sglang", "vllm-mooncake"})

Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=1)]


class BadEngineServer(ValueError):
    """What an operator wrote of a server cannot be used; the message names it."""


class StaticNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server: where it is, what it does, and what it would have said of itself.

    Args:
        url: Base URL of its OpenAI API.
        dialect: The protocol between its engine and a router.
        kv_host: Where its peers reach it for KV; the URL's host when not given.
        bootstrap_port: Port of its bootstrap server (SGLang, Mooncake); 8998 when not given.
        handshake_port: Port for handshakes of KV transfers (MoRIIO, ATOM); ATOM servers report theirs.
        notify_port: Port for notifications of KV transfers (MoRIIO).
        tp_size: Tensor-parallel size; 1 when neither given nor reported (ATOM).
        dp_size: Data-parallel size; likewise.
        transfer_mode: Which side moves the KV (MoRIIO, ATOM); read when not given.
        model: Which of the models that it lists to serve; the first when not given.
        max_running: Most sequences that it runs at once; unlimited when not given.
    """

    url: str
    role: Role
    dialect: EngineDialect
    kv_host: str | None = None
    bootstrap_port: Port | None = None
    handshake_port: Port | None = None
    notify_port: Port | None = None
    tp_size: Count | None = None
    dp_size: Count | None = None
    transfer_mode: TransferMode | None = None
    model: str | None = None
    max_running: Count | None = None

    def __post_init__(self) -> None:
        for option in sorted(_FOR_SOME - _OPTIONS[self.dialect]):
            if getattr(self, option) is not None:
                raise ValueError(f"{option} means nothing to {self.dialect}")
        for option in sorted(_NEEDED[self.dialect]):
            if getattr(self, option) is None:
                raise ValueError(f"{self.dialect} needs {option}")
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise ValueError(f"{self.url!r} is not http://host:port")
        try:
            check_dialable(url.hostname)
        except ValueError as error:
            raise ValueError(f"{self.url!r} cannot be dialled: {error}") from error
        if not 0 < (url.port or 80) <= 65535:
            raise ValueError(f"{self.url!r} has no usable port")

    @property
    def address(self) -> str:
        """The URL as registrations spell it."""
        return self.url.rstrip("/")

    @property
    def control(self) -> str:
        """Where the engine's peers reach it for KV, spelled as its dialect reads it (`Register.control`)."""
        host = self.kv_host or urlsplit(self.url).hostname or ""
        match self.dialect:
            case "vllm-kvferry" | "vllm-nixl":
                return ""
            case "vllm-moriio":
                return f"host:{host},handshake:{self.handshake_port},notify:{self.notify_port}"
            case "vllm-mooncake" | "sglang":
                return f"http://{host_port(host, self.bootstrap_port or BOOTSTRAP_PORT)}"
            case "atom":
                return f"tcp://{bracketed(host)}:{self.handshake_port or atom.HANDSHAKE_PORT}"

    @property
    def info_path(self) -> str | None:
        """The page on which the server reports what its operator need not say; None where it has none."""
        return atom.INFO_PATH if self.dialect == "atom" else None

    @property
    def mode(self) -> TransferMode:
        """Which side moves the KV."""
        return self.transfer_mode or ("write" if self.dialect in _WRITERS else "read")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: list[dict[str, object]]
    dialect: EngineDialect | None = None


def server_from_words(text: str, role: Role, dialect: str | None) -> StaticNode:
    """Read `URL[,OPTION=VALUE…]`. Raises `BadEngineServer`."""
    url, *options = text.split(",")
    fields: dict[str, object] = {"url": url, "role": role}
    if dialect is not None:
        fields["dialect"] = dialect
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name in ("url", "role") or (name in fields and name != "dialect"):
            raise BadEngineServer(f"{text}: {option!r} is not OPTION=VALUE, or not one to be given here")
        fields[name] = value
    return _server(fields, text, strict=False)


def servers_from_file(path: Path) -> tuple[StaticNode, ...]:
    """Read a YAML file of nodes. Raises `OSError` and `BadEngineServer`."""
    try:
        data = read_yaml(path)
    except ValueError as error:
        raise BadEngineServer(str(error)) from error
    try:
        file = msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise BadEngineServer(f"{path}: {error}") from error
    shared: dict[str, object] = {} if file.dialect is None else {"dialect": file.dialect}
    return tuple(
        _server(shared | node, f"{path}, node {number}", strict=True)
        for number, node in enumerate(file.nodes, start=1)
    )


def check_distinct(servers: tuple[StaticNode, ...]) -> None:
    """Raise `BadEngineServer` if two have the same address: one would push the other out."""
    addresses = [server.address for server in servers]
    for address in addresses:
        if addresses.count(address) > 1:
            raise BadEngineServer(f"{address} is named twice")


def _server(fields: dict[str, object], where: str, *, strict: bool) -> StaticNode:
    if "dialect" not in fields:
        raise BadEngineServer(
            f"{where}: no dialect is given; choose from {', '.join(get_args(EngineDialect))}"
        )
    try:
        return msgspec.convert(fields, StaticNode, strict=strict)
    except msgspec.ValidationError as error:
        raise BadEngineServer(f"{where}: {error}") from error
