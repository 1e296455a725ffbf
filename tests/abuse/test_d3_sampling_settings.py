# SPDX-License-Identifier: Apache-2.0
"""D3: settings of one request that cost every other request's step."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.abuse.bystanders import SLACK_S, bystanders, control_run, send
from tests.system.conftest import StartAgent

PLAIN: dict[str, Any] = {"model": "ferry-tiny", "prompt": "Hello", "max_tokens": 64, "ignore_eos": True}
TOO_MANY_STOP_IDS = (
    b'{"model": "ferry-tiny", "prompt": "Hello", "n": 8, "max_tokens": 32, "stop_token_ids": ['
    + b"1," * 3_900_000
    + b"1]}"
)


@pytest.mark.timeout(180)
async def test_no_setting_slows_everybody_s_steps(start_agent: StartAgent) -> None:
    """Once: 936 biases with 64 choices 272 ms a step, 3.9 million stop ids 18 s to never."""
    biases = {str(token): -1.0 for token in range(900)}
    refused = {
        "logit_bias": json.dumps({**PLAIN, "n": 64, "logit_bias": biases}).encode(),
        "stop_token_ids": TOO_MANY_STOP_IDS,
        "stop": json.dumps({**PLAIN, "stop": ["a" * 1025]}).encode(),
    }
    allowed = {
        **PLAIN,
        "n": 32,
        "logit_bias": dict(list(biases.items())[:300]),
        "stop_token_ids": [899] * 1024,
        "stop": ["~" * 64] * 16,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    async with start_agent() as agent:
        control = await control_run(agent.url)
        async with bystanders(agent.url) as gaps:
            for field, raw in refused.items():
                status, body = await send(agent.url, raw)
                assert (status, body["error"]["param"]) == (400, field)
                assert body["error"]["type"] == "invalid_request_error"
            began = time.monotonic()
            status, body = await send(agent.url, json.dumps(allowed).encode())
            took_s = time.monotonic() - began
            assert status == 200, body
            assert all(choice["finish_reason"] for choice in body["choices"])
            await asyncio.sleep(0.5)
        print(
            f"control {control.longest:.2f} s, beside the abuse {gaps.longest:.2f} s; {took_s:.1f} s served"
        )
        assert gaps.longest < control.longest + SLACK_S
