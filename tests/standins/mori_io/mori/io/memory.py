# SPDX-License-Identifier: Apache-2.0
"""Reading and writing another process's memory, with no help from that process."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

PIECES_PER_CALL = 1024
"""The kernel's IOV_MAX."""
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_read, _write = _libc.process_vm_readv, _libc.process_vm_writev
for _call in (_read, _write):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


class MemoryGone(Exception):
    """The other process, or the memory, is not there (any more)."""


def allow_readers() -> None:
    """Let processes of the same user reach our memory even where the Yama module guards it."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def started(pid: int) -> int:
    """When a process started, in clock ticks: with the pid its identity. Raises `MemoryGone`."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise MemoryGone(f"no process {pid}") from error
    if after_name[0] == "Z":
        raise MemoryGone(f"process {pid} is dead")
    return int(after_name[19])


def copy(pid: int, pieces: Any, *, read: bool) -> None:
    """Copy pieces, an int64 array of (local address, remote address, length). Raises `MemoryGone`."""
    call = _read if read else _write
    for first in range(0, len(pieces), PIECES_PER_CALL):
        some = pieces[first : first + PIECES_PER_CALL]
        local = np.ascontiguousarray(some[:, [0, 2]])
        remote = np.ascontiguousarray(some[:, [1, 2]])
        moved = call(pid, local.ctypes.data, len(some), remote.ctypes.data, len(some), 0)
        if moved != some[:, 2].sum():
            raise MemoryGone(f"process {pid}: moved {moved} bytes, errno {ctypes.get_errno()}")
