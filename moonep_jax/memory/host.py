"""Symmetric memory of the CPU backend: memfd chunks, shared between processes by file descriptor.

`share()` is the collective part: create, export, exchange, import, map. `FdServer` and `fetch()` hand any descriptor
to a peer process of the same user. What maps memory is given as a `Mapper` (the native module). Linux only.
Imports env, errors, exchange, handles and topology; starts threads, and closes every descriptor it opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from moonep_jax.env import Env
from moonep_jax.errors import SetupError, message
from moonep_jax.exchange import Exchange
from moonep_jax.handles import RECORD_BYTES, Capability, HandleRecord, choose_kind, decode, namespace_digest
from moonep_jax.topology import Group, Topology

_log = logging.getLogger("moonep_jax")

_REQUEST: Final = struct.Struct("<8sI16sIII")  # magic, version, digest, group, rank, asking process
_REQUEST_MAGIC: Final = b"MOONEPFD"
_REQUEST_VERSION: Final = 1
_RIGHTS: Final = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
_CONNECTION_S: Final = 2.0  # seconds the server grants one connection, so that a stray one cannot block the others
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# System calls without a wrapper in Python or older C libraries; the numbers are those of x86_64 and aarch64 alike.
_PIDFD_OPEN: Final = 434
_PIDFD_GETFD: Final = 438


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


# -- descriptors across processes --------------------------------------------------------------------------------------


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a unix socket, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid & 0xFFFFFFFF


class Offer(NamedTuple):
    """A descriptor to serve, whose chunk it is, and the process indices that may fetch it, each once."""

    group: int
    rank: int
    fd: int
    peers: Collection[int]


class FdServer:
    """Hands descriptors to peer processes of the same user through an abstract unix socket.

    An abstract name needs no file system, so neither a long TMPDIR nor a private /tmp matters. Stops listening once
    every offer was fetched, or at close(). The descriptors stay the caller's.
    """

    def __init__(
        self, digest: bytes, offers: Sequence[Offer], uid_of: Callable[[socket.socket], int] = peer_uid
    ) -> None:
        self.socket_name = f"moonep-{secrets.token_hex(16)}"
        self._digest, self._uid_of = digest, uid_of
        self._pending = {(o.group, o.rank, p): o.fd for o in offers for p in o.peers}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self.socket_name}")
            self._listener.listen(max(16, len(self._pending)))  # a full queue refuses, it does not wait
            self._thread = threading.Thread(target=self._serve, name="moonep-fd-server", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stops listening and joins the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            while self._pending:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # close() was called
                    return
                with connection:
                    try:
                        self._answer(connection)
                    except OSError as error:
                        _log.warning("setup: a peer left while fetching a descriptor: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECTION_S)
        # Read first: closing with the request unread would reset the connection and lose the refusal's text.
        request = connection.recv(_REQUEST.size)
        if (uid := self._uid_of(connection)) != os.geteuid():
            refusal = f"user {uid} is not {os.geteuid()}"
        elif len(request) != _REQUEST.size:
            refusal = f"request of {len(request)} bytes, expected {_REQUEST.size}"
        else:
            magic, version, digest, *key = _REQUEST.unpack(request)
            fd = self._pending.get((key[0], key[1], key[2]))
            if (magic, version) != (_REQUEST_MAGIC, _REQUEST_VERSION):
                refusal = f"magic {magic!r} version {version}"
            elif digest != self._digest:
                refusal = "request of another setup or job"
            elif fd is None:
                refusal = "no descriptor for group {}, rank {} and process {}".format(*key)
            else:
                socket.send_fds(connection, [b"\0"], [fd])
                del self._pending[(key[0], key[1], key[2])]
                return
        _log.warning("setup: refused to hand out a descriptor: %s", refusal)
        connection.sendall(b"\1" + refusal.encode())


def fetch_by_socket(record: HandleRecord, process_index: int, timeout_s: float) -> int:
    """The record's descriptor from its FdServer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{record.socket_name}")
        if (uid := peer_uid(connection)) != record.uid:
            raise PermissionError(f"the server's user is {uid}, not {record.uid}")
        head = (_REQUEST_MAGIC, _REQUEST_VERSION, record.digest)
        connection.sendall(_REQUEST.pack(*head, record.group, record.rank, process_index))
        # Not socket.recv_fds: it drops the flag, and a child started meanwhile would inherit the descriptor.
        room = socket.CMSG_SPACE(struct.calcsize("i"))
        reply, ancillary, _, _ = connection.recvmsg(1024, room, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for level, kind, data in ancillary if (level, kind) == _RIGHTS for (fd,) in struct.iter_unpack("i", data)]
    if len(fds) == 1 and reply == b"\0":
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise OSError(f"the server refused: {reply[1:].decode(errors='replace') or 'no reply'}")


def fetch_by_pidfd(record: HandleRecord, process_index: int, timeout_s: float) -> int:
    """The record's descriptor by pidfd_getfd; needs ptrace permission. Never blocks. Raises OSError."""
    del process_index, timeout_s
    pidfd = _syscall(_PIDFD_OPEN, record.pid, 0)
    try:
        return _syscall(_PIDFD_GETFD, pidfd, record.fd, 0)  # the new descriptor is close-on-exec
    except PermissionError as error:
        need = "needs CAP_SYS_PTRACE or kernel.yama.ptrace_scope=0, and a seccomp profile that allows pidfd_getfd"
        raise PermissionError(f"{error}; {need}") from error
    finally:
        os.close(pidfd)


def _syscall(number: int, *args: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


Transport = Callable[[HandleRecord, int, float], int]
TRANSPORTS: Final[tuple[tuple[str, Transport], ...]] = (("socket", fetch_by_socket), ("pidfd_getfd", fetch_by_pidfd))


def fetch(
    record: HandleRecord,
    process_index: int,
    timeout_s: float,
    transports: Sequence[tuple[str, Transport]] = TRANSPORTS,
    validate: Callable[[int, HandleRecord], None] = validate_memfd,
) -> int:
    """The record's descriptor in this process, validated; the caller closes it.

    Tries the transports in order. Raises SetupError saying what failed in each; no descriptor stays open then.
    """
    failures: list[str] = []
    for name, transport in transports:
        try:
            fd = transport(record, process_index, timeout_s)
            try:
                validate(fd, record)
            except BaseException:
                os.close(fd)
                raise
            return fd
        except (OSError, SetupError) as error:
            failures.append(f"{name}: {error}")
    fix = "run the processes as one user, in one network namespace or with ptrace permission"
    wrong = f"cannot import the chunk of rank {record.rank} of group {record.group} from pid {record.pid}"
    raise SetupError(message("setup", wrong, f"[{' | '.join(failures)}]", "its descriptor", fix))


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
    fetch: Callable[[HandleRecord, int, float], int] = fetch,
    free: Callable[[], FreeBytes] = free_bytes,
) -> SharedMemory:
    """Creates and maps one zeroed chunk of nbytes per rank. Collective over the topology's processes.

    hosts: from gather_hosts. A failure anywhere frees everything and raises the same SetupError in every process; a
    group within one process uses private memory and exports nothing. fetch and free are replaced in tests only.
    """
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
