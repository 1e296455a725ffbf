# SPDX-License-Identifier: Apache-2.0
"""`make chaos SEED=… REQUESTS=… BACKEND=…`: the long form of the chaos run."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from tests.chaos.plan import ROUND_REQUESTS
from tests.chaos.run import Settings, ask_alone, run
from tests.chaos.victims import BACKENDS

LONG = 1000
"""A run of so many requests must have met every hardship."""


async def chaos(settings: Settings, backends: tuple[str, ...], log_dir: Path) -> bool:
    """Run over each backend and say how it went; true if all is well."""
    references = await ask_alone(settings, log_dir)
    well = True
    for backend in backends:
        print(settings.command(backend), flush=True)
        tally = await run(settings, backend, references, log_dir / backend, _say)
        print(tally.table(), flush=True)
        complaints = tally.complaints() + (tally.missing() if settings.requests >= LONG else [])
        for complaint in complaints:
            print(f"  WRONG {complaint}", flush=True)
        well = well and not complaints
    return well


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--requests", type=int, default=2000, help="per backend")
    parser.add_argument("--backend", choices=("all", *BACKENDS), default="all")
    parser.add_argument("--questions", type=int, default=200, help="distinct requests")
    parser.add_argument("--stop-s", type=float, nargs=2, default=(3.0, 20.0), metavar=("FROM", "TO"))
    parser.add_argument(
        "--round-size", type=int, default=ROUND_REQUESTS, help="requests between two stocktakings"
    )
    parser.add_argument("--decode-tp", type=int, default=1, help="ranks of each decode agent")
    parser.add_argument("--log-dir", type=Path, default=Path("logs/chaos"))
    args = parser.parse_args()
    settings = Settings(
        seed=args.seed,
        requests=args.requests,
        questions=args.questions,
        stop_s=tuple(args.stop_s),
        round_size=args.round_size,
        decode_tp=args.decode_tp,
    )
    backends = BACKENDS if args.backend == "all" else (args.backend,)
    return 0 if asyncio.run(chaos(settings, backends, args.log_dir / f"seed-{args.seed}")) else 1


if __name__ == "__main__":
    sys.exit(main())
