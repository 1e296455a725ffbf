# SPDX-License-Identifier: Apache-2.0
"""One rank of an SGLang server as the transfer plane sees it: its KV's memory, its identity, its load."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.agent.plugin.identity import config_digest, files_digest, short_digest, tokenizer_digest
from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.sglang.rooms import Rooms
from kvferry.common.hashing import Purpose, digest
from kvferry.proxy.wire.registration import WorkReport
from kvferry.transfer.layout import MAX_TEMPLATE_ROWS, KVGeometry, LayerView, split_heads
from kvferry.transfer.memory import KVPool, pool_of_layers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Memory of a GPU, for `torch.as_tensor`."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def memory_at(address: int, nbytes: int, device: str) -> torch.Tensor:
    """The bytes at an address of the host (`device` is cpu) or of a GPU, as a tensor; they are not copied."""
    import torch

    if device == "cpu":
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(address, nbytes), device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """Which of the KV heads a rank has. What all ranks have, as with MLA, is one head.

    A page holds them token by token, so the KV of one head is a run of bytes for each token. Where that makes
    too many (`is_whole`), a page is not split, and only ranks of equally many can exchange KV.
    """

    rank: int
    num_ranks: int
    total: int
    is_whole: bool = False

    @classmethod
    def of(cls, args: Any, rank: int, num_ranks: int, total: int) -> HeadShare:
        """`args` is SGLang's `KVArgs`. Raises `NotServed` if the heads are not split evenly."""
        try:
            split_heads(total, num_ranks, rank)
        except ValueError as error:
            raise NotServed(str(error)) from error
        runs = len(args.kv_data_ptrs) * args.page_size * total
        is_whole = total > 1 and runs > MAX_TEMPLATE_ROWS
        return cls(rank=rank, num_ranks=num_ranks, total=total, is_whole=is_whole)

    @property
    def heads(self) -> range:
        """By their number over all ranks."""
        return split_heads(self.total, self.num_ranks, self.rank)

    @property
    def runs(self) -> tuple[range, int]:
        """The heads that a page is split into, and of how many."""
        return (range(1), 1) if self.is_whole else (self.heads, self.total)

    def sources(self, num_ranks: int) -> dict[int, range]:
        """Which of this rank's heads to read from which ranks of a server that has so many.

        All ranks that SGLang pairs this one with are named, with no heads where another has the same. Raises
        ValueError if they do not have all.
        """
        per_rank = max(1, num_ranks // self.num_ranks)
        first = self.rank * num_ranks // self.num_ranks
        missing = self.heads
        sources = {}
        for rank in range(first, first + per_rank):
            theirs = split_heads(self.total, num_ranks, rank)
            found = (
                range(missing.start, min(missing.stop, theirs.stop)) if missing.start in theirs else range(0)
            )
            missing = missing[len(found) :]
            sources[rank] = found
        if missing:
            raise ValueError(
                f"{num_ranks} ranks do not pair with {self.num_ranks}: head {missing[0]} is missing"
            )
        return sources


def pool_of(args: Any, device: str, share: HeadShare) -> KVPool:
    """A rank's KV: one buffer for each layer's K and each layer's V, or for both, of pages of equal size.

    `args` is SGLang's `KVArgs`. Raises `NotServed` for another layout.
    """
    items, lengths = set(args.kv_item_lens), set(args.kv_data_lens)
    if len(items) != 1 or len(lengths) != 1:
        raise NotServed(f"the KV cache's layout is not served: pages of {sorted(items)} bytes")
    [item], [length] = items, lengths
    num_pages = length // item
    heads, total = share.runs
    tokens = args.page_size if total > 1 else 1
    if item % (tokens * len(heads)):
        raise NotServed(f"the KV cache's layout is not served: pages of {item} bytes for {len(heads)} heads")
    shape = (num_pages, tokens, len(heads), -1) if tokens > 1 else (num_pages, len(heads), -1)
    views = [
        LayerView(
            name=number.to_bytes(2, "big"),
            tensor=memory_at(address, length, device)[: num_pages * item].view(shape),
            planes=tokens,
            heads=heads,
            total_heads=total,
        )
        for number, address in enumerate(args.kv_data_ptrs)
    ]
    try:
        return pool_of_layers([views], num_pages)
    except ValueError as error:
        raise NotServed(f"the KV cache's layout is not served: {error}") from error


def geometry_of(args: Any, model: Any, *, version: str, share: HeadShare) -> KVGeometry:
    """The shape of the KV over all ranks, and of the metadata beside it.

    Args:
        args: SGLang's `KVArgs`; `model`: its `ModelConfig`.
    """
    heads, total = share.runs
    layout = (
        version,
        args.kv_cache_dtype_str,
        str(args.kv_layout),
        str(args.kv_layer_ids),
        str(args.aux_item_lens),
    )
    order = short_digest(Purpose.SGLANG_LAYOUT, *layout)
    return KVGeometry(
        num_layers=len(args.kv_data_ptrs),
        num_kv_heads=total,
        head_dim=args.kv_item_lens[0] // args.page_size // len(heads),
        dtype="uint8",
        block_size=args.page_size,
        rope=f"config {config_digest(model.hf_text_config, Purpose.SGLANG_CONFIG)}",
        order=f"{order} heads of {share.rank} of {share.num_ranks}" if share.is_whole else order,
    )


def weights_of(model: Any, load_format: str, seed: int) -> str:
    """16 hex digits: equal for equal weights of a local checkpoint; else of its name and revision.

    `model` is SGLang's `ModelConfig`.
    """
    loaded = f"{model.quantization} {model.dtype}"
    directory = Path(model.model_path)
    config = config_digest(model.hf_text_config, Purpose.SGLANG_CONFIG)
    if load_format == "dummy":
        return short_digest(Purpose.SGLANG_WEIGHTS, "dummy", loaded, config, str(seed))
    if directory.is_dir():
        files = files_digest(directory, Purpose.SGLANG_FILES)
        return short_digest(Purpose.SGLANG_WEIGHTS, "files", loaded, files)
    return short_digest(
        Purpose.SGLANG_WEIGHTS, "by name", loaded, model.model_path, str(model.revision), config
    )


def tokenizer_of(args: Any) -> str:
    """`args` is SGLang's `ServerArgs`."""
    name = args.tokenizer_path or args.model_path
    return tokenizer_digest(name, args.revision, Purpose.SGLANG_TOKENIZER)


def prompt_hash(ids: Sequence[int]) -> str:
    """Of all that a prompt's KV depends on, but for the weights: images are in the ids, by their hashes."""
    return digest(Purpose.SGLANG_PROMPT, np.asarray(ids, dtype="<i8").tobytes(), size=16).hex()


def read_row(args: Any, index: int) -> bytes:
    """What SGLang's metadata buffers (`KVArgs.aux_…`) hold of one request, one buffer after the other."""
    parts = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    return b"".join(ctypes.string_at(address + index * nbytes, nbytes) for address, nbytes in parts)


def write_row(args: Any, index: int, row: bytes) -> None:
    """The reverse. Raises ValueError if the row is of another length."""
    if len(row) != sum(args.aux_item_lens):
        raise ValueError(f"metadata of {len(row)} bytes, expected {sum(args.aux_item_lens)}")
    at = 0
    for address, nbytes in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True):
        ctypes.memmove(address + index * nbytes, row[at : at + nbytes], nbytes)
        at += nbytes


class SchedulerLoad:
    """An `EngineLoad` of SGLang's scheduler. Any thread may ask: nothing is changed."""

    capacity = None

    def __init__(self, scheduler: Any, rooms: Rooms, *, is_decode: bool, page_size: int) -> None:
        self._scheduler = scheduler
        self._rooms = rooms
        self._is_decode = is_decode
        self._page_size = page_size
        self.transfers = 0
        """Senders and receivers that SGLang has not cleared."""

    @property
    def requests(self) -> int:
        if not self._is_decode:
            return self.transfers
        prealloc = self._scheduler.disagg_decode_prealloc_queue
        retracted = len(prealloc.retracted_queue) if prealloc is not None else 0  # None while it starts
        return self.transfers + len(self._scheduler.waiting_queue) + retracted + self.running

    @property
    def running(self) -> int:
        return len(self._scheduler.running_batch.reqs) if self._is_decode else self.transfers

    @property
    def steps(self) -> int:
        """Passes of its loop: a prefill server that only waits for readers runs no batch."""
        return int(self._scheduler.forward_ct) + self._rooms.polls

    @property
    def leased_blocks(self) -> int:
        return self._rooms.leased_pages

    @property
    def work(self) -> WorkReport:
        return self._rooms.counts.work(self._rooms.leases_expired)

    def free_pages(self) -> int:
        """Those that hold nothing which a request needs."""
        free = self._scheduler.token_to_kv_pool_allocator.available_size()
        return (int(free) + int(self._scheduler.tree_cache.evictable_size())) // self._page_size
