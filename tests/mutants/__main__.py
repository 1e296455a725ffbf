# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import os

from tests.mutants.defects import DEFECTS
from tests.mutants.run import run

parser = argparse.ArgumentParser(description="seed defects and see that tests notice each")
parser.add_argument("--core", action="store_true", help="the short form: modules whose tests take seconds")
parser.add_argument("--file", help="only defects of files whose path contains this")
parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
options = parser.parse_args()
chosen = [
    defect for defect in DEFECTS if (defect.core or not options.core) and (options.file or "") in defect.file
]
raise SystemExit(1 if run(chosen, options.jobs) else 0)
