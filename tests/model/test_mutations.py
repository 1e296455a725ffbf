# SPDX-License-Identifier: Apache-2.0
"""The checker can fail: it finds every seeded defect of the machines, and shows how to get there."""

from __future__ import annotations

import pytest

from tests.model.explore import Counterexample, explore
from tests.model.mutations import MUTATIONS, Mutation, mutated
from tests.model.scenarios import SHORT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.sentence)
def test_the_checker_finds(mutation: Mutation) -> None:
    with pytest.raises(Counterexample) as found:
        explore(SHORT[mutation.world], mutated(mutation))
    print(found.value)
