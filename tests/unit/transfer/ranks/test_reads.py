# SPDX-License-Identifier: Apache-2.0
"""What a peer says about itself never ends the rank that hears it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.control.messages import EngineDescription
from kvferry.transfer.engine import EngineOptions, TransferEngine, open_engine
from kvferry.transfer.layout import BlockTemplate, pair_blocks
from kvferry.transfer.ranks import messages as wire
from kvferry.transfer.ranks import reads
from kvferry.transfer.ranks.reads import RankReader
from tests.unit.transfer.test_plane import BACKENDS

POOL_BYTES = 4096
BEYOND = np.array([[0, POOL_BYTES - 16, 64, 64, 64]], dtype=np.int64)
"""A template of which block 0 ends beyond the peer's pool."""
TIMEOUT_S = 20.0


class Rank:
    """One rank's links, over one engine, and what it reported."""

    def __init__(self, backend: str) -> None:
        self.pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        options = EngineOptions(
            name=f"test-{time.monotonic_ns()}",
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
        )
        self.engine: TransferEngine = open_engine(backend, options)
        [self.region] = self.engine.register([self.pool])
        self.reports: list[wire.Report] = []
        self.links = RankReader(0, {backend: self.engine}, self.reports.append)
        self.secret = new_secret()
        self.engine.admit(self.secret)

    @property
    def description(self) -> EngineDescription:
        return EngineDescription(engine=self.engine.describe(), regions=(self.region.describe(),))

    def connect(
        self, link: int, description: EngineDescription, token: bytes, pieces: np.ndarray = BEYOND
    ) -> None:
        plan = {0: {0: BlockTemplate(pieces)}}
        command = wire.Connect(
            link=link, transfer=self.engine.name, ranks=(description,), plan=wire.pack_plan(plan),
            token=token, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        self.links.handle(command)

    def report(self, kind: type[Any], *others: Rank) -> Any:
        """The next report of a kind. The other ranks go on meanwhile."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for report in self.reports:
                if isinstance(report, kind):
                    self.reports.remove(report)
                    return report
            for rank in (self, *others):
                rank.engine.progress()
                rank.links.collect()
            time.sleep(0.001)
        raise AssertionError(f"no {kind.__name__}")


@pytest.fixture(params=BACKENDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    made = Rank(request.param), Rank(request.param)
    yield made
    for rank in made:
        rank.engine.close()


def changes(value: Any) -> Iterator[Any]:
    """A description with one of its members, however deep, turned into what no honest peer says."""
    nonsense = {
        int: [-1, 2**63, 2**64 - 1],
        str: ["", "a..b", "x" * 64, "a\0b", "elsewhere.invalid"],
        bytes: [b"", b"\0", b"\xff" * 40],
    }
    if isinstance(value, dict):
        for key, member in value.items():
            for other in changes(member):
                yield {**value, key: other}
    elif isinstance(value, list):
        for index, member in enumerate(value):
            for other in changes(member):
                yield [*value[:index], other, *value[index + 1 :]]
    elif type(value) in nonsense:
        yield from nonsense[type(value)]
    yield None


def damaged(packed: bytes) -> Iterator[bytes]:
    try:
        value = msgspec.msgpack.decode(packed)
    except msgspec.DecodeError:
        value = None
    if isinstance(value, dict):
        yield from map(msgspec.msgpack.encode, changes(value))
    yield from (b"", packed[:-1], packed + b"\0", bytes(len(packed)))


def test_nonsense_in_a_description_costs_its_link_only(ranks: tuple[Rank, Rank]) -> None:
    ours, theirs = ranks
    honest, token = theirs.description, mint(theirs.secret)
    nonsense = [EngineDescription(engine=each, regions=honest.regions) for each in damaged(honest.engine)]
    nonsense += [
        EngineDescription(engine=honest.engine, regions=(each,)) for each in damaged(honest.regions[0])
    ]
    nonsense += [EngineDescription(engine=honest.engine, regions=())]
    for link, description in enumerate(nonsense):
        ours.connect(link, description, token)
        ours.links.handle(wire.CloseLink(link=link))
    # A backend may not meet a peer again while a thread is still at an earlier attempt.
    for link in itertools.count(len(nonsense)):
        ours.connect(link, honest, token)
        while (report := ours.report(wire.Connected, theirs)).link != link:
            assert report.error is not None
        if report.error is None:
            break
        assert "an earlier attempt" in report.error


def test_a_read_beyond_the_peers_pool_is_refused_and_quiescent(ranks: tuple[Rank, Rank]) -> None:
    ours, theirs = ranks
    ours.connect(1, theirs.description, mint(theirs.secret))
    assert ours.report(wire.Connected, theirs).error is None
    blocks = wire.pack_blocks({0: pair_blocks([0], [0])})
    ours.links.handle(wire.Read(link=1, transfer_id="t", seq=0, blocks=blocks, timeout_s=TIMEOUT_S))
    ended = ours.report(wire.ReadEnded, theirs)
    assert (ended.ok, ended.reason, ended.quiescent) == (False, "refused", True)


@pytest.mark.parametrize("most", [2, 3, 8, 9])
def test_what_is_too_much_for_a_transfer_is_read_by_several(
    ranks: tuple[Rank, Rank], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MAX_SPANS", most)
    ours, theirs = ranks
    theirs.pool.copy_(torch.arange(POOL_BYTES) % 251)
    # Two pieces of 16 bytes of each block of 64, which are apart.
    pieces = np.array([[0, 0, 16, 64, 64], [32, 32, 16, 64, 64]], dtype=np.int64)
    ours.connect(1, theirs.description, mint(theirs.secret), pieces)
    assert ours.report(wire.Connected, theirs).error is None
    blocks = wire.pack_blocks({0: pair_blocks([5, 6, 20, 9], [1, 2, 3, 30])})
    ours.links.handle(wire.Read(link=1, transfer_id="t", seq=0, blocks=blocks, timeout_s=TIMEOUT_S))
    ended = ours.report(wire.ReadEnded, theirs)
    assert (ended.ok, ended.nbytes) == (True, 4 * 32)
    wanted = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    for local, remote in zip((5, 6, 20, 9), (1, 2, 3, 30), strict=True):
        for at in (0, 32):
            wanted[64 * local + at :][:16] = theirs.pool[64 * remote + at :][:16]
    assert torch.equal(ours.pool, wanted)
