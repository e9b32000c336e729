"""The few calls of the CUDA runtime that torch does not offer: memory that peers can map, and copies without tensors.

The library is the one that torch has loaded, found by its name. torch's device and current context apply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from splash.core.errors import CapacityError, PlatformUnavailable

IPC_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses say what they are
_PEER_ATOMICS = 3  # cudaDevP2PAttrNativeAtomicSupported


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class Runtime:
    """The CUDA runtime. Addresses are ints.

    Raises:
        PlatformUnavailable: the library cannot be loaded, or a call fails; the message has CUDA's own words.
    """

    def __init__(self) -> None:
        name = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise PlatformUnavailable(f"cuda: torch needs {name}, which cannot be loaded: {error}") from None
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # a failed call leaves its error behind, for the next one to find
            text = f"{name}: {self._library.cudaGetErrorString(code).decode()} (error {code})"
            raise CapacityError(text) if code == _OUT_OF_MEMORY else PlatformUnavailable(f"cuda: {text}")

    def allocate(self, num_bytes: int) -> int:
        """Address of zeroed memory on the current device, aligned to at least 256 bytes.

        Raises:
            CapacityError: the device has no `num_bytes` left.
        """
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        self._call("cudaMemset", address, 0, ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        """A handle with which another process of this host can map memory from `allocate`."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(memoryview(handle))

    def map(self, handle: bytes) -> int:
        """Address, for the current device, of another process's memory. Devices must be peers."""
        address = ctypes.c_void_p()
        exported = IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), exported, ctypes.c_uint(_LAZY_PEER_ACCESS))
        assert address.value is not None
        return address.value

    def unmap(self, address: int) -> None:
        """Undo `map`."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def has_atomics(self, device: int, peer: int) -> bool:
        """Whether `device` can do atomic operations in a peer's memory: over NVLink it can, over PCIe not."""
        value = ctypes.c_int()
        self._call("cudaDeviceGetP2PAttribute", ctypes.byref(value), ctypes.c_int(_PEER_ATOMICS), device, peer)
        return bool(value.value)

    def copy(self, target: int, source: int, extents: np.ndarray, stream: int) -> None:
        """Queue copies of byte ranges, int64 [n, 3] of (to, from, bytes) relative to the two addresses."""
        call, kind, queue = self._library.cudaMemcpyAsync, ctypes.c_int(_DEFAULT_KIND), ctypes.c_void_p(stream)
        pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
        for to, start, size in extents.tolist():
            code = call(pointer(target + to), pointer(source + start), size_t(size), kind, queue)
            if code:
                self._call("cudaMemcpyAsync", pointer(target + to), pointer(source + start), size_t(size), kind, queue)


@cache
def runtime() -> Runtime:
    """The one runtime of this process."""
    return Runtime()


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of memory that the caller keeps alive.

    The device is given, not asked of the address: a peer's memory answers with the device that it lies on, and torch
    would refuse to mix it with tensors of this one.
    """
    c: Any = torch._C
    storage = c._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]


def check_peers(devices: Sequence[int]) -> None:
    """See that every device can read every other's memory.

    Raises:
        PlatformUnavailable: naming the first two that cannot.
    """
    for first in devices:
        for second in devices:
            if first != second and not torch.cuda.can_device_access_peer(first, second):
                raise PlatformUnavailable(
                    f"cuda: GPU {first} cannot read the memory of GPU {second}, which ranks must (NVLink, or PCIe with "
                    "peer access). Choose GPUs that are peers with CUDA_VISIBLE_DEVICES, or fewer ranks"
                )
