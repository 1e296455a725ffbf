# SPDX-License-Identifier: Apache-2.0
"""`make test-rdma`: run the tests that need RDMA verbs in an emulated machine that has them.

    python -m tests.rdma [--mori CHECKOUT] [STAGE…]

With a clone of ROCm/mori its own tests are one more stage. Each stage is one boot, and two run at a time, as
mostly only one of a machine's two processors has work. Consoles are printed as they come; a table follows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.rdma.machine import RESULTS, Machine, MissingPackages, Outcome
from tests.rdma.mori.library import VERSION, MoriLibrary

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "rdma"
AT_ONCE = 2
PATIENCE = 6
"""How many times slower than a small machine the emulated one may be, tests' limits included."""
MORI_OPTIONS = ",".join(
    f"mori.{option}"
    for option in (
        "probe_s=0",  # the tests ask once, and the child imports torch again
        "poll_cq_mode=event",  # polling keeps a lock busy, for which whoever makes queue pairs waits
        "retry_count=3",  # soft RoCE takes the usual 7 for no limit
        "max_send_wr=512",
        "max_cqe_num=2048",
        "num_worker_threads=1",
        "qp_per_transfer=2",
        "control_timeout_ms=30000",
    )
)
MORI: Mapping[str, str] = {
    "KVFERRY_TEST_TRANSFER_OPTIONS": MORI_OPTIONS,
    "MORI_IO_LOG_LEVEL": "error",
    # For tests of the library itself, which set no options.
    "MORI_IO_QP_RETRY_CNT": "3",
    "MORI_IO_QP_MAX_SEND_WR": "512",
    "MORI_IO_QP_MAX_CQE": "2048",
    "MORI_IO_CP_TIMEOUT_MS": "30000",
    "MORI_IO_POLL_CQ_MODE": "event",
}
_SITE = Path(sysconfig.get_path("purelib"))
NIXL: Mapping[str, str] = {
    "NIXL_LIBRARIES": " ".join(str(path) for path in _SITE.glob("nixl_cu*.libs/libibverbs-*")),
    "UCX_TLS": "rc_verbs,ud_verbs",
    "UCX_NET_DEVICES": "rxe0:1",
    "UCX_RC_VERBS_RETRY_COUNT": "3",  # soft RoCE takes the usual 7 for no limit
    "UCX_LOG_LEVEL": "info",
    "UCX_PROTO_INFO": "used",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One boot: the module that is run with these arguments, and how long it may take."""

    name: str
    limit_s: float
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "pytest"


STAGES = (  # what all run on, then the longest first
    Stage("devices", 600, ("tests/rdma/test_device.py",), {**MORI, **NIXL}),
    Stage("mori-agents", 2400, ("tests/rdma/test_agents.py", "-k", "mori"), MORI),
    Stage("nixl-agents", 2400, ("tests/rdma/test_agents.py", "-k", "nixl"), NIXL),
    Stage("mori-contract", 1500, ("tests/contract", "-k", "mori and not cuda"), MORI),
    Stage("nixl-contract", 1200, ("tests/contract", "-k", "nixl and not cuda"), NIXL),
    Stage("mori-library", 900, ("tests/unit/transfer/backends/mori/test_standin.py", "-k", "library"), MORI),
    Stage("no-pci-address", 300, ("tests/rdma/test_no_pci_address.py",), {"WITHOUT_PCI_ADDRESS": "1"}),
)


def own_tests(checkout: Path) -> Stage:
    """MORI's own tests."""
    arguments = (str(checkout.resolve()), "--library")
    return Stage("mori-own", 1500, arguments, MORI, "tests.rdma.mori.own_tests")


def main(arguments: Sequence[str]) -> int:
    """Run the stages of these names, or all. Returns 0 when every one passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.rdma", description="Tests on emulated RDMA.")
    parser.add_argument(
        "--mori", type=Path, metavar="CHECKOUT", help="a clone of ROCm/mori: run its own tests too"
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(stage.name for stage in STAGES))
    asked = parser.parse_args(arguments)
    stages = (*STAGES, own_tests(asked.mori)) if asked.mori else STAGES
    wanted = set(asked.stages) or {stage.name for stage in stages}
    if unknown := wanted - {stage.name for stage in stages}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    machine, library = Machine(FOLDER / "machine", Path(sys.prefix)), MoriLibrary(FOLDER / "mori")
    try:
        kernel = machine.prepare()
    except MissingPackages as missing:
        print(f"These packages of Debian are missing: {missing}", file=sys.stderr)
        return 2
    library.make()
    print(f"kernel {kernel}, amd-mori {VERSION}, Python {sys.version.split()[0]}", flush=True)
    asked_for = [stage for stage in stages if stage.name in wanted]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = pool.map(lambda stage: run(stage, machine, library), asked_for)
        outcomes = {stage.name: outcome for stage, outcome in zip(asked_for, ended, strict=True)}
    print(f"\n{'stage':16}{'passed':>8}{'failed':>8}{'skipped':>8}{'s':>8}")
    for name, outcome in outcomes.items():
        passed, failed, skipped = count(outcome)
        print(f"{name:16}{passed:8}{failed:8}{skipped:8}{outcome.wall_s:8.0f}")
    # What is skipped has shown nothing.
    good = all(outcome.status == 0 and count(outcome)[0] for outcome in outcomes.values())
    if asked.mori and "mori-own" in outcomes:
        good &= standin_agrees(asked.mori, outcomes["mori-own"])
    return 0 if good else 1


def run(stage: Stage, machine: Machine, library: MoriLibrary) -> Outcome:
    """Boot the machine for one stage."""
    environment = {
        "PYTHONPATH": str(library.package),
        "LD_LIBRARY_PATH": str(library.rocm),
        "KVFERRY_TEST_PATIENCE": str(PATIENCE),
        "KVFERRY_TEST_RDMA": "1",
        "OMP_NUM_THREADS": "1",
        **stage.environment,
    }
    command = (
        sys.executable, "-m", stage.module, *stage.arguments, "-p", "no:cacheprovider", "-v", "-s",
        "--durations", "0", "--timeout", f"{stage.limit_s:.0f}", "--junitxml", f"{RESULTS}/report.xml",
    )  # fmt: skip
    results = FOLDER / "results" / stage.name
    shutil.rmtree(results, ignore_errors=True)
    return machine.run(
        command,
        limit_s=stage.limit_s,
        environment=environment,
        results=results,
        say=lambda line: print(f"{stage.name}: {line}", flush=True),
    )


def standin_agrees(checkout: Path, library: Outcome) -> bool:
    """Run MORI's own tests with the stand-in, here, and compare each verdict with the real library's."""
    report = library.results / "report.xml"
    if not report.exists():
        return False
    print("\n=== mori-own with the stand-in", flush=True)
    command = (sys.executable, "-m", "tests.rdma.mori.own_tests", str(checkout), "--same-as", str(report))
    return subprocess.run(command).returncode == 0


def count(outcome: Outcome) -> tuple[int, int, int]:
    """Tests passed, failed and skipped; none when the stage ended before its report."""
    report = outcome.results / "report.xml"
    if not report.exists():
        return 0, 0, 0
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - failed - skipped, failed, skipped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
