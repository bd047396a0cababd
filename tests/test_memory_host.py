"""memfd chunks shared between processes: sizes, seals, descriptor transport, and setup that fails without a trace."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonep_jax.env import Env
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange, InProcessStore
from moonep_jax.handles import HandleRecord, namespace_digest
from moonep_jax.memory import host
from moonep_jax.memory.host import FdServer, FreeBytes, HostInfo, Offer, SharedMemory, fetch, share
from moonep_jax.topology import Topology

NAMESPACE = "moonep/test/0"
DIGEST = namespace_digest(NAMESPACE)
PAGE = mmap.PAGESIZE
PLENTY = FreeBytes(1 << 40, 1 << 40)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class PyMapper:
    """The native mapper's stand-in; `live` holds what is mapped."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.fail_after: int | None = None

    def _map(self, nbytes: int, flags: int, fd: int) -> int:
        if self.fail_after is not None and len(self.live) >= self.fail_after:
            raise OSError(errno.ENOMEM, "mmap failed (injected)")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self.live[address] = nbytes
        return address

    def map_fd(self, fd: int, nbytes: int, /) -> int:
        return self._map(nbytes, mmap.MAP_SHARED, fd)

    def map_anonymous(self, nbytes: int, /) -> int:
        return self._map(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def unmap(self, address: int, nbytes: int, /) -> None:
        assert self.live.pop(address) == nbytes
        assert _libc.munmap(address, nbytes) == 0


def open_fds() -> dict[str, str]:
    found: dict[str, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith("/proc/"):  # a thread that is listing the folder
                found[fd] = target
    return found


def listening() -> int:
    return Path("/proc/net/unix").read_text().count("@moonep-")


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    fds, threads = open_fds(), threading.active_count()
    yield
    assert open_fds() == fds
    assert threading.active_count() == threads
    assert listening() == 0


def record_of(fd: int, nbytes: int = PAGE, name: str = "none", **changes: Any) -> HandleRecord:
    return replace(HandleRecord("fd", DIGEST, 0, 1, nbytes, os.getpid(), os.geteuid(), fd, name), **changes)


@pytest.fixture
def chunk() -> Iterator[int]:
    fd = host.create(PAGE, host.chunk_name(DIGEST, 0, 1))
    yield fd
    os.close(fd)


# -- create and validate -----------------------------------------------------------------------------------------------


def test_create(chunk: int) -> None:
    assert os.fstat(chunk).st_size == PAGE and not os.get_inheritable(chunk)
    assert os.pread(chunk, PAGE, 0) == bytes(PAGE)
    os.pwrite(chunk, b"x", 0)
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(chunk, size)
    host.validate_memfd(chunk, record_of(chunk))


def test_create_without_memory() -> None:
    with pytest.raises(SetupError, match=r"not enough memory .* got \d+ bytes free, expected 1125899906842624 bytes"):
        host.create(1 << 50, "big")


def test_check_free_names_numbers_and_knobs() -> None:
    host.check_free(10, 20, FreeBytes(20, 10))
    with pytest.raises(SetupError, match=r"this host; got 19 bytes free, expected 20 bytes; .*tokens.*stage_bytes"):
        host.check_free(10, 20, FreeBytes(19, 100))
    with pytest.raises(SetupError, match="control group; got 9 bytes free, expected 10 bytes"):
        host.check_free(10, 20, FreeBytes(100, 9))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, FreeBytes(1000 * 1024, 1000 * 1024)),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "3000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 7\ninactive_file 500\n",
            },
            FreeBytes(1000 * 1024, 2500),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n4:memory,hugetlb:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "9999\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            FreeBytes(1000 * 1024, 0),
        ),
    ],
    ids=["no cgroup", "version 2, parent's limit", "version 1"],
)
def test_free_bytes(tmp_path: Path, files: dict[str, str], expected: FreeBytes) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:  1000 kB\n", **files})
    assert host.free_bytes(tmp_path) == expected


def test_free_bytes_of_this_machine() -> None:
    free = host.free_bytes()
    assert 0 < free.cgroup <= free.host


def memfd(name: str, size: int, seals: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
BAD_FDS: list[tuple[Callable[[], int], str]] = [
    (lambda: os.open("/dev/null", os.O_RDWR), "foreign; got /dev/null"),
    (lambda: memfd("other", PAGE, ALL_SEALS), "foreign; got /memfd:other"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 2), PAGE, ALL_SEALS), "foreign"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 1), 2 * PAGE, ALL_SEALS), f"got {2 * PAGE} bytes, expected {PAGE}"),
    (lambda: memfd(host.chunk_name(DIGEST, 0, 1), PAGE, fcntl.F_SEAL_GROW), "not sealed; got seals 0x4"),
]


@pytest.mark.parametrize(("make", "text"), BAD_FDS)
def test_a_foreign_descriptor_is_refused_and_closed(make: Callable[[], int], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        fetch(record_of(3), 1, 1.0, transports=[("injected", lambda *_: make())])


# -- server and fetch in one process -----------------------------------------------------------------------------------


def test_server_hands_out_each_offer_once_and_stops(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5, 6])])
    record = record_of(chunk, name=server.socket_name)
    by_socket = host.TRANSPORTS[:1]
    for peer in (5, 6):
        got = fetch(record, peer, 5.0, by_socket)
        assert got != chunk and not os.get_inheritable(got)
        assert os.path.sameopenfile(got, chunk)
        os.close(got)
        if peer == 5:
            with pytest.raises(SetupError, match="no descriptor for group 0, rank 1 and process 5"):
                fetch(record, 5, 5.0, by_socket)
    server._thread.join(5)  # ends by itself
    with pytest.raises(SetupError, match=r"socket: .*refused"):
        fetch(record, 5, 5.0, by_socket)
    server.close()
    server.close()


def test_server_refusals(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
    try:
        good = record_of(chunk, name=server.socket_name)
        for record, peer, text in [
            (replace(good, digest=bytes(16)), 5, "another setup or job"),
            (replace(good, group=1), 5, "no descriptor for group 1, rank 1"),
            (replace(good, rank=0), 5, "no descriptor for group 0, rank 0"),
            (good, 4, "and process 4"),
            (replace(good, uid=12345), 5, "the server's user is"),
        ]:
            with pytest.raises(OSError, match=text):
                host.fetch_by_socket(record, peer, 5.0)
        for raw, text in [(b"x" * host._REQUEST.size, b"magic"), (b"short", b"request of 5 bytes, expected 40")]:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect("\0" + server.socket_name)
                s.sendall(raw)
                assert text in s.recv(1000)
        with socket.socket(socket.AF_UNIX) as s:  # a peer that leaves without a word
            s.connect("\0" + server.socket_name)
        got = host.fetch_by_socket(good, 5, 5.0)  # still served
        os.close(got)
    finally:
        server.close()


def test_server_refuses_another_user(chunk: int) -> None:
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])], uid_of=lambda _: os.geteuid() + 1)
    try:
        with pytest.raises(OSError, match=r"user .* is not"):
            host.fetch_by_socket(record_of(chunk, name=server.socket_name), 5, 5.0)
    finally:
        server.close()


def test_a_silent_connection_does_not_block_the_server(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CONNECTION_S", 0.1)
    server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect("\0" + server.socket_name)
        os.close(host.fetch_by_socket(record_of(chunk, name=server.socket_name), 5, 5.0))
    server.close()


def test_close_with_offers_pending(chunk: int) -> None:
    for _ in range(50):
        server = FdServer(DIGEST, [Offer(0, 1, chunk, [5])])
        server.close()


def test_a_server_that_never_answers_times_out(chunk: int) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind("\0mute-test")
        mute.listen(1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            host.fetch_by_socket(record_of(chunk, name="mute-test"), 5, 0.2)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("reply", ["several", "none"])
def test_a_server_that_answers_wrongly(chunk: int, reply: str) -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind("\0odd-test")
        odd.listen(1)

        def answer() -> None:
            connection, _ = odd.accept()
            with connection:
                connection.recv(100)
                if reply == "several":
                    rights = array.array("i", [chunk])
                    connection.sendmsg([b"\1no"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="refused: no" if reply == "several" else "refused: no reply"):
            host.fetch_by_socket(record_of(chunk, name="odd-test"), 5, 5.0)
        thread.join(5)


def test_fetch_falls_back_to_pidfd(chunk: int) -> None:
    got = fetch(record_of(chunk, name="nobody-listens"), 5, 5.0)
    assert os.path.sameopenfile(got, chunk)
    os.close(got)


def test_fetch_names_all_failures(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, *args: int) -> int:
        if number == host._PIDFD_GETFD:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(host, "_syscall", refuse)
    with pytest.raises(SetupError) as caught:
        fetch(record_of(chunk, name="nobody-listens"), 5, 5.0)
    text = str(caught.value)
    assert "socket: " in text and "pidfd_getfd: " in text and "CAP_SYS_PTRACE" in text and f"pid {os.getpid()}" in text


def test_pidfd_of_closed_fd_and_dead_process() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        host.fetch_by_pidfd(record_of(999_999), 5, 1.0)
    with pytest.raises(ProcessLookupError):
        host.fetch_by_pidfd(record_of(3, pid=2**22 - 1), 5, 1.0)


# -- real second processes ---------------------------------------------------------------------------------------------

OWNER = """
import os, sys
from moonep_jax.handles import HandleRecord, namespace_digest
from moonep_jax.memory import host
digest = namespace_digest("moonep/test/0")
fd = host.create(8192, host.chunk_name(digest, 0, 1))
os.pwrite(fd, b"from the owner", 0)
server = host.FdServer(digest, [host.Offer(0, 1, fd, [7])])
record = HandleRecord("fd", digest, 0, 1, 8192, os.getpid(), os.geteuid(), fd, server.socket_name)
print(record.encode().hex(), flush=True)
sys.stdin.readline()
assert os.pread(fd, 4, 4096) == b"back"
server.close()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", host.TRANSPORTS, ids=lambda t: t[0])
def test_fetch_from_another_process(transport: tuple[str, host.Transport]) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        killer = threading.Timer(40, owner.kill)
        killer.start()
        try:
            assert owner.stdin and owner.stdout
            from moonep_jax.handles import decode

            data = bytes.fromhex(owner.stdout.readline())
            record = decode(data, namespace=NAMESPACE, group=0, rank=1, ranks=2, nbytes=8192)
            fd = fetch(record, 7, 10.0, [transport])
            assert os.pread(fd, 14, 0) == b"from the owner"
            os.pwrite(fd, b"back", 4096)
            os.close(fd)
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.wait(20) == 0
        finally:
            killer.cancel()
            killer.join()
            owner.kill()


# -- share -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"


def topology(groups: int, owners: list[int]) -> Topology:
    """`groups` groups; owners[r] is the process of rank r of every group; groups have processes of their own."""
    count = max(owners) + 1
    devices = np.empty((groups, len(owners)), dtype=object)
    for g in range(groups):
        for r, p in enumerate(owners):
            devices[g, r] = FakeDevice(g * len(owners) + r, g * count + p)
    mesh: Any = SimpleNamespace(devices=devices, axis_names=("dp", "ep"))
    return Topology.from_mesh(mesh, "ep")


class World:
    """Every process of a topology as a thread, with its own mapper and the same store."""

    def __init__(self, topo: Topology, env: Env | None = None, timeout_s: float = 20.0) -> None:
        self.topology, self.env, self.timeout_s = topo, env or Env(), timeout_s
        self.store = InProcessStore()
        self.mappers = {p: PyMapper() for p in topo.processes}
        self.hosts: dict[int, HostInfo] = {}
        self.share_args: dict[int, dict[str, Any]] = {}

    def run(self, use: Callable[[int, SharedMemory, Exchange], Any] = lambda *_: None) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def main(p: int) -> None:
            topo = self.topology
            args = {"free": lambda: PLENTY, **self.share_args.get(p, {})}
            try:
                with (
                    contextlib.ExitStack() as stack,
                    Exchange(self.store, NAMESPACE, p, topo.processes, self.timeout_s, topo.describe) as ex,
                ):
                    hosts = host.gather_hosts(ex, self.hosts.get(p))
                    memory = share(ex, topo, p, PAGE, self.mappers[p], self.env, hosts, **args)
                    stack.callback(memory.free)
                    results[p] = use(p, memory, ex)
                    ex.barrier("used")
            except Exception as error:
                results[p] = error

        threads = [threading.Thread(target=main, args=(p,)) for p in self.topology.processes]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not any(t.is_alive() for t in threads)
        assert all(not m.live for m in self.mappers.values())
        assert self.store.keys() == []
        return results


def same_text(results: dict[int, Any]) -> str:
    assert all(isinstance(r, SetupError) for r in results.values()), results
    assert len({str(r) for r in results.values()}) == 1, results
    return str(results[min(results)])


@pytest.mark.parametrize(
    ("groups", "owners"), [(1, [0, 1]), (1, [0, 0, 1, 1]), (2, [0, 1, 0]), (1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 0])]
)
def test_every_rank_sees_every_chunk_of_its_groups(groups: int, owners: list[int]) -> None:
    topo = topology(groups, owners)
    world = World(topo)
    before = open_fds()

    def use(p: int, memory: SharedMemory, ex: Exchange) -> None:
        local = topo.local(p)
        mine = {g.index for g, _ in local}
        assert set(memory.address) == {(g, r) for g in mine for r in range(topo.ranks)}
        assert len(world.mappers[p].live) == len(memory.address) == len(set(memory.address.values()))
        assert {memory.kind_of(g) for g in mine} == {"local" if len(set(owners)) == 1 else "fd"}
        for (g, r), address in memory.address.items():
            assert ctypes.string_at(address, PAGE) == bytes(PAGE), (g, r)
        ex.barrier("zero")
        assert open_fds() == before  # all closed after import
        ex.barrier("fds")
        for g, m in local:  # each rank writes its device id into its slot of every chunk of its group
            for r in range(topo.ranks):
                ctypes.c_int.from_address(memory.address[g.index, r] + 4 * m.rank).value = 1 + m.device_id
        ex.barrier("written")
        for (g, _), address in memory.address.items():
            got = list((ctypes.c_int * topo.ranks).from_address(address))
            assert got == [1 + m.device_id for m in topo.groups[g].devices]
        ex.barrier("read")
        memory.unmap_peers()
        memory.unmap_peers()
        assert set(memory.address) == {(g.index, m.rank) for g, m in local} or memory.kind_of(0) == "local"
        assert len(world.mappers[p].live) == len(local)

    assert world.run(use) == dict.fromkeys(topo.processes)


def test_local_group_exports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "create", None)
    monkeypatch.setattr(host, "FdServer", None)
    topo = topology(1, [0, 0, 0])
    world = World(topo, Env(mem_handle_type="fabric"))  # no handle, so no kind to force
    assert world.run(lambda p, memory, ex: memory.kind_of(0)) == {0: "local"}


def test_import_failure_on_one_frees_everything_everywhere() -> None:
    topo = topology(1, [0, 1, 2])
    before = open_fds()

    def fail(record: HandleRecord, process: int, timeout_s: float) -> int:
        if record.rank == 2:
            raise SetupError("cannot import rank 2 (injected)")
        return fetch(record, process, timeout_s)

    for _ in range(20):
        world = World(topo)
        world.share_args[1] = {"fetch": fail}
        text = same_text(world.run())
        assert "step 'import the chunks' failed on 1 of 3" in text
        assert "process 1 (rank 1 of group 0): cannot import rank 2 (injected)" in text
        assert open_fds() == before


@pytest.mark.parametrize("fail_after", [0, 1, 2])
def test_mapping_failure(fail_after: int) -> None:
    world = World(topology(1, [0, 1, 1]))
    world.mappers[1].fail_after = fail_after
    text = same_text(world.run())
    assert "mmap failed (injected)" in text and "process 1 (ranks 1,2 of group 0)" in text


def test_short_memory_is_an_error_on_all() -> None:
    world = World(topology(1, [0, 1, 1]))
    world.share_args = {p: {"free": lambda: FreeBytes(3 * PAGE - 1, 1 << 40)} for p in (0, 1)}
    text = same_text(world.run())
    assert f"got {3 * PAGE - 1} bytes free, expected {3 * PAGE} bytes" in text and "stage_bytes" in text


def test_forced_fabric_and_hosts_apart() -> None:
    text = same_text(World(topology(1, [0, 1]), Env(mem_handle_type="fabric")).run())
    assert "fabric handles are forced" in text and "rank 0 on" in text and "rank 1 on" in text
    for kind in ("auto", "fd"):
        world = World(topology(1, [0, 1, 0]), Env(mem_handle_type=kind))
        world.hosts = {0: HostInfo("boot-1", "alpha"), 1: HostInfo("boot-2", "alpha")}
        text = same_text(world.run())
        assert "alpha (boot boot-1) (ranks 0,2), alpha (boot boot-2) (ranks 1)" in text


def test_a_failure_of_one_group_fails_the_others_too() -> None:
    topo = topology(2, [0, 1])
    world = World(topo)
    world.mappers[3].fail_after = 1
    assert "process 3 (rank 1 of group 1)" in same_text(world.run())


@pytest.mark.parametrize("forgery", ["short", "rank", "job"])
def test_forged_handle_record(forgery: str) -> None:
    class Forger(InProcessStore):
        def set(self, key: str, value: bytes) -> bool:
            at = value.find(b"MOONEPHD")
            if at >= 0 and key.endswith("/1"):
                raw = bytearray(value)
                if forgery == "rank":
                    raw[at + 36] = 9
                elif forgery == "job":
                    raw[at + 16] ^= 1
                else:  # a whole frame of half a record
                    raw = raw[: at + 100]
                    raw[16:24] = (100).to_bytes(8, "little")
                value = bytes(raw)
            return super().set(key, value)

    world = World(topology(1, [0, 1]))
    world.store = Forger()
    expected = {"short": "100 bytes, expected 1 records of 232", "rank": "rank out of range", "job": "another setup"}
    assert expected[forgery] in same_text(world.run())


def test_a_process_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    topo = topology(1, [0, 1])
    ex = Exchange(InProcessStore(), NAMESPACE, 0, (0, 1), 0.3, topo.describe)
    here = HostInfo.here()
    mapper = PyMapper()
    with pytest.raises(SetupError, match="no word from process 1 \\(rank 1 of group 0\\)"):
        share(ex, topo, 0, PAGE, mapper, Env(), {0: here, 1: here})
    assert not mapper.live
    ex.finish()


def test_free_runs_every_step_even_if_one_raises() -> None:
    class Sulking(PyMapper):
        def unmap(self, address: int, nbytes: int, /) -> None:
            super().unmap(address, nbytes)
            raise OSError("unmap complains")

    mapper = Sulking()
    memory = SharedMemory(PAGE, {0: "local"}, mapper)
    for rank in range(3):
        memory.add(0, rank, mapper.map_anonymous(PAGE), own=rank == 0)
    with pytest.raises(OSError, match="complains"):
        memory.free()
    assert not mapper.live and not memory.address
    memory.free()


def test_host_info() -> None:
    here = HostInfo.here()
    assert here == HostInfo.here() and here.boot_id and here.hostname
    assert here != replace(here, hostname="x") and here != replace(here, boot_id="x")


# -- the whole of it between real processes ----------------------------------------------------------------------------

PROCESS = """
import ctypes, os, sys, threading
import jax
address, count, me = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, me)
sys.path.insert(0, sys.argv[4])
from test_memory_host import PAGE, PyMapper, open_fds, topology
from moonep_jax import env
from moonep_jax.exchange import Exchange, namespace, open_store
from moonep_jax.memory import host
topo = topology(1, list(range(count)))
before, mapper = open_fds(), PyMapper()
ex = Exchange(open_store(topo.processes), namespace(topo.processes), me, topo.processes, 30.0, topo.describe)
hosts = host.gather_hosts(ex)
memory = host.share(ex, topo, me, PAGE, mapper, env.read(), hosts)
def new_fds():  # jax's own descriptors come and go
    return [t for t in open_fds().values() if "moonep" in t or "pidfd" in t]
assert not new_fds(), new_fds()
for r in range(count):
    ctypes.c_int.from_address(memory.address[0, r] + 4 * me).value = 10 + me
ex.barrier("written")
for r in range(count):
    assert list((ctypes.c_int * count).from_address(memory.address[0, r])) == [10 + p for p in range(count)]
ex.barrier("read")
memory.unmap_peers()
ex.barrier("unmapped")
memory.free()
assert not mapper.live
ex.finish()
print("OK", flush=True)
"""


@pytest.mark.multiprocess
def test_share_between_processes() -> None:
    count = 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = str(Path(__file__).parent)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen([sys.executable, "-c", PROCESS, address, str(count), str(p), folder], **pipes)
        for p in range(count)
    ]
    try:
        outputs = [w.communicate(timeout=50) for w in workers]
    finally:
        for w in workers:
            w.kill()
            w.wait()
    assert [out for out, _ in outputs] == ["OK\n"] * count, outputs
