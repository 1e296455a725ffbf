# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.standins.paced_agent …`: an agent whose steps take as long as a formula says.

So several agents on few cores are as fast as if each had hardware of its own: the bundled model computes a
step in a part of that time, and the engine sleeps for the rest. `PACE_VARIABLE` has three numbers of seconds
with commas between: of a step, of each token of a prompt, and of each sequence that is decoded.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from kvferry.agent.__main__ import main as run_agent
from kvferry.agent.engine import process
from kvferry.agent.engine.executor import Executor
from kvferry.agent.messages.steps import Step, StepOutputs

MODULE = "tests.standins.paced_agent"
PACE_VARIABLE = "KVFERRY_TEST_PACE"


class Pace(NamedTuple):
    """Seconds, as a plan's `ServerModel` has them."""

    step_s: float
    token_s: float
    sequence_s: float

    def environment(self) -> dict[str, str]:
        """Return what the agent is to find in its environment."""
        return {PACE_VARIABLE: ",".join(map(str, self))}

    def seconds(self, step: Step) -> float:
        """Return what a step takes. A chunk of one token is taken for a decoded one."""
        sizes = [len(chunk.token_ids) for chunk in step.chunks]
        decoded = sizes.count(1)
        return self.step_s + (sum(sizes) - decoded) * self.token_s + decoded * self.sequence_s


class PacedExecutor(Executor):
    """Sleeps until a step has taken as long as it is to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pace = Pace(*map(float, os.environ[PACE_VARIABLE].split(",")))

    async def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs:
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self._pace.seconds(step)
        outputs = await super().run(step, on_written)
        await asyncio.sleep(max(0.0, ends_at - clock()))
        return outputs


def main(argv: Sequence[str]) -> int:
    """Run the agent, or its engine process, which is started with a run directory."""
    if "--run-dir" not in argv:
        return run_agent(argv, engine_module=MODULE)
    with mock.patch.object(process, "Executor", PacedExecutor):
        return process.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
