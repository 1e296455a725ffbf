# SPDX-License-Identifier: Apache-2.0
"""How backends describe the regions of a pool to peers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

MemoryAddress = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumBytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_SIZE = struct.Struct("<Q")


class SizedRegion:
    """A region that peers may ask for; its description is its size in bytes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def describe(self) -> bytes:
        return _SIZE.pack(self._nbytes)


def unpack_sizes(descriptions: Sequence[bytes]) -> tuple[int, ...]:
    """The sizes of a peer's `SizedRegion`s. Raises `struct.error`."""
    return tuple(int(_SIZE.unpack(description)[0]) for description in descriptions)
