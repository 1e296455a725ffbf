# SPDX-License-Identifier: Apache-2.0
"""Our connector has every method that a version of vLLM calls, with the parameters that it calls it with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agent.vllm.hooks import hooks_of, recorded

CONNECTOR = Path(__file__).parents[4] / "agent/vllm/connector.py"


@pytest.mark.parametrize("version", recorded())
def test_the_connector_has_the_interface_of_each_version(version: str) -> None:
    ours, theirs = hooks_of(CONNECTOR.read_text(), "KvferryConnector"), recorded()[version]
    assert not {name for name, hook in theirs.items() if hook.abstract} - ours.keys()
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 15
    for name in shared - {"__init__"}:
        assert (ours[name].parameters, ours[name].kind) == (theirs[name].parameters, theirs[name].kind), name
    # vLLM's factory looks for the name of the third.
    assert ours["__init__"].parameters == theirs["__init__"].parameters


def test_the_oldest_and_the_newest_served_version_are_recorded() -> None:
    minors = {tuple(map(int, version.split(".")[:2])) for version in recorded()}
    assert {(0, 24), (0, 33)} <= minors
