"""Symmetric memory on NVIDIA GPUs: chunks of CUDA virtual memory, shared by fd or by fabric handle.

Each chunk is mapped once per process, for all of the group's devices there. Behind the bytes that users may touch, a
chunk carries a stamp that says whose it is: importers read it, so that no other memory can pass for it, and reading
proves that the data path works. A *device* is JAX's `device.id`; an *ordinal* is the CUDA driver's number of it here.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final
from weakref import WeakKeyDictionary

from moonep_jax.errors import SetupError, message
from moonep_jax.handles import HandleRecord, Kind
from moonep_jax.memory.backend import Chunk, Mapped
from moonep_jax.memory.driver import OUT_OF_MEMORY, Driver, DriverError

_STAMP: Final = struct.Struct("<8s16sIIQ")  # magic, digest, group, rank, bytes
_STAMP_MAGIC: Final = b"MOONEPCH"
_STAMP_BYTES: Final = 64  # kept free for it at the end of a chunk
_PROBE_BYTES: Final = 64


def ordinals(devices: Iterable[Any], process_index: int) -> dict[int, int]:
    """JAX `device.id` -> CUDA ordinal, of this process's devices among `devices` (jax.Device objects)."""
    table: dict[int, int] = {}
    for d in devices:
        if d.process_index == process_index:
            # Not device.id, which counts over all processes, nor a rank: JAX may have been given some devices only.
            if (ordinal := d.local_hardware_id) is None:
                fix = "use a mesh of NVIDIA GPUs"
                raise SetupError(message("setup", f"{d} has no local hardware id", None, "a CUDA ordinal", fix))
            table[int(d.id)] = int(ordinal)
    return table


# -- support, asked once per process -----------------------------------------------------------------------------------

_known: WeakKeyDictionary[Driver, dict[tuple[int, Kind], str]] = WeakKeyDictionary()  # a process has one driver
_known_lock = threading.Lock()


def refusal(driver: Driver, ordinal: int, kind: Kind) -> str:
    """Why a device cannot export memory by handles of a kind, "" when it can; asked once per process and remembered.

    The device's attribute first, then a small allocation and its export. Says nothing of imports by other processes.
    """
    with _known_lock:
        known = _known.setdefault(driver, {})
        if (ordinal, kind) not in known:
            known[ordinal, kind] = _probe(driver, ordinal, kind)
        return known[ordinal, kind]


def fabric_supported(driver: Driver, ordinal: int) -> bool:
    """Whether a device can export fabric handles; asked once per process and remembered."""
    return not refusal(driver, ordinal, "fabric")


def _probe(driver: Driver, ordinal: int, kind: Kind) -> str:
    has = driver.attributes(ordinal)
    if not has.vmm:
        return f"CUDA device {ordinal} has no virtual memory management"
    if not getattr(has, kind):
        return f"CUDA device {ordinal} says that it does not support {kind} handles"
    try:
        with ExitStack() as stack:
            nbytes = _rounded(driver, _PROBE_BYTES, [ordinal], kind)
            allocation = driver.create(ordinal, nbytes, kind)
            stack.callback(driver.release, allocation)
            if kind == "fd":
                os.close(driver.export_fd(allocation))
            else:
                driver.export_fabric(allocation)
    except DriverError as error:
        if error.code == OUT_OF_MEMORY:  # says nothing about the kind, and may pass
            raise
        return str(error)
    return ""


# -- the backend -------------------------------------------------------------------------------------------------------


class CudaMemory:
    """The GPUs' `Backend`."""

    trial: bool = True

    def __init__(self, driver: Driver, ordinals: Mapping[int, int]) -> None:
        """ordinals: JAX device.id -> CUDA ordinal, of all devices of this process in the mesh."""
        self._driver, self._ordinals = driver, dict(ordinals)

    def check_room(self, nbytes: int, devices: Sequence[int], on_host: int) -> None:
        """See Backend."""
        for device in devices:
            ordinal = self._ordinals[device]
            need = _rounded(self._driver, nbytes, [ordinal], None)
            if (free := self._driver.free_bytes(ordinal)) < need:
                raise self._short(device, need, free)

    def refusal(self, kind: Kind, device: int) -> str:
        """See Backend."""
        ordinal = self._ordinals[device]
        try:
            return refusal(self._driver, ordinal, kind)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            need = _rounded(self._driver, _PROBE_BYTES, [ordinal], kind)
            raise self._short(device, need, self._driver.free_bytes(ordinal)) from error

    def create(
        self, chunk: Chunk, kind: Kind | None, device: int, devices: Sequence[int], transient: ExitStack
    ) -> tuple[Mapped, int | bytes | None]:
        """See Backend."""
        driver, ordinal = self._driver, self._ordinals[device]
        local = [self._ordinals[d] for d in devices]
        size = _rounded(driver, chunk.nbytes, local, kind)
        try:
            allocation = driver.create(ordinal, size, kind)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise self._short(device, size, driver.free_bytes(ordinal)) from error
        # Not released before the peers have imported it.
        transient.callback(driver.release, allocation)
        with ExitStack() as undo:
            mapped = self._map(allocation, size, local, kind)
            undo.callback(mapped.unmap)
            # New memory is not promised to be zero, and peers look at it as soon as they have the handle.
            driver.zero(ordinal, mapped.address, size)
            driver.write(ordinal, mapped.address + size - _STAMP_BYTES, _stamp(*chunk))
            handle: int | bytes | None = None
            if kind == "fd":
                handle = driver.export_fd(allocation)
                transient.callback(os.close, handle)
            elif kind == "fabric":
                handle = driver.export_fabric(allocation)
            undo.pop_all()
        return mapped, handle

    def validate_fd(self, fd: int, record: HandleRecord) -> None:
        """See Backend."""
        try:
            self._driver.release(self._driver.import_fd(fd))
        except DriverError as error:
            fix = "run setup again; another program may have interfered"
            wrong = f"rank {record.rank}'s descriptor is foreign"
            raise SetupError(message("setup", wrong, error, "memory of CUDA", fix)) from error

    def attach(self, record: HandleRecord, handle: int | bytes, devices: Sequence[int]) -> Mapped:
        """See Backend."""
        driver, local = self._driver, [self._ordinals[d] for d in devices]
        size = _rounded(driver, record.nbytes, local, record.kind)
        with ExitStack() as undo:
            allocation = driver.import_fd(handle) if isinstance(handle, int) else driver.import_fabric(handle)
            with ExitStack() as transient:
                transient.callback(driver.release, allocation)  # the mapping keeps the memory
                mapped = self._map(allocation, size, local, record.kind)
                undo.callback(mapped.unmap)
            expected = _stamp(record.digest, record.group, record.rank, record.nbytes)
            for ordinal in local:
                if (got := driver.read(ordinal, mapped.address + size - _STAMP_BYTES, len(expected))) != expected:
                    wrong = f"the memory imported for rank {record.rank} is not its chunk, seen from device {ordinal}"
                    fix = "run setup again; another program may have interfered"
                    raise SetupError(message("setup", wrong, got.hex(), expected.hex(), fix))
            undo.pop_all()
            return mapped

    def _map(self, allocation: int, size: int, local: Sequence[int], kind: Kind | None) -> Mapped:
        driver = self._driver
        with ExitStack() as undo:
            address = driver.reserve(size, _granularity(driver, local, kind))
            undo.callback(driver.free_address, address, size)
            driver.map(address, size, allocation)
            undo.callback(driver.unmap, address, size)
            driver.set_access(address, size, local)
            return Mapped(address, undo.pop_all().close)

    def _short(self, device: int, need: int, free: int) -> SetupError:
        where = f"CUDA device {self._ordinals[device]} (JAX device id {device})"
        fix = (
            "lower EPConfig.tokens or set EPConfig.stage_bytes; leave room beside JAX's own memory by lowering "
            "XLA_PYTHON_CLIENT_MEM_FRACTION; run setup before the first jit"
        )
        wrong = f"not enough memory for the symmetric chunk on {where}"
        return SetupError(message("setup", wrong, f"{free} bytes free", f"{need} bytes", fix))


def _stamp(digest: bytes, group: int, rank: int, nbytes: int) -> bytes:
    return _STAMP.pack(_STAMP_MAGIC, digest, group, rank, nbytes)


def _granularity(driver: Driver, local: Sequence[int], kind: Kind | None) -> int:
    return max(driver.granularity(ordinal, kind) for ordinal in local)  # powers of two


def _rounded(driver: Driver, nbytes: int, local: Sequence[int], kind: Kind | None) -> int:
    """Bytes to allocate for a chunk of nbytes and its stamp."""
    step = _granularity(driver, local, kind)
    return -(-(nbytes + _STAMP_BYTES) // step) * step
