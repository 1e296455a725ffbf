# SPDX-License-Identifier: Apache-2.0
"""The servers of a running fleet, as a proxy's `/nodes` reports what they have measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, mean

from kvferry.common.http.tls import client_context
from kvferry.common.options import read_key
from kvferry.deploy.http_client import client_session, fetch_nodes
from kvferry.deploy.plan.simulation import BLOCK, ServerModel
from kvferry.proxy.api.openapi import NodeView, NodeWorkView
from kvferry.proxy.wire.dialects import NATIVE_DIALECT

MAX_BATCH_TOKENS = 1024
"""Of a step of kvferry's agents by default: they do not announce it."""


async def fetch_agents(url: str, key: Path | None, ca: Path | None, model: str | None) -> list[NodeView]:
    """Return the ready agents of a model: the only one that the proxy serves, unless one is named.

    Raises `ValueError` where there are none, `StatusFailed`, OSError and `BadCertificate`.
    """
    bearer = None if key is None else read_key(key)
    async with client_session(None if ca is None else client_context(ca), bearer) as http:
        nodes = (await fetch_nodes(http, url)).nodes
    ready = [node for node in nodes if node.state == "ready"]
    served = sorted({node.model for node in ready})
    if model is None and len(served) > 1:
        raise ValueError(f"{url} serves several models: name one by --model ({', '.join(served)})")
    found = [node for node in ready if model in (None, node.model)]
    if not found:
        raise ValueError(f"{url} has no agent that is ready" + (f" for {model}" if model else ""))
    return found


def server_model(agents: Sequence[NodeView]) -> ServerModel:
    """Return a server that is their mean. Raises `ValueError` if they have not measured enough.

    One that has lately spent more of its time on prompts, or on decoding, counts for more in what these take:
    what long prompts take is not known where only short ones are computed.
    """
    works = [node.work for node in agents if node.work is not None]

    def measured(of: Callable[[NodeWorkView], tuple[float | None, float]], what: str) -> float:
        found = [(value, share) for value, share in map(of, works) if value is not None]
        if not found:
            raise ValueError(
                f"no agent has measured what {what} takes yet: send the fleet some requests first"
            )
        values, shares = zip(*found, strict=True)
        return fmean(values, shares if any(shares) else None)

    default = ServerModel()
    chunk = min((node.prefill_chunk for node in agents if node.prefill_chunk), default=default.chunk)
    is_native = all(node.dialect == NATIVE_DIALECT for node in agents)
    slots = [node.load.max_running for node in agents if node.load.max_running]
    pools = [node.load.kv_blocks_total * BLOCK for node in agents if node.load.kv_blocks_total > 0]
    pulls = [work.pull_s for work in works if work.pull_s > 0.0]
    return ServerModel(
        token_s=measured(lambda work: (work.prompt_token_s, work.prefill_share), "a prompt"),
        step_s=measured(lambda work: (work.step_s, work.decode_share), "a step"),
        prompt_step_s=measured(lambda work: (work.prompt_step_s, work.prefill_share), "a prompt"),
        sequence_s=measured(lambda work: (work.sequence_s, work.decode_share), "a step"),
        chunk=chunk,
        batch_tokens=max(chunk, MAX_BATCH_TOKENS) if is_native else None,
        kv_tokens=min(pools, default=default.kv_tokens),
        max_running=min(slots, default=default.max_running),
        pull_s=mean(pulls) if pulls else default.pull_s,
        pull_token_s=0.0 if pulls else default.pull_token_s,
    )
