# SPDX-License-Identifier: Apache-2.0
"""One reader in this process, and serving peers in processes of their own, for every backend."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.engine import (
    EngineOptions,
    Peer,
    Status,
    Transfer,
    TransferEngine,
    Usability,
    open_engine,
    parse_backend_options,
    usable,
)
from kvferry.transfer.options import BACKENDS
from tests.contract.pools import allocations, pattern
from tests.contract.serving_peer import serve
from tests.helpers.forked import Forked
from tests.helpers.gpu import count_gpus, needs_gpus
from tests.helpers.waiting import patient, wait_until
from tests.standins import mori_io

POOL_BYTES = 16 << 20
DEADLINE_S = patient(20.0)
OPTIONS = parse_backend_options(os.environ.get("KVFERRY_TEST_TRANSFER_OPTIONS", ""))
"""Options of backends on a machine that needs some, as an agent takes them."""


def engine_options(name: str, backend: str) -> EngineOptions:
    """What an engine of these tests is opened with."""
    return EngineOptions(
        name=name,
        bind_host="127.0.0.1",
        advertise_host="127.0.0.1",
        backend_options=OPTIONS.get(backend, {}),
    )


class ServingPeer(Forked):
    """The other process."""

    def __init__(
        self,
        backend: str,
        fault: str | None = None,
        device: str = "cpu",
        pool_bytes: int = POOL_BYTES,
        num_regions: int = 1,
    ) -> None:
        self.secret = new_secret()
        options = OPTIONS.get(backend, {})
        super().__init__(serve, backend, options, pool_bytes, self.secret, device, fault, num_regions)
        self.engine, self.regions = self.said


class Reader:
    """An engine in this process with a pool of its own."""

    def __init__(
        self, backend: str, device: str = "cpu", *, computing: bool = False, num_regions: int = 1
    ) -> None:
        """`computing`: as if a model ran on the device all the time."""
        self._regions = allocations(torch.zeros(POOL_BYTES, dtype=torch.uint8, device=device), num_regions)
        options = engine_options(f"reader-{backend}", backend)
        if computing:
            options.computing.set()
        self.engine: TransferEngine = open_engine(backend, options)
        self._secret = new_secret()
        self.engine.admit(self._secret)
        self._described = [region.describe() for region in self.engine.register(self._regions)]
        self._settle()

    @property
    def pool(self) -> np.ndarray:
        """The bytes of the pool as they are now."""
        return torch.cat([region.cpu() for region in self._regions]).numpy()

    def clear(self) -> None:
        for region in self._regions:
            region.zero_()
        self._settle()

    def restore(self, pool: np.ndarray) -> None:
        """Set every byte of the pool, in place."""
        for region, part in zip(self._regions, np.split(pool, len(self._regions)), strict=True):
            region.copy_(torch.from_numpy(part))
        self._settle()

    def connect(
        self, peer: ServingPeer, token: bytes | None = None, timeout_s: float = patient(10.0)
    ) -> Peer:
        """Connect and wait for it. Raises what the backend raises."""
        return self._connect(
            peer.engine, peer.regions, mint(peer.secret) if token is None else token, timeout_s
        )

    def connect_to_itself(self, timeout_s: float = patient(10.0)) -> Peer:
        """Connect the engine to itself, so that it reads its own pool."""
        return self._connect(self.engine.describe(), self._described, mint(self._secret), timeout_s)

    def _connect(self, engine: bytes, regions: list[bytes], token: bytes, timeout_s: float) -> Peer:
        connection = self.engine.connect(engine, regions, token, timeout_s)
        self.wait(connection.poll)
        return connection

    def read(
        self, peer: Peer, spans: list[tuple[int, int, int]], timeout_s: float = patient(10.0)
    ) -> Transfer:
        return self.engine.read(peer, np.array(spans, dtype=np.int64).reshape(-1, 3), timeout_s)

    def finish(self, transfer: Transfer) -> Status:
        """Progress until the transfer has ended."""
        self.wait(lambda: transfer.poll() is not Status.PENDING)
        return transfer.poll()

    def _settle(self) -> None:
        """What we wrote to the pool is in it: backends do not wait for our stream. Nor do we for theirs: an
        NCCL kernel runs until the peer has sent what this very thread may yet have to ask it for.
        """
        if self._regions[0].is_cuda:
            torch.cuda.current_stream(self._regions[0].device).synchronize()

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, DEADLINE_S, step=self.engine.progress)


@pytest.fixture(scope="session")
def served_bytes() -> np.ndarray:
    return pattern(POOL_BYTES)


@pytest.fixture(scope="package")
def mori_standin() -> Iterator[None]:
    """Where AMD's library is not installed, its backend is held to the contract on the stand-in."""
    if importlib.util.find_spec("mori") is not None:
        yield
        return
    with mori_io.on_path():
        yield


@pytest.fixture(scope="package")
def usability(mori_standin: None) -> Callable[[str], Usability]:
    """Whether a backend works here; each is tried once."""
    return functools.cache(lambda name: usable(name, OPTIONS.get(name)))


ON_HOSTS = [name for name in BACKENDS if name != "cuda_ipc"]
ON_GPUS = [
    pytest.param(f"{name}@cuda", marks=(pytest.mark.gpu, needs_gpus(count)))
    for name, count in (("cuda_ipc", 1), ("nixl", 1), ("nccl", 2))
]
"""Between two GPUs where there are two, else within one, which NCCL refuses."""
PEER_GPU, READER_GPU = "cuda:0", f"cuda:{min(1, max(0, count_gpus() - 1))}"


@pytest.fixture(params=[*ON_HOSTS, *ON_GPUS])
def cell(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend, and the kind of memory that the pools are in."""
    name, _, device = str(request.param).partition("@")
    return name, device or "cpu"


@pytest.fixture
def backend(cell: tuple[str, str], usability: Callable[[str], Usability]) -> str:
    name = cell[0]
    if not usability(name).ok:
        pytest.skip(f"{name} does not work here: {usability(name).reason}")
    return name


@pytest.fixture
def reader(backend: str, cell: tuple[str, str]) -> Iterator[Reader]:
    made = Reader(backend, "cpu" if cell[1] == "cpu" else READER_GPU)
    yield made
    made.engine.close()


@pytest.fixture
def start_peer(backend: str, cell: tuple[str, str]) -> Iterator[Callable[..., ServingPeer]]:
    device = "cpu" if cell[1] == "cpu" else PEER_GPU
    started: list[ServingPeer] = []

    def start(fault: str | None = None, num_regions: int = 1) -> ServingPeer:
        started.append(ServingPeer(backend, fault, device, num_regions=num_regions))
        return started[-1]

    yield start
    for peer in started:
        peer.close()
