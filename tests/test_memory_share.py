"""share(): chunks of many participants, and setups that fail on one of them without leaving a trace."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_kit import (
    NAMESPACE,
    PAGE,
    PLENTY,
    PyMapper,
    nothing_left_open,  # noqa: F401  (fixtures)
    open_fds,
    outputs_of,
    run_processes,
    same_text,
    topology,
)

from moonep_jax.env import Env
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange
from moonep_jax.handles import HandleRecord
from moonep_jax.memory import backend, fds, host
from moonep_jax.memory.host import FreeBytes, HostMemory
from moonep_jax.memory.hosts import HostInfo, gather_hosts
from moonep_jax.memory.share import SharedMemory, share
from moonep_jax.stores import InProcessStore
from moonep_jax.topology import Topology


class World:
    """Every process of a topology as a thread, with its own mapper and the same store."""

    def __init__(self, topo: Topology, env: Env | None = None, timeout_s: float = 20.0) -> None:
        self.topology, self.env, self.timeout_s = topo, env or Env(), timeout_s
        self.store = InProcessStore()
        self.mappers = {p: PyMapper() for p in topo.processes}
        self.hosts: dict[int, HostInfo] = {}
        self.share_args: dict[int, dict[str, Any]] = {}

    def run(self, use: Callable[[int, SharedMemory, Exchange], Any] = lambda *_: None) -> dict[int, Any]:
        def main(p: int, ex: Exchange) -> Any:
            args = dict(self.share_args.get(p, {}))
            memory_of = HostMemory(self.mappers[p], args.pop("free", lambda: PLENTY))
            hosts = gather_hosts(ex, self.hosts.get(p))
            with contextlib.ExitStack() as stack:
                memory = share(ex, self.topology, p, PAGE, memory_of, self.env, hosts, **args)
                stack.callback(memory.free)
                result = use(p, memory, ex)
                ex.barrier("used")
                return result

        results = run_processes(self.topology, self.store, self.timeout_s, main)
        assert all(not m.live for m in self.mappers.values())
        return results


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
    monkeypatch.setattr(backend, "FdServer", None)
    topo = topology(1, [0, 0, 0])
    world = World(topo, Env(mem_handle_type="fabric"))  # no handle, so no kind to force
    assert world.run(lambda p, memory, ex: memory.kind_of(0)) == {0: "local"}


def test_import_failure_on_one_frees_everything_everywhere() -> None:
    topo = topology(1, [0, 1, 2])
    before = open_fds()

    def fail(record: HandleRecord, process: int, timeout_s: float) -> int:
        if record.rank == 2:
            raise SetupError("cannot import rank 2 (injected)")
        return fds.fetch(record, process, timeout_s, validate=host.validate_memfd)

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
    assert "fabric handles are forced" in text and "ranks 0,1 on" in text
    for kind in ("auto", "fd"):
        world = World(topology(1, [0, 1, 0]), Env(mem_handle_type=kind))
        world.hosts = {0: HostInfo("boot-1", "alpha"), 1: HostInfo("boot-2", "alpha")}
        text = same_text(world.run())
        assert "alpha (boot boot-1) (ranks 0,2), alpha (boot boot-2) (ranks 1)" in text


@pytest.mark.parametrize("owners", [[0, 1, 1], [0, 0, 0]])
def test_chunks_of_some_ranks_only(owners: list[int]) -> None:
    world = World(topology(1, owners))
    world.share_args = {p: {"owners": [2]} for p in world.topology.processes}

    def use(p: int, memory: SharedMemory, ex: Exchange) -> int:
        assert set(memory.address) == {(0, 2)} and len(world.mappers[p].live) == 1
        if p == owners[2]:
            ctypes.c_int.from_address(memory.address[0, 2]).value = 42
        ex.barrier("written")
        return ctypes.c_int.from_address(memory.address[0, 2]).value

    assert world.run(use) == dict.fromkeys(world.topology.processes, 42)
    world.share_args = {p: {"owners": [2, 3]} for p in world.topology.processes}
    assert "bad owners; got [2, 3], expected ranks 0 to 2" in same_text(world.run())


def test_a_failure_of_one_group_fails_the_others_too() -> None:
    topo = topology(2, [0, 1])
    world = World(topo)
    world.mappers[3].fail_after = 1
    assert "process 3 (rank 1 of group 1)" in same_text(world.run())


@pytest.mark.parametrize("forgery", ["short", "rank", "job", "kind"])
def test_forged_handle_record(forgery: str) -> None:
    class Forger(InProcessStore):
        def set(self, key: str, value: bytes) -> bool:
            at = value.find(b"MOONEPHD")
            if at >= 0 and key.endswith("/1"):
                raw = bytearray(value)
                if forgery == "rank":
                    raw[at + 36] = 9
                elif forgery == "kind":  # a fabric record without a fault of its own
                    raw[at + 10], raw[at + 168 : at + 232] = 2, bytes([1] * 64)
                    raw[at + 56 : at + 168] = b"\xff" * 4 + bytes(108)
                elif forgery == "job":
                    raw[at + 16] ^= 1
                else:  # a whole frame of half a record
                    raw = raw[: at + 100]
                    raw[16:24] = (100).to_bytes(8, "little")
                value = bytes(raw)
            return super().set(key, value)

    world = World(topology(1, [0, 1]))
    world.store = Forger()
    expected = {
        "short": "100 bytes, expected 1 records of 232",
        "rank": "rank out of range",
        "job": "another setup",
        "kind": "of another kind; got fabric, expected fd",
    }
    assert expected[forgery] in same_text(world.run())


def test_a_process_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    topo = topology(1, [0, 1])
    ex = Exchange(InProcessStore(), NAMESPACE, 0, (0, 1), 0.3, topo.describe)
    here = HostInfo.here()
    mapper = PyMapper()
    with pytest.raises(SetupError, match="no word from process 1 \\(rank 1 of group 0\\)"):
        share(ex, topo, 0, PAGE, HostMemory(mapper), Env(), {0: here, 1: here})
    assert not mapper.live
    ex.finish()


def test_free_runs_every_step_even_if_one_raises() -> None:
    class Sulking(PyMapper):
        def unmap(self, address: int, nbytes: int, /) -> None:
            super().unmap(address, nbytes)
            raise OSError("unmap complains")

    mapper = Sulking()
    memory = SharedMemory(PAGE, {0: "local"})
    for rank in range(3):
        address = mapper.map_anonymous(PAGE)
        memory.add(0, rank, address, partial(mapper.unmap, address, PAGE), own=rank == 0)
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
from memory_kit import PAGE, PyMapper, open_fds, topology
from moonep_jax import env
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.stores import open_store
from moonep_jax.memory.host import HostMemory
from moonep_jax.memory.hosts import gather_hosts
from moonep_jax.memory.share import share
topo = topology(1, list(range(count)))
before, mapper = open_fds(), PyMapper()
ex = Exchange(open_store(topo.processes), namespace(topo.processes), me, topo.processes, 30.0, topo.describe)
memory = share(ex, topo, me, PAGE, HostMemory(mapper), env.read(), gather_hosts(ex))
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
    outputs = outputs_of(workers, timeout_s=50)
    assert [out for out, _ in outputs] == ["OK\n"] * count, outputs
