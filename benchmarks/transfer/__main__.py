# SPDX-License-Identifier: Apache-2.0
"""`make bench-transfer`: what the transfer backends of this machine carry, beside what they could.

python -m benchmarks.transfer [--out DIR] [--machine WORDS] [--only cpu|control|gpu]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
from pathlib import Path

import torch

from benchmarks.transfer import control, on_cpu, on_gpu
from benchmarks.transfer.report import Report
from kvferry.transfer.engine import usable

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-MACHINE")
    parser.add_argument("--machine", default=_machine(), help="what to call it in the results")
    parser.add_argument("--only", choices=("cpu", "control", "gpu"), help="one part")
    options = parser.parse_args()
    report = Report(options.machine)
    name = "-".join([datetime.date.today().isoformat(), *options.machine.replace(",", "").split()]).lower()
    try:
        _run(report, options.only)
    finally:  # a part that fails takes nothing from those before it
        report.write(options.out or RESULTS / name)
        print(f"\n{report.markdown()}")


def _run(report: Report, only: str | None) -> None:
    if only in (None, "gpu"):
        verdict = usable("cuda_ipc")
        if verdict.ok:
            asyncio.run(on_gpu.run(report))
        else:
            print(f"GPU cases left out: {verdict.reason}")
    if only in (None, "cpu"):
        on_cpu.run(report)
    if only in (None, "control"):
        asyncio.run(control.run(report))


def _machine() -> str:
    """In general words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return "CPU only"


if __name__ == "__main__":
    main()
