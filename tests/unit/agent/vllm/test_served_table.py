# SPDX-License-Identifier: Apache-2.0
"""The page on vLLM says what the connector serves."""

from __future__ import annotations

from tests.unit.agent.vllm.served_table import PAGE, page


def test_the_page_says_what_the_connector_serves() -> None:
    """`make served-table` mends the page."""
    assert PAGE.read_text() == page()
