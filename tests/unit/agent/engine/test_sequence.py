# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvferry.agent.engine.sequence import Clock, Request, Sequence, SequenceState
from kvferry.common.state_machine import IllegalTransition
from tests.unit.agent.local_engine import request

W, P, R, F = (
    SequenceState.WAITING,
    SequenceState.WAITING_FOR_REMOTE_KV,
    SequenceState.RUNNING,
    SequenceState.FINISHED,
)
LEGAL = {(W, P), (W, R), (W, F), (P, W), (P, R), (P, F), (R, W), (R, F)}


def make_sequence(prompt_len: int, outputs: int = 0, **changes: Any) -> Sequence:
    submit = request("r", [1] * prompt_len, **changes)
    return Sequence(Request(submit, 0.0, Clock(0.0)), 0, [*submit.prompt_ids, *[2] * outputs])


@pytest.mark.parametrize(("start", "to"), list(itertools.product(SequenceState, repeat=2)))
def test_only_the_edges_of_the_table_exist(start: SequenceState, to: SequenceState) -> None:
    sequence = make_sequence(3)
    sequence.state = start
    if (start, to) in LEGAL:
        sequence.transition(to)
        assert sequence.state is to
    else:
        with pytest.raises(IllegalTransition, match="r/0"):
            sequence.transition(to)
        assert sequence.state is start


@pytest.mark.parametrize(
    ("computed", "end"), [(0, 8), (4, 8), (8, 16), (12, 16), (16, 20), (20, 21), (21, 22)]
)
def test_prompt_chunks_end_at_absolute_multiples_and_outputs_go_one_by_one(computed: int, end: int) -> None:
    sequence = make_sequence(20, outputs=5)
    sequence.num_computed = computed
    assert sequence.next_chunk_end(8) == end


def test_ids_go_to_the_sampler_only_where_a_penalty_looks_at_them() -> None:
    assert make_sequence(3, 2).sampling_row(0).output_ids == ()
    frequency = make_sequence(3, 2, frequency_penalty=0.5)
    assert frequency.request.describe().prompt_ids == ()
    assert frequency.sampling_row(0).output_ids == (2, 2)
    frequency.tokens.append(5)
    assert frequency.sampling_row(0).output_ids == (5,), "only what is new since the last row"
    repetition = make_sequence(3, 2, repetition_penalty=1.5)
    assert repetition.request.describe().prompt_ids == (1, 1, 1)
    assert repetition.sampling_row(0).output_ids == (2, 2)


def test_hashes_grow_with_the_tokens_and_are_not_computed_twice() -> None:
    sequence = make_sequence(9)
    first = sequence.full_block_hashes(4, 9)
    sequence.tokens += [5, 5, 5]
    assert len(first) == 2
    assert sequence.full_block_hashes(4, 12)[:2] == first
    assert len(sequence.full_block_hashes(4, 12)) == 3
    assert sequence.full_block_hashes(4, 7) == first[:1]
