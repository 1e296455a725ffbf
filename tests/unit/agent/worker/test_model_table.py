# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.unit.agent.worker.model_table import PAGE, with_tables


def test_the_page_of_models_says_what_is_tested() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run `make model-table`"
