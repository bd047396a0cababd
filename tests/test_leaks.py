"""Setups that succeed or fail, many times: descriptors, mappings, threads, /dev/shm and keys are back at the start.

And no way to leave a program hangs, or changes the exit code that JAX gives it. With few open files: test_setup; device
memory: test_cuda_domain. LEAKS=all in the environment runs the full numbers of cycles, which take some minutes.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import make_mesh
from harness import launch, one_fast
from jax.sharding import PartitionSpec as P
from memory_kit import nothing_left_open
from setup_kit import CONFIG, STEPS, Job, at, job_of, refused, with_payload

import moonep_jax as moonep

__all__ = ["nothing_left_open"]  # a fixture for all tests here
FULL = os.environ.get("LEAKS") == "all"
CLEAN, FAILING = (500, 200) if FULL else (50, 6)  # cycles of two processes; of failing ones, at each step
SIMULATED = 200 if FULL else 30  # failing cycles of simulated processes at each step


def counts() -> dict[str, Any]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "moonep maps": sum("/memfd:moonep" in line for line in maps),
        "maps": len(maps),
        "KiB": int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "shm": sorted(os.listdir("/dev/shm")),
    }


def unchanged(first: dict[str, Any], last: dict[str, Any], what: str, threads: int = 0) -> None:
    """What one cycle leaves, all do. JAX, Python and malloc map a little now and then; JAX starts threads late."""
    for name, slack in {"fds": 0, "moonep maps": 0, "threads": threads, "maps": 12, "KiB": 16384}.items():
        assert last[name] - first[name] <= slack, f"{what}: {name} grew by {last[name] - first[name]}: {first}, {last}"
    assert last.get("shm") == first.get("shm") and not last.get("keys")


@pytest.fixture(scope="module", autouse=True)
def jax_has_started() -> None:
    """Its threads stay."""
    mesh = make_mesh((4,), ("ep",))
    run = jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    run(np.zeros(4)).block_until_ready()


def settled() -> dict[str, Any]:
    """The counts, once threads that end have ended."""
    found = counts()
    for _ in range(100):
        time.sleep(0.05)
        if found == (found := counts()):
            return found
    raise AssertionError(found)


# -- one process -------------------------------------------------------------------------------------------------------


def test_500_setups_in_one_process() -> None:
    mesh, config = make_mesh((4,), ("ep",)), moonep.EPConfig(**CONFIG)
    first: dict[str, Any] = {}
    for cycle in range(500):
        moonep.setup(mesh, "ep", config).close()
        if cycle == 20:
            first = settled()
    unchanged(first, settled(), "500 setups")


@pytest.fixture(name="job")
def job_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with job_of((0, 1, 1, 2), monkeypatch) as job:
        yield job


@pytest.mark.slow
def test_setups_of_three_simulated_processes(job: Job) -> None:
    first: dict[str, Any] = {}
    for cycle in range(500 if FULL else 100):
        job.clean_setup()
        if cycle == 20:
            first = settled()
    unchanged(first, settled(), "setups of simulated processes")
    assert job.store.keys() == []


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_setups_that_fail_at(job: Job, step: str) -> None:
    """A process in turn says nonsense in a step, or cannot reach the store, after it has done its part of the step."""

    def gone(_: bytes) -> bytes:
        raise moonep.SetupError("setup: the store is gone; got nothing, expected an answer; start it")

    first: dict[str, Any] = {}
    for cycle in range(SIMULATED):
        culprit = cycle % 3
        change = gone if cycle % 2 else lambda r: with_payload(r, b"\xff nonsense")
        job.on_set = [at(step, change, sender=culprit)]
        refused(job.setup(), f"process {culprit}", "handles'" if step == "handles" else f"'{step}'")
        if cycle == 20:
            first = settled()
    unchanged(first, settled(), f"{SIMULATED} failures at '{step}'")
    assert job.store.keys() == [] and not job.native.live
    job.clean_setup()


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_cycles_of_two_processes(tmp_path: Path) -> None:
    run = launch("leaks:cycles", 2, 1, tmp_path, args={"clean": CLEAN, "failing": FAILING}, timeout_s=840)
    assert run.of("steps")[0] == list(STEPS)
    for case in ("clean", *(f"failing at: {step}" for step in STEPS)):
        for got in run.of(case):
            unchanged(got["first"], got["last"], f"{case} ({got['cycles']} cycles)", threads=2)
            print(f"{case}: {got['cycles']} cycles in {got['seconds']:.1f} s")
    assert all(run.of("works"))
    run.ended_well()


# -- ways to leave -----------------------------------------------------------------------------------------------------


@functools.cache
def plain_codes(how: str, out: Path) -> list[int | None]:
    """Exit codes of two processes without the library, of which one leaves early."""
    run = launch("leaks:leave", 2, 1, out, args={"how": how, "domain": False}, timeout_s=90)
    return [p.returncode for p in run.processes]


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", one_fast(["inside", "without close"], "inside"))
@pytest.mark.parametrize("how", one_fast(["raise", "exit"], "raise"))
def test_leaving_has_the_exit_code_that_jax_gives(how: str, where: str, tmp_path: Path, shared: Path) -> None:
    """One of two processes leaves early: inside the context, or with an open domain while the other closes its own."""
    args = {"how": f"{how} {where}", "domain": True}
    run = launch("leaks:leave", 2, 1, tmp_path, args=args, env={"MOONEP_SETUP_TIMEOUT_S": "3"}, timeout_s=90)
    assert all(run.of("works"))
    codes = [p.returncode for p in run.processes]
    assert codes == plain_codes(how, shared / how) == [0, 1 if how == "raise" else 3], f"{codes}\n{run.tails()}"
    if where == "without close":
        error = run.processes[0].results["close"]
        assert error["text"].startswith("close: step 'close' timed out; got no word from process 1"), error
        assert run.processes[0].results["seconds"] < 60
    else:
        assert all(s < 60 for s in run.of("seconds"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


EXITS = {
    "raise inside": ("with setup() as ep: raise ValueError('on purpose')", 1),
    "exit inside": ("with setup() as ep: sys.exit(3)", 3),
    "interrupt inside": ("with setup() as ep: raise KeyboardInterrupt", -signal.SIGINT),
    "raise without close": ("ep = setup(); raise ValueError('on purpose')", 1),
    "exit without close": ("ep = setup(); sys.exit(3)", 3),
    "end without close": ("ep = setup()", 0),
    "calls in flight": ("ep = setup(); y = [step(ep) for _ in range(8)]; sys.exit(4)", 4),
    "raise in setup": ("setup(experts=3)", 1),
}
PROGRAM = """
import sys, jax, numpy as np, moonep_jax as moonep
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
P = jax.sharding.PartitionSpec("ep")
def setup(experts=4):
    return moonep.setup(mesh, "ep", moonep.EPConfig(tokens=4, hidden=8, topk=2, experts=experts, dtype="float32"))
def step(ep, made={}):
    run = made.setdefault(0, jax.jit(jax.shard_map(lambda i: ep.plan(i).dst_row, mesh=mesh, in_specs=P, out_specs=P)))
    return run(np.zeros((8, 2), np.int32))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", one_fast(EXITS, "calls in flight"))
def test_ends_of_a_program(name: str) -> None:
    """One process: the exit code is Python's, soon, and nothing is printed but its traceback."""
    line, code = EXITS[name]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM + line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == (code in (1, -signal.SIGINT)) and "Exception ignored" not in done.stderr
