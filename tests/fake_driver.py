"""A simulated CUDA driver: many hosts, GPUs and processes in one Python process, faults on demand, everything counted.

Memory is bytes, descriptors are real ones (memfds that name an allocation), so that they travel as the library sends
them. It refuses what the driver refuses: sizes that are no multiple of the granularity, access that was not granted,
handles of a kind that was not asked for, use after release.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonep_jax.handles import Kind
from moonep_jax.memory.driver import Attributes, DriverError, Facts, Link

GRANULE = 4096
GARBAGE = 0xA5  # what new memory holds
NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    101: "CUDA_ERROR_INVALID_DEVICE",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    800: "CUDA_ERROR_NOT_PERMITTED",
    999: "CUDA_ERROR_UNKNOWN",
}


@dataclass(eq=False)
class Allocation:
    number: int
    place: tuple[str, int]  # host, ordinal on it
    imex: str
    kind: Kind | None
    data: bytearray
    references: int = 0  # handles and mappings in all processes
    handles: int = 0  # of them, handles
    at_export: bytes = b""  # its content when it was first exported


@dataclass(eq=False)
class Machines:
    """What all processes share: the memory of all GPUs."""

    capacity: int = 1 << 30  # bytes per GPU
    lock: threading.RLock = field(default_factory=threading.RLock)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def used(self, place: tuple[str, int]) -> int:
        return sum(len(a.data) for a in self.allocations.values() if a.place == place)


@dataclass
class Mapping:
    nbytes: int
    allocation: Allocation
    access: set[int] = field(default_factory=set)


class FakeDriver:
    """One process's driver; `faults[call, k]` is the error that the k-th call (from 1) of that name returns.

    A call that undoes something has undone it even then.
    """

    def __init__(self, machines: Machines, host: str, ordinals: Sequence[int], imex: str = "imex") -> None:
        self.machines, self.host, self.ordinals, self.imex = machines, host, tuple(ordinals), imex
        self.says = Attributes(vmm=True, fd=True, fabric=True, multicast=False)
        self.links: dict[tuple[int, int], Link] = {}  # others: direct access with atomics
        self.compute = (9, 0)
        self.refuses: dict[Kind, int] = {}  # kind -> what create() returns, whatever the attribute says
        self.granule = GRANULE
        self.faults: dict[tuple[str, int], int] = {}
        self.calls: Counter[str] = Counter()
        self.handles: dict[int, Allocation] = {}
        self.mappings: dict[int, Mapping] = {}
        self.reservations: dict[int, int] = {}

    def live(self) -> dict[str, int]:
        """What this process holds."""
        held = {"handles": self.handles, "mappings": self.mappings, "reservations": self.reservations}
        return {name: len(table) for name, table in held.items() if table}

    # -- Driver --------------------------------------------------------------------------------------------------------

    def attributes(self, ordinal: int) -> Attributes:
        self._begin("attributes", ordinal)
        return self.says

    def version(self) -> int:
        self._begin("version")
        return 13000

    def facts(self, ordinal: int) -> Facts:
        self._begin("facts", ordinal)
        return Facts("Fake GPU", self.compute, self.machines.capacity, f"0000:0{ordinal}:00.0")

    def link(self, ordinal: int, other: int) -> Link:
        self._begin("link", ordinal, other)
        return self.links.get((ordinal, other), Link(True, True, 0))

    def granularity(self, ordinal: int, kind: Kind | None) -> int:
        self._begin("granularity", ordinal)
        return self.granule

    def free_bytes(self, ordinal: int) -> int:
        self._begin("free_bytes", ordinal)
        return self.machines.capacity - self.machines.used((self.host, ordinal))

    def create(self, ordinal: int, nbytes: int, kind: Kind | None) -> int:
        self._begin("create", ordinal)
        self._check("create", nbytes > 0 and nbytes % self.granule == 0)
        if kind in self.refuses:
            self._fail("create", self.refuses[kind])
        with self.machines.lock:
            place = (self.host, ordinal)
            self._check("create", self.machines.used(place) + nbytes <= self.machines.capacity, 2)
            number = next(self.machines.numbers)
            made = Allocation(number, place, self.imex, kind, bytearray([GARBAGE]) * nbytes)
            self.machines.allocations[number] = made
            return self._hold(made)

    def export_fd(self, allocation: int) -> int:
        found = self._exported("export_fd", allocation, "fd")
        fd = os.memfd_create(f"fake-cuda-{found.number}", os.MFD_CLOEXEC)
        os.pwrite(fd, f"CUDA {found.number}".encode(), 0)
        return fd

    def export_fabric(self, allocation: int) -> bytes:
        found = self._exported("export_fabric", allocation, "fabric")
        return f"FABRIC {found.number}".encode().ljust(64, b".")

    def import_fd(self, fd: int) -> int:
        self._begin("import_fd")
        found = self._named("import_fd", os.pread(fd, 64, 0), b"CUDA", 304)
        self._check("import_fd", found.place[0] == self.host)
        return self._hold(found)

    def import_fabric(self, handle: bytes) -> int:
        self._begin("import_fabric")
        found = self._named("import_fabric", handle.rstrip(b"."), b"FABRIC", 1)
        self._check("import_fabric", found.imex == self.imex)
        return self._hold(found)

    def release(self, allocation: int) -> None:
        self._check("release", allocation in self.handles)
        with self.machines.lock:
            self.handles[allocation].handles -= 1
            self._drop(self.handles.pop(allocation))
        self._begin("release")

    def reserve(self, nbytes: int, alignment: int) -> int:
        self._begin("reserve")
        self._check("reserve", nbytes % self.granule == 0 and alignment % self.granule == 0)
        address = next(self.machines.numbers) << 32
        self.reservations[address] = nbytes
        return address

    def free_address(self, address: int, nbytes: int) -> None:
        self._check("free_address", self.reservations.get(address) == nbytes and address not in self.mappings)
        del self.reservations[address]
        self._begin("free_address")

    def map(self, address: int, nbytes: int, allocation: int) -> None:
        self._begin("map")
        self._check("map", self.reservations.get(address) == nbytes and address not in self.mappings)
        found = self.handles.get(allocation)
        self._check("map", found is not None and len(found.data) == nbytes)
        assert found is not None
        with self.machines.lock:
            found.references += 1
        self.mappings[address] = Mapping(nbytes, found)

    def set_access(self, address: int, nbytes: int, ordinals: Sequence[int]) -> None:
        self._begin("set_access", *ordinals)
        self._check("set_access", address in self.mappings and self.mappings[address].nbytes == nbytes)
        self.mappings[address].access |= set(ordinals)

    def unmap(self, address: int, nbytes: int) -> None:
        self._check("unmap", address in self.mappings and self.mappings[address].nbytes == nbytes)
        self._drop(self.mappings.pop(address).allocation)
        self._begin("unmap")

    def zero(self, ordinal: int, address: int, nbytes: int) -> None:
        self._begin("zero", ordinal)
        data, offset = self._accessible("zero", ordinal, address, nbytes)
        data[offset : offset + nbytes] = bytes(nbytes)

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        self._begin("write", ordinal)
        target, offset = self._accessible("write", ordinal, address, len(data))
        target[offset : offset + len(data)] = data

    def read(self, ordinal: int, address: int, nbytes: int) -> bytes:
        self._begin("read", ordinal)
        data, offset = self._accessible("read", ordinal, address, nbytes)
        return bytes(data[offset : offset + nbytes])

    # -- behind it -----------------------------------------------------------------------------------------------------

    def _begin(self, call: str, *ordinals: int) -> None:
        self.calls[call] += 1
        if code := self.faults.get((call, self.calls[call])):
            self._fail(call, code)
        self._check(call, all(o in self.ordinals for o in ordinals), 101)  # a rank or a JAX id is no ordinal

    def _check(self, call: str, fine: Any, code: int = 1) -> None:
        if not fine:
            self._fail(call, code)

    def _fail(self, call: str, code: int) -> None:
        raise DriverError(f"fake {call}", code, NAMES[code])

    def _hold(self, allocation: Allocation) -> int:
        with self.machines.lock:
            allocation.references += 1
            allocation.handles += 1
            handle = next(self.machines.numbers)
        self.handles[handle] = allocation
        return handle

    def _drop(self, allocation: Allocation) -> None:
        with self.machines.lock:
            allocation.references -= 1
            if not allocation.references:
                del self.machines.allocations[allocation.number]

    def _exported(self, call: str, allocation: int, kind: Kind) -> Allocation:
        self._begin(call)
        found = self.handles.get(allocation)
        self._check(call, found is not None and found.kind == kind)
        assert found is not None
        found.at_export = found.at_export or bytes(found.data)
        return found

    def _named(self, call: str, name: bytes, magic: bytes, code: int) -> Allocation:
        head, _, number = name.partition(b" ")
        with self.machines.lock:
            found = self.machines.allocations.get(int(number)) if head == magic else None
        # Stricter than the driver, which does not say what a handle is worth once nobody holds the allocation.
        self._check(call, found is not None and found.handles, code)
        assert found is not None
        return found

    def _accessible(self, call: str, ordinal: int, address: int, nbytes: int) -> tuple[bytearray, int]:
        for base, m in self.mappings.items():
            if base <= address and address + nbytes <= base + m.nbytes and ordinal in m.access:
                return m.allocation.data, address - base
        self._fail(call, 1)
        raise AssertionError
