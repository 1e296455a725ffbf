# SPDX-License-Identifier: Apache-2.0
"""A producer's ranks take part in what its readers do while they must, and cost nothing afterwards."""

from __future__ import annotations

import pytest

from kvferry.transfer.consumer.link import Link
from kvferry.transfer.engine import EngineOptions, open_engine
from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed
from kvferry.transfer.ids import new_transfer_id
from kvferry.transfer.plane import one_group
from kvferry.transfer.ranks.messages import Command, Read, Serve
from kvferry.transfer.ranks.reads import RankReader
from tests.helpers.waiting import until
from tests.unit.transfer.rig import Agent
from tests.unit.transfer.test_plane import BACKENDS, OURS, THEIRS, TOKENS, needs_nixl

AWAITED = Serve(on=True, awaited=True)
ATTENTIVE = Serve(on=True, awaited=False)
IDLE = Serve(on=False, awaited=False)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """What the ranks have carried out."""
    handle, seen = RankReader.handle, []

    def handle_and_keep(links: RankReader, command: Command) -> None:
        handle(links, command)
        seen.append(command)

    monkeypatch.setattr(RankReader, "handle", handle_and_keep)
    return seen


def serves(commands: list[Command]) -> list[Serve]:
    """The `Serve` commands of the producer's rank; a consumer's rank gets none."""
    return [command for command in commands if isinstance(command, Serve)]


@pytest.mark.parametrize("transfer", ["tcp", pytest.param("nixl", marks=needs_nixl)])
async def test_ranks_take_part_only_while_a_peer_connects_or_reads(
    transfer: str, commands: list[Command]
) -> None:
    """Not for a while after the first transfer either, which began with a greeting."""
    async with Agent(seed=1, transfer=transfer) as prefill, Agent(seed=2, transfer=transfer) as decode:
        for number in (1, 2):
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            await decode.event(PullDone)
            await until(lambda number=number: serves(commands) == [AWAITED, IDLE] * number)


async def test_a_peer_that_greets_and_never_asks_is_awaited_for_a_while(
    monkeypatch: pytest.MonkeyPatch, commands: list[Command]
) -> None:
    monkeypatch.setattr("kvferry.transfer.producer.producer._HELLO_S", 0.5)
    monkeypatch.setattr(Link, "open", lambda *_: None)
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        decode.plane.pull(new_transfer_id(), prefill.remote(TOKENS), one_group(OURS), 2.0)
        await until(lambda: serves(commands) == [AWAITED, IDLE])
        assert (await decode.event(PullFailed)).reason == "deadline"


async def test_a_producer_takes_part_until_a_read_that_was_given_up_can_have_ended(
    commands: list[Command],
) -> None:
    """Over sockets UCX ends a cancelled read only if both processes go on; the lease has ended by then."""
    async with (
        Agent(seed=1, tcp_fault="stall:after=64", quarantine_s=1.0) as prefill,
        Agent(seed=2) as decode,
    ):
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 20.0)
        await until(lambda: any(isinstance(command, Read) for command in commands))
        decode.plane.cancel(transfer_id)
        assert (await prefill.event(LeaseEnded)).cause == "released"
        with pytest.raises(TimeoutError):
            await until(lambda: IDLE in serves(commands), 0.7)
        await until(lambda: serves(commands) == [AWAITED, ATTENTIVE, IDLE])


@pytest.mark.parametrize("transfer", BACKENDS)
def test_how_often_a_backend_is_polled(transfer: str) -> None:
    """Often while a peer waits for it, seldom while one might; not at all otherwise, or where it tells."""
    options = EngineOptions(name="polled", bind_host="127.0.0.1", advertise_host="127.0.0.1")
    engine = open_engine(transfer, options)
    try:
        links = RankReader(0, {transfer: engine}, lambda report: None)
        paces = [links.poll_ms]
        for serve in (AWAITED, ATTENTIVE, IDLE):
            links.handle(serve)
            paces.append(links.poll_ms)
        assert paces == ([None, 1, 20, None] if engine.fileno() is None else [None] * 4)
    finally:
        engine.close()
