"""Symmetric memory on simulated GPUs: kinds, trial and vote, lack of memory, and no trace of any failure."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_kit import NBYTES, World
from fake_driver import FakeDriver, Machines
from memory_kit import (
    nothing_left_open,  # noqa: F401  (fixtures)
    open_fds,
    same_text,
    topology,
)

from moonep_jax import exchange
from moonep_jax.env import Env
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange
from moonep_jax.handles import HandleRecord
from moonep_jax.memory import cuda, fds
from moonep_jax.memory.share import SharedMemory, share
from moonep_jax.stores import InProcessStore

SPLIT: Callable[[int], str] = "{}".format  # every process on a host of its own


def kinds(world: World) -> set[str]:
    """share() works, the data passes the check, and these are the kinds of all processes' groups."""

    def use(p: int, memory: SharedMemory, ex: Exchange) -> set[str]:
        world.check(p, memory, ex)
        return {memory.kind_of(g.index) for g, _ in world.topology.local(p)}

    results = world.run(use)
    assert all(isinstance(r, set) for r in results.values()), results
    return set().union(*results.values())


@pytest.mark.parametrize(
    ("groups", "owners"), [(1, [0, 1]), (1, [0, 0, 1, 1]), (2, [0, 1, 0]), (1, [1, 0, 2, 3]), (2, [0, 0]), (1, [0])]
)
def test_every_rank_sees_every_chunk_of_its_groups(groups: int, owners: list[int]) -> None:
    before = open_fds()
    world = World(topology(groups, owners))

    def use(p: int, memory: SharedMemory, ex: Exchange) -> None:
        ex.barrier("shared")
        assert open_fds() == before  # all closed after import
        ex.barrier("fds")
        chunks = [m.allocation for m in world.drivers[p].mappings.values()]
        # Peers look at a chunk as soon as they have its handle: it was zero before.
        assert all(not any(c.at_export[:NBYTES]) for c in chunks)
        assert all(c.at_export for c in chunks) == (len(set(owners)) > 1)
        ex.barrier("zero at export")
        world.check(p, memory, ex)

    assert world.run(use) == dict.fromkeys(world.topology.processes)
    assert kinds(World(topology(groups, owners))) == {"local" if len(set(owners)) == 1 else "fd"}


def test_local_group_exports_and_tries_nothing() -> None:
    world = World(topology(1, [0, 0, 0]), env=Env(mem_handle_type="fabric"))  # no handle, so no kind to force
    assert kinds(world) == {"local"}
    assert not any(world.drivers[0].calls[c] for c in ("export_fd", "export_fabric", "attributes"))


def test_72_ranks_on_18_hosts() -> None:
    world = World(topology(1, [r // 4 for r in range(72)]), SPLIT)
    assert kinds(world) == {"fabric"}
    assert all(not d.calls["export_fd"] for d in world.drivers.values())  # an fd cannot leave its host


# -- the kind ----------------------------------------------------------------------------------------------------------


def test_fabric_on_one_host_only_if_asked_for() -> None:
    assert kinds(World(topology(1, [0, 1]))) == {"fd"}
    for kind, other in (("fabric", "export_fd"), ("fd", "export_fabric")):
        world = World(topology(1, [0, 1]), env=Env(mem_handle_type=kind))
        assert kinds(world) == {kind}
        assert not any(d.calls[other] for d in world.drivers.values())  # what cannot be chosen is not tried


def test_attribute_says_fabric_but_it_is_not_permitted() -> None:
    world = World(topology(1, [0, 1]))
    for d in world.drivers.values():
        d.refuses["fabric"] = 800
    assert kinds(world) == {"fd"}
    world = World(topology(1, [0, 0, 1, 2]), SPLIT)
    for d in world.drivers.values():
        d.refuses["fabric"] = 800
    text = same_text(world.run())
    assert "step 'choose the handle kind' failed" in text and "fabric handles are needed (the group is on" in text
    assert "ranks 0,1 on alpha (boot 0): fabric: fake create returned CUDA_ERROR_NOT_PERMITTED (800)" in text


def test_own_import_works_but_a_peers_does_not() -> None:
    """Hosts of two IMEX domains: everybody's own trial is fine, and only a peer's import shows it."""
    world = World(topology(1, [0, 0, 1, 2]), SPLIT)
    world.drivers[2].imex = "another"
    text = same_text(world.run())
    assert "fabric handles are needed" in text
    error = "fake import_fabric returned CUDA_ERROR_INVALID_VALUE (1)"
    assert f"ranks 0,1 on alpha (boot 0): fabric: cannot import from rank 3: {error}" in text
    assert f"rank 3 on alpha (boot 2): fabric: cannot import from ranks 0,1,2: {error}" in text
    world.env = Env(mem_handle_type="fabric")
    assert "fabric handles are forced, but do not work on some ranks" in same_text(world.run())


def test_ranks_with_different_kinds() -> None:
    world = World(topology(1, [0, 1, 2]))
    world.drivers[1].says = replace_attributes(world.drivers[1], fabric=False)
    assert kinds(world) == {"fd"}
    world.env = Env(mem_handle_type="fabric")
    text = same_text(world.run())  # names the unsupported rank, and no other
    assert "[rank 1 on alpha (boot 0): fabric: CUDA device 4 says that it does not support fabric handles]" in text
    world = World(topology(1, [0, 1]))
    world.drivers[0].says = replace_attributes(world.drivers[0], fabric=False)
    world.drivers[1].says = replace_attributes(world.drivers[1], fd=False)
    for env in (Env(), Env(mem_handle_type="fd")):
        world.env = env
        assert "rank 1 on alpha (boot 0): fd: CUDA device 4 says" in same_text(world.run())


def replace_attributes(driver: FakeDriver, **changes: bool) -> Any:
    return driver.says._replace(**changes)


def test_no_virtual_memory_management() -> None:
    world = World(topology(1, [0, 1]))
    world.drivers[0].says = replace_attributes(world.drivers[0], vmm=False)
    assert "CUDA device 3 has no virtual memory management" in same_text(world.run())


def test_forced_fd_on_two_hosts() -> None:
    text = same_text(World(topology(1, [0, 1]), SPLIT, Env(mem_handle_type="fd")).run())
    assert "fd handles are forced, but the group spans hosts" in text


def test_groups_choose_each_for_itself() -> None:
    """Processes 0 and 1 share a host, 2 and 3 do not."""
    world = World(topology(2, [0, 1]), lambda p: str(max(p, 1)))
    assert world.run(lambda p, memory, ex: memory.kind_of(p // 2)) == {0: "fd", 1: "fd", 2: "fabric", 3: "fabric"}


def test_a_failure_of_one_group_fails_the_others_too() -> None:
    world = World(topology(2, [0, 1]))
    world.drivers[3].refuses = {"fd": 800, "fabric": 800}
    text = same_text(world.run())
    assert "rank 1 on alpha" in text and "process 2 (rank 0 of group 1), process 3 (rank 1 of group 1)" in text


# -- support is asked once ---------------------------------------------------------------------------------------------


def test_support_is_asked_once_per_process() -> None:
    driver = FakeDriver(Machines(), "host", [0, 1])
    assert cuda.fabric_supported(driver, 0) and cuda.fabric_supported(driver, 0)
    assert (driver.calls["attributes"], driver.calls["create"]) == (1, 1)
    driver.refuses["fabric"] = 800
    assert cuda.fabric_supported(driver, 0) and not cuda.fabric_supported(driver, 1)
    driver.refuses.clear()
    assert not cuda.fabric_supported(driver, 1)
    assert driver.calls["attributes"] == 2 and not driver.live()
    assert cuda.fabric_supported(FakeDriver(Machines(), "host", [1]), 1)  # another process asks for itself
    world = World(topology(1, [0, 1]))
    kinds(world)
    asked = [d.calls["attributes"] for d in world.drivers.values()]
    kinds(world)
    assert [d.calls["attributes"] for d in world.drivers.values()] == asked == [2, 2]  # one per kind


def test_lack_of_memory_is_not_remembered_as_lack_of_support() -> None:
    world = World(topology(1, [0, 1]))
    world.drivers[1].faults["create", 1] = 2
    text = same_text(world.run())
    assert "step 'try the handle kinds' failed on 1 of 2" in text and "bytes free" in text and "stage_bytes" in text
    assert kinds(world) == {"fd"}


# -- lack of memory ----------------------------------------------------------------------------------------------------

KNOBS = ("EPConfig.tokens", "EPConfig.stage_bytes", "XLA_PYTHON_CLIENT_MEM_FRACTION", "setup before the first jit")


def test_too_little_memory() -> None:
    world = World(topology(1, [0, 1, 1]))
    world.machines.capacity = 4096
    text = same_text(world.run())
    assert "step 'check the memory' failed on 2 of 2" in text and "got 4096 bytes free, expected 8192 bytes" in text
    assert "CUDA device 4 (JAX device id 1)" in text and all(knob in text for knob in KNOBS)


@pytest.mark.parametrize("owners", [[0, 1], [0, 0]])
def test_memory_that_another_program_took_meanwhile(owners: list[int]) -> None:
    world = World(topology(1, owners))
    driver = world.drivers[max(owners)]
    kinds(world)
    assert kinds(world) == {"fd"} if owners[1] else {"local"}
    per_setup = driver.calls["create"] // 2
    driver.calls.clear()
    driver.faults["create", per_setup - (owners[1] == 1)] = 2  # the chunk's: the last one
    text = same_text(world.run())
    assert "step 'create the chunks' failed on 1 of" in text and "expected 8192 bytes" in text
    assert "bytes free" in text and all(knob in text for knob in KNOBS)


# -- every failure frees everything ------------------------------------------------------------------------------------

CALLS = ("create", "export_fd", "export_fabric", "import_fd", "import_fabric", "reserve", "map", "set_access", "zero")


@pytest.mark.parametrize("host_of", [None, SPLIT], ids=["fd", "fabric"])
@pytest.mark.parametrize("call", [*CALLS, "write", "read", "granularity", "attributes", "free_bytes"])
def test_every_call_may_fail(call: str, host_of: Callable[[int], str] | None) -> None:
    """World.run checks that nothing is left. The error is the same everywhere, or the other kind was taken."""
    good = World(topology(1, [0, 1, 1]), host_of)
    kind = set(good.run(lambda p, memory, ex: memory.kind_of(0)).values())
    count, failed = good.drivers[1].calls[call], 0
    for k in range(1, count + 1):
        world = World(topology(1, [0, 1, 1]), host_of)
        world.drivers[1].faults[call, k] = 999
        results = world.run(lambda p, memory, ex: memory.kind_of(0))
        if any(isinstance(r, Exception) for r in results.values()):
            text = same_text(results)
            assert f"fake {call} returned CUDA_ERROR_UNKNOWN (999)" in text, text
            failed += 1
        else:  # fabric does not matter on one host
            assert set(results.values()) == kind == {"fd"}
    assert failed > 0 or count == 0 or (call == "import_fabric" and kind == {"fd"})


@pytest.mark.parametrize("host_of", [None, SPLIT], ids=["fd", "fabric"])
@pytest.mark.parametrize("call", ["unmap", "free_address", "release"])
def test_a_failing_cleanup_still_runs_the_rest(
    call: str, host_of: Callable[[int], str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_SLICE_S", 0.02)  # the others hear of it soon
    good = World(topology(1, [0, 1, 1]), host_of)
    good.run()
    count = good.drivers[1].calls[call]
    assert count > 5
    for k in range(1, count + 1):
        world = World(topology(1, [0, 1, 1]), host_of)
        world.drivers[1].faults[call, k] = 999
        results = world.run()
        assert results[1] is None or "(999)" in str(results[1]), results


def test_100_setups_that_fail_at_import() -> None:
    before = open_fds()
    world = World(topology(1, [0, 1]))
    for _ in range(100):
        driver = world.drivers[1]
        driver.calls.clear()
        driver.faults["import_fd", 4] = 999  # two imports in the trial, two of the chunk
        assert "step 'import the chunks' failed on 1 of 2" in same_text(world.run())
        assert open_fds() == before
    driver.faults.clear()
    assert kinds(world) == {"fd"}


def test_a_process_that_never_comes() -> None:
    world = World(topology(1, [0, 1]))
    ex = Exchange(InProcessStore(), "moonep/test/0", 0, (0, 1), 0.3, world.topology.describe)
    backend = cuda.CudaMemory(world.drivers[0], world.ordinals[0])
    with pytest.raises(SetupError, match=r"no word from process 1 \(rank 1 of group 0\)"):
        share(ex, world.topology, 0, NBYTES, backend, Env(), world.hosts)
    assert not world.drivers[0].live()
    ex.finish()


# -- no other memory passes for a chunk --------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", [True, False], ids=["trial", "chunk"])
def test_the_descriptor_of_another_rank(trial: bool) -> None:
    """pidfd_getfd finds another process where containers number their processes each for themselves."""
    world = World(topology(1, [0, 1, 2]))

    def fetch(record: HandleRecord, process: int, timeout_s: float) -> int:
        backend = cuda.CudaMemory(world.drivers[0], world.ordinals[0])
        # Of the setup's two digests, the trial's comes first.
        if record.rank == 2 and trial == (len(seen) == 1):
            place = seen[record.digest]
            return fds.fetch(place, process, timeout_s, fds.TRANSPORTS[1:], validate=backend.validate_fd)
        seen[record.digest] = record
        return fds.fetch(record, process, timeout_s, fds.TRANSPORTS[1:], validate=backend.validate_fd)

    seen: dict[bytes, HandleRecord] = {}
    world.fetch[0] = fetch
    text = same_text(world.run())
    assert "the memory imported for rank 2 is not its chunk, seen from device 3" in text
    assert ("fd handles do not work on some ranks" if trial else "step 'import the chunks' failed") in text


def test_a_foreign_descriptor() -> None:
    world = World(topology(1, [0, 1]))
    backend = cuda.CudaMemory(world.drivers[0], world.ordinals[0])
    null = [("injected", lambda *_: os.open("/dev/null", os.O_RDWR))]
    world.fetch[0] = partial(fds.fetch, transports=null, validate=backend.validate_fd)
    text = same_text(world.run())
    assert "injected: setup: rank 1's descriptor is foreign; got fake import_fd" in text and "(304)" in text


@pytest.mark.parametrize("forgery", ["kind", "rank", "chunk"])
def test_forged_records(forgery: str) -> None:
    class Forger(InProcessStore):
        def set(self, key: str, value: bytes) -> bool:
            magic = b"MOONEPHD".hex().encode()
            if (at := value.find(magic)) >= 0 and key.endswith("/1"):  # hexadecimal: the trial's
                raw = bytearray(value)
                if forgery == "kind":
                    raw[at + 20 : at + 22] = b"01"
                elif forgery == "rank":
                    raw[at + 72 : at + 74] = b"00"
                value = bytes(raw)
            elif (at := value.find(b"MOONEPHD")) >= 0 and key.endswith("/1") and forgery == "chunk":
                value = value[: at + 10] + b"\x01" + value[at + 11 :]
            return super().set(key, value)

    world = World(topology(1, [0, 1]), SPLIT)
    world.store = Forger()
    expected = {"kind": "of another kind; got fd, expected fabric", "rank": "a record of another rank"}
    assert expected.get(forgery, expected["kind"]) in same_text(world.run())


# -- memory owned by some ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("owners", [[0], [1], [0, 2]])
@pytest.mark.parametrize("processes", [[0, 1, 2], [0, 1, 1], [0, 0, 0]])
def test_owners(owners: list[int], processes: list[int]) -> None:
    world = World(topology(1, processes))
    world.owners = owners
    assert kinds(world) == {"fd" if processes[2] else "local"}


@pytest.mark.parametrize("owners", [[], [3], [-1]])
def test_bad_owners(owners: list[int]) -> None:
    world = World(topology(1, [0, 1, 2]))
    world.owners = owners
    assert f"bad owners; got {owners}, expected ranks 0 to 2" in same_text(world.run())


# -- devices, log ------------------------------------------------------------------------------------------------------


def test_ordinals_are_the_local_hardware_ids() -> None:
    devices = [
        SimpleNamespace(id=8, process_index=1, local_hardware_id=2),
        SimpleNamespace(id=3, process_index=0, local_hardware_id=2),
        SimpleNamespace(id=9, process_index=1, local_hardware_id=0),
    ]
    assert cuda.ordinals(devices, 1) == {8: 2, 9: 0}
    devices[0].local_hardware_id = None
    with pytest.raises(SetupError, match="no local hardware id"):
        cuda.ordinals(devices, 1)


def test_the_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for world, kind in [
        (World(topology(1, [0, 1])), "2 ranks on 1 host(s)) is shared by: fd"),
        (World(topology(1, [0, 1]), SPLIT), "2 ranks on 2 host(s)) is shared by: fabric"),
        (World(topology(1, [0, 0])), "2 ranks on 1 host(s)) is shared by: local"),
    ]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "moonep_jax"):
            world.run()
        lines = [r.getMessage() for r in caplog.records if "is shared by" in r.getMessage()]
        assert lines == [f"setup: memory of group 0 ({kind}"] * len(world.topology.processes)
