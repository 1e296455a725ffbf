# SPDX-License-Identifier: Apache-2.0
"""The legs that the proxy sends to vLLM servers, read by vLLM's own code (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.system.vllm.servers import MARKS, PYTHON, ROOT

EXCHANGES = ROOT / "tests/unit/proxy/dialects/exchanges"

pytestmark = MARKS


def test_vllms_own_types_take_every_leg() -> None:
    """No field is unknown, the params arrive as they are, and MoRIIO finds the peer in the request id."""
    script = Path(__file__).with_name("accepts.py")
    result = subprocess.run(
        [PYTHON, script, EXCHANGES],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    read = json.loads(result.stdout.splitlines()[-1])
    paths = sorted(EXCHANGES.glob("vllm_*.json"))
    assert read.keys() == {path.stem for path in paths}
    for path in paths:
        told = json.loads(path.read_text())
        for leg, peer in (("prefill_leg", "decode"), ("decode_leg", "prefill")):
            found = read[path.stem][leg]
            assert found["kv_transfer_params"] == told[leg]["body"]["kv_transfer_params"]
            assert not found["unknown"], (path.name, leg)
            if told["dialect"] == "vllm-moriio":
                assert found["peer"] == told[peer]["control"]
                assert found["peer_address"][1:] == [6301, 61005]
