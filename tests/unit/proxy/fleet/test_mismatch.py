# SPDX-License-Identifier: Apache-2.0
"""Which agents may serve a request together."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.proxy.fleet.pairing import Mismatch, mismatch
from kvferry.proxy.fleet.snapshot import NodeState, incompatible_pairs
from tests.unit.proxy.builders import registration, snapshot


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"tp_size": 4}, None),
        ({"host_id": "elsewhere"}, None),
        ({"model": "other"}, Mismatch.MODEL),
        ({"weights": "other"}, Mismatch.WEIGHTS),
        ({"tokenizer": "other"}, Mismatch.TOKENIZER),
        ({"layout": "other"}, Mismatch.LAYOUT),
        ({"transfer_mode": "write"}, Mismatch.MODE),
        ({"transfers": ("nixl",)}, Mismatch.TRANSFER),
        ({"dialect": "atom"}, Mismatch.DIALECT),
        ({"control_versions": (1, 1)}, None),
        ({"control_versions": (1, 2)}, None),
        ({"control_versions": (2, 3)}, Mismatch.VERSION),
    ],
)
def test_a_mismatch_is_found_and_named(fields: dict[str, Any], why: Mismatch | None) -> None:
    """Rows 13 and X3 of the references: refused up front, where anybody can see it."""
    assert mismatch(registration("prefill", 1), registration("decode", 2, **fields)) is why


@pytest.mark.parametrize("dialect", ["native", "vllm-kvferry"])
def test_cuda_ipc_works_only_within_one_host(dialect: str) -> None:
    """Of vLLM's servers too, which list what our plane has opened in them."""
    prefill = registration("prefill", 1, transfers=("cuda_ipc", "tcp"), dialect=dialect)
    near = registration("decode", 2, transfers=("cuda_ipc",), dialect=dialect)
    far = registration("decode", 2, transfers=("cuda_ipc",), host_id="elsewhere", dialect=dialect)
    assert mismatch(prefill, near) is None
    assert mismatch(prefill, far) is Mismatch.TRANSFER


def test_an_agent_pairs_with_itself_whatever_it_can_transfer() -> None:
    agent = registration("both", 1, transfers=())
    assert mismatch(agent, agent) is None


def test_what_the_agents_found_out_themselves_keeps_these_two_apart_for_good() -> None:
    """A new start of either is another incarnation, and gets another chance."""
    prefill, other = registration("prefill", 1), registration("prefill", 3)
    decode = registration("decode", 2, refusals={prefill.incarnation: "verify_kv: theirs off, ours on"})
    assert mismatch(prefill, decode) is Mismatch.HANDSHAKE
    assert mismatch(other, decode) is None
    (pair,) = incompatible_pairs(snapshot(prefill, other, decode))
    assert pair.text == "rejected by the decode agent in their handshake: verify_kv: theirs off, ours on"


def test_layouts_that_differ_are_told_by_what_differs() -> None:
    prefill = registration("prefill", 1, layout="a", geometry={"block_size": "16", "dtype": "bfloat16"})
    decode = registration("decode", 2, layout="b", geometry={"block_size": "32", "dtype": "bfloat16"})
    (pair,) = incompatible_pairs(snapshot(prefill, decode))
    assert pair.text == "different KV layouts: block_size 16 at the prefill agent, 32 at the decode agent"


def test_versions_that_differ_are_told_with_the_programs_they_are_of() -> None:
    prefill = registration("prefill", 1, control_versions=(1, 1), version="0.1")
    decode = registration("decode", 2, control_versions=(2, 3), version="0.3")
    (pair,) = incompatible_pairs(snapshot(prefill, decode))
    assert pair.text == (
        "no version of the control channel in common: "
        "1 to 1 at the prefill agent (0.1), 2 to 3 at the decode agent (0.3)"
    )


def test_refused_pairs_are_listed_while_both_are_up() -> None:
    prefill, misfit = registration("prefill", 1), registration("decode", 2, layout="other")
    agents = (prefill, misfit, registration("decode", 3), registration("decode", 4, model="other"))
    assert list(incompatible_pairs(snapshot(*agents))) == [(prefill, misfit, Mismatch.LAYOUT)]
    assert not list(incompatible_pairs(snapshot(*agents, state=NodeState.DRAINING)))
