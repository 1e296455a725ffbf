# SPDX-License-Identifier: Apache-2.0
"""The list of seeded defects fits the code. `make mutants` shows that tests notice them."""

from __future__ import annotations

import pytest

from tests.mutants.defects import DEFECTS, Defect
from tests.mutants.run import ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.sentence)
def test_the_line_to_change_is_there_once_and_its_tests_exist(defect: Defect) -> None:
    source = (ROOT / defect.file).read_text()
    assert source.count(defect.old) == 1, f"{defect.file} has changed: adapt tests/mutants/defects.py"
    compile(source.replace(defect.old, defect.new), defect.file, "exec")
    assert defect.tests
    for test in defect.tests:
        path, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / path).read_text(), test
