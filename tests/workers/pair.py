"""Worker of test_cuda_pair: ranks with a GPU each - beside NCCL, with a late device, and with one of them killed or
stopped. The checks against the oracle are workers/gpu.py's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from workers import Context, gpu, raised
from workers.each_op import OPS, EachOp, alive, wait_for_state

LIMIT_S, FIRST_S = 2.0, 10.0  # of later and of first calls where a process is killed or stopped
INSIDE_S = 10.0  # where it is killed inside a call: its kernels run on until its context is gone, and must not give up
EP = P("ep")


def run(c: Context) -> None:
    """Everything against the oracle, then beside NCCL; if asked for, with a device of this process late."""
    c.record("first", _first(c))  # not a case: if it raises, all that follow would only wait for their limits
    gpu.run(c)
    c.case("mixed", lambda: _mixed(c, c.args["launches"]))
    if c.args["late"]:
        c.case("late", lambda: _late(c))
        c.case("too_late", lambda: _too_late(c))


# -- beside NCCL -------------------------------------------------------------------------------------------------------


def _mixed(c: Context, launches: int) -> dict[str, int]:
    """One program again and again, each launch on the last one's results: elements that went wrong."""
    mesh, r, s, h, k = c.mesh(), c.devices, 64, 256, 2
    config = moonep.EPConfig(tokens=s, hidden=h, topk=k, experts=4 * r, dtype=jnp.float32)
    with moonep.setup(mesh, "ep", config) as ep:

        def model(x: Any, turn: Any, wrong: Any) -> Any:
            me = jax.lax.axis_index("ep")
            ids = (5 * jnp.arange(s)[:, None] + 7 * jnp.arange(k)[None] + 3 * turn[0] + me) % (4 * r)
            everyone = jax.lax.all_gather(x, "ep")  # neither of these two waits for the calls, nor they for them
            total = jax.lax.psum(x, "ep")
            d = ep.dispatch(x, ids.astype(np.int32))
            y = ep.combine(d.plan, d.hidden)
            back = jax.lax.psum(y, "ep")
            bad = jnp.sum(y != k * x) + jnp.sum(back != k * total) + jnp.sum(everyone.sum(0) != total)
            # Whole numbers below 1000: all of this is exact.
            x = jnp.mod(3 * x + everyone[(me + 1) % r] + turn[0].astype(np.float32), 251)
            return x, turn + 1, wrong + bad.astype(np.int32)

        step = jax.jit(jax.shard_map(model, mesh=mesh, in_specs=EP, out_specs=EP))
        want = np.random.default_rng(0).integers(0, 251, (r, s, h)).astype(np.float32)
        x = c.put(want.reshape(r * s, h), mesh, EP)
        turn, wrong = (c.put(np.zeros(r, np.int32), mesh, EP) for _ in range(2))
        for i in range(launches):
            x, turn, wrong = step(x, turn, wrong)
            want = np.mod(3 * want + np.roll(want, -1, axis=0) + i, 251).astype(np.float32)
            if i % 50 == 49:
                jax.block_until_ready(x)
        differ = sum(int((v != want.reshape(r * s, h)[index]).sum()) for index, v in c.local(x))
        return {"seen": sum(int(v.sum()) for _, v in c.local(wrong)), "differ": differ, "launches": launches}


# -- a late device -----------------------------------------------------------------------------------------------------


def _busy(seconds: float) -> Callable[[], None]:
    """Enqueues about so many seconds of matrix products on the second device; the host does not wait for them."""
    # Large ones: a stream takes about a thousand launches before the host has to wait.
    one = jax.device_put(jnp.eye(16384, dtype=np.float32), jax.devices()[1])

    def chain(length: int) -> Any:
        f = jax.jit(lambda a: jax.lax.scan(lambda a, _: (a @ a, None), a, length=length)[0])
        return f.lower(one).compile()

    short = chain(4)
    jax.block_until_ready(short(one))
    start = time.monotonic()
    jax.block_until_ready(short(one))
    long = chain(max(1, round(4 * seconds / (time.monotonic() - start))))
    return lambda: long(one)


def _step(c: Context, timeout_s: float) -> tuple[moonep.Domain, Callable[[], jax.Array], np.ndarray]:
    """A domain, a compiled dispatch and combine on it that has run once, and what it gives."""
    mesh, r, s = c.mesh(), c.devices, 64
    config = moonep.EPConfig(tokens=s, hidden=256, topk=2, experts=4 * r, dtype=jnp.float32, timeout_s=timeout_s,
                             first_call_timeout_s=20.0)  # fmt: skip
    ep = moonep.setup(mesh, "ep", config)

    def body(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden)

    rng = np.random.default_rng(1)
    x = rng.integers(-9, 9, (r * s, 256)).astype(np.float32)
    args = c.put(x, mesh, EP), c.put(rng.integers(0, 4 * r, (r * s, 2)).astype(np.int32), mesh, EP)
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=EP, out_specs=EP)).lower(*args).compile()
    jax.block_until_ready(step(*args))
    return ep, lambda: step(*args), 2 * x


def _first(c: Context) -> bool:
    """Whether a first call works, with a limit of seconds and not of minutes."""
    ep, step, want = _step(c, timeout_s=20.0)
    with ep:
        ep.check()
        return c.error(step(), want) == 0


def _late(c: Context) -> dict[str, Any]:
    """Later than any call takes, sooner than the limit: the other device waits, and nothing else happens."""
    busy = _busy(1.5)
    ep, step, want = _step(c, timeout_s=60.0)
    with ep:
        start = time.monotonic()
        busy()
        y = step()
        enqueued = time.monotonic() - start
        error = c.error(y, want)
        return {"enqueued_s": enqueued, "seconds": time.monotonic() - start, "error": error, "check": raised(ep.check)}


def _too_late(c: Context) -> dict[str, Any]:
    """Later than the limit: every rank gives up, names the late one, and both devices go on."""
    busy = _busy(4.0)
    ep, step, _ = _step(c, timeout_s=1.0)
    busy()
    ran = raised(lambda: jax.block_until_ready(step()))
    report: dict[str, Any] = {
        "ran": ran,
        "check": raised(ep.check),
        "next": raised(lambda: jax.block_until_ready(step())),
    }
    report["alive"] = all(alive(device) for device in jax.devices()[:2])
    start = time.monotonic()
    ep.close()
    return {**report, "close_s": time.monotonic() - start}


# -- a process is killed or stopped ------------------------------------------------------------------------------------


def _exchange_pids(c: Context) -> int:
    """The process id of process 1."""
    path = c.out / "1.pid"
    if c.index == 1:
        path.write_text(str(os.getpid()))
    c.barrier()
    return int(path.read_text())


def _bring_to(c: Context, at: EachOp, phase: str) -> tuple[str, ...]:
    """Runs all before `phase` ("idle": nothing at all); the ops from there on, and then all of them again."""
    if phase == "idle":
        at.prepare("plan")  # the ops behind it fail before they are compiled
        return OPS[:1]
    at.warm()
    place = OPS.index(phase)
    for op in OPS[:place]:
        at.run(op)
    return OPS[place:] + OPS


def kill(c: Context) -> None:
    """Process 1 is killed before it makes the call of a phase, or ("inside") while its kernels wait in it."""
    phase, pid = c.args["phase"], _exchange_pids(c)
    inside = c.args["inside"]
    at = EachOp(c, timeout_s=INSIDE_S if inside else LIMIT_S, first_call_timeout_s=FIRST_S)
    ops = _bring_to(c, at, phase)
    c.barrier()
    if c.index == 1:
        if inside:
            at.start(phase)
            time.sleep(1.0)  # its kernels wait by now
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_state(pid, "ZX")
    time.sleep(1.0)  # its threads and its context go after it
    c.record("fault", at.until_error(ops))
    c.record("close_s", at.close())
    c.record("alive", alive(jax.local_devices()[0]))
    c.shut_down_after(range(2, c.processes))


def stop(c: Context) -> None:
    """Process 1 is stopped before the call of each phase until process 0 has reported; then it goes on."""
    pid = _exchange_pids(c)
    for phase in ("idle", *OPS):
        c.case(phase, lambda phase=phase: _stopped(c, phase, pid))
    c.case("short", lambda: _stopped_for_a_while(c, pid))
    c.shut_down_after(range(1, c.processes))


@contextlib.contextmanager
def _process_1_stopped(c: Context, pid: int) -> Iterator[None]:
    """Process 1 stops here, and goes on when process 0 leaves, however it does."""
    if c.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if c.index == 0:
            wait_for_state(pid, "T")
        yield
    finally:
        if c.index == 0:
            os.kill(pid, signal.SIGCONT)


def _stopped(c: Context, phase: str, pid: int) -> dict[str, Any]:
    at = EachOp(c, timeout_s=LIMIT_S, first_call_timeout_s=FIRST_S)
    ops = _bring_to(c, at, phase)
    c.barrier()
    with _process_1_stopped(c, pid):
        report = at.until_error(ops)
    return {**report, "close_s": at.close()}


def _stopped_for_a_while(c: Context, pid: int) -> dict[str, Any]:
    """A stop shorter than the limit: the call waits, and gives what it always gives."""
    at = EachOp(c, timeout_s=60.0, first_call_timeout_s=60.0)
    at.warm()
    at.run("plan")
    c.barrier()
    with _process_1_stopped(c, pid):
        result = at.start("dispatch")
        if c.index == 0:
            time.sleep(1.5)
    right = at.finish("dispatch", result) == at.first["dispatch"]
    return {"right": right, "check": raised(at.ep.check), "close_s": at.close()}
