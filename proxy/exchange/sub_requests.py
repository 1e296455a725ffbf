# SPDX-License-Identifier: Apache-2.0
"""A client's request split into smaller ones, and their usage added up. Pure.

Most other engines sample one choice of one prompt per transfer (`proxy.dialects.base`): a sub-request is one
choice, sampled with the seed that one server would have used: the client's, plus the choice's place among
those of its prompt (vLLM's own rule for n > 1). Where an engine samples all choices of a prompt from one
transfer, a sub-request is one prompt.

kvferry's agents take one prompt with all its choices: a share is one prompt. With the client's seed each
prompt gets the answer that it gets by itself; without one, each has another seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.proxy.dialects.base import SubRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest, split_prompts


def split(
    request: ClientRequest, ids: Identity, transfer_ids: Sequence[TransferId]
) -> tuple[SubRequest, ...]:
    """One sub-request for each choice of each prompt. The transfer ids, one for each, must be fresh."""
    prompts = [None] if request.chat else split_prompts(request.prompt)
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


def split_into_prompts(
    request: ClientRequest, ids: Identity, transfer_ids: Sequence[TransferId]
) -> tuple[SubRequest, ...]:
    """One sub-request for each prompt, with its choices. The transfer ids, one for each, must be fresh."""
    prompts = [None] if request.chat else split_prompts(request.prompt)
    body = {name: value for name, value in request.body.items() if name != "best_of"}
    return tuple(
        SubRequest(
            request=request,
            ids=ids,
            body=body if request.chat else body | {"prompt": prompt},
            choices=range(index * request.n, (index + 1) * request.n),
            prompt=index,
            transfer_id=transfer_id,
        )
        for index, (prompt, transfer_id) in enumerate(zip(prompts, transfer_ids, strict=True))
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


class PromptShare(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a client's request to native agents. Its choices come from `first_choice` on."""

    request: ClientRequest
    ids: Identity
    first_choice: int = 0


def split_by_prompt(request: ClientRequest, ids: Identity) -> tuple[PromptShare, ...]:
    """One share for each prompt."""
    if request.prompts == 1:
        return (PromptShare(request=request, ids=ids),)
    return tuple(
        PromptShare(
            request=msgspec.structs.replace(
                request, body={**request.body, "prompt": prompt}, prompt=prompt, prompts=1
            ),
            ids=ids
            if request.seed is not None
            else msgspec.structs.replace(ids, seed=(ids.seed + index) % 2**63),
            first_choice=index * request.n,
        )
        for index, prompt in enumerate(split_prompts(request.prompt))
    )


def add_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up dictionaries of counts, member by member; what is not a count is the first one's."""
    added: dict[str, Any] = {}
    for name, first in counts[0].items():
        values = [each.get(name) for each in counts]
        if all(isinstance(value, int) for value in values):
            added[name] = sum(value for value in values if isinstance(value, int))
        elif all(isinstance(value, dict) for value in values):
            added[name] = add_counts([value for value in values if isinstance(value, dict)])
        else:
            added[name] = first
    return added
