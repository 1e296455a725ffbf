# SPDX-License-Identifier: Apache-2.0
"""`make soak SECONDS=600`: the long form of the soak, on two prefill and two decode agents."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, start_process
from tests.abuse.soak import soak
from tests.chaos.plan import make_questions
from tests.chaos.run import Settings, ask_alone
from tests.system.conftest import COMMON_ARGS

QUESTIONS = 100
LONG_S = 300.0
"""A run of so many seconds must be flat at its end."""


async def run(seconds: float, seed: int, log_dir: Path) -> bool:
    """Run once and print what came of it; true if all is well."""
    settings = Settings(seed=seed, requests=0, questions=QUESTIONS, stop_s=(0.0, 0.0))
    references = await ask_alone(settings, log_dir)
    agents = tuple(
        AgentSpec(name=f"{role}-{index}", role=role, args=COMMON_ARGS)
        for role in ("prefill", "decode")
        for index in range(2)
    )
    spec = ClusterSpec(model="ferry-tiny", agents=agents, log_dir=log_dir)
    async with Cluster(spec) as cluster:
        await cluster.wait_ready()
        discovery = f"127.0.0.1:{cluster.proxy.listening['discovery_port']}"
        hostile = await start_process("hostile", ("-m", "tests.standins.hostile", discovery), log_dir)
        try:
            figures = await soak(cluster, seconds, make_questions(seed, QUESTIONS), references, seed)
        finally:
            await hostile.stop()
    print(figures.table())
    complaints = figures.complaints(flat=seconds >= LONG_S)
    for complaint in complaints:
        print(f"  WRONG {complaint}")
    return not complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    args = parser.parse_args()
    print(f"make soak SECONDS={args.seconds:.0f} SEED={args.seed}", flush=True)
    return 0 if asyncio.run(run(args.seconds, args.seed, Path(f"logs/soak/seed-{args.seed}"))) else 1


if __name__ == "__main__":
    sys.exit(main())
