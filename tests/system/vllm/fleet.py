# SPDX-License-Identifier: Apache-2.0
"""Two proxies, and vLLM servers started by `kvferry agent --engine vllm`."""

from __future__ import annotations

import os
from pathlib import Path
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


class VllmFleet(Fleet):
    """See `Fleet`. `agent_args` are of `kvferry agent`, `words` of vLLM; each server runs `max_running`
    sequences at once.

    Two cores that start and serve several engines may be late with pings: the proxies wait `PATIENCE` times
    as long for them.
    """

    proxy_module = "tests.standins.patient_proxy"
    start_timeout_s = START_TIMEOUT_S
    stop_grace_s = STOP_TIMEOUT_S
    deadline_s = patient(300.0)

    def __init__(
        self,
        log_dir: Path,
        agent_args: tuple[str, ...],
        max_running: int,
        model: Path = MODEL_DIR,
        words: tuple[str, ...] = (),
    ) -> None:
        super().__init__(log_dir, agent_args)
        self._model = model
        self._engine_words = (*engine_words(max_running), "--enable-prefix-caching", *words)
        self._stack.enter_context(patch.dict(os.environ, {**ENVIRONMENT, "KVFERRY_TEST_PATIENCE": PATIENCE}))

    def agent_words(self, role: str, where: list[str]) -> tuple[str, ...]:
        return (
            "-m", "kvferry.deploy", "agent", "--engine", "vllm", "--engine-python", str(PYTHON),
            "--model", str(self._model), "--served-model-name", MODEL, "--role", role,
            "--port", str(free_port()), "--control-port", "0", *where, *self._agent_args,
            "--", *self._engine_words,
        )  # fmt: skip
