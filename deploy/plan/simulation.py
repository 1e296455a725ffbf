# SPDX-License-Identifier: Apache-2.0
"""Servers in virtual time, behind the proxy's own registry and router.

A server computes in steps: up to `chunk` tokens of each prompt that it has, the oldest first and up to
`batch_tokens` of all, and one token of each sequence that it decodes. Such a step takes `step_s`, `token_s`
for each token of a prompt, and `sequence_s` for each sequence. Servers measure themselves as the agents do
(`CapacityMeter`) and ping once a second. What is left out: the network, prefix caches, preemption.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from kvferry.agent.announce.capacity import CapacityMeter
from kvferry.deploy.bench.arrivals import SizedArrival
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import FleetSettings, make_router
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.routing.candidates import Slots
from kvferry.proxy.fleet.routing.router import Decision, Turns
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import NoPair
from kvferry.proxy.wire.registration import (
    PING_INTERVAL_S,
    Incarnation,
    LinkUse,
    Load,
    Register,
    Role,
    WorkReport,
)

BLOCK = 16


class ServerModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What servers take. `prompt_step_s`: of a step with prompts; None is a `step_s`. `pull_token_s`: of the
    transfer of one token's KV; `pull_s`: of any transfer; `leg_s`: of each leg before its first step, for
    HTTP and what else computes nothing. `batch_tokens`: None is a chunk, so prompts are computed one after
    the other.
    """

    token_s: float = 27e-6
    step_s: float = 0.007
    prompt_step_s: float | None = None
    sequence_s: float = 0.0001
    chunk: int = 2048
    batch_tokens: int | None = None
    kv_tokens: int = 400_000
    max_running: int = 256
    pull_s: float = 0.005
    pull_token_s: float = 2.2e-6
    leg_s: float = 0.0


class SizedRequest(RoutingRequest, frozen=True, kw_only=True):
    """A request of which only the sizes are known."""

    length: int

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def chunks(self) -> tuple[bytes, ...]:
        return ()


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way, and when its first and its last token came; between them its KV was pulled."""

    arrival: SizedArrival
    reservation: Reservation | None = None
    prompt_left: int = 0
    first_at: float = 0.0
    pulled_at: float = 0.0
    ended_at: float = 0.0


class VirtualClock:
    """Virtual time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.now, _, event = heapq.heappop(self._events)
            event()


class SimulatedServer:
    """One server. `prefilled` and `ended` are called with a job at its first and its last token."""

    def __init__(
        self,
        model: ServerModel,
        info: Register,
        clock: VirtualClock,
        prefilled: Callable[[SimulatedServer, Job], None],
        ended: Callable[[SimulatedServer, Job], None],
    ) -> None:
        self.info = info
        self.busy_s = 0.0
        self._model = model
        self._clock = clock
        self._prefilled = prefilled
        self._ended = ended
        self._meter = CapacityMeter(model.max_running, model.kv_tokens // BLOCK)
        self._prompts: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []
        """By the number of the step that makes a job's last token."""
        self._inbox: list[Job] = []
        self._numbers = count()
        self._steps = self._stretch = 0
        self._begun_at = self._step_s = 0.0
        self._parts: list[int] = []
        """Tokens of each of the first prompts in the step."""
        self._kv_tokens = 0
        self._run = 0
        self._pulls, self._pulled_s = 0, 0.0

    def submit(self, job: Job) -> None:
        """Take a job: one whose prompt is computed here, or else was."""
        self._kv_tokens += job.arrival.prompt_tokens + job.arrival.answer_tokens
        self._inbox.append(job)
        if not self._stretch:
            self._begin()
        elif self._stretch > 1:  # it joins after the step that runs
            self._stretch = min(self._stretch, self._steps_done() + 1)
            self._schedule()

    def pull_s(self, job: Job) -> float:
        """Return the seconds that a pull takes."""
        seconds = self._model.pull_s + job.arrival.prompt_tokens * self._model.pull_token_s
        self._pulls, self._pulled_s = self._pulls + 1, self._pulled_s + seconds
        return seconds

    def ping(self) -> Register:
        """Return what it says of itself now."""
        waiting, free = len(self._prompts), max(0, self._model.kv_tokens - self._kv_tokens) // BLOCK
        load = Load(
            len(self._decoding) + len(self._inbox) + min(1, waiting), max(0, waiting - 1), free,
            self._model.kv_tokens // BLOCK, 0, self._model.max_running,
        )  # fmt: skip
        left = sum(job.prompt_left for job in (*self._prompts, *self._inbox))
        link = LinkUse(producer=Incarnation("others"), pulls=self._pulls, seconds=self._pulled_s)
        self.info = msgspec.structs.replace(
            self.info, index=self.info.index + 1, steps=self._steps + self._steps_done(), load=load,
            capacity=self._meter.report(left), work=WorkReport(links=(link,)),
        )  # fmt: skip
        return self.info

    def _steps_done(self) -> int:
        """Return how many of the stretch of equal steps that runs are over."""
        return int((self._clock.now - self._begun_at) / self._step_s) if self._stretch else 0

    def release(self, job: Job) -> None:
        """Free a job's KV."""
        self._kv_tokens -= job.arrival.prompt_tokens + job.arrival.answer_tokens

    def _begin(self) -> None:
        for job in self._inbox:
            if job.prompt_left:
                self._prompts.append(job)
            else:
                self._decode(job)
        self._inbox.clear()
        model, decoding = self._model, len(self._decoding)
        self._parts, left = [], model.batch_tokens or model.chunk
        for job in self._prompts:
            self._parts.append(min(left, model.chunk, job.prompt_left))
            left -= self._parts[-1]
            if not left:
                break
        self._stretch = 1 if self._prompts else self._decoding[0][0] - self._steps if decoding else 0
        own_s = model.prompt_step_s if self._parts else None
        self._step_s = model.step_s if own_s is None else own_s
        self._step_s += sum(self._parts) * model.token_s + decoding * model.sequence_s
        self._begun_at = self._clock.now
        if self._stretch:
            self._schedule()

    def _schedule(self) -> None:
        self._run += 1
        run = self._run
        self._clock.at(
            self._begun_at + self._stretch * self._step_s, lambda: self._end() if run == self._run else None
        )

    def _end(self) -> None:
        self._steps += self._stretch
        self.busy_s += self._stretch * self._step_s
        decoding = len(self._decoding)
        self._meter.step(
            self._step_s, prompt_tokens=sum(self._parts), decoded=decoding,
            blocks_used=self._kv_tokens // BLOCK, holders=decoding,
        )  # fmt: skip
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._finish(heapq.heappop(self._decoding)[2])
        begun: list[Job] = []
        for done in self._parts:
            job = self._prompts.popleft()
            job.prompt_left -= done
            if job.prompt_left:
                begun.append(job)
            else:
                self._meter.prompt_done()
                job.first_at = self._clock.now
                self._prefilled(self, job)
        self._prompts.extendleft(reversed(begun))
        self._begin()

    def _decode(self, job: Job) -> None:
        """Decode all tokens but the first."""
        if job.arrival.answer_tokens > 1:
            last = self._steps + job.arrival.answer_tokens - 1
            heapq.heappush(self._decoding, (last, next(self._numbers), job))
        else:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self._meter.answer_done(job.arrival.answer_tokens - 1)
        job.ended_at = self._clock.now
        self.release(job)
        self._ended(self, job)

    def stay(self, job: Job) -> None:
        """Decode a job whose prompt was computed here."""
        self._decode(job)


class SimulatedFleet:
    """Servers, and a proxy in front of them."""

    def __init__(self, roles: Sequence[Role], model: ServerModel, settings: FleetSettings) -> None:
        self._clock = VirtualClock()
        self._slots = Slots()
        self._registry = Registry(self._clock, self._slots.in_flight)
        self._router = make_router(settings, self._slots)
        self._turns = Turns()
        self._waiting: deque[Job] = deque()
        self._left = 0
        self._model = model
        self.servers = [
            SimulatedServer(model, _info(at, role), self._clock, self._prefilled, self._ended)
            for at, role in enumerate(roles)
        ]
        self._by_incarnation = {server.info.incarnation: server for server in self.servers}

    def run(self, load: Iterable[SizedArrival]) -> list[Job]:
        """Serve all of a load. Returns its jobs."""
        jobs = [Job(arrival, prompt_left=arrival.prompt_tokens) for arrival in load]
        self._left = len(jobs)
        for at, server in enumerate(self.servers):
            self._registry.register(server.ping())
            self._clock.at(PING_INTERVAL_S * at / len(self.servers), lambda server=server: self._ping(server))  # type: ignore[misc]
        for job in jobs:
            self._clock.at(job.arrival.at, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self._clock.run(lambda: not self._left)
        return jobs

    @property
    def now(self) -> float:
        return self._clock.now

    def _ping(self, server: SimulatedServer) -> None:
        self._registry.register(server.ping())
        self._clock.at(self._clock.now + PING_INTERVAL_S, lambda: self._ping(server))
        self._admit()

    def _arrive(self, job: Job) -> None:
        self._waiting.append(job)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _start(self, job: Job) -> bool:
        snapshot, arrival = self._registry.snapshot(), job.arrival
        request = SizedRequest(model="m", length=arrival.prompt_tokens, one_token=arrival.answer_tokens == 1)
        chosen = self._router.choose(snapshot, request, self._turns, now=self._clock.now)
        if isinstance(chosen, NoPair):
            assert chosen is NoPair.FULL, chosen
            return False
        assert isinstance(chosen, Decision)
        self._router.apply(chosen, request, self._turns, snapshot.models)
        job.reservation = Reservation(chosen.pair, 1, self._free)
        job.reservation.acquire(self._slots)
        prefill = self._by_incarnation[chosen.pair.prefill.incarnation]
        self._clock.at(self._clock.now + self._model.leg_s, lambda: prefill.submit(job))
        return True

    def _prefilled(self, server: SimulatedServer, job: Job) -> None:
        assert job.reservation is not None
        pair = job.reservation.pair
        if pair.alone:
            job.pulled_at = self._clock.now
            server.stay(job)
            return
        job.reservation.prefill_over()
        decode = self._by_incarnation[pair.decode.incarnation]

        def pulled() -> None:
            job.pulled_at = self._clock.now
            server.release(job)
            decode.submit(job)

        self._clock.at(self._clock.now + self._model.leg_s + decode.pull_s(job), pulled)

    def _ended(self, _: SimulatedServer, job: Job) -> None:
        assert job.reservation is not None
        self._record_outcome(job, job.reservation.pair)
        job.reservation.release()
        self._left -= 1
        self._admit()

    def _record_outcome(self, job: Job, pair: Pair) -> None:
        tokens = job.arrival.answer_tokens - 1
        token_s = (job.ended_at - job.pulled_at) / tokens if tokens else None
        if (prediction := pair.prediction) is not None:
            self._registry.record_outcome(pair.prefill, pair.decode, prediction, job.first_at, token_s)

    def _free(self, agent: Incarnation, number: int, is_prefill: bool) -> None:
        self._slots.release(agent, number, is_prefill=is_prefill)


def _info(at: int, role: Role) -> Register:
    return Register(
        role=role, incarnation=Incarnation(f"{at:016x}"), index=0, address=f"http://server-{at:04}:8000",
        control=f"tcp://server-{at:04}:6301", dialect="native", model="m", max_model_len=1 << 20, tp_size=1,
        dp_size=1, transfers=("tcp",), host_id="", layout="", weights="", tokenizer="", transfer_mode="read",
        version="", state="ready", steps=0, load=Load(0, 0, 1, 1, 0),
    )  # fmt: skip
