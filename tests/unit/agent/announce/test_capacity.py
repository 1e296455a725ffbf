# SPDX-License-Identifier: Apache-2.0
"""What an engine measures of its own work."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvferry.agent.announce.capacity import MIN_STEPS, CapacityMeter, StepFit
from kvferry.proxy.wire.registration import Capacity


def meter(**fields: int) -> CapacityMeter:
    return CapacityMeter(**({"max_running": 64, "num_blocks": 1000} | fields))


def decode(meter: CapacityMeter, sequences: int, seconds: float, *, blocks: int = 0) -> None:
    meter.step(seconds, prompt_tokens=0, decoded=sequences, blocks_used=blocks, holders=sequences)


def prefill(meter: CapacityMeter, tokens: int, seconds: float, *, decoded: int = 0) -> None:
    meter.step(seconds, prompt_tokens=tokens, decoded=decoded, blocks_used=0, holders=decoded)


def test_steps_of_several_sizes_give_the_line_between_them() -> None:
    fit = StepFit()
    for sequences in (1, 2, 5, 9, 30) * 4:
        fit.add(sequences, 0.01 + 0.002 * sequences)
    assert fit.line() == pytest.approx((0.01, 0.002), rel=1e-6)


def test_a_size_that_was_never_seen_is_not_taken_for_free() -> None:
    """One size does not show whether a larger batch gains anything; two do, but hardly through noise."""
    alone = StepFit()
    for _ in range(20):
        alone.add(2, 0.02)
    assert alone.line() == pytest.approx((0.0, 0.01))
    noise, noisy = random.Random(1), StepFit()
    for _ in range(200):
        noisy.add(noise.choice((1, 2)), 0.02 * noise.uniform(0.5, 1.5))
    line = noisy.line()
    assert line is not None
    assert line[0] + 64 * line[1] > 0.02 * 1.5, "on average, more sequences took no longer"


def test_at_its_own_size_a_batch_takes_what_it_took() -> None:
    noise, fit = random.Random(2), StepFit()
    for _ in range(500):
        sequences = noise.randint(60, 64)
        fit.add(sequences, (0.01 + 0.001 * sequences) * noise.uniform(0.8, 1.2))
    line = fit.line()
    assert line is not None
    assert line[0] + 64 * line[1] == pytest.approx(0.074, rel=0.05)


def test_where_steps_are_all_of_one_size_they_take_what_one_without_prompts_takes() -> None:
    """Chunks of 2,048 tokens only: a chunk of few would be taken for quicker than a step that decodes."""
    fit = StepFit()
    for _ in range(2 * MIN_STEPS):
        fit.add(2048, 0.07)
    assert fit.line(0.007) == pytest.approx((0.007, 0.063 / 2048))
    assert fit.line(0.1) == pytest.approx((0.07, 0.0))


def test_what_was_long_ago_is_forgotten_but_only_by_work() -> None:
    fit = StepFit()
    for _ in range(2000):
        fit.add(1, 0.1)
    for _ in range(2000):
        fit.add(1, 0.2)
    line = fit.line()
    assert line is not None
    assert sum(line) == pytest.approx(0.2, rel=0.01)


def test_nothing_is_said_before_it_is_measured() -> None:
    made = meter()
    assert made.report(100) == Capacity(slots=64)
    for _ in range(MIN_STEPS - 1):
        decode(made, 1, 0.01)
    assert made.report(0).step_s is None
    decode(made, 1, 0.01)
    assert made.report(0).sequence_s == pytest.approx(0.01)


def test_seconds_of_prompts_are_what_steps_take_beyond_decoding() -> None:
    made = meter()
    prefill(made, 100, 0.5)
    assert made.report(0).prefill_s == 0.5
    prefill(made, 30, 0.4, decoded=10)
    assert made.report(0).prefill_s == pytest.approx(0.5 + 0.3), "nothing is known of decoding: by tokens"
    for _ in range(MIN_STEPS):
        decode(made, 10, 0.1)
    prefill(made, 30, 0.4, decoded=10)
    assert made.report(0).prefill_s == pytest.approx(0.5 + 0.3 + 0.3)
    prefill(made, 1, 0.05, decoded=10)
    assert made.report(0).prefill_s == pytest.approx(0.5 + 0.3 + 0.3), "it took no longer than decoding does"
    all_s = 0.5 + 0.4 + MIN_STEPS * 0.1 + 0.4 + 0.05
    assert made.report(0).decode_s == pytest.approx(all_s - 0.5 - 0.3 - 0.3), "all else was decoding"


def test_steps_with_prompts_give_a_line_of_their_own_without_what_decodes() -> None:
    made, sizes = meter(), (16, 100, 256, 1024) * 2
    for n in (1, 2, 5, 9, 30) * 4:
        decode(made, n, 0.01 + 0.002 * n)
    for tokens in sizes:
        prefill(made, tokens, 0.03 + 0.001 * tokens + 0.002 * 7, decoded=7)
    report = made.report(0)
    assert (report.prompt_step_s, report.prompt_token_s) == pytest.approx((0.03, 0.001), rel=1e-3)
    alone = meter()
    for tokens in sizes:
        assert alone.report(0).prompt_step_s is None
        prefill(alone, tokens, 0.03 + 0.001 * tokens, decoded=0)
        prefill(alone, tokens, 9.0, decoded=1)
    report = alone.report(0)
    assert (report.prompt_step_s, report.prompt_token_s) == pytest.approx((0.03, 0.001), rel=1e-3)


def test_backlog_goes_by_the_tokens_of_late_cached_ones_included() -> None:
    made = meter()
    made.cached(100)
    prefill(made, 100, 1.0)
    assert made.report(50).backlog_s == pytest.approx(0.25, rel=0.02)


def test_slots_are_as_many_as_the_blocks_hold() -> None:
    made = meter(num_blocks=100)
    assert made.report(0).slots == 64
    decode(made, 4, 0.01, blocks=20)
    assert made.report(0).slots == 20
    decode(made, 1, 0.01, blocks=0)
    decode(made, 1, 0.01, blocks=1000)
    assert made.report(0).slots == 1


def test_any_report_is_one_that_proxies_accept() -> None:
    noise, made = random.Random(3), meter()
    for _ in range(500):
        made.step(
            noise.choice((0.0, 1e-9, 0.01, 100.0)),
            prompt_tokens=noise.choice((0, 5)),
            decoded=noise.choice((0, 1, 64)),
            blocks_used=noise.randrange(1000),
            holders=noise.choice((0, 64)),
        )
        made.answer_done(3)
        said = made.report(noise.randrange(1000))
        assert msgspec.convert(msgspec.to_builtins(said), Capacity) == said
