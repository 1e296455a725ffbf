# SPDX-License-Identifier: Apache-2.0
"""How many agents the load wants, in seconds of work, as the agents have measured it.

The model. Requests of one model arrive at this proxy at some rate, those that are rejected included. What one
of them costs is what the fleet's requests have cost lately, as agents report it (`Capacity`):

- A prompt costs P seconds of prefill: seconds that agents have spent on prompts over the prompts that they
  have computed. Prefix caches, batches and recomputed prompts are in it. So `prompts per second * P` agents
  are kept busy.
- A sequence costs L decoded tokens. An agent that decodes n sequences makes a step in `a + n*b` seconds, and
  has S slots. A sequence holds its slot while its prompt is computed, T seconds, and for L steps. So with M
  agents for each sequence per second, n of S slots are decoding where

      S = (T + L*(a + n*b)) / M    and    n = L*(a + n*b) / M.

  Without n that is a quadratic equation for M, of which the larger root is the answer; with T = 0 it is
  `L*(a + S*b)/S`, the time of a full batch's step shared by its sequences.

`proxy.fleet.routing.costs` has the same steps and the same share for prompts, of one request at one moment.
Here they are solved for the number of agents: with as many as are wanted, it predicts agents that are full.

Work is attributed to the roles that have done it, so a fleet may have any mix of roles. It is assumed that
agents of one role and model are alike, that requests that come cost what those before them did, and that a
client's second try is another request. A wanted number of 1.0 is one agent that is never idle.

Everything is this process's own part: sums over proxies, and over workers, are of the whole load. What is
not known, as no agent that does such work has reported it, is None or left out.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.proxy.wire.registration import Bye, Capacity, Incarnation, Register, Role

ARRIVALS_S = 60.0
"""Time constant of the mean over arrivals."""
COSTS_S = 60.0
"""That of what requests have cost, while there is work."""
LEAST_AGE_S = 5.0
"""A rate over less time is only noise."""
PREFILL_LATENCY = 1.5
"""How many times its own work a prompt takes, for it waits for others at its agent: in a fleet that is large
enough, not too many."""
MAX_MODELS = 64
GONE_S = 60.0
"""A model whose agents have not pinged for so long makes room for another."""
MAX_AGENTS = 4096


class DecayingRate:
    """Events per second, those of the last `ARRIVALS_S` above all."""

    def __init__(self, since: float) -> None:
        self._since = self._at = since
        self._sum = 0.0

    def add(self, count: int, now: float) -> None:
        self._sum = self._decayed(now) + count
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the rate; one that was watched for a short time is not taken for a low one."""
        age = max(now - self._since, LEAST_AGE_S)
        return self._decayed(now) / (ARRIVALS_S * -math.expm1(-age / ARRIVALS_S))

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / ARRIVALS_S)


@dataclass(slots=True)
class RoleWork:
    """What agents of one role have done lately; see `Capacity`."""

    prompts: float = 0.0
    prefill_s: float = 0.0
    answers: float = 0.0
    answer_tokens: float = 0.0

    def scale(self, factor: float) -> None:
        self.prompts *= factor
        self.prefill_s *= factor
        self.answers *= factor
        self.answer_tokens *= factor


@dataclass(slots=True)
class Costs:
    """What requests for one model have cost lately, by role."""

    by_role: dict[Role, RoleWork] = field(default_factory=dict)
    at: float = -math.inf

    def add(self, role: Role, done: Capacity, before: Capacity | None, now: float) -> None:
        """Add what an agent has done between two reports. Of one that was not known before, which may have
        worked for long, one prompt and one answer are taken for all.
        """
        work = self.by_role.setdefault(role, RoleWork())
        if before is None:
            if done.prompts:
                work.prompts += 1
                work.prefill_s += done.prefill_s / done.prompts
            if done.answers:
                work.answers += 1
                work.answer_tokens += done.answer_tokens / done.answers
            return
        grown = RoleWork(
            max(0, done.prompts - before.prompts),
            max(0.0, done.prefill_s - before.prefill_s),
            max(0, done.answers - before.answers),
            max(0, done.answer_tokens - before.answer_tokens),
        )
        if grown == RoleWork():
            return
        # While nothing is done nothing is forgotten, and afterwards not all of it at once.
        keep = math.exp(-min(1.0, max(0.0, now - self.at) / COSTS_S))
        for each in self.by_role.values():
            each.scale(keep)
        self.at = now
        work.prompts += grown.prompts
        work.prefill_s += grown.prefill_s
        work.answers += grown.answers
        work.answer_tokens += grown.answer_tokens

    def prefill_s(self, role: Role | None = None) -> float | None:
        """Return the seconds of one prompt, those at agents of a role only if one is given.

        None where no agent, or none of that role, has reported: what it does not say is not nothing.
        """
        prompts = sum(work.prompts for work in self.by_role.values())
        total = self._sum(role, lambda work: work.prefill_s)
        return total / prompts if prompts and total is not None else None

    def answer_tokens(self, role: Role | None = None) -> float | None:
        """Return the tokens that are decoded of one sequence; likewise."""
        answers = sum(work.answers for work in self.by_role.values())
        total = self._sum(role, lambda work: work.answer_tokens)
        return total / answers if answers and total is not None else None

    def _sum(self, role: Role | None, value: Callable[[RoleWork], float]) -> float | None:
        if role is not None and role not in self.by_role:
            return None
        return sum(value(work) for each, work in self.by_role.items() if role in (None, each))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoad:
    """What clients ask of this process, for one model.

    Sequences are those of which more than one token is wanted.
    """

    prompts_per_s: float
    sequences_per_s: float
    waiting_prompts: int
    waiting_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """An agent and what this process has there, in sequences.

    `ours_at_ping`: what it had there when the agent reported. `decodes`: whether decode legs are sent there
    now.
    """

    info: Register
    in_flight: int
    ours_at_ping: int
    decodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """This process's part, for one model; None, or no entry, where it is not known.

    `prefill_backlog_s`: seconds of one agent's work that its prompts will take which are not computed yet.
    `decode_pressure`: its sequences, waiting or not, over the slots of all decode agents. `wanted`: agents
    of each role that its requests keep busy all the time.
    """

    prefill_backlog_s: float | None
    decode_pressure: float | None
    wanted: dict[Role, float]


def signals_of(
    agents: Sequence[AgentLoad], costs: Costs, own: OwnLoad, decode_limit: int | None = None
) -> Signals:
    """Compute the signals of one model.

    Args:
        agents: All that serve the model, whatever their state.
        decode_limit: Most sequences at one agent, where the proxy is to go by that.
    """
    wanted = {
        role: number
        for role in sorted({agent.info.role for agent in agents})
        if (number := _wanted(role, agents, costs, own, decode_limit)) is not None
    }
    return Signals(
        prefill_backlog_s=_prefill_backlog_s(agents, costs, own),
        decode_pressure=_decode_pressure(agents, own, decode_limit),
        wanted=wanted,
    )


def decode_agents_per_sequence(
    tokens: float, hold_s: float, slots: float, step_s: float, sequence_s: float
) -> float:
    """Return M: how many decode agents one sequence per second keeps busy, as the docstring above has it.

    Args:
        tokens: L.
        hold_s: T.
        slots: S.
        step_s: a.
        sequence_s: b.
    """
    middle = slots * tokens * sequence_s + hold_s + tokens * step_s
    under_root = middle * middle - 4.0 * slots * hold_s * tokens * sequence_s
    return (middle + math.sqrt(max(0.0, under_root))) / (2.0 * slots)


def _wanted(
    role: Role, agents: Sequence[AgentLoad], costs: Costs, own: OwnLoad, decode_limit: int | None
) -> float | None:
    prefill_s = costs.prefill_s(role)
    if prefill_s is None:
        return None
    prefill = own.prompts_per_s * prefill_s
    if role == "prefill":
        return prefill
    per_sequence = _decode_agents_per_sequence(role, agents, costs, decode_limit)
    return None if per_sequence is None else prefill + own.sequences_per_s * per_sequence


def _decode_agents_per_sequence(
    role: Role, agents: Sequence[AgentLoad], costs: Costs, decode_limit: int | None
) -> float | None:
    all_tokens, tokens = costs.answer_tokens(), costs.answer_tokens(role)
    measured = [
        (slots, agent.info.capacity.step_s, agent.info.capacity.sequence_s)
        for agent in agents
        if agent.info.role == role
        and agent.info.capacity is not None
        and agent.info.capacity.step_s is not None
        and agent.info.capacity.sequence_s is not None
        and (slots := _slots(agent, decode_limit))
    ]
    if not all_tokens or tokens is None:
        return None
    share, hold_s = tokens / all_tokens, PREFILL_LATENCY * (costs.prefill_s() or 0.0)
    each = [
        decode_agents_per_sequence(all_tokens, hold_s, slots, step_s, sequence_s)
        for slots, step_s, sequence_s in measured
    ]
    # Of agents that are not alike, each serves as much as it can.
    served = [1.0 / number for number in each if number > 0.0]
    return share * len(served) / sum(served) if served else None


def _prefill_backlog_s(agents: Iterable[AgentLoad], costs: Costs, own: OwnLoad) -> float | None:
    per_prompt = costs.prefill_s()
    if per_prompt is None:
        return None
    backlog = own.waiting_prompts * per_prompt
    for agent in agents:
        capacity, load = agent.info.capacity, agent.info.load
        if capacity is not None and capacity.backlog_s is not None:
            ours = agent.ours_at_ping
            backlog += capacity.backlog_s * ours / max(1, ours, load.running + load.waiting)
        elif agent.info.role == "prefill":
            backlog += agent.in_flight * per_prompt
    return backlog


def _decode_pressure(agents: Iterable[AgentLoad], own: OwnLoad, decode_limit: int | None) -> float | None:
    serving = [agent for agent in agents if agent.decodes]
    slots = [_slots(agent, decode_limit) for agent in serving]
    if not serving or None in slots:
        return None
    sequences = own.waiting_sequences + sum(agent.in_flight for agent in serving)
    return sequences / sum(filter(None, slots))


def _slots(agent: AgentLoad, decode_limit: int | None) -> int | None:
    """Return how many sequences an agent can decode at once; None if that is not known."""
    capacity = agent.info.capacity
    known = [
        limit
        for limit in (decode_limit or agent.info.load.max_running, capacity and capacity.slots)
        if limit  # none and 0: it does not say
    ]
    return min(known, default=None)


class ScalingSignals:
    """The signals of one process, of pings and of requests that arrive, in bounded memory.

    Args:
        clock: Monotonic seconds.
        decode_limit: As `signals_of` takes it.
    """

    def __init__(self, clock: Callable[[], float], decode_limit: int | None = None) -> None:
        self._clock = clock
        self._decode_limit = decode_limit
        self._models: OrderedDict[str, _Model] = OrderedDict()
        """Whose agents have not pinged for longest is first."""
        self._last: OrderedDict[Incarnation, Capacity] = OrderedDict()
        """What each agent has reported; who has not pinged for longest is first."""

    def note(self, update: Register | Bye) -> None:
        """Take a ping, or a goodbye."""
        if isinstance(update, Bye):
            self._last.pop(update.incarnation, None)
            return
        now = self._clock()
        model = self._pinged(update.model, now) if update.model else None
        if model is None or update.capacity is None:
            return
        before = self._last.pop(update.incarnation, None)
        self._last[update.incarnation] = update.capacity
        if len(self._last) > MAX_AGENTS:
            self._last.popitem(last=False)
        model.costs.add(update.role, update.capacity, before, now)

    def _pinged(self, name: str, now: float) -> _Model | None:
        """Return what is known of a model whose agent pings; None where there is no room for another."""
        model = self._models.get(name)
        if model is None:
            if len(self._models) >= MAX_MODELS:
                longest_silent, known = next(iter(self._models.items()))
                if now - known.pinged_at < GONE_S:
                    return None
                del self._models[longest_silent]
            model = self._models[name] = _Model(DecayingRate(now), DecayingRate(now), now)
        model.pinged_at = now
        self._models.move_to_end(name)
        return model

    def arrived(self, model: str, prompts: int, sequences: int) -> None:
        """Count a request of a client, before it is known who serves it. Another model's is ignored.

        Args:
            sequences: Of which more than one token is wanted.
        """
        served = self._models.get(model)
        if served is not None:
            now = self._clock()
            served.prompts.add(prompts, now)
            served.sequences.add(sequences, now)

    def of_models(
        self, agents: Iterable[AgentLoad], waiting: Callable[[str], tuple[int, int]]
    ) -> dict[str, Signals]:
        """Return the signals of each model that an agent serves now.

        Args:
            waiting: How many prompts and sequences for a model wait in this process.
        """
        by_model: dict[str, list[AgentLoad]] = {}
        for agent in agents:
            by_model.setdefault(agent.info.model, []).append(agent)
        now = self._clock()
        made = {}
        for name, serving in by_model.items():
            model = self._models.get(name)
            if model is not None:
                prompts, sequences = waiting(name)
                own = OwnLoad(
                    prompts_per_s=model.prompts.per_second(now),
                    sequences_per_s=model.sequences.per_second(now),
                    waiting_prompts=prompts,
                    waiting_sequences=sequences,
                )
                made[name] = signals_of(serving, model.costs, own, self._decode_limit)
        return made


@dataclass(slots=True)
class _Model:
    prompts: DecayingRate
    sequences: DecayingRate
    pinged_at: float
    costs: Costs = field(default_factory=Costs)
