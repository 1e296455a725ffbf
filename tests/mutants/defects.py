# SPDX-License-Identifier: Apache-2.0
"""Seeded defects: one line each that a named test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """`old`, which occurs once in `file`, becomes `new`; then some of `tests` must fail.

    `core`: part of the short form, which CI runs. Its tests take a second or two and start no processes.
    """

    sentence: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    core: bool = True


AGENT = "tests/unit/agent/engine"
SAMPLER = "tests/unit/agent/worker/test_sampler.py"
REFERENCE = "tests/unit/agent/worker/test_sampler_reference.py"
SCHEDULER = f"{AGENT}/test_scheduler.py"
BLOCKS = f"{AGENT}/test_blocks.py"
HASHES = "tests/unit/test_hashes.py"
PREFIXES = f"{AGENT}/test_prefix_transfers.py"
MASKS_IN_STEPS = f"{AGENT}/test_masks_in_steps.py"
MASK_QUEUE = "tests/unit/agent/grammar/test_mask_queue.py"
TRIAL = "tests/unit/agent/grammar/test_trial.py"
LEASE = "tests/unit/transfer/producer/test_lease.py"
PULL = "tests/unit/transfer/consumer/test_pull.py"
QUARANTINE = "tests/unit/transfer/consumer/test_quarantine.py"
AGGREGATE = "tests/unit/transfer/ranks/test_aggregate.py"
BREAKER = "tests/unit/proxy/fleet/test_circuit_breaker.py"
FAIR_QUEUE = "tests/unit/proxy/fleet/test_fair_queue.py"
ADMISSION = "tests/unit/proxy/fleet/test_admission.py"
REGISTRY = "tests/unit/proxy/fleet/test_registry.py"

DEFECTS = (
    # The agent.
    Defect(
        sentence="What is left of a failed pull of a prefix counts as computed.",
        file="agent/engine/scheduler.py",
        old="        if outcome.failure is not None:\n            self._requeue(sequence)\n",
        new="        if False:\n            self._requeue(sequence)\n",
        tests=(PREFIXES,),
    ),
    Defect(
        sentence="Blocks that a failed pull of a prefix may still write to are used again.",
        file="agent/engine/transfers.py",
        old="            self._allocator.quarantine(pull.destination)\n",
        new="            self._allocator.release(pull.destination)\n",
        tests=(PREFIXES,),
    ),
    Defect(
        sentence="More blocks of a prefix are asked for than a lender takes.",
        file="agent/engine/prefix_lenders.py",
        old="[sequence.num_remembered :][:MAX_LOAN_BLOCKS]",
        new="[sequence.num_remembered :]",
        tests=(PREFIXES,),
    ),
    Defect(
        sentence="The stream of a prompt with images goes on from its token ids.",
        file="agent/vllm/connector_scheduler.py",
        old='self._continuable and not getattr(request, "mm_features", None)',
        new="self._continuable",
        tests=("tests/unit/agent/vllm/test_connector_scheduler.py",),
    ),
    Defect(
        sentence="Lent blocks are not pinned.",
        file="agent/engine/transfers.py",
        old="            self._allocator.lease(blocks)\n"
        "            self._leases[event.transfer_id] = _Lease(blocks)\n",
        new="            self._leases[event.transfer_id] = _Lease([])\n",
        tests=(PREFIXES,),
    ),
    Defect(
        sentence="Fewer blocks came of a prefix than count as computed.",
        file="agent/engine/transfers.py",
        old="(len(pull.before) + event.num_blocks) *",
        new="(len(pull.before) + len(pull.destination)) *",
        tests=(PREFIXES,),
    ),
    Defect(
        sentence="Anybody may open what was lent to one agent.",
        file="transfer/producer/lease.py",
        old="            lease.readers.add(consumer)\n        return effects\n\n    def advance",
        new="            lease.readers.discard(consumer)\n        return effects\n\n    def advance",
        tests=(LEASE,),
    ),
    Defect(
        sentence="A loan of other tokens is read.",
        file="transfer/consumer/pull.py",
        old="        self._ids_hash = self._hashes[num_blocks - 1].hex()\n",
        new="",
        tests=(PULL,),
    ),
    Defect(
        sentence="A block's hash does not cover the blocks before it.",
        file="common/hashing.py",
        old="        parent = hasher.digest()\n        yield parent",
        new="        yield hasher.digest()",
        tests=(BLOCKS, SCHEDULER),
    ),
    Defect(
        sentence="The fields of a hash are joined.",
        file="common/hashing.py",
        old='        hasher.update(len(raw).to_bytes(8, "little"))\n',
        new="",
        tests=(HASHES,),
    ),
    Defect(
        sentence="A prefix is shared by requests of any salt.",
        file="agent/block_hashes.py",
        old="digest(Purpose.PREFIX_ROOT, salt, size",
        new="digest(Purpose.PREFIX_ROOT, size",
        tests=(HASHES,),
    ),
    Defect(
        sentence="Clients with different API keys share prefixes.",
        file="proxy/request.py",
        old="size=_CACHE_SALT_BYTES, key=salt_key)",
        new="size=_CACHE_SALT_BYTES)",
        tests=("tests/unit/proxy/exchange/test_cache_salts.py::test_no_client_can_name_anothers_salt",),
    ),
    Defect(
        sentence="A block that the prefix cache names may be quarantined.",
        file="agent/engine/blocks.py",
        old="self._references[block] != 1 or block in self._hash_of or",
        new="self._references[block] != 1 or",
        tests=(BLOCKS,),
    ),
    Defect(
        sentence="A leased block is freed with its sequence.",
        file="agent/engine/blocks.py",
        old="        blocks = list(blocks)\n        self.share(blocks)\n        self._leases",
        new="        blocks = list(blocks)\n        self._leases",
        tests=(BLOCKS,),
    ),
    Defect(
        sentence="Probabilities are not normalised again between top_k and top_p.",
        file="agent/worker/sampler.py",
        old="probability = probability / probability[: sampling.top_k].sum()",
        new="pass",
        tests=(REFERENCE,),
    ),
    Defect(
        sentence="top_p keeps one token more where the others reach it exactly.",
        file="agent/worker/sampler.py",
        old="- probability < sampling.top_p",
        new="- probability <= sampling.top_p",
        tests=(REFERENCE,),
    ),
    Defect(
        sentence="min_p drops tokens that are exactly as likely as it asks.",
        file="agent/worker/sampler.py",
        old="ordered >= ordered[0]",
        new="ordered > ordered[0]",
        tests=(SAMPLER,),
    ),
    Defect(
        sentence="A grammar may compile for as long as its process is left alive.",
        file="agent/grammar/trial.py",
        old="    if time.process_time() - began > MAX_COMPILE_CPU_S:\n",
        new="    if False:\n",
        tests=(TRIAL,),
    ),
    Defect(
        sentence="Of a grammar that is tried, the first mask alone counts.",
        file="agent/grammar/trial.py",
        old="        if spent > MAX_MASKS_CPU_S:\n",
        new="        if False:\n",
        tests=(TRIAL,),
    ),
    Defect(
        sentence="A request's masks may take as much as they like.",
        file="agent/grammar/mask_queue.py",
        old="        if isinstance(answer, Mask) and request.is_too_costly:\n",
        new="        if False:\n",
        tests=(MASK_QUEUE,),
    ),
    Defect(
        sentence="Masks are computed in the order in which they were wanted.",
        file="agent/grammar/mask_queue.py",
        old="        request = min(waiting, key=lambda each: each.begins_at)\n",
        new="        request = min(waiting, key=lambda each: each.wanted[0].ticket)\n",
        tests=(MASK_QUEUE,),
    ),
    Defect(
        sentence="A request that wants masks again comes before all others until it has had as much.",
        file="agent/grammar/mask_queue.py",
        old="            request.begins_at = max(request.begins_at, self._virtual_s)\n",
        new="            pass\n",
        tests=(MASK_QUEUE,),
    ),
    Defect(
        sentence="Who meets a limit of llguidance takes the others of the same grammar along.",
        file="agent/grammar/mask_queue.py",
        old="            self._compiler.discard(matcher)\n        matcher = self._begin",
        new="            pass\n        matcher = self._begin",
        tests=(MASK_QUEUE,),
    ),
    Defect(
        sentence="A lexer that met a limit is kept for the next request with its grammar.",
        file="agent/grammar/mask_queue.py",
        old="            self._compiler.discard(matcher)\n            raise\n",
        new="            raise\n",
        tests=(MASK_QUEUE,),
    ),
    Defect(
        sentence="The mask of an earlier position is used.",
        file="agent/engine/sequence.py",
        old="if self.known_mask is None or self.known_mask[0] != self.num_outputs:",
        new="if self.known_mask is None:",
        tests=(MASKS_IN_STEPS,),
    ),
    Defect(
        sentence="A token is sampled without its mask.",
        file="agent/engine/scheduler.py",
        old="        for sequence in filter(self._can_sample, sequences):\n",
        new="        for sequence in sequences:\n",
        tests=(MASKS_IN_STEPS,),
    ),
    Defect(
        sentence="The noise does not depend on the choice.",
        file="agent/worker/sampler.py",
        old="(sample.choice << 32) | sample.position",
        new="sample.position",
        tests=(SAMPLER,),
    ),
    Defect(
        sentence="The repetition penalty makes unlikely tokens likelier.",
        file="agent/worker/sampler.py",
        old="torch.where(score > 0, score / penalty, score * penalty)",
        new="score / penalty",
        tests=(SAMPLER, REFERENCE),
    ),
    Defect(
        sentence="Ranks hear of a choice's earlier tokens again with every row.",
        file="agent/engine/sequence.py",
        old="self.num_described = self.num_outputs",
        new="pass",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="A produced prompt may be preempted.",
        file="agent/engine/scheduler.py",
        old="next(seq for seq in reversed(self._running) if not seq.request.produces)",
        new="self._running[-1]",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="Sequences are admitted in the step of a preemption.",
        file="agent/engine/scheduler.py",
        old="while self._waiting and not plan.preempted and",
        new="while self._waiting and",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="Blocks are freed at an abort while a pull may still write into them.",
        file="agent/engine/transfers.py",
        old="        sequence.blocks = []\n        ids_hash",
        new="        ids_hash",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="A transfer is held for as long as its request may run.",
        file="agent/engine/transfers.py",
        old="timeout_s = min(request.submit.timeout_s, self._limits.pull_timeout_s)",
        new="timeout_s = request.submit.timeout_s",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="After a preemption the prompt's chunks begin elsewhere.",
        file="agent/engine/kv_cache.py",
        old="found = found[: len(found) // per_chunk * per_chunk]",
        new="pass",
        tests=(SCHEDULER,),
    ),
    Defect(
        sentence="A shared block is written in place.",
        file="agent/engine/kv_cache.py",
        old="self._allocator.num_references(block) - copied > 1",
        new="self._allocator.num_references(block) - copied > 9",
        tests=(SCHEDULER,),
    ),
    # The transfer plane.
    Defect(
        sentence="A link to an old incarnation at an address is kept.",
        file="transfer/consumer/link_pool.py",
        old='other.lose("incarnation", f"{link.source} is there now")',
        new="pass",
        tests=("tests/unit/transfer/consumer/test_link_pool.py",),
    ),
    Defect(
        sentence="A second reader may open a lease that has one.",
        file="transfer/producer/lease.py",
        old="if num_readers != self.num_readers or not self.may_read(consumer):",
        new="if num_readers != self.num_readers:",
        tests=(LEASE,),
    ),
    Defect(
        sentence="A renewal may keep a lease beyond its request.",
        file="transfer/producer/lease.py",
        old="min(now + self._lease_s, lease.limit)",
        new="now + self._lease_s",
        tests=(LEASE,),
    ),
    Defect(
        sentence="A pull takes what the producer calls invalid.",
        file="transfer/consumer/pull.py",
        old='        if not valid:\n            return self._failed("invalid")\n',
        new="",
        tests=(PULL,),
    ),
    Defect(
        sentence="A pull takes the blocks of another prompt.",
        file="transfer/consumer/pull.py",
        old="self._ids_hash is not None and grant.ids_hash != self._ids_hash",
        new="False",
        tests=("tests/unit/transfer/test_plane.py::test_other_token_ids_fail_the_pull",),
    ),
    Defect(
        sentence="A read that failed counts as quiescent at once.",
        file="transfer/consumer/pull.py",
        old="quiescent=not self._writing,",
        new="quiescent=True,",
        tests=(PULL,),
    ),
    Defect(
        sentence="A whole is complete without its last rank.",
        file="transfer/ranks/aggregate.py",
        old="if len(group.reports) < self._num_ranks:",
        new="if len(group.reports) < self._num_ranks - 1:",
        tests=(AGGREGATE,),
    ),
    Defect(
        sentence="A rebuild is ordered again and again for one quarantined transfer.",
        file="transfer/consumer/quarantine.py",
        old="entry.ordered = entry.backend in due",
        new="pass",
        tests=(QUARANTINE,),
    ),
    # The proxy.
    Defect(
        sentence="The pings of an incarnation that was replaced count again.",
        file="proxy/fleet/registry.py",
        old="if incarnation in self._retired:",
        new="if False:",
        tests=(REGISTRY,),
    ),
    Defect(
        sentence="An older ping overwrites a newer one.",
        file="proxy/fleet/registry.py",
        old="record is not None and info.index < record.info.index",
        new="False",
        tests=(REGISTRY,),
    ),
    Defect(
        sentence="A waiter that is cancelled as it gets its slots keeps them.",
        file="proxy/fleet/admission.py",
        old="                    granted.release()\n",
        new="                    pass\n",
        tests=(ADMISSION,),
    ),
    Defect(
        sentence="An API key that did not wait has saved up what it did not use.",
        file="proxy/fleet/fair_queue.py",
        old="(self._virtual_time, next(self._numbers), waiter.key)",
        new="(0.0, next(self._numbers), waiter.key)",
        tests=(FAIR_QUEUE,),
    ),
    Defect(
        sentence="What was admitted of an API key does not count when it comes again.",
        file="proxy/fleet/fair_queue.py",
        old="(start + work, next(self._numbers), key)",
        new="(start, next(self._numbers), key)",
        tests=(FAIR_QUEUE,),
    ),
    Defect(
        sentence="A client gives its requests any priority, whatever its key allows.",
        file="proxy/api/completions.py",
        old="max(asked, client.min_priority)",
        new="asked",
        tests=("tests/unit/proxy/api/test_order.py",),
    ),
    Defect(
        sentence="A breaker that tries an agent again lets all requests through.",
        file="proxy/fleet/circuit_breaker.py",
        old="self._due_at = now + PROBE_INTERVAL_S",
        new="pass",
        tests=(BREAKER,),
    ),
    Defect(
        sentence="The pause of a breaker grows for ever.",
        file="proxy/fleet/circuit_breaker.py",
        old="min(2 * self._pause_s, MAX_PAUSE_S)",
        new="2 * self._pause_s",
        tests=(BREAKER,),
    ),
    Defect(
        sentence="An attempt's slots are not given back at its end.",
        file="proxy/exchange/attempt.py",
        old="        self._reservation.release()\n",
        new="        pass\n",
        tests=("tests/unit/proxy/exchange/test_exchange.py",),
        core=False,
    ),
    Defect(
        sentence="KV at another engine is proven by the operator's number.",
        file="proxy/exchange/kv_lifetime.py",
        old="if now() < self._sent_at + SURE_S:",
        new="if now() < self._sent_at + SURE_S or not self.is_over:",
        tests=("tests/unit/proxy/exchange/test_lease_check.py",),
        core=False,
    ),
    Defect(
        sentence="A count of expired leases that came too late proves KV at another engine.",
        file="proxy/exchange/kv_lifetime.py",
        old="in_time = count is not None and count.came_at < self._sent_at + SURE_S",
        new="in_time = count is not None",
        tests=("tests/unit/proxy/exchange/test_lease_check.py",),
        core=False,
    ),
    Defect(
        sentence="A retry goes to the agent that was lost.",
        file="proxy/exchange/exchange.py",
        old="self._exclude |= {lost.agent}",
        new="pass",
        tests=("tests/unit/proxy/exchange/test_exchange.py",),
        core=False,
    ),
    Defect(
        sentence="A stream that broke goes on with another response's tokens.",
        file="proxy/dialects/sent_tokens.py",
        old="if not all(choice.begins_with(first(index)) for index, choice in has.items()):",
        new="if False:",
        tests=(
            "tests/unit/proxy/dialects/test_sent_tokens.py",
            "tests/unit/proxy/exchange/test_migration.py",
        ),
        core=False,
    ),
    Defect(
        sentence="Retries are not bounded by the budget.",
        file="proxy/exchange/exchange.py",
        old="        self._tokens -= 1\n",
        new="",
        tests=("tests/unit/proxy/exchange/test_retry.py",),
    ),
    # ATOM's dialect, as it was before it had met ATOM's own code.
    Defect(
        sentence="An ATOM prefill that reached its limit is taken for the whole answer.",
        file="proxy/dialects/atom.py",
        old='_TO_BE_CONTINUED = frozenset({"max_tokens", "length"})',
        new='_TO_BE_CONTINUED = frozenset({"length"})',
        tests=("tests/unit/proxy/dialects/test_dialects.py",),
    ),
    Defect(
        sentence="An ATOM decode server reads the rank that was asked for, not the one that holds the KV.",
        file="proxy/dialects/atom.py",
        old='"remote_dp_rank": prefilled.params.get("dp_rank"),',
        new='"remote_dp_rank": endpoints.prefill_rank,',
        tests=("tests/unit/proxy/dialects/test_dialects.py",),
    ),
    Defect(
        sentence="A choice that ends twice, as ATOM's do, ends twice for the client.",
        file="proxy/exchange/rewrite.py",
        old="                if index in self._ended:\n",
        new="                if False:\n",
        tests=("tests/unit/proxy/exchange/test_rewrite.py",),
    ),
    Defect(
        sentence="A client that leaves late has KV fetched for one token that was read before.",
        file="proxy/exchange/attempt.py",
        old="if now() < accepted_by:",
        new="if True:",
        tests=(
            "tests/unit/proxy/exchange/test_other_engines.py"
            "::test_a_client_that_leaves_late_has_nothing_fetched_again",
        ),
        core=False,
    ),
    Defect(
        sentence="Where KV is fetched is believed after a leg of the only sub-request has failed.",
        file="proxy/exchange/attempt.py",
        old="        except AGENT_FAILURES:\n            self._forget_kv_endpoints()\n",
        new="        except AGENT_FAILURES:\n",
        tests=(
            "tests/unit/proxy/exchange/test_other_engines.py"
            "::test_what_was_learned_in_an_attempt_that_failed_is_forgotten",
        ),
        core=False,
    ),
    Defect(
        sentence="The usage of a stream whose server was lost at its end lacks tokens without a text.",
        file="proxy/exchange/rewrite.py",
        old="self._sent.count_sampled",
        new="self._sent.count",
        tests=("tests/unit/proxy/exchange/test_rewrite.py",),
    ),
    Defect(
        sentence="The canary takes a logprob that is no number for an equal one.",
        file="proxy/canary/comparison.py",
        old="math.inf if math.isnan(difference) else max(largest, difference)",
        new="max(largest, difference)",
        tests=("tests/unit/proxy/canary/test_comparison.py",),
    ),
    Defect(
        sentence="A pair that differs seldom is trusted again after ten equal answers.",
        file="proxy/canary/pair_record.py",
        old="max(LEAST_RIGHT, 3 * self.right_in_a_row)",
        new="LEAST_RIGHT",
        tests=("tests/unit/proxy/canary/test_pair_record.py",),
    ),
)
