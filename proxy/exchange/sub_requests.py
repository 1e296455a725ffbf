# SPDX-License-Identifier: Apache-2.0
"""A client's request split into sub-requests of one choice each. Pure.

This is for other engines, which sample one choice of one prompt per transfer (`proxy.dialects.base`). A
choice is sampled with the seed that one server would have used: the client's, plus the choice's place among
those of its prompt (vLLM's own rule for n > 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.proxy.dialects.base import SubRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest, prompts_of


def split(
    request: ClientRequest, ids: Identity, transfer_ids: Sequence[TransferId]
) -> tuple[SubRequest, ...]:
    """One sub-request for each choice of each prompt. The transfer ids, one for each, must be fresh."""
    prompts = [None] if request.chat else prompts_of(request.body)
    return tuple(
        SubRequest(
            request=request,
            ids=ids,
            body=_narrowed(request, prompts[index // request.n], index % request.n),
            choices=range(index, index + 1),
            prompt=index // request.n,
            transfer_id=transfer_id,
        )
        for index, transfer_id in enumerate(transfer_ids)
    )


def whole_request(request: ClientRequest, ids: Identity, transfer_id: TransferId) -> SubRequest:
    """All of the request, for one server that serves it alone."""
    choices = range(request.sequences)
    return SubRequest(
        request=request, ids=ids, body=request.body, choices=choices, prompt=0, transfer_id=transfer_id
    )


def _narrowed(request: ClientRequest, prompt: Any, choice: int) -> dict[str, Any]:
    body = {name: value for name, value in request.body.items() if name not in ("n", "best_of")}
    if not request.chat:
        body["prompt"] = prompt
    if request.seed is not None:
        body["seed"] = (request.seed + choice) % 2**63
    return body
