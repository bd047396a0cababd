"""What the tests of shared memory use together: a mapper in Python, handle records, a check that nothing stays open."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange
from moonep_jax.handles import HandleRecord, namespace_digest
from moonep_jax.memory import host
from moonep_jax.memory.host import FreeBytes
from moonep_jax.stores import InProcessStore
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
    """Sockets of the library that this process holds; other processes of the machine may run the library, too."""
    mine = open_fds().values()
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@moonep-" in line)
    return sum(f"socket:[{row[6]}]" in mine for row in rows)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before, threads = open_fds(), threading.active_count()
    yield
    assert open_fds() == before
    assert threading.active_count() <= threads  # threads of tests before may end meanwhile
    assert listening() == 0


def record_of(fd: int, nbytes: int = PAGE, name: str = "none", **changes: Any) -> HandleRecord:
    return replace(HandleRecord("fd", DIGEST, 0, 1, nbytes, os.getpid(), os.geteuid(), fd, name), **changes)


@pytest.fixture(name="chunk")
def chunk_fixture() -> Iterator[int]:
    fd = host.create(PAGE, host.chunk_name(DIGEST, 0, 1))
    yield fd
    os.close(fd)


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"


def in_threads(processes: Iterable[int], body: Callable[[int], Any]) -> dict[int, Any]:
    """body(process) in a thread for each: results or exceptions. None may take more than a minute."""
    results: dict[int, Any] = {}

    def run(p: int) -> None:
        try:
            results[p] = body(p)
        except Exception as error:
            results[p] = error

    threads = [threading.Thread(target=run, args=(p,)) for p in processes]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return results


def run_processes(
    topo: Topology, store: InProcessStore, timeout_s: float, main: Callable[[int, Exchange], Any]
) -> dict[int, Any]:
    """main(process, exchange) in a thread per process of a topology: its results or errors; no key may be left."""

    def run(p: int) -> Any:
        with Exchange(store, NAMESPACE, p, topo.processes, timeout_s, topo.describe) as ex:
            return main(p, ex)

    results = in_threads(topo.processes, run)
    assert store.keys() == []
    return results


def same_text(results: dict[int, Any]) -> str:
    """The text of the SetupError that all processes raised alike."""
    assert all(isinstance(r, SetupError) for r in results.values()), results
    assert len({str(r) for r in results.values()}) == 1, results
    return str(results[min(results)])


def topology(groups: int, owners: list[int]) -> Topology:
    """`groups` groups; owners[r] is the process of rank r of every group; groups have processes of their own."""
    count = max(owners) + 1
    devices = np.empty((groups, len(owners)), dtype=object)
    for g in range(groups):
        for r, p in enumerate(owners):
            devices[g, r] = FakeDevice(g * len(owners) + r, g * count + p)
    mesh: Any = SimpleNamespace(devices=devices, axis_names=("dp", "ep"))
    return Topology.from_mesh(mesh, "ep")


def outputs_of(workers: list[subprocess.Popen[str]], timeout_s: float) -> list[tuple[str, str]]:
    """stdout and stderr of each worker; none is left behind, whatever happens."""
    try:
        return [w.communicate(timeout=timeout_s) for w in workers]
    finally:
        for w in workers:
            w.kill()
            w.wait()
