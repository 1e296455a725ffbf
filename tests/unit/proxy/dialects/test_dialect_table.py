# SPDX-License-Identifier: Apache-2.0
"""The page on dialects says what the code does."""

from __future__ import annotations

from tests.unit.proxy.dialects.dialect_table import PAGE, page


def test_the_page_says_what_the_code_does() -> None:
    """Row 10: every field is handled or refused, and written down. `make dialect-table` mends the page."""
    assert PAGE.read_text() == page()
