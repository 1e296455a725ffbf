# SPDX-License-Identifier: Apache-2.0
"""The faults of the stand-in, set by the environment variable MORI_STANDIN_FAULT.

Faults are written `kind:key=value,...` and joined by `;`. Work requests are counted per queue pair, from 0.

    topology                        end the process when a backend is made, as the real library does
    no_device                       there is no RDMA device
    no_pci_address                  never return from making a backend: a device without a PCI address
    registration:above=BYTES        abort the process when more bytes than that are registered at once
    fail:after=N[,lane=L]           break the queue pair at work request N
    stall:seconds=S,after=N[,lane=L]    let work request N wait that long
    delay:seconds=S                 let every work request wait that long
    jitter:seconds=S                let every work request wait up to that long: batches end out of order
    connect:seconds=S               take that long to make queue pairs to a peer
    unheard                         tell of no dead peer: transfers alone show it
    init:seconds=S                  leave a new status in INIT that long
    full:after=N                    refuse the Nth batch once its first part is posted: the send queue is full
    die:after=N[,lane=L]            end the process, unasked, at work request N
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

VARIABLE = "MORI_STANDIN_FAULT"

_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "topology": frozenset(),
        "no_device": frozenset(),
        "no_pci_address": frozenset(),
        "registration": frozenset({"above"}),
        "fail": frozenset({"after", "lane"}),
        "stall": frozenset({"seconds", "after", "lane"}),
        "delay": frozenset({"seconds"}),
        "jitter": frozenset({"seconds"}),
        "connect": frozenset({"seconds"}),
        "unheard": frozenset(),
        "init": frozenset({"seconds"}),
        "full": frozenset({"after"}),
        "die": frozenset({"after", "lane"}),
    }
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    after: int = 0
    lane: int | None = None
    seconds: float = 0.0
    above: int = 0

    def hits(self, lane: int, number: int) -> bool:
        """Whether it is this work request of this queue pair that suffers."""
        return number == self.after and self.lane in (None, lane)


Faults = Mapping[str, Fault]


def from_environment() -> Faults:
    """The faults by kind. Raises ValueError for one that makes no sense."""
    texts = [text for text in os.environ.get(VARIABLE, "").split(";") if text]
    return MappingProxyType(dict(_parse(text) for text in texts))


def _parse(text: str) -> tuple[str, Fault]:
    kind, _, arguments = text.partition(":")
    pairs = [pair.partition("=") for pair in arguments.split(",") if pair]
    given = {key: value for key, _, value in pairs}
    if kind not in _KEYS or not given.keys() <= _KEYS[kind]:
        raise ValueError(f"{VARIABLE}: {text!r}")
    values: dict[str, Any] = {
        key: float(value) if key == "seconds" else int(value) for key, value in given.items()
    }
    return kind, Fault(**values)
