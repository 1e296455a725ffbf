# SPDX-License-Identifier: Apache-2.0
"""First tokens in the engine's and in the plane's form; `test_scheduler.py` tests leases and pulls."""

from __future__ import annotations

import msgspec

from kvferry.agent.engine.transfers import from_wire, to_wire
from kvferry.agent.messages.requests import SamplingParams, Token, TokenLogprob


def test_first_tokens_survive_the_wire() -> None:
    logprob = TokenLogprob(logprob=-0.25, margin=float("inf"), top=((3, -0.25), (4, -2.0)))
    tokens = (Token(index=0, token_id=3, logprob=logprob), Token(index=1, token_id=4, finish="stop"))
    wire = to_wire(tokens, 16)
    sampling = SamplingParams(seed=1, n=2, max_tokens=5)
    assert from_wire(wire, sampling, 50) == tokens
    assert from_wire(wire, msgspec.structs.replace(sampling, max_tokens=1), 50) is None
