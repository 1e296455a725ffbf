# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --engine sglang`: starts an SGLang server with our transfer plane inside.

SGLang runs in the environment of `--engine-python`, where kvferry must be installed too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.agent.plugin.launch import EngineEnvironment, EngineServerOptions, inspect_engine, serve
from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.sglang import BACKEND
from kvferry.agent.sglang.settings import check_version, environment_of, read_settings
from kvferry.common.roles import Role


@dataclass(frozen=True, kw_only=True)
class SglangEngineConfig(EngineServerOptions):
    """The options of `kvferry agent --engine sglang`. Words after `--` go to SGLang as they are.

    Engine:
        engine: The engine, sglang.

    Network:
        role: Whether this server prefills or decodes.

    KV transfer:
        on_pull_failure: SGLang fails a request whose KV cannot be proven right: the proxy retries it.
    """

    engine_name: ClassVar[str] = "SGLang"
    bootstrap_port: ClassVar[tuple[str, int]] = ("--disaggregation-bootstrap-port", 8998)
    engine: Literal["sglang"] = "sglang"
    role: Role = "prefill"
    on_pull_failure: Literal["fail"] = "fail"

    def __post_init__(self) -> None:
        self.check_server()
        self.check_plane()
        if self.role == "both":
            raise ValueError("role must be prefill or decode: SGLang has no server of both")
        try:
            read_settings(self.environment(""), host=self.host, port=self.port or 1, own_ip="127.0.0.1")
        except NotServed as error:
            raise ValueError(str(error)) from error

    @classmethod
    def inspect(cls, python: str, *, count_gpus: bool = False) -> EngineEnvironment:
        return inspect_engine(python, cls.engine_name, ("sglang",), check_version, count_gpus=count_gpus)

    @staticmethod
    def cpu_environment(threads: int) -> dict[str, str]:
        return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads)}

    @staticmethod
    def cpu_words() -> tuple[str, ...]:
        # Its other ways to keep what a decode server takes back need a GPU's driver.
        return ("--device", "cpu", "--disaggregation-decode-retraction-backup", "cpu_tensor")

    def command(self, rest: Sequence[str], drain_socket: str) -> list[str]:
        """What starts the server."""
        model, served = self.named_model()
        words = [self.engine_python, "-m", "sglang.launch_server", "--model-path", model]
        words += ["--host", self.host, "--port", str(self.port), "--tp-size", str(self.tp)]
        words += ["--disaggregation-mode", self.role, "--disaggregation-transfer-backend", BACKEND]
        if served is not None:
            words += ["--served-model-name", served]
        return [*words, *rest]

    def environment(self, drain_socket: str) -> Mapping[str, str]:
        return environment_of(self.plane_settings(drain_socket))


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    return serve(SglangEngineConfig, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
