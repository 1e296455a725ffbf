# SPDX-License-Identifier: Apache-2.0
"""Sends one prompt through a pair and to its decode server alone, compares the answers, and takes a pair out
that differs (docs/canary.md).

The decode server alone computes the prompt itself: no KV moves, and nothing that the prefill server has
computed is used. The two answers are sent with different cache salts, so that neither can use what the other
has left in a prefix cache. Probes are requests like others, routed to a named pair; they are counted apart
from clients'.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import msgspec

from kvferry.proxy.canary.comparison import (
    FLOOR,
    NUM_LOGPROBS,
    ROUGH_FLOOR,
    BadAnswer,
    Comparison,
    GreedyAnswer,
    Tolerance,
    compare,
    read_answer,
)
from kvferry.proxy.canary.pair_record import CanaryReport, PairRecord, PairTrust, ProbeReport
from kvferry.proxy.canary.prompts import Prompts
from kvferry.proxy.errors import Overloaded, ProxyError
from kvferry.proxy.exchange.exchange import Exchange, ExchangeContext, RetryBudget
from kvferry.proxy.exchange.legs import PausableSource
from kvferry.proxy.fleet.pairing import Mismatch
from kvferry.proxy.fleet.routing.routing_request import PinnedPair
from kvferry.proxy.fleet.snapshot import Snapshot
from kvferry.proxy.ids import new_identity, request_id_from
from kvferry.proxy.request import parse_request
from kvferry.proxy.telemetry.history import FailureLog
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import RequestLog, Timelines
from kvferry.proxy.wire.dialects import (
    VLLM_KVFERRY,
    VLLM_MOONCAKE,
    VLLM_MORIIO,
    VLLM_NIXL,
    serves_alone,
)
from kvferry.proxy.wire.registration import Incarnation, Register

logger = logging.getLogger(__name__)

_WITH_TOKEN_NAMES = frozenset({VLLM_KVFERRY, VLLM_MOONCAKE, VLLM_MORIIO, VLLM_NIXL})

OUTPUT_TOKENS = 16
PROBE_TIMEOUT_S = 60.0
QUEUE_TIMEOUT_S = 5.0
PART = OUTPUT_TOKENS // 2
"""Tokens of an answer that a server computes as part of the prompt, to be compared with itself."""
LEARN_FIRST = 4
"""Comparisons of a server with itself before the first one of a pair counts."""
LEARN_EVERY = 16
"""Probes of a model between two of those later."""
MAX_WAITING = 8
"""Probes by hand that wait for their turn at once."""
FREE_TOKENS = 100_000
"""Tokens of probes that do not count against their share."""


@dataclass(slots=True)
class _OfModel:
    prompts: Prompts
    tolerance: Tolerance
    probes: int = 0


@dataclass(slots=True)
class _Probe:
    """One prompt on its way through a pair."""

    pair: PinnedPair
    prefill: Register
    decode: Register
    record: PairRecord
    of_model: _OfModel
    prompt: str
    salt: str
    comparison: Comparison | None = None

    def report(self, verdict: str, detail: str) -> ProbeReport:
        worst = None if self.comparison is None else self.comparison.worst
        return ProbeReport(
            model=self.decode.model,
            pair=self.record.name,
            verdict=verdict,
            state=self.record.state,
            difference=worst if worst is not None and math.isfinite(worst) else None,
            tolerance=self.of_model.tolerance.value,
            detail=detail,
        )


class Canary:
    """The canary of one proxy process.

    Args:
        metrics: That count clients' tokens, and get the probes.
        interval_s: Seconds between the starts of two probes; None: they are sent by `probe` alone.
        max_share: Most tokens of probes, of those of clients.
    """

    def __init__(
        self,
        context: ExchangeContext,
        metrics: Metrics,
        interval_s: float | None,
        max_share: float,
        rng: Random | None = None,
    ) -> None:
        once = replace(
            context.settings,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            total_timeout_s=PROBE_TIMEOUT_S,
            first_byte_timeout_s=min(PROBE_TIMEOUT_S, context.settings.first_byte_timeout_s),
            retries=0,
            migrations=0,
        )
        self._context = replace(context, settings=once, retry_budget=RetryBudget())
        self._registry = context.fleet.registry
        self._metrics = metrics
        self._interval_s = interval_s
        self._max_share = max_share
        self._rng = rng or Random()
        self._models: dict[str, _OfModel] = {}
        self._records: dict[PinnedPair, PairRecord] = {}
        self._probed_at: dict[Incarnation, float] = {}
        """When each prefill agent was probed last."""
        self._spent = 0
        self._lock = asyncio.Lock()
        self._waiting = 0

    @cached_property
    def _unshown(self) -> tuple[Metrics, FailureLog, Timelines]:
        """Probes are no client's: their phases, times and failures are counted in none of what is shown."""
        return Metrics(), FailureLog(), Timelines()

    async def run(self) -> None:
        """Probe pair after pair until cancelled; returns at once where probes are sent by hand only."""
        interval_s = self._interval_s
        if interval_s is None:
            return
        while True:
            begun = time.monotonic()
            if self._spent - FREE_TOKENS <= self._max_share * self._metrics.num_client_tokens():
                with suppress(Overloaded):
                    await self.probe()
            await asyncio.sleep(max(0.0, begun + interval_s - time.monotonic()))

    async def probe(self, model: str | None = None) -> ProbeReport | None:
        """Probe the pair whose turn it is, of that model or of any. Only one probe is under way at a time.

        Returns None if there is no pair to probe. Raises `Overloaded` while `MAX_WAITING` others wait.
        """
        if self._waiting >= MAX_WAITING:
            raise Overloaded("other probes wait for their turn", retry_after_s=1)
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            snapshot = self._registry.snapshot()
            self._forget(snapshot)
            pair = self._next(snapshot, model)
            if pair is None:
                return None
            nodes = {node.incarnation: node.info for node in snapshot.nodes}
            probe = self._begin(nodes[pair.prefill], nodes[pair.decode], pair)
            try:
                report = await self._compare(probe)
            except (ProxyError, BadAnswer) as error:
                probe.record.failed += 1
                probe.record.last = f"no answer: {error}"
                report = probe.report("failed", probe.record.last)
            self._metrics.canary_probes.labels(report.verdict).inc()
            return report
        finally:
            self._lock.release()

    def report(self) -> CanaryReport:
        """Return what is known of each pair, for operators."""
        now = time.monotonic()
        return CanaryReport(
            pairs=[record.report(now) for record in self._records.values()],
            tolerances={name: of_model.tolerance.value for name, of_model in self._models.items()},
            tokens=self._spent,
        )

    def _begin(self, prefill: Register, decode: Register, pair: PinnedPair) -> _Probe:
        of_model = self._models.get(prefill.model)
        if of_model is None:
            floor = FLOOR if decode.geometry.get("dtype") == "float32" else ROUGH_FLOOR
            prompts = Prompts(Random(self._rng.random()))
            of_model = self._models[prefill.model] = _OfModel(prompts, Tolerance(floor))
        record = self._records.get(pair)
        if record is None:
            names = (info.name or info.location for info in (prefill, decode))
            record = self._records[pair] = PairRecord(" → ".join(names))
        record.probed_at = self._probed_at[pair.prefill] = time.monotonic()
        prompt, salt = of_model.prompts.make(pair, prefill.prefill_chunk, decode.max_model_len, OUTPUT_TOKENS)
        return _Probe(pair, prefill, decode, record, of_model, prompt, salt)

    async def _compare(self, probe: _Probe) -> ProbeReport:
        """Raises `ProxyError` and `BadAnswer`."""
        of_model, record, pair = probe.of_model, probe.record, probe.pair
        tolerance = of_model.tolerance
        alone, own_salt = PinnedPair(pair.decode, pair.decode), f"{probe.salt}-alone-{self._rng.random()}"
        reference = await self._complete(probe, own_salt, alone)
        of_model.prompts.learn(probe.prompt, reference.prompt_tokens)
        of_model.probes += 1
        is_learning = tolerance.num_learnt < LEARN_FIRST
        has_learnt = is_learning or of_model.probes % LEARN_EVERY == 0
        if has_learnt:
            tolerance.learn(await self._compare_with_itself(probe, reference, own_salt))
        probe.comparison = compare(reference, await self._complete(probe, probe.salt, pair))
        if not has_learnt and probe.comparison.worst > tolerance.value:
            # With this prompt it may differ from itself by as much.
            tolerance.learn(await self._compare_with_itself(probe, reference, own_salt))
        record.last = _explained(probe.comparison, tolerance.value)
        if is_learning:
            return probe.report("learning", record.last)
        is_same = probe.comparison.worst <= tolerance.value
        if not is_same:
            words = "canary: %s answered %d tokens of prompt otherwise than its decode agent alone: %s"
            logger.warning(words, record.name, reference.prompt_tokens, record.last)
        if record.note(is_same=is_same):
            is_out = record.state is PairTrust.OUT
            self._registry.keep_apart(pair.prefill, pair.decode, is_out, record.last)
        return probe.report("same" if is_same else "different", record.last)

    async def _compare_with_itself(self, probe: _Probe, reference: GreedyAnswer, salt: str) -> Comparison:
        """Have the decode server compute the first part of its answer anew, as part of the prompt; if it does
        not give ids, all of the prompt but what it has cached.
        """
        alone = PinnedPair(probe.pair.decode, probe.pair.decode)
        ids = (*reference.prompt_ids, *reference.ids[:PART])
        if not reference.prompt_ids or not reference.ids:
            return compare(reference, await self._complete(probe, salt, alone))
        again = await self._complete(probe, f"{salt}-part", alone, ids, OUTPUT_TOKENS - PART)
        return compare(reference.after(PART), again)

    async def _complete(
        self,
        probe: _Probe,
        salt: str,
        pair: PinnedPair,
        prompt_ids: tuple[int, ...] | None = None,
        max_tokens: int = OUTPUT_TOKENS,
    ) -> GreedyAnswer:
        """Answer the probe's prompt, or one of these token ids. Raises `ProxyError` and `BadAnswer`."""
        body: dict[str, Any] = {
            "model": probe.decode.model,
            "prompt": probe.prompt if prompt_ids is None else prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": NUM_LOGPROBS,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_token_ids": True,
        }
        if probe.decode.dialect in _WITH_TOKEN_NAMES:
            body["return_tokens_as_token_ids"] = True  # several tokens may have one text
        request = parse_request("completions", msgspec.json.encode(body))
        log = RequestLog("completions", request_id_from(None), *self._unshown)
        ids = new_identity("completions", log.request_id, None, None)
        sink = _Kept()
        log.set_request(request)
        status = 500
        try:
            await Exchange(self._context, request, ids, log, pair).run(sink)
            status = 200
        except ProxyError as error:
            status = error.status
            raise
        finally:
            log.end(status)
        answer = read_answer(sink.body)
        self._spent += answer.num_tokens
        self._metrics.canary_tokens.inc(answer.num_tokens)
        return answer

    def _next(self, snapshot: Snapshot, model: str | None) -> PinnedPair | None:
        """Return the pair whose turn it is: one under suspicion; or else that of the prefill agent, and then
        of its decode agents, whose last probe was longest ago.
        """
        nodes, pairing = snapshot.nodes, snapshot.pairing
        decodes = {
            position: nodes[position].incarnation
            for position in snapshot.up("decode")
            if serves_alone(nodes[position].info.dialect, "decode")
        }
        prefills = {
            nodes[position].incarnation: position
            for position in snapshot.up("prefill")
            if model in (None, nodes[position].info.model)
        }
        able = set(decodes.values())
        for pair, record in self._records.items():
            if record.state is PairTrust.SUSPECT and pair.prefill in prefills and pair.decode in able:
                return pair
        for prefill in sorted(prefills, key=lambda each: self._probed_at.get(each, float("-inf"))):
            position = prefills[prefill]
            pairs = [
                PinnedPair(prefill, decodes[each])
                for each in pairing.fitting(position, "prefill")
                if each in decodes
                and each != position
                and pairing.why(position, each) in (None, Mismatch.CANARY)
            ]
            if pairs:
                return min(pairs, key=self._last_probe)
        return None

    def _last_probe(self, pair: PinnedPair) -> float:
        record = self._records.get(pair)
        return float("-inf") if record is None else record.probed_at

    def _forget(self, snapshot: Snapshot) -> None:
        """Drop what is known of agents that are gone."""
        present = {node.incarnation for node in snapshot.nodes}
        models = {node.info.model for node in snapshot.nodes}
        self._records = {pair: record for pair, record in self._records.items() if present.issuperset(pair)}
        self._models = {name: of for name, of in self._models.items() if name in models}
        self._probed_at = {agent: at for agent, at in self._probed_at.items() if agent in present}


def _explained(comparison: Comparison, tolerance: float) -> str:
    largest = f"logprobs differ by up to {comparison.largest:.3g} over {comparison.compared} tokens"
    token = "" if comparison.at is None else f"; token {comparison.at + 1}: {comparison.detail}"
    return f"{largest}{token} (tolerance {tolerance:.3g})"


@dataclass(slots=True)
class _Kept:
    """Keeps the response of a probe (`ResponseSink`)."""

    body: bytes = b""

    def set_whole(self, content_type: str, body: bytes) -> None:
        self.body = body

    def throttling(self, source: PausableSource) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, events: bytes) -> None:
        raise BadAnswer("a stream in place of a whole answer")

    write_event = write
