# SPDX-License-Identifier: Apache-2.0
"""Loads: of traces, or made."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from kvferry.common.exceptions import message_of

MAX_TOKENS = 10_000_000
"""Of a prompt, or of an answer."""


class SizedArrival(NamedTuple):
    """A request: when it comes, and its sizes in tokens, at least 1 each."""

    at: float
    prompt_tokens: int
    answer_tokens: int


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


def read_trace(path: Path) -> list[SizedArrival]:
    """Read a trace, from time 0 on: Azure's CSV (by its header) or Mooncake's JSONL, gzipped or not.

    Raises `OSError`, and `ValueError` for what is neither.
    """
    raw = path.read_bytes()
    try:
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        found = sorted(_mooncake(raw) if raw.lstrip().startswith(b"{") else _azure(raw.decode()))
    except (ValueError, EOFError, TypeError, zlib.error, csv.Error) as error:
        raise ValueError(f"{path} is damaged, or no trace: {message_of(error)}") from error
    if not found:
        raise ValueError(f"{path} holds no requests")
    if (most := max(max(each[1:]) for each in found)) > MAX_TOKENS:
        raise ValueError(f"{path} has a request of {most} tokens, more than {MAX_TOKENS}")
    return [each._replace(at=each.at - found[0].at) for each in found]


def poisson(
    prompt: Callable[[Random], int], answer: Callable[[Random], int], rate: float, number: int, rng: Random
) -> list[SizedArrival]:
    """Make a load of requests that come at random times, so many per second on average."""
    at, made = 0.0, []
    for _ in range(number):
        at += rng.expovariate(rate)
        made.append(SizedArrival(at, prompt(rng), answer(rng)))
    return made


def at_rate(load: Sequence[SizedArrival], rate: float) -> list[SizedArrival]:
    """Return the load, faster or more slowly, so that it has so many requests per second."""
    factor = len(load) / max(load[-1].at, 1e-9) / rate
    return [each._replace(at=each.at * factor) for each in load]


def _mooncake(raw: bytes) -> Iterator[SizedArrival]:
    for line in msgspec.json.Decoder(_MooncakeLine).decode_lines(raw):
        yield SizedArrival(line.timestamp / 1000, max(1, line.input_length), max(1, line.output_length))


def _azure(text: str) -> Iterator[SizedArrival]:
    try:
        for row in csv.DictReader(io.StringIO(text)):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield SizedArrival(at, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
    except KeyError as error:
        raise ValueError(f"no column {error} in the trace") from error
