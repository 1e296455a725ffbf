# SPDX-License-Identifier: Apache-2.0
"""Training examples of both tasks, sampled as token tensors on the device that trains.

Every example is first laid out in cells, one per token that it could have; a mask says which cells it has,
and `pack` closes the gaps. Half of the rows are raw completions, half are chats.

A training row of the recall task asks many times: after the pairs come queries, each followed by its answer,
until the row is full. One row so teaches dozens of look-ups. The first of them is exactly a held-out prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tools.train.tasks import MOST_DIGITS, is_held_out
from tools.train.vocabulary import ASSISTANT, END, FIRST_KEY, KEYS, PAD, USER

IGNORED = -100  # a target that cross_entropy skips
ADDITION_WIDTH = 16  # <|user|> 999 + 999 = <|end|><|assistant|> 1998 <|end|>
MEAN_PAIR_TOKENS = 6.5
SHORTEST_PAIR_TOKENS = 6


class Batch(NamedTuple):
    """`ids` and `targets`, both [rows, width] int64: the target of a position is the next token where that
    belongs to an answer, IGNORED elsewhere."""

    ids: Tensor
    targets: Tensor


class Cells(NamedTuple):
    """Three [rows, cells] tensors: the token of each cell, whether it exists, whether it is in an answer."""

    tokens: Tensor
    exists: Tensor
    answer: Tensor


def pack(cells: Cells, width: int) -> Batch:
    """Closes the gaps of each row, cuts it at `width` tokens and pads it on the right."""
    order = (~cells.exists).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    exists = cells.exists.gather(1, order)
    ids = torch.where(exists, cells.tokens.gather(1, order), PAD)
    answer = exists & cells.answer.gather(1, order)
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = torch.where(answer[:, 1:], ids[:, 1:], IGNORED)
    return Batch(ids, targets)


def recall_batch(generator: torch.Generator, rows: int, width: int) -> Batch:
    """Rows of `width` tokens: pairs fill between a quarter and nearly all of a row, queries the rest."""
    device = generator.device
    capacity = width // SHORTEST_PAIR_TOKENS
    share = 0.25 + 0.73 * torch.rand(rows, generator=generator, device=device)
    count = (share * width / MEAN_PAIR_TOKENS).long().clamp(2, capacity)
    chat = torch.rand(rows, generator=generator, device=device) < 0.5
    keys = FIRST_KEY + torch.rand(rows, len(KEYS), generator=generator, device=device).argsort(dim=1)
    keys = keys[:, :capacity]
    digits = _digits(torch.randint(10, (rows, capacity, 4), generator=generator, device=device))
    has_fourth = torch.rand(rows, capacity, generator=generator, device=device) < 0.5
    asked = torch.rand(rows, capacity, generator=generator, device=device)
    asked = (asked * count[:, None]).long().clamp(max=capacity - 1)
    opening = Cells(
        torch.full((rows, 1), USER, device=device), chat[:, None], torch.zeros_like(chat)[:, None]
    )
    parts = (
        opening,
        _pair_cells(keys, digits, has_fourth, count),
        _query_cells(keys, digits, has_fourth, asked, chat),
    )
    return pack(Cells(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True))), width)


def addition_batch(generator: torch.Generator, rows: int) -> Batch:
    """One addition a row; those that are held out teach nothing."""
    device = generator.device
    a, b = _numbers(generator, rows), _numbers(generator, rows)
    chat = torch.rand(rows, generator=generator, device=device) < 0.5
    always = torch.ones_like(chat)
    columns: list[tuple[Tensor, Tensor, bool]] = [(_fill(a, USER), chat, False)]
    columns += _number_columns(a, MOST_DIGITS, answer=False)
    columns.append((_fill(a, ord("+")), always, False))
    columns += _number_columns(b, MOST_DIGITS, answer=False)
    columns.append((_fill(a, ord("=")), always, False))
    columns += [(_fill(a, END), chat, False), (_fill(a, ASSISTANT), chat, False)]
    columns += _number_columns(a + b, MOST_DIGITS + 1, answer=True)
    columns.append((_fill(a, END), always, True))
    tokens = torch.stack([column[0] for column in columns], dim=1)
    exists = torch.stack([column[1] for column in columns], dim=1)
    taught: Tensor = ~is_held_out(a, b)
    answer = torch.stack([taught if column[2] else ~always for column in columns], dim=1)
    return pack(Cells(tokens, exists, answer), ADDITION_WIDTH)


def _pair_cells(keys: Tensor, digits: Tensor, has_fourth: Tensor, count: Tensor) -> Cells:
    """`key=dddd;` for the first `count` keys of each row."""
    tokens = torch.stack([keys, _fill(keys, ord("=")), *digits.unbind(dim=2), _fill(keys, ord(";"))], dim=2)
    exists = (torch.arange(keys.shape[1], device=keys.device) < count[:, None])[:, :, None].expand_as(tokens)
    exists = exists.clone()
    exists[:, :, 5] &= has_fourth
    return Cells(tokens.flatten(1), exists.flatten(1), torch.zeros_like(exists).flatten(1))


def _query_cells(keys: Tensor, digits: Tensor, has_fourth: Tensor, asked: Tensor, chat: Tensor) -> Cells:
    """`?key=dddd<|end|>` for each asked index; in a chat every query but the first opens a user's turn."""
    key = keys.gather(1, asked)
    value = digits.gather(1, asked[:, :, None].expand(-1, -1, 4))
    opening, question, equals = (_fill(key, token) for token in (USER, ord("?"), ord("=")))
    turn, assistant = _fill(key, END), _fill(key, ASSISTANT)
    tokens = torch.stack(
        [opening, question, key, equals, turn, assistant, *value.unbind(dim=2), _fill(key, END)], dim=2
    )
    exists = torch.ones_like(tokens, dtype=torch.bool)
    for chat_only in (0, 4, 5):
        exists[:, :, chat_only] = chat[:, None]
    exists[:, 0, 0] = False
    exists[:, :, 9] = has_fourth.gather(1, asked)
    answer = torch.zeros_like(exists)
    answer[:, :, 6:] = True
    return Cells(tokens.flatten(1), exists.flatten(1), answer.flatten(1))


def _numbers(generator: torch.Generator, rows: int) -> Tensor:
    """Numbers of 1 to 3 digits, every length equally likely; [rows]."""
    device = generator.device
    length = torch.randint(1, MOST_DIGITS + 1, (rows,), generator=generator, device=device)
    lowest = torch.where(length > 1, 10 ** (length - 1), 0)
    share = torch.rand(rows, generator=generator, device=device)
    return (lowest + share * (10**length - lowest)).long().clamp(max=10**MOST_DIGITS - 1)


def _number_columns(number: Tensor, places: int, *, answer: bool) -> list[tuple[Tensor, Tensor, bool]]:
    """The decimal digits of `number`, most significant first; leading zeros do not exist."""
    columns = []
    for power in reversed(range(places)):
        rest = number // 10**power
        exists = rest > 0 if power else torch.ones_like(rest, dtype=torch.bool)
        columns.append((_digits(rest % 10), exists, answer))
    return columns


def _digits(values: Tensor) -> Tensor:
    return values + ord("0")


def _fill(like: Tensor, token: int) -> Tensor:
    return torch.full_like(like, token)
