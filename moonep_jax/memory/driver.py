"""The narrow part of the CUDA driver that symmetric memory needs: `Driver`, and `load()` for the real one.

The real one is `cuda.bindings.driver` of the package cuda-python, imported when it is first needed. An *ordinal* is the
CUDA driver's number of a device in this process, never JAX's `device.id` and never a rank. An *allocation* is a
CUmemGenericAllocationHandle: physical memory, which lives until it is released and no mapping is left. Never multicast.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

from moonep_jax.errors import MoonEPError, SetupError, message
from moonep_jax.handles import FABRIC_BYTES, Kind

OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(MoonEPError):
    """A call of the CUDA driver that failed: `call`, its error's number `code` and `name`."""

    def __init__(self, call: str, code: int, name: str, about: str = "") -> None:
        super().__init__(f"{call}{f' ({about})' if about else ''} returned {name} ({code})")
        self.call, self.code, self.name = call, code, name


class Attributes(NamedTuple):
    """What a device says it supports. Only a trial shows whether it is so; multicast is for reports, never used."""

    vmm: bool
    fd: bool
    fabric: bool
    multicast: bool


class Facts(NamedTuple):
    """What a device is: its name, compute capability, memory in bytes, and PCI address as NVML spells it."""

    name: str
    compute: tuple[int, int]
    total_bytes: int
    pci: str


class Link(NamedTuple):
    """What the driver says of a pair of devices: direct access, atomics across it, and its rank (0 is fastest)."""

    access: bool
    atomics: bool
    rank: int


class Driver(Protocol):
    """The calls; sizes in bytes. Every one raises DriverError, and then has changed nothing."""

    def attributes(self, ordinal: int) -> Attributes:
        """What the device says of itself."""
        ...

    def version(self) -> int:
        """The newest CUDA version that the driver runs, 1000 * major + 10 * minor."""
        ...

    def facts(self, ordinal: int) -> Facts:
        """What the device is; for reports."""
        ...

    def link(self, ordinal: int, other: int) -> Link:
        """What connects two devices; for reports."""
        ...

    def granularity(self, ordinal: int, kind: Kind | None) -> int:
        """What sizes and addresses of the device's memory must be multiples of."""
        ...

    def free_bytes(self, ordinal: int) -> int:
        """Memory of the device that is free now."""
        ...

    def create(self, ordinal: int, nbytes: int, kind: Kind | None) -> int:
        """A new allocation on the device, exportable as `kind`."""
        ...

    def export_fd(self, allocation: int) -> int:
        """A new descriptor of the allocation, not inherited by children; the caller closes it."""
        ...

    def export_fabric(self, allocation: int) -> bytes:
        """The allocation's fabric handle, 64 bytes."""
        ...

    def import_fd(self, fd: int) -> int:
        """The allocation behind a descriptor, which stays the caller's."""
        ...

    def import_fabric(self, handle: bytes) -> int:
        """The allocation behind a fabric handle."""
        ...

    def release(self, allocation: int) -> None:
        """Gives up a created or imported allocation; mappings keep the memory alive."""
        ...

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserves addresses."""
        ...

    def free_address(self, address: int, nbytes: int) -> None:
        """Undoes reserve()."""
        ...

    def map(self, address: int, nbytes: int, allocation: int) -> None:
        """Maps an allocation at reserved addresses; nobody may access it yet."""
        ...

    def set_access(self, address: int, nbytes: int, ordinals: Sequence[int]) -> None:
        """Lets these devices read and write a mapping."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undoes map()."""
        ...

    def zero(self, ordinal: int, address: int, nbytes: int) -> None:
        """Zeroes memory from the device; done when this returns."""
        ...

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        """Copies bytes to the device's address; done when this returns."""
        ...

    def read(self, ordinal: int, address: int, nbytes: int) -> bytes:
        """Copies bytes from an address that the device can access."""
        ...


def _text(name: bytes) -> str:
    return name.split(b"\0")[0].decode(errors="replace")


@functools.cache
def load() -> Driver:
    """The driver of this process, one object. Raises SetupError, saying what is missing, where there is none."""
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        fix = "pip install 'moonep-jax[cuda13]', or cuda-python of the CUDA version that jax uses"
        wrong = "the CUDA backend needs the package cuda-python"
        raise SetupError(message("setup", wrong, error, "module cuda.bindings.driver", fix)) from error
    return CudaDriver(bindings)


class CudaDriver:
    """`Driver` over cuda.bindings.driver. Uses each device's primary context, which JAX uses, too, and changes none."""

    def __init__(self, bindings: Any) -> None:
        """bindings: the module cuda.bindings.driver. Raises SetupError when there is no driver to bind to."""
        self._cu = bindings
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        handle_type = bindings.CUmemAllocationHandleType
        self._types: dict[Kind | None, Any] = {
            None: handle_type.CU_MEM_HANDLE_TYPE_NONE,
            "fd": handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            "fabric": handle_type.CU_MEM_HANDLE_TYPE_FABRIC,
        }
        try:
            self._call("cuInit", 0)
        except Exception as error:  # the bindings raise errors of their own when they find no libcuda
            fix = "install the NVIDIA driver, or use a mesh of CPU devices (JAX_PLATFORMS=cpu)"
            raise SetupError(message("setup", "no CUDA driver", error, "a working libcuda", fix)) from error

    def attributes(self, ordinal: int) -> Attributes:
        """See Driver."""
        names = (
            "VIRTUAL_MEMORY_MANAGEMENT",
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
            "HANDLE_TYPE_FABRIC",
            "MULTICAST",
        )
        enum, device = self._cu.CUdevice_attribute, self._device(ordinal)
        keys = (getattr(enum, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED") for name in names)
        return Attributes(*(bool(self._call("cuDeviceGetAttribute", key, device)) for key in keys))

    def version(self) -> int:
        """See Driver."""
        return int(self._call("cuDriverGetVersion"))

    def facts(self, ordinal: int) -> Facts:
        """See Driver."""
        enum, device = self._cu.CUdevice_attribute, self._device(ordinal)
        names = (f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR"))
        major, minor = (int(self._call("cuDeviceGetAttribute", getattr(enum, name), device)) for name in names)
        name, pci = (self._call(call, 64, device) for call in ("cuDeviceGetName", "cuDeviceGetPCIBusId"))
        total = int(self._call("cuDeviceTotalMem", device))
        return Facts(_text(name), (major, minor), total, _text(pci))

    def link(self, ordinal: int, other: int) -> Link:
        """See Driver."""
        enum, pair = self._cu.CUdevice_P2PAttribute, (self._device(ordinal), self._device(other))
        names = ("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED", "PERFORMANCE_RANK")
        keys = (getattr(enum, f"CU_DEVICE_P2P_ATTRIBUTE_{name}") for name in names)
        access, atomics, rank = (int(self._call("cuDeviceGetP2PAttribute", key, *pair)) for key in keys)
        return Link(bool(access), bool(atomics), rank)

    def granularity(self, ordinal: int, kind: Kind | None) -> int:
        """See Driver."""
        option = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(ordinal, kind), option))

    def free_bytes(self, ordinal: int) -> int:
        """See Driver."""
        with self._current(ordinal):
            return int(self._call("cuMemGetInfo")[0])

    def create(self, ordinal: int, nbytes: int, kind: Kind | None) -> int:
        """See Driver."""
        about = f"{nbytes} bytes on CUDA device {ordinal}, handle kind {kind or 'none'}"
        return int(self._call("cuMemCreate", nbytes, self._properties(ordinal, kind), 0, about=about))

    def export_fd(self, allocation: int) -> int:
        """See Driver."""
        fd = int(self._call("cuMemExportToShareableHandle", allocation, self._types["fd"], 0, about="fd"))
        os.set_inheritable(fd, False)
        return fd

    def export_fabric(self, allocation: int) -> bytes:
        """See Driver."""
        return bytes(self._call("cuMemExportToShareableHandle", allocation, self._types["fabric"], 0, about="fabric"))

    def import_fd(self, fd: int) -> int:
        """See Driver."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._types["fd"], about="fd"))

    def import_fabric(self, handle: bytes) -> int:
        """See Driver."""
        if len(handle) != FABRIC_BYTES:  # the driver would read beyond its end
            raise ValueError(f"fabric handle of {len(handle)} bytes, expected {FABRIC_BYTES}")
        struct = self._cu.CUmemFabricHandle()
        struct.data = handle
        pointer = int(struct.getPtr())
        return int(self._call("cuMemImportFromShareableHandle", pointer, self._types["fabric"], about="fabric"))

    def release(self, allocation: int) -> None:
        """See Driver."""
        self._call("cuMemRelease", allocation)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """See Driver."""
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0, about=f"{nbytes} bytes"))

    def free_address(self, address: int, nbytes: int) -> None:
        """See Driver."""
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, allocation: int) -> None:
        """See Driver."""
        self._call("cuMemMap", address, nbytes, 0, allocation, 0, about=f"{nbytes} bytes")

    def set_access(self, address: int, nbytes: int, ordinals: Sequence[int]) -> None:
        """See Driver."""
        descriptions: list[Any] = []
        for ordinal in ordinals:
            d = self._cu.CUmemAccessDesc()
            d.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            d.location.id = ordinal
            d.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            descriptions.append(d)
        about = f"CUDA devices {','.join(map(str, ordinals))}"
        self._call("cuMemSetAccess", address, nbytes, descriptions, len(descriptions), about=about)

    def unmap(self, address: int, nbytes: int) -> None:
        """See Driver."""
        self._call("cuMemUnmap", address, nbytes)

    def zero(self, ordinal: int, address: int, nbytes: int) -> None:
        """See Driver."""
        with self._stream(ordinal) as stream:
            self._call("cuMemsetD8Async", address, 0, nbytes, stream)

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        """See Driver."""
        with self._stream(ordinal) as stream:
            self._call("cuMemcpyHtoDAsync", address, data, len(data), stream)

    def read(self, ordinal: int, address: int, nbytes: int) -> bytes:
        """See Driver."""
        data = bytearray(nbytes)
        with self._stream(ordinal) as stream:
            self._call("cuMemcpyDtoHAsync", data, address, nbytes, stream)
        return bytes(data)

    def _call(self, call: str, *args: Any, about: str = "") -> Any:
        code, *results = getattr(self._cu, call)(*args)
        if int(code) != 0:
            raise DriverError(call, int(code), getattr(code, "name", "an unknown error"), about)
        return results[0] if len(results) == 1 else results

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal, about=f"CUDA device {ordinal}")

    def _properties(self, ordinal: int, kind: Kind | None) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._types[kind]
        return properties

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Makes the device's primary context current for a while; the thread's own one is back afterwards."""
        with self._lock:
            if ordinal not in self._contexts:
                # Kept until the process ends: giving up the last reference would destroy the context, mappings and all.
                self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", self._device(ordinal))
        self._call("cuCtxPushCurrent", self._contexts[ordinal])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    @contextmanager
    def _stream(self, ordinal: int) -> Iterator[Any]:
        """A stream of the device, waited for at the end."""
        with self._current(ordinal):
            # Of its own: the default stream would wait for kernels of other domains, which may wait for peers.
            stream = self._call("cuStreamCreate", self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            try:
                yield stream
                self._call("cuStreamSynchronize", stream)
            finally:
                self._call("cuStreamDestroy", stream)
