# SPDX-License-Identifier: Apache-2.0
"""Two proxies, and servers of another engine started by `kvferry agent --engine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from tests.helpers.servers import free_port
from tests.helpers.waiting import patient
from tests.system.test_rolling import Fleet
from tests.system.vllm.servers import (
    ENVIRONMENT,
    MODEL,
    MODEL_DIR,
    PYTHON,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    engine_words,
)

PATIENCE = "6"


class EngineFleet(Fleet):
    """See `Fleet`. `agent_args` are of `kvferry agent`, `words` of the engine.

    Two cores that start and serve several engines may be late with pings: the proxies wait `PATIENCE` times
    as long for them.
    """

    proxy_module = "tests.standins.patient_proxy"
    start_timeout_s = START_TIMEOUT_S
    stop_grace_s = STOP_TIMEOUT_S
    deadline_s = patient(300.0)
    engine: ClassVar[str]
    python: ClassVar[Path]
    environment: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        log_dir: Path,
        agent_args: tuple[str, ...],
        words: tuple[str, ...],
        model: Path = MODEL_DIR,
    ) -> None:
        super().__init__(log_dir, agent_args)
        self._model = model
        self._engine_words = words
        environment = {**self.environment, "KVFERRY_TEST_PATIENCE": PATIENCE}
        self._stack.enter_context(patch.dict(os.environ, environment))

    def agent_words(self, role: str, where: list[str]) -> tuple[str, ...]:
        return (
            "-m", "kvferry.deploy", "agent", "--engine", self.engine, "--engine-python", str(self.python),
            "--model", str(self._model), "--served-model-name", MODEL, "--role", role,
            "--port", str(free_port()), "--control-port", "0", *where, *self._agent_args,
            "--", *self._engine_words,
        )  # fmt: skip


class VllmFleet(EngineFleet):
    """Of vLLM servers, each of which runs `max_running` sequences at once."""

    engine = "vllm"
    python = PYTHON
    environment = ENVIRONMENT

    def __init__(
        self,
        log_dir: Path,
        agent_args: tuple[str, ...],
        max_running: int,
        model: Path = MODEL_DIR,
        words: tuple[str, ...] = (),
    ) -> None:
        words = (*engine_words(max_running), "--enable-prefix-caching", *words)
        super().__init__(log_dir, agent_args, words, model)
