# SPDX-License-Identifier: Apache-2.0
"""Whether MORI-IO works here, tried in a child process, which it may end.

    python -m kvferry.transfer.backends.mori.probe '{"host": "127.0.0.1", "options": {}}'

The library ends its process when it finds no GPU topology or cannot register memory, so this process does
what a rank will do: one of two engines reads from the other. It prints a line of JSON, whose `reason` is null
if that worked. It registers little memory; a pool beyond RLIMIT_MEMLOCK still ends the rank.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.transfer.backends.mori.library import create_engine
from kvferry.transfer.backends.mori.settings import read_settings
from kvferry.transfer.rdma_devices import list_rdma_devices

_MODULE = "kvferry.transfer.backends.mori.probe"
_WAIT_MS = 5000
_NBYTES = 1 << 16
_GPU_DRIVER = Path("/dev/kfd")
_WHEEL_PYTHON = (3, 12)
_WHEEL_GLIBC = (2, 39)
"""What the wheel of amd-mori that the extra `mori` installs is built for (docs/sources.md#mori-io)."""
_NO_GPU = "ROCm-SMI"
"""In the message with which the library exits for want of ROCm SMI or of a GPU."""


def find_reason(host: str, options: Mapping[str, str]) -> str | None:
    """Why MORI-IO does not work on this machine, or None if it does, as a child process has tried.

    With `probe_s` 0 it is not tried, and None means only that nothing speaks against it.
    """
    if importlib.util.find_spec("mori") is None:
        return f"mori: not installed: {_how_to_install(sys.version_info[:2], *platform.libc_ver())}"
    settings = read_settings(options)
    endless = [
        each.name for each in list_rdma_devices() if not each.pci_address and settings.takes(each.name)
    ]
    if endless:
        return (
            f"mori: it would look for the PCI address of {', '.join(endless)} without end: there is none "
            f"(to do without: mori.devices=^{'+'.join(endless)})"
        )
    if not settings.probe_s:
        return None
    question = json.dumps({"host": host, "options": dict(options)})
    command = [sys.executable, "-m", _MODULE, question]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=settings.probe_s)
    except subprocess.TimeoutExpired:
        return f"mori: the probe did not end within {settings.probe_s} s"
    answers = [line for line in child.stdout.splitlines() if line.startswith('{"reason"')]
    if child.returncode or not answers:
        message = _last_line(child.stderr)
        hint = " (it needs ROCm SMI and a GPU, also to move host memory)" if _NO_GPU in message else ""
        return f"mori: child {_ending(child.returncode)}: {message}{hint}"
    reason = json.loads(answers[-1])["reason"]
    return f"mori: {reason}" if reason else None


def _how_to_install(python: tuple[int, int], libc: str, libc_version: str) -> str:
    """Return the command that installs it, or what its wheel needs and a machine with these lacks."""
    lacking = []
    if python != _WHEEL_PYTHON:
        lacking.append("Python {}.{} (this is {}.{})".format(*_WHEEL_PYTHON, *python))
    if libc != "glibc" or tuple(map(int, libc_version.split("."))) < _WHEEL_GLIBC:
        this = f"{libc} {libc_version}".strip() or "another C library"
        lacking.append("glibc {}.{} (this is {})".format(*_WHEEL_GLIBC, this))
    return f"amd-mori's wheel needs {' and '.join(lacking)}" if lacking else "pip install 'kvferry[mori]'"


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with {status - 256 if status > 127 else status}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _try(host: str, options: Mapping[str, str]) -> str | None:
    """Read from one engine to another, of host memory and, where there is an AMD GPU, of its memory."""
    try:
        import mori.io as library
    except (ImportError, OSError) as error:  # OSError: a shared library that it loads is missing
        return str(error)
    settings = read_settings(options)
    try:
        reader, owner = (create_engine(library, name, host, settings) for name in ("reader", "owner"))
        reader.register_remote_engine(owner.get_engine_desc())
        owner.register_remote_engine(reader.get_engine_desc())
        host_reason = _move(library, reader, owner, _host_buffers(library))
        if host_reason is None or not _GPU_DRIVER.exists():
            return host_reason
        return _move(library, reader, owner, _gpu_buffers(library))
    except (RuntimeError, OSError) as error:
        return str(error)


def _move(library: Any, reader: Any, owner: Any, buffers: list[tuple[Any, int, int, Any]]) -> str | None:
    mine, theirs = (
        engine.register_memory(address, _NBYTES, device, kind)
        for engine, (_, address, device, kind) in zip((reader, owner), buffers, strict=True)
    )
    session = reader.create_session(mine, theirs)
    if session is None:
        return "no way to move this machine's memory"
    status = session.batch_read([0], [0], [_NBYTES], reader.allocate_transfer_uid())
    status.WaitFor(_WAIT_MS)
    if not status.Succeeded():
        return f"a first read ended as {status.Code()}: {status.Message()}"
    return None


def _host_buffers(library: Any) -> list[tuple[Any, int, int, Any]]:
    """Two of (owner of the memory, address, device, kind)."""
    buffers = [ctypes.create_string_buffer(_NBYTES) for _ in range(2)]
    return [(each, ctypes.addressof(each), -1, library.MemoryLocationType.CPU) for each in buffers]


def _gpu_buffers(library: Any) -> list[tuple[Any, int, int, Any]]:
    import torch

    buffers = [torch.zeros(_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return [(each, each.data_ptr(), each.get_device(), library.MemoryLocationType.GPU) for each in buffers]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"reason": _try(asked["host"], asked["options"])}), flush=True)
    os._exit(0)  # the library's own shutdown may wait for a peer without limit
