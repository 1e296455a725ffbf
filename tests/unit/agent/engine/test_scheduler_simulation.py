# SPDX-License-Identifier: Apache-2.0
"""Random histories against the scheduler: whatever happens, answers are right and blocks come back."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.agent.messages.requests import Output, RequestFailed, Submit
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens
from tests.standins.model import StandInRunner, expected_answer, next_token
from tests.unit.agent.local_engine import LIMITS, LocalEngine, remote, request, resumed_choices

NUM_BLOCKS = 20
BASE = [1 + (7 * position) % 49 for position in range(40)]

prompts = st.builds(
    lambda shared, tail: [*BASE[:shared], *tail],
    st.integers(1, 36),
    st.lists(st.integers(1, 49), max_size=4),
)


class History(RuleBasedStateMachine):
    """What can befall one agent. Choices of a rule are taken modulo what there is to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = StandInRunner(NUM_BLOCKS, LIMITS.block_size)
        self.engine = LocalEngine(self.runner, NUM_BLOCKS)
        self.submitted: dict[str, Submit] = {}
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.unquiet_blocks: dict[str, tuple[int, ...]] = {}

    def _submit(self, submit: Submit) -> None:
        self.submitted[submit.request_id] = submit
        self.engine.submit(submit)

    @property
    def _name(self) -> str:
        return f"r{len(self.submitted)}"

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), n=st.integers(1, 3), ignore_eos=st.booleans())
    def local(self, prompt: list[int], max_tokens: int, n: int, ignore_eos: bool) -> None:
        self._submit(
            request(
                self._name, prompt, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, frequency_penalty=0.5
            )
        )

    @rule(prompt=prompts, max_tokens=st.integers(1, 3), n=st.integers(1, 3))
    def produce(self, prompt: list[int], max_tokens: int, n: int) -> None:
        name = self._name
        self._submit(request(name, prompt, max_tokens=max_tokens, n=n, produce=f"p-{name}"))

    @rule(prompt=prompts, max_tokens=st.integers(2, 10), n=st.integers(1, 3))
    def consume(self, prompt: list[int], max_tokens: int, n: int) -> None:
        name = self._name
        first = [next_token(prompt, choice) for choice in range(n)]
        self._submit(
            request(
                name,
                prompt,
                max_tokens=max_tokens,
                n=n,
                ignore_eos=True,
                remote=remote(f"c-{name}", prompt),
                resumed=resumed_choices(*first),
                repetition_penalty=1.5,
            )
        )

    @rule(prompt=prompts, max_tokens=st.integers(2, 10), n=st.integers(1, 3))
    def consume_streamed(self, prompt: list[int], max_tokens: int, n: int) -> None:
        name = self._name
        kv = msgspec.structs.replace(remote(f"c-{name}", prompt), streamed=True)
        self._submit(
            request(
                name, prompt, max_tokens=max_tokens, n=n, ignore_eos=True, remote=kv, presence_penalty=0.5
            )
        )

    @rule()
    def step(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 10**6))
    def abort(self, which: int) -> None:
        self._abort(list(self.submitted)[which % len(self.submitted)])

    @precondition(lambda self: self.engine.connector.pulls)
    @rule(which=st.integers(0, 10**6))
    def abort_while_pulling(self, which: int) -> None:
        self._abort(self._pick(self.engine.connector.pulls, which).removeprefix("c-"))

    def _abort(self, name: str) -> None:
        if not self._is_over(name):
            self.aborted.add(name)
        self.engine.scheduler.abort(name)

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 10**6), choice=st.integers(0, 2))
    def stop_choice(self, which: int, choice: int) -> None:
        name = list(self.submitted)[which % len(self.submitted)]
        if self.engine.tokens(name, choice):
            self.stopped.add((name, choice))
            self.engine.scheduler.stop_choice(name, choice)

    @precondition(lambda self: self.engine.connector.pulls)
    @rule(which=st.integers(0, 10**6))
    def pull_succeeds(self, which: int) -> None:
        self._finish_pull(self._pick(self.engine.connector.pulls, which))

    def _finish_pull(self, transfer_id: str) -> None:
        pull = self.engine.connector.pulls[transfer_id]
        prompt = self.submitted[transfer_id.removeprefix("c-")].prompt_ids
        start = pull.first_block * LIMITS.block_size
        if not pull.cancelled:
            self.runner.write(pull.block_ids, start, prompt[start:])
        self.engine.connector.finish_pull(transfer_id, self._first_tokens(transfer_id))

    def _first_tokens(self, transfer_id: str) -> SampledTokens:
        submit = self.submitted[transfer_id.removeprefix("c-")]
        sampled = [next_token(submit.prompt_ids, choice) for choice in range(submit.sampling.n)]
        return SampledTokens(choices=tuple(SampledToken(id=token) for token in sampled))

    @precondition(lambda self: self.engine.connector.pulls)
    @rule(which=st.integers(0, 10**6), quiescent=st.booleans(), told=st.booleans())
    def pull_fails(self, which: int, quiescent: bool, told: bool) -> None:
        transfer_id = self._pick(self.engine.connector.pulls, which)
        pull = self.engine.connector.pulls[transfer_id]
        if not quiescent:
            self.unquiet_blocks[transfer_id] = pull.block_ids[pull.first_block :]
        first = self._first_tokens(transfer_id) if told else None
        self.engine.connector.fail_pull(transfer_id, quiescent=quiescent, first_tokens=first)

    @precondition(lambda self: self.engine.connector.unquiet)
    @rule(which=st.integers(0, 10**6))
    def transfer_falls_quiet(self, which: int) -> None:
        self._quieten(self._pick(self.engine.connector.unquiet, which))

    def _quieten(self, transfer_id: str) -> None:
        del self.unquiet_blocks[transfer_id]
        self.engine.connector.quieten(transfer_id)

    @precondition(lambda self: self.engine.connector.leases)
    @rule(which=st.integers(0, 10**6), cause=st.sampled_from(["released", "expired", "dropped"]))
    def lease_ends(self, which: int, cause: str) -> None:
        transfer_id = self._pick(self.engine.connector.leases, which)
        if cause == "dropped":
            self.engine.scheduler.drop_transfer(transfer_id)
        elif cause == "expired" or transfer_id in self.engine.connector.ready_leases:
            self.engine.connector.end_lease(transfer_id, cause)

    @rule(seconds=st.sampled_from([0.5] * 9 + [5.0, 21.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @invariant()
    def transfers_write_where_they_may(self) -> None:
        """Design I3: if any of these blocks had been reused, some context would hold garbage now."""
        for pull in self.engine.connector.pulls.values():
            self.runner.scribble(pull.block_ids[pull.first_block :])
        for blocks in self.unquiet_blocks.values():
            self.runner.scribble(blocks)

    @invariant()
    def leased_kv_is_what_was_promised(self) -> None:
        """Design I1 and I2: a reader finds the prompt in every block that it was told is readable."""
        for transfer_id, blocks in self.engine.connector.lease_blocks.items():
            prompt = self.submitted[transfer_id.removeprefix("p-")].prompt_ids
            ready = transfer_id in self.engine.connector.ready_leases
            readable = self.engine.connector.leases[transfer_id] * LIMITS.block_size
            count = len(prompt) if ready else min(readable, len(prompt))
            assert self.runner.read(blocks, count) == list(prompt[:count])

    @invariant()
    def the_books_agree(self) -> None:
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        """Let everything come to its end; then every request has one, and every block is free."""
        connector = self.engine.connector
        for _ in range(500):
            for transfer_id in list(connector.pulls):
                self._finish_pull(transfer_id)
            for transfer_id in list(connector.unquiet):
                self._quieten(transfer_id)
            for transfer_id in list(connector.leases):
                connector.end_lease(transfer_id, "expired")
            if not self.engine.step() and self.engine.scheduler.is_idle and not connector.events:
                break
        self.engine.assert_all_free()
        assert not connector.holds, "a producer's lease is renewed for nobody"
        for name, submit in self.submitted.items():
            self._check_answer(name, submit)

    def _check_answer(self, name: str, submit: Submit) -> None:
        messages = self.engine.messages.get(name, [])
        ends = [message for message in messages if isinstance(message, RequestFailed) or message.done]
        assert len(ends) == (0 if name in self.aborted else 1), f"{name} ended {len(ends)} times"
        assert not ends or ends[0] is messages[-1]
        complete = bool(ends) and isinstance(ends[0], Output)
        for choice in range(submit.sampling.n):
            answer = expected_answer(submit.prompt_ids, choice, submit.sampling)
            if submit.produce is not None:
                answer = answer[:1]
            elif submit.resumed:
                answer = answer[1:]
            tokens = self.engine.tokens(name, choice)
            assert tokens == answer[: len(tokens)]
            assert tokens == answer or not complete or (name, choice) in self.stopped

    def _is_over(self, name: str) -> bool:
        messages = self.engine.messages.get(name, [])
        pending = self.engine.scheduler._outbox
        ours = [*messages, *(message for message in pending if message.request_id == name)]
        return any(isinstance(message, RequestFailed) or message.done for message in ours)

    @staticmethod
    def _pick(choices: object, which: int) -> str:
        ordered = sorted(choices)  # type: ignore[call-overload]
        return ordered[which % len(ordered)]  # type: ignore[no-any-return]


History.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=80,
    # Shrinking a long history outlasts a test's time limit; add Phase.shrink by hand to study a failure.
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestHistory = History.TestCase
