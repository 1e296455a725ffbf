# SPDX-License-Identifier: Apache-2.0
"""What a server of SGLang's says of its KV."""

from __future__ import annotations

import pytest

from kvferry.agent.sglang.server import share_of


@pytest.mark.parametrize("is_mla", [False, True])
def test_servers_with_other_numbers_of_ranks_are_not_paired(is_mla: bool) -> None:
    """Seen at real servers: with MLA, 2 ranks and 1, the lease of the second rank had no reader."""
    assert share_of(0, 2, is_mla=is_mla) != share_of(0, 1, is_mla=is_mla)


def test_with_mla_all_ranks_have_the_same() -> None:
    assert share_of(0, 2, is_mla=True) == share_of(1, 2, is_mla=True)
    assert share_of(0, 2, is_mla=False) != share_of(1, 2, is_mla=False)
