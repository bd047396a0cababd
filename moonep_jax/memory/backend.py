"""What share() needs of a kind of memory (`Backend`), and how a chunk's handle leaves one process and enters another.

A *device* here is JAX's global `device.id`. Imports fds and handles; nothing here knows of memfd or CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple, Protocol

from moonep_jax.handles import HandleRecord, Kind
from moonep_jax.memory.fds import FdServer, Offer


class Chunk(NamedTuple):
    """A chunk's identity: digest of the setup, group index, rank that owns it, bytes that its users may touch."""

    digest: bytes
    group: int
    rank: int
    nbytes: int


class Mapped(NamedTuple):
    """Memory mapped into this process: its address, and what undoes the mapping."""

    address: int
    unmap: Callable[[], None]


class Backend(Protocol):
    """One process's memory. Everything it makes is undone when a call raises, or else by what the call returns."""

    @property
    def trial(self) -> bool:
        """Whether only a trial between the processes can tell which handle kinds work."""
        ...

    def check_room(self, nbytes: int, devices: Sequence[int], on_host: int) -> None:
        """Raises SetupError when chunks of nbytes cannot fit: one per device, `on_host` of them on this host."""
        ...

    def refusal(self, kind: Kind, device: int) -> str:
        """Why a device cannot export handles of a kind, "" when it can. Asked once per process and remembered."""
        ...

    def create(
        self, chunk: Chunk, kind: Kind | None, device: int, devices: Sequence[int], transient: ExitStack
    ) -> tuple[Mapped, int | bytes | None]:
        """Makes zeroed memory on `device`, mapped for `devices`, and its handle: an fd, or a fabric handle's bytes.

        kind None: no handle. What only the handle needs to stay valid goes onto `transient`.
        """
        ...

    def validate_fd(self, fd: int, record: HandleRecord) -> None:
        """Raises SetupError when a fetched descriptor cannot be the record's chunk."""
        ...

    def attach(self, record: HandleRecord, handle: int | bytes, devices: Sequence[int]) -> Mapped:
        """Maps another process's chunk for `devices`; the handle stays the caller's. Raises unless it is that chunk."""
        ...


class Export(NamedTuple):
    """A chunk to be offered to the processes `peers`, with its handle."""

    chunk: Chunk
    kind: Kind
    handle: int | bytes
    peers: Collection[int]


Fetch = Callable[[HandleRecord, int, float], int]  # as memory.fds.fetch: record, this process, seconds


def offer(exports: Sequence[Export], transient: ExitStack) -> list[HandleRecord]:
    """Records of chunks of one setup. Descriptors are served until `transient` ends."""
    name = ""
    if offers := [Offer(e.chunk.group, e.chunk.rank, e.handle, e.peers) for e in exports if isinstance(e.handle, int)]:
        server = FdServer(exports[0].chunk.digest, offers)
        transient.callback(server.close)
        name = server.socket_name
    records: list[HandleRecord] = []
    for (digest, group, rank, nbytes), kind, handle, _ in exports:
        record = HandleRecord(kind, digest, group, rank, nbytes, os.getpid(), os.geteuid())
        if isinstance(handle, int):
            records.append(replace(record, fd=handle, socket_name=name))
        else:
            records.append(replace(record, fabric=handle))
    return records


def accept(
    backend: Backend, record: HandleRecord, devices: Sequence[int], fetch: Fetch, process_index: int, timeout_s: float
) -> Mapped:
    """Maps the record's chunk; no descriptor stays open."""
    if record.kind == "fabric":
        return backend.attach(record, record.fabric, devices)
    fd = fetch(record, process_index, timeout_s)
    try:
        return backend.attach(record, fd, devices)
    finally:
        os.close(fd)
