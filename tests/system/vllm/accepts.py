# SPDX-License-Identifier: Apache-2.0
"""Reads the legs in `exchanges/` with vLLM's own code: its request types, and how MoRIIO reads request ids.

Run by the Python of `.venv-vllm`, where nothing of kvferry is: `python accepts.py EXCHANGES` prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common as moriio
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

REQUESTS = {"completions": CompletionRequest, "chat/completions": ChatCompletionRequest}


def read_leg(told: dict[str, Any], leg: str) -> dict[str, Any]:
    """What vLLM takes from one leg; raises what it raises."""
    asked = told[leg]
    request = REQUESTS[told["endpoint"]].model_validate(asked["body"])
    found = {"kv_transfer_params": request.kv_transfer_params, "unknown": sorted(request.model_extra or {})}
    if told["dialect"] == "vllm-moriio":
        # The engine puts its own prefix before the id and eight digits behind it.
        request_id = f"cmpl-{asked['headers']['X-Request-Id']}-0-1a2b3c4d"
        peer = moriio.get_peer_zmq_from_request_id(request_id, is_producer=leg == "prefill_leg")
        found["peer"] = peer
        found["peer_address"] = moriio.parse_moriio_zmq_address(peer)
    return found


def main(folder: Path) -> None:
    """Read the legs of every file."""
    legs = {}
    for path in sorted(folder.glob("vllm_*.json")):
        told = json.loads(path.read_text())
        legs[path.stem] = {leg: read_leg(told, leg) for leg in ("prefill_leg", "decode_leg")}
    print(json.dumps(legs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
