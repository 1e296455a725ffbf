# SPDX-License-Identifier: Apache-2.0
"""Messages between the engine process and the process that computes the masks of constrained answers.

The frames are msgspec's msgpack over `transfer.ranks.channel`, as between the engine and its ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvferry.agent.config import AgentConfig

MaskFailure = Literal["nothing_allowed", "grammar_too_costly", "invalid_grammar"]
"""Why the next token of an answer cannot be constrained: the code of the error that its request ends with."""


class MaskWanted(msgspec.Struct, frozen=True, kw_only=True, tag="wanted"):
    """Compute which tokens may come next in one choice of the request `key`.

    `ids` are its output tokens since the last one. The first one of a request brings its grammar, in
    llguidance's JSON form.
    """

    ticket: int
    key: int
    choice: int
    ids: tuple[int, ...]
    grammar: str = ""


class RequestOver(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """A request wants no more masks, those under way included."""

    key: int


ToMasks = MaskWanted | RequestOver


class MasksReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process computes masks; or, with a `refusal`, why it cannot."""

    refusal: str = ""


class Mask(msgspec.Struct, frozen=True, kw_only=True, tag="mask"):
    """Which tokens may come next, a bit each, the lowest first."""

    ticket: int
    bits: bytes


class NoMaskFor(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """There is no mask, and the request cannot go on."""

    ticket: int
    failure: MaskFailure
    message: str


FromMasks = MasksReady | Mask | NoMaskFor


class MasksBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the process reads from its standard input at start, as JSON."""

    config: AgentConfig
    vocab_size: int
    eos_ids: tuple[int, ...]


def masks_address(run_dir: Path) -> Path:
    """The Unix socket on which the engine wants masks."""
    return run_dir / "masks"


def current_ticket_path(run_dir: Path) -> Path:
    """The file in which the process writes the ticket that it works on: so it is known whose end it met."""
    return run_dir / "current-mask"
