"""Symmetric memory of the CPU backend: memfd chunks, shared between processes by file descriptor.

What maps memory is given as a `Mapper` (the native module). Linux only. Imports backend, errors and handles.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from moonep_jax.errors import SetupError, message
from moonep_jax.handles import HandleRecord, Kind
from moonep_jax.memory.backend import Chunk, Mapped

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Mapper(Protocol):
    """What maps memory into this process; sizes in bytes. The native module provides it."""

    def map_fd(self, fd: int, nbytes: int, /) -> int:
        """Maps a descriptor shared, readable and writable; returns the address. The caller may close the fd then."""
        ...

    def map_anonymous(self, nbytes: int, /) -> int:
        """Maps zeroed private memory; returns the address."""
        ...

    def unmap(self, address: int, nbytes: int, /) -> None:
        """Undoes one of the above."""
        ...


# -- free memory -------------------------------------------------------------------------------------------------------


class FreeBytes(NamedTuple):
    """Bytes still free: on the host, and under the limits of this process's control groups."""

    host: int
    cgroup: int


def free_bytes(root: Path = Path("/")) -> FreeBytes:
    """Reads free memory from /proc and /sys below `root`. An absent limit counts as the host's free memory."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    host = int(fields["MemAvailable"].split()[0]) * 1024
    cgroup = host
    base = root / "sys/fs/cgroup"
    # File names of version 2 (one hierarchy, empty controller list) and version 1 (the memory controller's).
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit_name, usage_name) = (base / "memory", v1) if controllers else (base, v2)
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):  # a parent's limit holds for its children
            limit, usage = _read(place / limit_name).strip(), _read(place / usage_name).strip()
            if limit.isdecimal() and usage.isdecimal():
                stat = dict(row.split() for row in _read(place / "memory.stat").splitlines())
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # given back on demand
                cgroup = min(cgroup, max(0, int(limit) - int(usage) + cache))
            if place == top:
                break
    return FreeBytes(host, cgroup)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_free(own: int, on_host: int, free: FreeBytes) -> None:
    """Raises SetupError when `own` bytes exceed the control group's free memory, or `on_host` the host's."""
    for need, have, where in ((own, free.cgroup, "this process's control group"), (on_host, free.host, "this host")):
        if need > have:
            fix = "lower EPConfig.tokens or set EPConfig.stage_bytes"
            wrong = f"not enough memory for the symmetric chunks in {where}"
            raise SetupError(message("setup", wrong, f"{have} bytes free", f"{need} bytes", fix))


# -- memfd chunks ------------------------------------------------------------------------------------------------------


def chunk_name(digest: bytes, group: int, rank: int) -> str:
    """Name of a chunk's memfd; an importer checks it, so that a reused descriptor number cannot pass for the chunk."""
    return f"moonep-{digest.hex()}-{group}-{rank}"


def create(nbytes: int, name: str) -> int:
    """A new zeroed memfd of nbytes that nobody can resize; the caller closes it. Raises SetupError without memory."""
    check_free(nbytes, nbytes, free_bytes())
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # born open to everybody who gets at its descriptor
        os.ftruncate(fd, nbytes)
        # Sealed: a peer that shrinks the file would make our next access a SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def validate_memfd(fd: int, record: HandleRecord) -> None:
    """Raises SetupError unless fd is the record's memfd, of the record's size, and sealed against resizing."""
    fix = "run setup again; another program may have interfered"
    target = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    expected = f"/memfd:{chunk_name(record.digest, record.group, record.rank)}"
    if target != expected:
        raise SetupError(message("setup", f"rank {record.rank}'s descriptor is foreign", target, expected, fix))
    if (size := os.fstat(fd).st_size) != record.nbytes:
        wrong = f"rank {record.rank}'s memfd has the wrong size"
        raise SetupError(message("setup", wrong, f"{size} bytes", f"{record.nbytes} bytes", fix))
    if (seals := fcntl.fcntl(fd, fcntl.F_GET_SEALS)) & _SEALS != _SEALS:
        wrong = f"rank {record.rank}'s memfd is not sealed"
        raise SetupError(message("setup", wrong, f"seals {seals:#x}", f"seals {_SEALS:#x}", fix))


# -- the backend -------------------------------------------------------------------------------------------------------


class HostMemory:
    """The CPU's `Backend`: every handle is an fd, and what works here works in every process of the host."""

    trial: bool = False

    def __init__(self, mapper: Mapper, free: Callable[[], FreeBytes] = free_bytes) -> None:
        self._mapper, self._free = mapper, free

    def check_room(self, nbytes: int, devices: Sequence[int], on_host: int) -> None:
        """See Backend."""
        check_free(nbytes * len(devices), nbytes * on_host, self._free())

    def refusal(self, kind: Kind, device: int) -> str:
        """See Backend."""
        return "" if kind == "fd" else "host memory has no fabric handles"

    def create(
        self, chunk: Chunk, kind: Kind | None, device: int, devices: Sequence[int], transient: ExitStack
    ) -> tuple[Mapped, int | bytes | None]:
        """See Backend."""
        if kind is None:
            return self._mapped(self._mapper.map_anonymous(chunk.nbytes), chunk.nbytes), None
        fd = create(chunk.nbytes, chunk_name(chunk.digest, chunk.group, chunk.rank))
        transient.callback(os.close, fd)
        return self._mapped(self._mapper.map_fd(fd, chunk.nbytes), chunk.nbytes), fd

    def validate_fd(self, fd: int, record: HandleRecord) -> None:
        """See Backend."""
        validate_memfd(fd, record)

    def attach(self, record: HandleRecord, handle: int | bytes, devices: Sequence[int]) -> Mapped:
        """See Backend."""
        assert isinstance(handle, int)  # refusal() leaves no other kind
        return self._mapped(self._mapper.map_fd(handle, record.nbytes), record.nbytes)

    def _mapped(self, address: int, nbytes: int) -> Mapped:
        return Mapped(address, functools.partial(self._mapper.unmap, address, nbytes))
