# SPDX-License-Identifier: Apache-2.0
"""Messages of one pair, and the copies between them and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.transfer.backends.nccl.wire import HEAD_BYTES, PART_BYTES, Pieces
from kvferry.transfer.layout import OFFSET_MASK, REGION_SHIFT

if TYPE_CHECKING:
    import torch

_Region = TypeVar("_Region", "torch.Tensor", npt.NDArray[np.uint8])


class Copy(Protocol):
    """A copy out of a message."""

    def query(self) -> bool:
        """Whether the pool holds the bytes."""

    def synchronize(self) -> None:
        """Wait until it does."""


class Staging(Protocol):
    """One pair's access to the pool."""

    def on_stream(self) -> AbstractContextManager[None]:
        """Order the work of the pair's thread on a stream of its own."""

    def new_message(self) -> torch.Tensor:
        """Allocate the longest message, in the pool's kind of memory."""

    def fill(self, message: torch.Tensor, head: bytes, pieces: Pieces) -> torch.Tensor:
        """Gather pieces of the pool behind a head; returns the part of the message that is to be sent."""

    def head(self, message: torch.Tensor) -> bytes:
        """The head of a message that has been received."""

    def scatter(self, message: torch.Tensor, pieces: Pieces) -> Copy:
        """Begin to copy a received message into the pool. It must not be reused before that ends."""


def staging(pool: Sequence[torch.Tensor]) -> Staging:
    """Access to a pool of contiguous regions."""
    return GpuStaging(pool) if pool[0].is_cuda else HostStaging(pool)


class HostStaging:
    """A pool in host memory. numpy copies: torch would start a thread pool for every copying thread."""

    def __init__(self, pool: Sequence[torch.Tensor]) -> None:
        import torch

        self._regions = [region.view(-1).view(torch.uint8).numpy() for region in pool]

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_message(self) -> torch.Tensor:
        import torch

        return torch.empty(HEAD_BYTES + PART_BYTES, dtype=torch.uint8)

    def fill(self, message: torch.Tensor, head: bytes, pieces: Pieces) -> torch.Tensor:
        view = message.numpy()
        view[:HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
        at = HEAD_BYTES
        for offset, length in pieces:
            view[at : at + length] = _piece(self._regions, offset, length)
            at += length
        return message[:at]

    def head(self, message: torch.Tensor) -> bytes:
        return message.numpy()[:HEAD_BYTES].tobytes()

    def scatter(self, message: torch.Tensor, pieces: Pieces) -> Copy:
        view = message.numpy()
        at = HEAD_BYTES
        for offset, length in pieces:
            _piece(self._regions, offset, length)[:] = view[at : at + length]
            at += length
        return FinishedCopy()


class FinishedCopy:
    """A copy in host memory: it ends before `scatter` returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class GpuStaging:
    """A pool on a GPU. Copies out of messages use a second stream, on the transfer thread."""

    def __init__(self, pool: Sequence[torch.Tensor]) -> None:
        import torch

        self._regions = [region.view(-1).view(torch.uint8) for region in pool]
        self._device = pool[0].device
        self._pair_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def on_stream(self) -> AbstractContextManager[None]:
        import torch

        return torch.cuda.stream(self._pair_stream)

    def new_message(self) -> torch.Tensor:
        import torch

        return torch.empty(HEAD_BYTES + PART_BYTES, dtype=torch.uint8, device=self._device)

    def fill(self, message: torch.Tensor, head: bytes, pieces: Pieces) -> torch.Tensor:
        import torch

        message[:HEAD_BYTES].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        at = HEAD_BYTES
        for offset, length in pieces:
            message[at : at + length].copy_(_piece(self._regions, offset, length))
            at += length
        return message[:at]

    def head(self, message: torch.Tensor) -> bytes:
        return message[:HEAD_BYTES].cpu().numpy().tobytes()

    def scatter(self, message: torch.Tensor, pieces: Pieces) -> Copy:
        """The host has waited for the receive (`Communicator.wait`), so the bytes are there (L1)."""
        import torch

        with torch.cuda.stream(self._copy_stream):
            at = HEAD_BYTES
            for offset, length in pieces:
                _piece(self._regions, offset, length).copy_(message[at : at + length])
                at += length
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._copy_stream)
        return done


def _piece(regions: Sequence[_Region], offset: int, length: int) -> _Region:
    """The bytes at a virtual offset."""
    start = offset & OFFSET_MASK
    return regions[offset >> REGION_SHIFT][start : start + length]
