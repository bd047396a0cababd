"""Every process of a topology as a thread with a simulated CUDA driver of its own, and share() run in all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from fake_driver import FakeDriver, Machines
from memory_kit import run_processes

from moonep_jax.env import Env
from moonep_jax.exchange import Exchange
from moonep_jax.memory.backend import Fetch
from moonep_jax.memory.cuda import CudaMemory
from moonep_jax.memory.hosts import HostInfo, gather_hosts
from moonep_jax.memory.share import SharedMemory, share
from moonep_jax.stores import InProcessStore
from moonep_jax.topology import Topology

NBYTES = 5000  # no multiple of anything

Use = Callable[[int, SharedMemory, Exchange], Any]


class World:
    """host_of: process -> its host's name; None: all on one. Devices of a host have ordinals 3, 4, ..., so that no
    ordinal is a rank or a JAX device id."""

    def __init__(self, topo: Topology, host_of: Callable[[int], str] | None = None, env: Env | None = None) -> None:
        self.topology, self.env = topo, env or Env()
        self.machines, self.store, self.timeout_s = Machines(), InProcessStore(), 30.0
        self.owners: Collection[int] | None = None
        self.fetch: dict[int, Fetch] = {}
        self.hosts = {p: HostInfo(host_of(p) if host_of else "0", "alpha") for p in topo.processes}
        self.ordinals: dict[int, dict[int, int]] = {}  # process -> JAX device id -> ordinal
        self.drivers: dict[int, FakeDriver] = {}
        taken: Counter[str] = Counter()
        for p, info in self.hosts.items():
            table = self.ordinals[p] = {}
            for _, m in topo.local(p):
                table[m.device_id] = 3 + taken[info.boot_id]
                taken[info.boot_id] += 1
            self.drivers[p] = FakeDriver(self.machines, info.boot_id, sorted(table.values()))

    def run(self, use: Use = lambda *_: None) -> dict[int, Any]:
        """share() and use() in every process: results or errors. Nothing is left of it, whatever happened."""

        def main(p: int, ex: Exchange) -> Any:
            hosts = gather_hosts(ex, self.hosts[p])
            backend = CudaMemory(self.drivers[p], self.ordinals[p])
            with ExitStack() as stack:
                more = {"owners": self.owners, "fetch": self.fetch.get(p)}
                memory = share(ex, self.topology, p, NBYTES, backend, self.env, hosts, **more)
                stack.callback(memory.free)
                result = use(p, memory, ex)
                ex.barrier("used")
                return result

        results = run_processes(self.topology, self.store, self.timeout_s, main)
        assert {p: d.live() for p, d in self.drivers.items()} == {p: {} for p in self.drivers}
        assert not self.machines.allocations
        return results

    def check(self, p: int, memory: SharedMemory, ex: Exchange) -> None:
        """Each rank writes into its place of every chunk of its group; all read all of it, from every local device."""
        topo, driver, table = self.topology, self.drivers[p], self.ordinals[p]
        owners = range(topo.ranks) if self.owners is None else self.owners
        local = topo.local(p)
        assert set(memory.address) == {(g.index, r) for g, _ in local for r in owners}
        count = len(memory.address)
        assert driver.live() == {"mappings": count, "reservations": count}  # one mapping each, all handles released
        for (_, rank), address in memory.address.items():
            for g, m in local:
                if (g.index, rank) in memory.address and memory.address[g.index, rank] == address:
                    assert driver.read(table[m.device_id], address, NBYTES) == bytes(NBYTES)
        ex.barrier("zero")
        for g, m in local:
            for r in owners:
                place = memory.address[g.index, r] + 8 * m.rank
                driver.write(table[m.device_id], place, (1 + m.device_id).to_bytes(8, "little"))
        ex.barrier("written")
        for g, m in local:
            expected = b"".join((1 + x.device_id).to_bytes(8, "little") for x in g.devices)
            for r in owners:
                assert driver.read(table[m.device_id], memory.address[g.index, r], len(expected)) == expected
        ex.barrier("read")
        memory.unmap_peers()
        memory.unmap_peers()
        mine = {(g.index, m.rank) for g, m in local if m.rank in owners}
        assert set(memory.address) == mine and driver.live().get("mappings", 0) == len(mine)
