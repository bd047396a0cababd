"""Symmetric memory of the CPU backend: memfd chunks, shared between processes by file descriptor.

`share()` is the collective part: create, export, exchange, import, map. What maps memory is given as a `Mapper` (the
native module). Linux only. Imports env, errors, exchange, fds, handles and topology; closes every descriptor it opened.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from moonep_jax.env import Env
from moonep_jax.errors import SetupError, message
from moonep_jax.exchange import Exchange
from moonep_jax.handles import RECORD_BYTES, Capability, HandleRecord, choose_kind, decode, namespace_digest
from moonep_jax.memory import fds
from moonep_jax.memory.fds import FdServer, Offer
from moonep_jax.topology import Group, Topology

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


# -- the collective part -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostInfo:
    """Where a process runs. Two processes share a host when boot id and host name agree."""

    boot_id: str
    hostname: str

    @staticmethod
    def here() -> HostInfo:
        """This process's host."""
        return HostInfo(_read(Path("/proc/sys/kernel/random/boot_id")).strip(), socket.gethostname())

    def __str__(self) -> str:
        return f"{self.hostname} (boot {self.boot_id[:8]})"


def gather_hosts(exchange: Exchange, here: HostInfo | None = None) -> dict[int, HostInfo]:
    """Every process's host, by process index. Collective."""
    info = HostInfo.here() if here is None else here
    sent = exchange.all_gather("hosts", json.dumps(dataclasses.asdict(info)).encode())
    return {p: HostInfo(**json.loads(data)) for p, data in sent.items()}


class SharedMemory:
    """The chunks of all groups that have a member in this process, mapped once each.

    Attributes: nbytes: size of a chunk. address: (group, rank) -> address in this process.
    """

    def __init__(self, nbytes: int, kinds: Mapping[int, Literal["local", "fd"]], mapper: Mapper) -> None:
        self.nbytes = nbytes
        self.address: dict[tuple[int, int], int] = {}
        self._kinds, self._mapper = dict(kinds), mapper
        # Exit stacks run every step even if one raises, and only once.
        self._own, self._peers = ExitStack(), ExitStack()

    def kind_of(self, group: int) -> Literal["local", "fd"]:
        """How a group's chunks are shared: "local" when all its members are in this process."""
        return self._kinds[group]

    def add(self, group: int, rank: int, address: int, *, own: bool) -> None:
        """Takes over a mapping."""
        stack = self._own if own else self._peers
        self.address[group, rank] = address
        stack.callback(self._mapper.unmap, address, self.nbytes)
        stack.callback(self.address.pop, (group, rank))

    def unmap_peers(self) -> None:
        """Unmaps the chunks of other processes. Idempotent."""
        self._peers.close()

    def free(self) -> None:
        """Unmaps everything; own chunks are freed once no peer maps them either. Idempotent."""
        try:
            self.unmap_peers()
        finally:
            self._own.close()


def share(
    exchange: Exchange,
    topology: Topology,
    process_index: int,
    nbytes: int,
    mapper: Mapper,
    env: Env,
    hosts: Mapping[int, HostInfo],
    *,
    fetch: Callable[[HandleRecord, int, float], int] | None = None,
    free: Callable[[], FreeBytes] = free_bytes,
) -> SharedMemory:
    """Creates and maps one zeroed chunk of nbytes per rank. Collective over the topology's processes.

    hosts: from gather_hosts. A failure anywhere frees everything and raises the same SetupError in every process; a
    group within one process uses private memory and exports nothing. fetch and free are replaced in tests only.
    """
    fetch = functools.partial(fds.fetch, validate=validate_memfd) if fetch is None else fetch
    local = topology.local(process_index)
    kinds: dict[int, Literal["local", "fd"]] = {g.index: _kind(g) for g, _ in local}
    shared = SharedMemory(nbytes, kinds, mapper)
    digest = namespace_digest(exchange.namespace)

    def choose() -> None:
        for group in (topology.groups[g] for g, kind in kinds.items() if kind == "fd"):
            detail = "host memory has no fabric handles"
            choose_kind(
                env.mem_handle_type,
                [Capability(m.rank, True, False, str(hosts[m.process_index]), detail) for m in group.devices],
            )

    def export() -> bytes:
        same_host = [p for p in topology.processes if hosts[p] == hosts[process_index]]
        check_free(nbytes * len(local), nbytes * sum(len(topology.local(p)) for p in same_host), free())
        offers: list[Offer] = []
        for group, member in local:
            if kinds[group.index] == "local":
                address = mapper.map_anonymous(nbytes)
            else:
                fd = create(nbytes, chunk_name(digest, group.index, member.rank))
                transient.callback(os.close, fd)
                address = mapper.map_fd(fd, nbytes)
                peers = [p for p in group.processes if p != process_index]
                offers.append(Offer(group.index, member.rank, fd, peers))
            shared.add(group.index, member.rank, address, own=True)
        if not offers:
            return b""
        server = FdServer(digest, offers)
        transient.callback(server.close)
        origin = (nbytes, os.getpid(), os.geteuid())
        records = [HandleRecord("fd", digest, o.group, o.rank, *origin, o.fd, server.socket_name) for o in offers]
        return b"".join(r.encode() for r in records)

    def attach() -> None:
        # Half of the limit, so that a slow import still leaves the others time to wait for this process's vote.
        deadline = time.monotonic() + exchange.timeout_s / 2
        for p, data in payloads.items():
            places = [(g, m) for g, m in topology.local(p) if _kind(g) == "fd"]
            if len(data) != RECORD_BYTES * len(places):
                wrong, got = f"{exchange.describe(p)} sent handle records of wrong length", f"{len(data)} bytes"
                expected = f"{len(places)} records of {RECORD_BYTES} bytes"
                fix = "run the same version of moonep_jax on every process"
                raise SetupError(message("setup", wrong, got, expected, fix))
            for i, (g, m) in enumerate(places):
                if p == process_index or g.index not in kinds:
                    continue
                part, at = data[i * RECORD_BYTES : (i + 1) * RECORD_BYTES], (g.index, m.rank)
                record = decode(
                    part, namespace=exchange.namespace, group=at[0], rank=at[1], ranks=topology.ranks, nbytes=nbytes
                )
                fd = fetch(record, process_index, max(0.1, deadline - time.monotonic()))
                try:
                    shared.add(*at, mapper.map_fd(fd, nbytes), own=False)
                finally:
                    os.close(fd)

    with ExitStack() as transient:  # descriptors and the server: gone on every path
        try:
            exchange.guarded("choose the handle kind", choose)
            payloads = exchange.all_gather("handles", exchange.guarded("create the chunks", export))
            exchange.guarded("import the chunks", attach)
        except BaseException:
            shared.free()
            raise
    return shared


def _kind(group: Group) -> Literal["local", "fd"]:
    return "local" if len(group.processes) == 1 else "fd"
