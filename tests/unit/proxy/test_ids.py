# SPDX-License-Identifier: Apache-2.0
"""Ids are random, however few calls of the system they take."""

from __future__ import annotations

from kvferry.proxy.ids import RandomBytes, new_transfer_id


def test_no_id_comes_twice() -> None:
    """Beyond what is fetched at a time, too."""
    random = RandomBytes()
    ids = [new_transfer_id(random) for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {32}
