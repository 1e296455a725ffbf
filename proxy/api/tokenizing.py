# SPDX-License-Identifier: Apache-2.0
"""`/tokenize` and `/detokenize`, as vLLM has them: an agent that serves the model answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.json_errors import check_utf8
from kvferry.proxy.dialects.fields import check_template_variables
from kvferry.proxy.errors import AgentLost, AgentTimeout, InvalidRequest, ModelNotFound, NoAgent
from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.fleet.snapshot import NodeState
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.ids import RequestId
from kvferry.proxy.request import MAX_MODEL_CHARS
from kvferry.proxy.wire.dialects import NATIVE_DIALECT
from kvferry.proxy.wire.registration import Register

TIMEOUT_S = 30.0
_TRIES = 2
"""Agents that are asked, one after the other, where the first is lost."""


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _NamedModel(msgspec.Struct):
    model: str | None = None


class TokenizerRelay:
    """Passes requests on to the agents in turn."""

    def __init__(self, fleet: Fleet, upstream: UpstreamPool) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._turns = count()

    async def forward(self, path: str, body: bytes, request_id: RequestId) -> bytes:
        """Return an agent's answer, which is JSON. Raises `ProxyError`."""
        agents = self._agents(_model(body))
        if any(agent.dialect != NATIVE_DIALECT for agent in agents):
            check_template_variables(_MEMBERS.decode(body))
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        lost: AgentLost | AgentTimeout | None = None
        for agent in agents[:_TRIES]:
            deadline = self._fleet.clock() + TIMEOUT_S / _TRIES
            leg = self._upstream.post(
                agent, path, body, headers, headers_deadline=deadline, deadline=deadline
            )
            try:
                async with leg as response:
                    return await response.read()
            except (AgentLost, AgentTimeout) as error:
                lost = error
        raise lost or NoAgent("no agent is ready for this model")

    def _agents(self, model: str | None) -> list[Register]:
        """Return the agents in rotation that serve the model, the one whose turn it is first.

        Without a model all of them must serve the same one.
        """
        snapshot = self._fleet.registry.snapshot()
        nodes = snapshot.nodes
        served = {node.info.model for node in nodes}
        if model is None and len(served) > 1:
            raise InvalidRequest("several models are served: say which", param="model")
        # Before any agent has registered, no model can be called unknown.
        if model is not None and served and model not in served:
            raise ModelNotFound(model, snapshot.served())
        ready = [
            node.info
            for node in nodes
            if node.state is NodeState.READY and (model is None or node.info.model == model)
        ]
        return list(_from_turn(ready, next(self._turns)))


def _from_turn(agents: list[Register], turn: int) -> Iterator[Register]:
    start = turn % len(agents) if agents else 0
    yield from agents[start:]
    yield from agents[:start]


def _model(body: bytes) -> str | None:
    """Return the model that a body names. Raises `InvalidRequest`."""
    try:
        check_utf8(body)
        model = msgspec.json.decode(body, type=_NamedModel).model
    except NOT_JSON as error:
        raise InvalidRequest.of_json(error) from error
    if model is not None and len(model) > MAX_MODEL_CHARS:
        raise InvalidRequest(f"model may have at most {MAX_MODEL_CHARS} characters", param="model")
    return model
