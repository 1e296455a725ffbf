# SPDX-License-Identifier: Apache-2.0
"""Numbers in what a peer says about itself, as narrow as the libraries need them that take them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65_535)]
MemoryAddress = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumBytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
