# SPDX-License-Identifier: Apache-2.0
"""A fleet in simulated time: agents that take as long as a formula says, measured by the product's own meter.

Prompts wait in line at prefill agents, sequences decode in batches, and two proxies admit requests as the
product's do: with a slot at both agents of a pair, first come first served, for at most 30 s. Pings come
every second. Everything random comes from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvferry.agent.announce.capacity import CapacityMeter
from kvferry.proxy.fleet.scaling import AgentLoad, ScalingSignals, Signals
from kvferry.proxy.wire.registration import Load, Register, Role
from tests.unit.proxy.builders import registration

QUEUE_TIMEOUT_S = 30.0
CHUNK_TOKENS = 1024
PREFILL_LIMIT = 64
BLOCKS = 1 << 20
_ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Mean tokens of prompts and answers; both vary, answers more (exponentially)."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds: of a prompt's token, of any step, and of each sequence in a step of decoding."""

    prompt_token_s: float = 0.0004
    step_s: float = 0.012
    sequence_s: float = 0.0005
    slots: int = 32


@dataclass(slots=True, eq=False)
class _Request:
    arrived: float
    prompt: int
    answer: int
    proxy: int
    prefill: _Agent | None = None
    decode: _Agent | None = None


@dataclass(slots=True, eq=False)
class _Agent:
    role: Role
    port: int
    meter: CapacityMeter
    held: list[int] = field(default_factory=lambda: [0, 0])
    """Slots, by proxy."""
    line: deque[_Request] = field(default_factory=deque)
    ends: list[tuple[int, int, _Request]] = field(default_factory=list)
    """Running sequences by the step at which they end."""
    steps: int = 0
    last_turn: int = 0
    is_stepping: bool = False


class SimulatedFleet:
    """One run.

    Args:
        per_s: Requests per second, which may change with time; they come at random, as from many clients.
    """

    def __init__(
        self,
        prefill: int,
        decode: int,
        *,
        mix: Mix,
        per_s: Callable[[float], float],
        seed: int = 1,
        speed: Speed = Speed(),
    ) -> None:
        self._random = random.Random(seed)
        self._mix, self._per_s, self._speed = mix, per_s, speed
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._agents = [self._agent("prefill", port) for port in range(prefill)]
        self._agents += [self._agent("decode", prefill + port) for port in range(decode)]
        self._by_role = {role: [each for each in self._agents if each.role == role] for role in _ROLES}
        self._turn = itertools.count(1)
        self._queues: list[deque[_Request]] = [deque(), deque()]
        self._reports: list[list[AgentLoad]] = [[], []]
        self.scaling = [ScalingSignals(lambda: self.now) for _ in range(2)]
        self.arrived: list[float] = []
        self.served: list[float] = []
        """When requests arrived, and when they were served."""

    def run(self, seconds: float) -> None:
        """Let time pass, from the start on; once."""
        self._ping()
        self._arrive()
        while self._events and self._events[0][0] <= seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = seconds

    @property
    def served_per_s(self) -> float:
        """Requests served per second, in the second half of the run."""
        return sum(each >= self.now / 2 for each in self.served) / (self.now / 2)

    @property
    def served_share(self) -> float:
        """What share of the load was served, in the second half of the run; may be over 1 by chance."""
        return self.served_per_s * self.now / 2 / sum(each >= self.now / 2 for each in self.arrived)

    def signals(self) -> list[Signals]:
        """Return each proxy's part."""
        return [self._signals(proxy) for proxy in range(2)]

    def wanted(self, role: Role) -> float:
        """Return what both proxies export, added up."""
        return sum(part.wanted[role] for part in self.signals())

    def _signals(self, proxy: int) -> Signals:
        waiting = len(self._queues[proxy])
        agents = [
            replace(report, in_flight=agent.held[proxy])
            for agent, report in zip(self._agents, self._reports[proxy], strict=True)
        ]
        return self.scaling[proxy].of_models(agents, lambda _: (waiting, waiting))["m"]

    def _agent(self, role: Role, port: int) -> _Agent:
        return _Agent(role, port, CapacityMeter(self._speed.slots, BLOCKS))

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _ping(self) -> None:
        for proxy, scaling in enumerate(self.scaling):
            self._reports[proxy] = []
            for agent in self._agents:
                info = self._registration(agent)
                scaling.note(info)
                held = agent.held[proxy]
                self._reports[proxy].append(
                    AgentLoad(info=info, in_flight=held, ours_at_ping=held, decodes=agent.role == "decode")
                )
        self._at(self.now + 1.0, self._ping)

    def _registration(self, agent: _Agent) -> Register:
        pending = sum(each.prompt for each in agent.line)
        load = Load(
            running=len(agent.ends),
            waiting=len(agent.line),
            kv_blocks_free=0,
            kv_blocks_total=0,
            kv_blocks_leased=0,
            max_running=self._speed.slots if agent.role == "decode" else PREFILL_LIMIT,
        )
        return registration(agent.role, agent.port, load=load, capacity=agent.meter.report(pending))

    def _arrive(self) -> None:
        rate = self._per_s(self.now)
        if self.now:
            request = _Request(
                self.now,
                max(1, round(self._random.uniform(0.5, 1.5) * self._mix.prompt)),
                max(2, round(self._random.expovariate(1 / self._mix.answer))),
                self._random.randrange(2),
            )
            self.scaling[request.proxy].arrived("m", 1, 1)
            self._queues[request.proxy].append(request)
            self.arrived.append(self.now)
            self._at(self.now + QUEUE_TIMEOUT_S, partial(self._time_out, request))
            self._pump()
        self._at(self.now + self._random.expovariate(rate), self._arrive)

    def _time_out(self, request: _Request) -> None:
        if request.prefill is None:
            self._queues[request.proxy].remove(request)

    def _pump(self) -> None:
        if not any(self._queues):
            return
        for queue in sorted(self._queues, key=lambda each: each[0].arrived if each else self.now):
            while queue:
                prefill = self._with_room("prefill", PREFILL_LIMIT)
                decode = self._with_room("decode", self._speed.slots)
                if prefill is None or decode is None:
                    return
                request = queue.popleft()
                request.prefill, request.decode = prefill, decode
                prefill.held[request.proxy] += 1
                decode.held[request.proxy] += 1
                prefill.line.append(request)
                self._step_prefill(prefill)

    def _with_room(self, role: Role, limit: int) -> _Agent | None:
        least = min(self._by_role[role], key=lambda each: (sum(each.held), each.last_turn))
        if sum(least.held) >= limit:
            return None
        least.last_turn = next(self._turn)
        return least

    def _step_prefill(self, agent: _Agent) -> None:
        if agent.is_stepping or not agent.line:
            return
        batch = [agent.line.popleft()]
        while agent.line and sum(each.prompt for each in batch) + agent.line[0].prompt <= CHUNK_TOKENS:
            batch.append(agent.line.popleft())
        tokens = sum(each.prompt for each in batch)
        num_steps = -(-tokens // CHUNK_TOKENS)
        seconds = self._noisy(num_steps * self._speed.step_s + tokens * self._speed.prompt_token_s)
        agent.is_stepping = True
        self._at(self.now + seconds, partial(self._prefilled, agent, batch, tokens, seconds))

    def _prefilled(self, agent: _Agent, batch: list[_Request], tokens: int, seconds: float) -> None:
        agent.meter.step(seconds, prompt_tokens=tokens, decoded=0, blocks_used=0, holders=0)
        agent.is_stepping = False
        for request in batch:
            agent.meter.prompt_done()
            agent.held[request.proxy] -= 1
            assert request.decode is not None
            request.decode.line.append(request)
            self._step_decode(request.decode)
        self._step_prefill(agent)
        self._pump()

    def _step_decode(self, agent: _Agent) -> None:
        if agent.is_stepping:
            return
        while agent.line:
            request = agent.line.popleft()
            heapq.heappush(agent.ends, (agent.steps + request.answer - 1, next(self._order), request))
        if not agent.ends:
            return
        seconds = self._noisy(self._speed.step_s + len(agent.ends) * self._speed.sequence_s)
        agent.is_stepping = True
        self._at(self.now + seconds, partial(self._decoded, agent, len(agent.ends), seconds))

    def _decoded(self, agent: _Agent, sequences: int, seconds: float) -> None:
        agent.meter.step(seconds, prompt_tokens=0, decoded=sequences, blocks_used=0, holders=0)
        agent.is_stepping = False
        agent.steps += 1
        while agent.ends and agent.ends[0][0] <= agent.steps:
            _, _, request = heapq.heappop(agent.ends)
            agent.meter.answer_done(request.answer - 1)
            agent.held[request.proxy] -= 1
            self.served.append(self.now)
        self._step_decode(agent)
        self._pump()

    def _noisy(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.9, 1.1)
