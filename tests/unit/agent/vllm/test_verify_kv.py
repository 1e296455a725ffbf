# SPDX-License-Identifier: Apache-2.0
"""Two servers with `verify_kv`, and a bit flipped in each prompt's KV on its way (`faults.tcp`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvferry.agent.vllm.settings import read_settings
from kvferry.transfer.plane import is_sampled
from tests.standins.faults import tcp
from tests.standins.vllm_scheduler import Status, VllmRequest, prompt
from tests.unit.agent.vllm.test_two_servers import HAND_OVER, LENGTH, ROLES, Server

PROMPTS = 20


@contextmanager
def pair(
    *,
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    tp_sizes: tuple[int, int] = (1, 1),
    stages: tuple[int, int] = (1, 1),
    shares: tuple[float, float] = (1.0, 1.0),
    fault: str | None = None,
) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack, tcp.injected(fault):
        producer, consumer = (
            Server(stack, role, order=order, tp_size=tp_size, seed=seed, stages=count, verify_kv=share)
            for role, order, tp_size, seed, count, share in zip(
                ROLES, orders, tp_sizes, (1, 9), stages, shares, strict=True
            )
        )
        yield producer, consumer


def move(producer: Server, consumer: Server, name: str, length: int = LENGTH) -> int:
    """Hand a prompt over; returns from which token on the consumer computed it."""
    lent = producer.vllm.add(VllmRequest(f"p{name}", prompt(length), HAND_OVER | {"transfer_id": name}))
    producer.vllm.step()
    producer.vllm.finish(lent)
    request = consumer.vllm.add(VllmRequest(f"d{name}", prompt(length), lent.params))
    consumer.until(lambda: request.status is Status.RUNNING)
    consumer.vllm.finish(request)
    producer.until(lambda: not producer.vllm.requests)
    return consumer.vllm.computed[request.request_id]


LAYOUTS = [
    (("LBHNC", "BHLNC"), (1, 2), (1, 1)),
    (("BLHNC", "LHBNC"), (2, 1), (1, 1)),
    (("HND", "HND"), (1, 1), (1, 1)),
    (("CPU", "CPU"), (2, 2), (1, 1)),
    (("LBNHC", "LBNHC"), (2, 2), (1, 1)),
    (("LBHNC", "BHLNC"), (2, 1), (2, 2)),
    (("hybrid", "hybrid"), (1, 1), (1, 1)),
    (("hybrid", "hybrid"), (1, 1), (2, 2)),
]


@pytest.mark.parametrize(("orders", "tp_sizes", "stages"), LAYOUTS, ids=str)
def test_what_was_flipped_is_computed_again_and_the_rest_is_not(
    orders: tuple[str, str], tp_sizes: tuple[int, int], stages: tuple[int, int]
) -> None:
    """In every layout, and with other ranks on the two sides. The control is the same without `verify_kv`."""
    found = {}
    layout = {"orders": orders, "tp_sizes": tp_sizes, "stages": stages}
    for share in (1.0, 0.0):
        with pair(**layout, shares=(share, share), fault=f"bit:count={PROMPTS}") as (producer, consumer):
            computed = [move(producer, consumer, str(number)) for number in range(2 * PROMPTS)]
            found[share] = computed.count(0)
            figures = consumer.scheduler.take_figures()
            assert figures.get("failed_transfers:checksum", 0) == figures.get("recomputed", 0) == found[share]
            for server in (producer, consumer):
                server.vllm.check_integrity()
    # Each rank's read counts: of several, some of one prompt's are flipped together.
    reads = max(tp_sizes) * max(stages)
    assert found[0.0] == 0
    assert PROMPTS / reads <= found[1.0] <= PROMPTS


@pytest.mark.parametrize("shares", [(0.5, 0.5), (1.0, 0.5), (0.5, 0.25)], ids=str)
def test_of_a_sample_what_was_flipped_is_found(shares: tuple[float, float]) -> None:
    """Both sides choose the same prompts, and a lender that sums more is as good."""
    names = [str(number) for number in range(PROMPTS)]
    with pair(shares=shares, fault="bit:seed=1") as (producer, consumer):
        again = [name for name in names if move(producer, consumer, name) == 0]
    assert again == [name for name in names if is_sampled(name, shares[1])]
    assert 0 < len(again) < PROMPTS


@pytest.mark.parametrize("shares", [(0.0, 1.0), (0.5, 1.0)], ids=str)
def test_a_lender_that_sums_less_is_refused(
    shares: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvferry")
    with pair(shares=shares) as (producer, consumer):
        assert move(producer, consumer, "t") == 0
        assert consumer.scheduler.take_figures() == {"failed_transfers:refused": 1, "recomputed": 1}
    theirs = {0.0: "off", 0.5: "0.5"}[shares[0]]
    assert f"verify_kv: theirs {theirs}, ours on" in caplog.text


def test_layers_that_are_spread_over_other_stages_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry")
    with pair(stages=(2, 1)) as (producer, consumer):
        assert move(producer, consumer, "t") == 0
        assert consumer.scheduler.take_figures() == {"failed_transfers:refused": 1, "recomputed": 1}
    assert "verify_kv: a producer rank holds other layers" in caplog.text


@pytest.mark.parametrize("share", [0, 0.05, 1])
def test_the_share_is_a_setting(share: float) -> None:
    assert read_settings({"verify_kv": share}).verify_kv == share


@pytest.mark.parametrize("share", [-0.1, 1.5, "all"])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match="verify_kv"):
        read_settings({"verify_kv": share})
