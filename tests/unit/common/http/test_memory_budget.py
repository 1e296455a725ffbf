# SPDX-License-Identifier: Apache-2.0
"""What several hold together is bounded, and who is evicted is a choice."""

from __future__ import annotations

import pytest

from kvferry.common.http.memory_budget import MemoryBudget, largest, oldest


@pytest.mark.parametrize(("choose", "evicted"), [(oldest, ["a", "b"]), (largest, ["b"])])
def test_beyond_the_limit_holders_are_evicted(choose: object, evicted: list[str]) -> None:
    gone: list[str] = []
    budget = MemoryBudget[str](100, choose, gone.append)  # type: ignore[arg-type]
    budget.hold("a", 10)
    budget.hold("b", 60)
    budget.hold("c", 30)
    budget.hold("b", 55)
    assert not gone
    budget.hold("c", 50)
    budget.hold("c", 90)
    assert gone == evicted
    budget.release("b")
    budget.release("c")
    assert budget.held == dict.fromkeys({"a"} - set(evicted), 10)


def test_one_that_is_too_much_alone_is_evicted_itself() -> None:
    gone: list[str] = []
    budget = MemoryBudget[str](100, oldest, gone.append)
    budget.hold("a", 101)
    assert (gone, budget.held) == (["a"], {})
    budget.hold("a", 100)
    assert gone == ["a"]
