# SPDX-License-Identifier: Apache-2.0
"""Admission of requests: the engine's limits, and why it refuses a request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.agent.messages.requests import RequestFailed, Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's settings; see `AgentConfig` for the words."""

    block_size: int
    prefill_chunk: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    max_waiting: int
    prefix_cache: bool
    recompute_on_pull_failure: bool
    pull_timeout_s: float
    eos_ids: frozenset[int]


def failed(submit: Submit, status: int, code: str, message: str) -> RequestFailed:
    return RequestFailed(request_id=submit.request_id, status=status, code=code, message=message)


def duplicate_transfer(submit: Submit) -> RequestFailed:
    """Refuse a transfer id that another request has, or blocks that are not free yet."""
    return failed(submit, 409, "duplicate_transfer", "This transfer id is in use.")


def check_request(submit: Submit, limits: Limits) -> RequestFailed | None:
    """Return why the engine can never serve a request, or None."""
    sampling = submit.sampling
    if submit.produce is not None and (submit.remote is not None or submit.resumed):
        return failed(submit, 400, "bad_transfer", "A prompt is either produced or pulled, not both.")
    if submit.remote is not None and not _transfer_matches(submit):
        return failed(submit, 400, "bad_transfer", "The transfer's tokens do not match the request.")
    if not submit.prompt_ids:
        return failed(submit, 400, "empty_prompt", "The prompt has no tokens.")
    known = (*submit.prompt_ids, *(token for choice in submit.resumed for token in choice.token_ids))
    if not 0 <= min(known) <= max(known) < limits.vocab_size:
        return failed(submit, 400, "bad_token", f"Token ids go from 0 to {limits.vocab_size - 1}.")
    if len(submit.prompt_ids) + sampling.max_tokens > limits.max_model_len:
        message = f"The context holds {limits.max_model_len} tokens."
        return failed(submit, 400, "context_length_exceeded", message)
    if submit.produce is None and sampling.n > limits.max_num_seqs:
        message = f"At most {limits.max_num_seqs} choices run at once."
        return failed(submit, 400, "too_many_choices", message)
    return None


def _transfer_matches(submit: Submit) -> bool:
    """Whether a request to be pulled brings what decoding starts from: the whole prompt and first tokens.

    The first tokens of a streamed one come with the KV.
    """
    assert submit.remote is not None
    return (
        submit.remote.source.num_tokens == len(submit.prompt_ids)
        and all(choice.finished or choice.token_ids for choice in submit.resumed)
        and bool(submit.resumed) != submit.remote.streamed
    )
