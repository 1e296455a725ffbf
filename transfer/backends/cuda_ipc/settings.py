# SPDX-License-Identifier: Apache-2.0
"""Options of the cuda_ipc backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.transfer.backends.common.settings import parse_settings

_MIXED_PART = 8
"""The kernel copies this fraction of a mixed launch: one in so many. Between two H200s, with spans of 2.4 MB:
an eighth 0.989 of a plain copy's speed, a quarter 0.985, half 0.965, everything 0.94, and nothing 0.92."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaIpcSettings:
    """Options of the cuda_ipc backend, as in `--transfer-options cuda_ipc.NAME=VALUE,…`.

    Args:
        sm_share: Share of the reading GPU's multiprocessors that a pull may occupy while the model rests.
            More is faster, up to the link's speed.
        busy_sm_share: The same for a pull that begins while the model computes, which cannot use those then.
            An eighth is over so soon that a gigabyte costs the model least: 0.8 ms, where a 64th or a
            quarter costs 1.4 (between two H200s).
        copy_engine_bytes: From so many bytes a span, on average, a pull that begins while the model computes
            is left to the GPU's copy engines: they take no multiprocessor, but more of the CPU. 0 for never.
        mixed_bytes: From so many bytes a span, on average, a pull that begins while the model rests is left
            to the copy engines but for an eighth: the kernel fills the pauses between their copies, which is
            the last twentieth of the link's speed. 0 for never.
        block_words: Words of 8 bytes that a multiprocessor has in flight at once. Few multiprocessors have to
            hide all of the link's latency.
        num_warps: Warps of 32 threads that share those; 32 fill half a multiprocessor.
    """

    sm_share: float = 0.125
    busy_sm_share: float = 0.125
    copy_engine_bytes: int = 262144
    mixed_bytes: int = 1048576
    block_words: int = 8192
    num_warps: int = 16

    def __post_init__(self) -> None:
        for name in ("sm_share", "busy_sm_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"cuda_ipc.{name} must be over 0 and at most 1, got {getattr(self, name)}")
        for name in ("copy_engine_bytes", "mixed_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"cuda_ipc.{name} must not be negative, got {getattr(self, name)}")
        for name, most in (("block_words", 1 << 17), ("num_warps", 32)):
            value = getattr(self, name)
            if not 0 < value <= most or value & (value - 1):
                raise ValueError(f"cuda_ipc.{name} must be a power of two, at most {most}, got {value}")

    def num_gathered(self, num_spans: int, nbytes: int, computing: bool) -> int:
        """Number of a launch's spans that the kernel copies; the copy engines copy the others."""
        least = self.copy_engine_bytes if computing else self.mixed_bytes
        if not least or nbytes < least * num_spans:
            return num_spans
        return 0 if computing else -(-num_spans // _MIXED_PART)

    def num_programs(self, multiprocessors: int, computing: bool) -> int:
        """Programs of one launch. The GPU spreads them, at first one per multiprocessor."""
        return max(1, int(multiprocessors * (self.busy_sm_share if computing else self.sm_share)))


def read_settings(options: Mapping[str, str]) -> CudaIpcSettings:
    """Read the options as text. Raises ValueError that names the wrong one."""
    return parse_settings("cuda_ipc", CudaIpcSettings, options)
