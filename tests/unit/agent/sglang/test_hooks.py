# SPDX-License-Identifier: Apache-2.0
"""Our classes have every method of SGLang's that they replace, with the parameters that it is called with."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.agent.sglang.settings import check_version
from tests.unit.agent.sglang.hooks import recorded
from tests.unit.agent.vllm.hooks import hooks_of

OURS = Path(__file__).parents[4] / "agent/sglang"
REPLACED = {"KvferryManager": 2, "KvferrySender": 4, "KvferryReceiver": 7}
"""So many methods at least of each class are SGLang's too."""


@pytest.mark.parametrize("version", recorded())
def test_what_is_replaced_is_there_and_called_alike(version: str) -> None:
    source = (OURS / "conn.py").read_text()
    for name, least in REPLACED.items():
        ours = hooks_of(source, name)
        theirs = recorded()[version]["CommonKV" + name.removeprefix("Kvferry")]
        shared = ours.keys() & theirs.keys() - {"__init__"}
        assert len(shared) >= least, name
        for method in shared:
            assert ours[method].parameters == theirs[method], (name, method)


@pytest.mark.parametrize("version", recorded())
def test_what_is_hooked_is_there(version: str) -> None:
    queues = recorded()[version]
    assert queues["PrefillBootstrapQueue"]["_init_kv_manager"] == ()
    assert queues["DecodePreallocQueue"]["_init_kv_manager"] == ()
    assert queues["PrefillBootstrapQueue"]["create_sender"][0] == "req"
    assert queues["DecodePreallocQueue"]["_create_receiver_and_enqueue"][0] == "req"


def test_every_recorded_version_is_served() -> None:
    for version in recorded():
        check_version(version)
