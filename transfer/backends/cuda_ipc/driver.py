# SPDX-License-Identifier: Apache-2.0
"""Calls of the CUDA driver that share a device's memory between processes (docs/sources.md#cuda-ipc), and
those that copy at a fraction of a tensor copy's CPU cost.

They call `libcuda` itself: torch shares tensors too, but counts their readers in files, and does not control
when a mapping ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvferry.transfer.backends.cuda_ipc.work import Words

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_CAPTURE_MODE_RELAXED = 2
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1


class CudaError(Exception):
    """A driver call failed; the message names the call and the error."""


class ExportedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of this process that another one may map.

    `handle` is of the whole allocation, which begins `offset` bytes before it.
    """

    handle: bytes
    offset: int
    nbytes: int


class MappedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of another process: its address for our device, and the start of the mapping that holds it."""

    address: int
    nbytes: int
    mapping: int


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    """`CUmemLocation`; zeros are no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`"""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The driver, for one device. Its context is the primary one, which torch uses too."""

    def __init__(self, device: int) -> None:
        """Raises `CudaError` without a driver or without such a device."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(str(error)) from error
        _declare(self._library)
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def close(self) -> None:
        """Release the context."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def enter(self) -> None:
        """Make the device's context the calling thread's, until `leave`."""
        self._call("cuCtxPushCurrent_v2", self._context)

    def leave(self) -> None:
        """Restore the context that the calling thread had before `enter`."""
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def export_memory(self, address: int, nbytes: int) -> ExportedMemory:
        """Export memory to other processes. Raises `CudaError` for kinds that cannot be exported."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return ExportedMemory(handle=bytes(handle.reserved), offset=address - base.value, nbytes=nbytes)

    def map_memory(self, exported: ExportedMemory) -> MappedMemory:
        """Map another process's memory into our device's context, whichever device it lies on.

        Raises `CudaError` if that process has ended or is on another host, or the devices cannot reach each
        other.
        """
        if len(exported.handle) != HANDLE_BYTES or exported.offset < 0 or exported.nbytes < 0:
            raise CudaError("not a handle of exported memory")
        mapping = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(exported.handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(mapping), handle, _LAZY_ENABLE_PEER_ACCESS)
        return MappedMemory(
            address=mapping.value + exported.offset, nbytes=exported.nbytes, mapping=mapping.value
        )

    def unmap_memory(self, mapped: MappedMemory) -> None:
        """Unmap. Memory whose owner is dead is free only once every mapping of it is gone."""
        with self._current():
            self._call("cuIpcCloseMemHandle", mapped.mapping)

    def read_bytes(self, mapped: MappedMemory) -> bytes:
        """Copy mapped memory to the host, and wait for it."""
        host = (ctypes.c_char * mapped.nbytes)()
        with self._current():
            self._call("cuMemcpyDtoH_v2", host, mapped.address, mapped.nbytes)
        return host.raw

    def upload(self, there: int, here: int, nbytes: int, stream: int) -> None:
        """Begin to copy pinned host memory to the device, in the order of a stream. Needs `enter`."""
        self._call("cuMemcpyHtoDAsync_v2", there, here, nbytes, stream)

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` is available: from CUDA 12.8 on."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words, stream: int) -> None:
        """Begin to copy between devices by the copy engines, in the order of a stream. Needs `enter`.

        The three arrays are contiguous and of one length.
        """
        attributes = _CopyAttributes(_SOURCE_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
        columns = [each.ctypes.data for each in (destinations, sources, sizes)]
        rest = (ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream)
        self._call("cuMemcpyBatchAsync", *columns, len(sizes), *rest)

    def relax_capture(self) -> None:
        """Let this thread query events while another captures a CUDA graph: the capture stays valid."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextmanager
    def _current(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({code})")


def _declare(library: ctypes.CDLL) -> None:
    """Declare argument types, without which ctypes truncates 64-bit numbers."""
    pointer, address = ctypes.c_void_p, ctypes.c_uint64
    signatures: dict[str, tuple[object, ...]] = {
        "cuInit": (ctypes.c_uint,),
        "cuDeviceGet": (pointer, ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (pointer, ctypes.c_int),
        "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
        "cuCtxPushCurrent_v2": (pointer,),
        "cuCtxPopCurrent_v2": (pointer,),
        "cuMemGetAddressRange_v2": (pointer, pointer, address),
        "cuIpcGetMemHandle": (pointer, address),
        "cuIpcOpenMemHandle_v2": (pointer, _IpcHandle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (address,),
        "cuMemcpyDtoH_v2": (pointer, address, ctypes.c_size_t),
        "cuMemcpyHtoDAsync_v2": (address, pointer, ctypes.c_size_t, pointer),
        "cuThreadExchangeStreamCaptureMode": (pointer,),
        "cuGetErrorName": (ctypes.c_int, pointer),
    }
    if hasattr(library, "cuMemcpyBatchAsync"):
        count = ctypes.c_size_t
        signatures["cuMemcpyBatchAsync"] = (*[pointer] * 3, count, pointer, pointer, count, pointer, pointer)
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes = list(types)
        function.restype = ctypes.c_int
