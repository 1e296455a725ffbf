# SPDX-License-Identifier: Apache-2.0
"""What a request costs at a server: the seconds that it takes itself, and those by which it delays others.

The model. A server computes prompts one after the other, `token_s` for each token, and a step that decodes n
sequences takes `step_s + n * sequence_s`. While it computes a prompt, the D sequences that it decodes wait.
So, of a request whose prompt takes w seconds, and whose answer has L tokens:

    prefill:  queue + w           until the first token
              + v * w * D * u^8   for the sequences decoded there, which then use the part u of the objective
                                  per token
    decode:   v * L * step / (1 - s)    where step = step_s + (D + 1) * sequence_s, and s is the share of the
                                  server's time that prompts take
              + v * L * sequence_s * D    for the other sequences
              + v * (queue + pull)        for prompts that wait there now, and for the transfer

A second of decoding counts v times as much as one before the first token: as much as the objectives say of an
answer of L tokens, `ttft_objective_s / (L * tpot_objective_s)`. A pair costs the sum of both. A server alone
costs the same without a transfer; what comes while its prompt waits and is computed delays its answer.
Objectives come first: a choice that is predicted to miss one, the request's own or else its model's, or to
have the sequences that an agent decodes miss the model's, is taken only where all that are compared miss one;
of more than eight agents, four are.
What a server reports is corrected by how wrong it was (`Bias`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kvferry.proxy.fleet.snapshot import Node, Prediction, Speed
from kvferry.proxy.objectives import ModelObjectives, Objective
from kvferry.proxy.wire.registration import Incarnation

SHORTEST_BURST_S = 0.1
LONGEST_BURST_S = 1.0
"""Bounds of the time constant of the share of an agent's time that the prompts sent there a moment ago take:
otherwise the time of an answer, because prompts that come within it are what delays it.
"""
MAX_SHARE = 0.95
"""A share that is measured as all of the time leaves some for decoding: steps do both."""
PRICE_S = 0.5
"""How long the price of an agent's time stands until it is made anew from all agents of its model."""
PRICE_DECAY_S = 60.0
"""Time constant with which a price falls. Prompts come in bursts: agents that begin to decode between two of
them would delay the second.
"""

SLACK_POWER = 8
"""Power of the part of the objective per token that delayed sequences would use: as long as this is small,
they can wait, and near the objective their delay counts in full.
"""

Cost = tuple[bool, float]
"""Whether an objective is predicted to be missed, and the cost in seconds; so the least is the best."""
UNKNOWN: Cost = (True, math.inf)
_State = tuple[float, int, float]


def add(first: Cost, second: Cost) -> Cost:
    """Return the cost of both."""
    return first[0] or second[0], first[1] + second[1]


class CostedRequest(Protocol):
    """What a cost is of: some of `RoutingRequest`, whose module is above this one."""

    @property
    def model(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def decoded_sequences(self) -> int: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...


class RouteCosts:
    """Costs of one request at one moment (`at`); the price of an agent's time stands for `PRICE_S`. They are
    `UNKNOWN` while no agent of the model has measured what they go by.

    Args:
        sequences: Returns how many sequences an agent has.
        prefills: Those of them that are prefill legs of pairs, by agent.
        predicted: Of the last prompt that was sent to an agent.
        objectives: Of requests without their own.
    """

    def __init__(
        self,
        sequences: Callable[[Node], int],
        prefills: Mapping[Incarnation, int],
        predicted: Mapping[Incarnation, Prediction],
        objectives: ModelObjectives,
    ) -> None:
        self._now = 0.0
        self._request: CostedRequest
        self._count = 0
        """Of the request's sequences that are decoded."""
        self._states: dict[Incarnation, _State] = {}
        self._sequences = sequences
        self._prefills = prefills
        self._predicted = predicted
        self._objectives = objectives
        self._ttft_s, self._tpot_s = Objective()
        self._prices: dict[str, float] = {}
        self._priced_at = -math.inf

    def at(self, now: float, nodes: Iterable[Node], request: CostedRequest) -> None:
        """Begin the choice for a request among these agents, at this time on the router's clock."""
        self._now, self._request, self._count = now, request, request.decoded_sequences
        objectives = self._objectives
        self._ttft_s, self._tpot_s = objectives.of_models.get(request.model, objectives.default)
        self._states.clear()
        if now - self._priced_at >= PRICE_S:
            kept = math.exp((self._priced_at - now) / PRICE_DECAY_S)
            before, self._prices, self._priced_at = self._prices, self._prices_of(nodes), now
            for model, price in self._prices.items():
                self._prices[model] = max(price, kept * before.get(model, 0.0))

    def prefill(self, node: Node) -> Cost:
        """Return the cost of the prefill leg."""
        speed = node.speed
        if speed.token_s is None:
            return UNKNOWN
        queue_s, others, share = self._state(node)
        work_s = self._request.tokens * speed.token_s * node.bias.prefill
        late = queue_s + work_s > (self._request.ttft_s or self._ttft_s)
        if not others:
            return late, queue_s + work_s
        weight = self._weight(node)
        delayed_s = self._step(node, others, share + work_s / _burst_s(speed))
        if delayed_s is not None:
            late = late or delayed_s > self._tpot_s
            weight *= min(1.0, max(0.0, delayed_s / self._tpot_s)) ** SLACK_POWER
        return late, queue_s + work_s * (1.0 + others * weight)

    def decode(self, node: Node) -> Cost:
        """Return the cost of the decode leg, where another server computes the prompt."""
        state = self._state(node)
        return self._decoding(node, state, state[0] + node.speed.pull_s)

    def alone(self, node: Node) -> Cost:
        """Return the cost of both."""
        state = queue_s, _, share = self._state(node)
        delay_s = (queue_s + self._request.tokens * (node.speed.token_s or 0.0) * node.bias.prefill) * share
        return add(self.prefill(node), self._decoding(node, state, delay_s))

    def predict(self, prefill: Node, decode: Node) -> Prediction | None:
        """Return when the prompt is computed if it is sent to the server now, and the time per token of its
        sequences at the other, or the same; None if nothing has been measured.
        """
        token_s, now = prefill.speed.token_s, self._now
        if token_s is None:
            return None
        count, work_s = self._count, self._request.tokens * token_s * prefill.bias.prefill
        queue_s, _, _ = self._state(prefill)
        last = self._predicted.get(prefill.info.incarnation)
        burst_s = _burst_s(prefill.speed)
        burst = 0.0 if last is None else last.share * math.exp((last.at - now) / burst_s)
        _, others, share = self._state(decode)
        step_s = self._step(decode, others + count, share) if count else None
        return Prediction(now, now + queue_s + work_s, burst + work_s / burst_s, step_s)

    def _prices_of(self, nodes: Iterable[Node]) -> dict[str, float]:
        """Return, by model, the price of a second of an agent that decodes nothing, in seconds of waiting."""
        busy, idle = defaultdict[str, float](float), Counter[str]()
        for node in nodes:
            if node.serves("prefill"):
                _, decoding, share = self._state(node)
                busy[node.info.model] += share
                idle[node.info.model] += decoding == 0
        shares = {model: min(MAX_SHARE, share / max(1, idle[model])) for model, share in busy.items()}
        return {model: share / (1.0 - share) for model, share in shares.items()}

    def _decoding(self, node: Node, state: _State, delay_s: float) -> Cost:
        """Return the cost of decoding, which is delayed for so long."""
        count, speed = self._count, node.speed
        if not count:
            return False, 0.0
        _, others, share = state
        own_s, sequence_s = self._step(node, others + count, share), speed.sequence_s
        if own_s is None or sequence_s is None:
            return UNKNOWN
        answer_s, price_s = speed.answer_tokens * own_s, 0.0
        if node.info.role == "both":
            price_s = answer_s * self._prices.get(node.info.model, 0.0) / (others + 1)
        answer_s += speed.answer_tokens * others * sequence_s * node.bias.decode
        late = own_s > (self._request.tpot_s or self._tpot_s)
        return late, self._weight(node) * count * (delay_s + answer_s) + price_s

    def _step(self, node: Node, count: int, share: float) -> float | None:
        """Return the time per token of so many sequences, while prompts take that share of the time."""
        step_s, sequence_s = node.speed.step_s, node.speed.sequence_s
        if step_s is None or sequence_s is None:
            return None
        return (step_s + count * sequence_s) * node.bias.decode / (1.0 - min(share, MAX_SHARE))

    def _weight(self, node: Node) -> float:
        return self._ttft_s / self._tpot_s / max(1.0, node.speed.answer_tokens)

    def _state(self, node: Node) -> _State:
        """Return the seconds until a prompt that is sent now is begun; the sequences that are decoded there,
        or will be once their prompts are computed; and the share of the agent's time that prompts take:
        lately, or of those sent a moment ago, which may be a burst.
        """
        info, now = node.info, self._now
        known = self._states.get(info.incarnation)
        if known is not None:
            return known
        capacity, last = info.capacity, self._predicted.get(info.incarnation)
        reported_s = None if capacity is None else capacity.backlog_s
        queue_s = 0.0
        if reported_s is not None:
            queue_s = max(0.0, node.heard_at + reported_s * node.bias.prefill - now)
        share = node.prefill_share
        if last is not None:
            if reported_s is None or last.at >= node.heard_at:
                queue_s = max(queue_s, last.first_token_at - now)
            share = max(share, min(1.0, last.share * math.exp((last.at - now) / _burst_s(node.speed))))
        decoding = 0
        if info.role != "prefill":  # what it has is prompts, those of other proxies and of one token too
            decoding = max(0, self._sequences(node) - self._prefills.get(info.incarnation, 0))
        self._states[info.incarnation] = state = queue_s, decoding, share
        return state


def _burst_s(speed: Speed) -> float:
    """Return the time constant of a burst: how long an answer of average length takes there."""
    answer_s = speed.answer_tokens * (speed.step_s or 0.0)
    return min(LONGEST_BURST_S, max(SHORTEST_BURST_S, answer_s)) if answer_s else LONGEST_BURST_S
