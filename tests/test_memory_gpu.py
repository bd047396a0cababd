"""Symmetric memory on a real GPU: between two processes that share GPU 0, and beside JAX. Skipped without a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_kit import DIGEST, outputs_of, run_processes, same_text, topology

from moonep_jax.env import Env
from moonep_jax.exchange import Exchange
from moonep_jax.handles import HandleRecord
from moonep_jax.memory import cuda, fds
from moonep_jax.memory.driver import Driver, DriverError, load
from moonep_jax.memory.hosts import gather_hosts
from moonep_jax.memory.share import SharedMemory, share
from moonep_jax.stores import InProcessStore

pytestmark = pytest.mark.cuda

MIB = 1 << 20


@pytest.fixture(name="driver", scope="module")
def driver_fixture() -> Driver:
    try:
        driver = load()
        driver.attributes(0)
        return driver
    except Exception as error:
        pytest.skip(f"no GPU: {error}")


def one_process(driver: Driver, nbytes: int, use: Any = lambda *_: None) -> Any:
    """share() of one rank on GPU 0: the result of use(memory), or the error."""
    topo = topology(1, [0])

    def main(p: int, ex: Exchange) -> Any:
        memory = share(ex, topo, p, nbytes, cuda.CudaMemory(driver, {0: 0}), Env(), gather_hosts(ex))
        try:
            return use(memory)
        finally:
            memory.free()

    return run_processes(topo, InProcessStore(), 20.0, main)


def test_attributes_and_kinds(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    says, fabric = driver.attributes(0), cuda.refusal(driver, 0, "fabric")
    with capsys.disabled():
        sizes = {kind: driver.granularity(0, kind) for kind in (None, "fd")}
        print(f"\nGPU 0: {says}; granularity {sizes}; fabric: {fabric or 'works'}")
    assert says.vmm and says.fd
    assert cuda.refusal(driver, 0, "fd") == ""
    assert cuda.fabric_supported(driver, 0) == (not fabric)


def test_chunk_of_one_process(driver: Driver) -> None:
    before = driver.free_bytes(0)

    def use(memory: SharedMemory) -> None:
        address = memory.address[0, 0]
        assert memory.kind_of(0) == "local" and address % (2 * MIB) == 0
        assert before - driver.free_bytes(0) >= 8 * MIB
        assert driver.read(0, address, 8 * MIB) == bytes(8 * MIB)
        driver.write(0, address + 8 * MIB - 5, b"hello")
        assert driver.read(0, address + 8 * MIB - 5, 5) == b"hello"

    for _ in range(3):
        assert one_process(driver, 8 * MIB, use) == {0: None}
    assert driver.free_bytes(0) >= before - MIB


def test_errors_of_the_driver(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"\(CUDA device 999\) returned CUDA_ERROR_INVALID_DEVICE \(101\)"):
        driver.attributes(999)
    with pytest.raises(DriverError, match=r"cuMemCreate .* returned CUDA_ERROR_\w+ \(\d+\)"):
        driver.create(0, 1, None)  # no multiple of the granularity
    text = same_text(one_process(driver, 1 << 50))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text and f"expected {(1 << 50) + 2 * MIB} bytes" in text


def test_a_descriptor_that_is_no_memory_of_cuda(driver: Driver) -> None:
    backend = cuda.CudaMemory(driver, {0: 0})
    record = HandleRecord("fd", DIGEST, 0, 1, 64, 1, 0, 5, "x")
    with open("/dev/null", "rb") as null, pytest.raises(Exception, match=r"descriptor is foreign; got cuMemImport"):
        backend.validate_fd(null.fileno(), record)


# -- two processes on one GPU ------------------------------------------------------------------------------------------

WORKER = """
import os, sys
from collections import Counter
from functools import partial
import jax
address, folder, transport, kind = sys.argv[1], *sys.argv[4:7]
count, me, cycles = (int(sys.argv[i]) for i in (2, 3, 7))
jax.distributed.initialize(address, count, me)
sys.path.insert(0, folder)
from memory_kit import open_fds, topology
from moonep_jax.env import Env
from moonep_jax.errors import SetupError
from moonep_jax.exchange import Exchange, namespace
from moonep_jax.stores import open_store
from moonep_jax.memory import cuda, driver, fds
from moonep_jax.memory.hosts import gather_hosts
from moonep_jax.memory.share import share

NBYTES = 16 << 20
gpu, topo = driver.load(), topology(1, list(range(count)))
backend = cuda.CudaMemory(gpu, {me: 0})  # every rank on GPU 0
transports = [t for t in fds.TRANSPORTS if transport in ("any", t[0])]
fetch = partial(fds.fetch, transports=transports, validate=backend.validate_fd)
store = open_store(topo.processes)

def cycle(fail):
    with Exchange(store, namespace(topo.processes), me, topo.processes, 60.0, topo.describe) as ex:
        null = [("null", lambda *_: os.open("/dev/null", os.O_RDONLY))]
        def use(record, *rest):  # a failure comes after the trial
            broken = fail and me == 1 and record.nbytes == NBYTES
            return fetch(record, *rest, **({"transports": null} if broken else {}))
        memory = share(ex, topo, me, NBYTES, backend, Env(mem_handle_type=kind), gather_hosts(ex), fetch=use)
        try:
            for r in range(count):
                assert gpu.read(0, memory.address[0, r], 4096) == bytes(4096)
            ex.barrier("zero")
            for r in range(count):
                gpu.write(0, memory.address[0, r] + 4 * me, bytes([10 + me] * 4))
                gpu.write(0, memory.address[0, r] + NBYTES - 4 * (1 + me), bytes([20 + me] * 4))
            ex.barrier("written")
            for r in range(count):
                head = gpu.read(0, memory.address[0, r], 4 * count)
                assert head == b"".join(bytes([10 + p] * 4) for p in range(count)), head
                tail = gpu.read(0, memory.address[0, r] + NBYTES - 4 * count, 4 * count)
                assert tail == b"".join(bytes([20 + p] * 4) for p in reversed(range(count))), tail
            ex.barrier("read")
            memory.unmap_peers()
            ex.barrier("unmapped")
            return memory.kind_of(0)
        finally:
            memory.free()

def state():
    with Exchange(store, namespace(topo.processes), me, topo.processes, 60.0, topo.describe) as ex:
        ex.barrier("all have freed")
        marks = ("nvidia", "moonep", "pidfd", "dmabuf", "memfd")  # jax's own descriptors come and go
        now = gpu.free_bytes(0), Counter(t for t in open_fds().values() if any(m in t for m in marks))
        ex.barrier("all have looked")
        return now

try:
    print("kind", cycle(False))
    before = state()
    for i in range(cycles):
        try:
            cycle(i % 5 == 4)
        except SetupError as error:
            assert i % 5 == 4 and "descriptor is foreign" in str(error), error
        else:
            assert i % 5 != 4
    after = state()
    assert before[0] - after[0] < 2 << 20, (before, after)
    assert before[1] == after[1], (before[1], after[1])
    print("cycles", cycles, flush=True)
except SetupError as error:
    print("error", error, flush=True)
"""


def run_workers(transport: str, kind: str, cycles: int) -> list[list[str]]:
    """The lines that each of two processes printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = str(Path(__file__).parent)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", WORKER, address, "2"]
    workers = [subprocess.Popen([*command, str(p), folder, transport, kind, str(cycles)], **pipes) for p in range(2)]
    outputs = outputs_of(workers, timeout_s=240)
    assert [w.returncode for w in workers] == [0, 0], outputs
    return [out.splitlines() for out, _ in outputs]


def transport_works(name: str) -> bool:
    """Whether a process may fetch a descriptor of its own user's in this way here at all."""
    try:
        with open("/dev/null", "rb") as null:
            record = HandleRecord("fd", DIGEST, 0, 1, 64, os.getpid(), os.geteuid(), null.fileno(), "none")
            os.close(dict(fds.TRANSPORTS)[name](record, 0, 1.0))
        return True
    except OSError:
        return name == "socket"


@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", ["socket", "pidfd_getfd"])
def test_two_processes_share_a_gpu_by_fd(driver: Driver, transport: str) -> None:
    if not transport_works(transport):
        pytest.skip(f"{transport} is not permitted here")
    assert run_workers(transport, "auto", 0) == [["kind fd", "cycles 0"]] * 2


@pytest.mark.multiprocess
@pytest.mark.slow
def test_50_cycles_give_everything_back(driver: Driver) -> None:
    """Every fifth fails at import on one rank."""
    assert run_workers("any", "auto", 50) == [["kind fd", "cycles 50"]] * 2


@pytest.mark.multiprocess
def test_fabric_between_two_processes(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_workers("any", "fabric", 0)
    with capsys.disabled():
        print(f"\nforced fabric: {lines[0][0]}")
    assert lines[0] == lines[1]
    if cuda.fabric_supported(driver, 0):
        assert lines[0] == ["kind fabric", "cycles 0"]
    else:
        assert "fabric handles are forced" in lines[0][0] and "ranks 0,1 on" in lines[0][0]


# -- beside JAX --------------------------------------------------------------------------------------------------------

BESIDE_JAX = """
import sys
import jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[1])
from memory_kit import topology
from moonep_jax.env import Env
from moonep_jax.exchange import Exchange
from moonep_jax.stores import InProcessStore
from moonep_jax.memory import cuda, driver
from moonep_jax.memory.hosts import gather_hosts
from moonep_jax.memory.share import share
gpu = driver.load()
try:
    jax.devices()
except Exception as error:  # of several types
    print("jax has no CUDA:", type(error).__name__)
    sys.exit()
table = cuda.ordinals(jax.devices(), 0)
assert table[jax.devices()[0].id] == jax.devices()[0].local_hardware_id == 0, table
f = jax.jit(lambda x: (x @ x).sum())
x = jnp.ones((512, 512))
before = f(x)
ex = Exchange(InProcessStore(), "moonep/jax/0", 0, (0,), 10.0)
memory = share(ex, topology(1, [0]), 0, 16 << 20, cuda.CudaMemory(gpu, table), Env(), gather_hosts(ex))
gpu.write(0, memory.address[0, 0], b"beside jax")
assert f(x) == before
assert gpu.read(0, memory.address[0, 0], 10) == b"beside jax"
memory.free()
assert f(x) == before and jax.jit(lambda x: x + 1)(x).sum() == 2 * x.size
print("OK")
"""


@pytest.mark.multiprocess
def test_beside_jax(driver: Driver) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", BESIDE_JAX, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    if done.stdout.startswith("jax has no CUDA"):
        pytest.skip(done.stdout)
    assert done.stdout == "OK\n", done.stderr
