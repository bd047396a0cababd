"""Worker of test_setup: setups that must fail alike everywhere, and setups whose traces must all go away again."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from workers import Context, client, raised, variables


def config(c: Context, **fields: Any) -> moonep.EPConfig:
    return moonep.EPConfig(
        **{"tokens": 4, "hidden": 4, "topk": 2, "experts": 2 * c.devices, "dtype": "float32"} | fields
    )


def setup(c: Context, **fields: Any) -> moonep.Domain:
    return moonep.setup(c.mesh(), "ep", config(c, **fields))


def works(c: Context, ep: moonep.Domain, mesh: jax.sharding.Mesh | None = None) -> bool:
    """One step of identity experts: every row comes back topk times."""
    mesh = mesh or c.mesh()
    spec = P(mesh.axis_names)

    def model(x: Any, ids: Any) -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden)

    x = np.arange(mesh.size * 16, dtype=np.float32).reshape(-1, 4)
    ids = np.arange(mesh.size * 8, dtype=np.int32).reshape(-1, 2) % ep.spec.config.experts
    step = jax.jit(jax.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec))
    y = jax.block_until_ready(step(c.put(x, mesh, spec), c.put(ids, mesh, spec)))
    return c.error(y, 2 * x) == 0


def traces(c: Context) -> dict[str, int]:
    """What a setup may leave behind in this process and in the store."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "moonep maps": sum("moonep" in line and "memfd" in line for line in maps),
        "maps": len(maps),
        "KiB": int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "keys": len(client().key_value_dir_get_bytes("moonep/")) if c.processes > 1 else 0,
    }


def failures(c: Context) -> None:
    """Collective failures; after each the processes set up a domain that works."""
    last = c.index == c.processes - 1

    def mismatch() -> Any:
        return raised(lambda: setup(c, tokens=5 if last else 4))

    def other_mesh() -> Any:
        mesh = c.mesh(order=tuple(reversed(range(c.devices))) if last else None)
        return raised(lambda: moonep.setup(mesh, "ep", config(c)))

    def indivisible() -> Any:
        return raised(lambda: setup(c, experts=2 * c.devices + 1))

    def fabric() -> Any:
        with variables(MOONEP_MEM_HANDLE_TYPE="fabric"):
            return raised(lambda: setup(c))

    def fabric_on_one() -> Any:
        with variables(MOONEP_MEM_HANDLE_TYPE="fabric" if last else "auto"):
            return raised(lambda: setup(c))

    for f in (mismatch, other_mesh, indivisible, fabric, fabric_on_one):
        c.case(f.__name__, f)
    with setup(c) as ep:
        c.record("works after failures", works(c, ep))
    for f in (halves, orders, other_setup_order, exception):
        c.case(f.__name__, functools.partial(f, c))
        c.barrier()
    c.record("keys", traces(c)["keys"])
    c.barrier()
    # Last: the setups of these processes are out of step after it.
    with variables(MOONEP_SETUP_TIMEOUT_S="3"):
        c.record("absent", None if last else raised(lambda: setup(c)))
    c.barrier()


def halves(c: Context) -> Any:
    """A domain on each half of the devices and one on all, in another order in either half of the processes."""
    lower = c.index < c.processes // 2
    devices = np.array(jax.devices()).reshape(2, -1)
    mesh = jax.sharding.Mesh(devices[0 if lower else 1], ("ep",))
    if lower:
        own, whole = moonep.setup(mesh, "ep", config(c)), setup(c)
    else:
        whole, own = setup(c), moonep.setup(mesh, "ep", config(c))
    right = [works(c, own, mesh), works(c, whole)]
    for ep in (own, whole) if lower else (whole, own):
        ep.close()
    return {"right": right, "ids": [own.spec.id, whole.spec.id]}


def orders(c: Context) -> Any:
    """Three domains of all processes, closed in another order on every process: a thread for each, as close() waits."""
    mesh = c.mesh((2, c.devices // 2), ("data", "expert"))
    eps = [(setup(c), None), *((moonep.setup(mesh, axis, config(c)), mesh) for axis in ("data", "expert"))]
    right = [works(c, ep, on) for ep, on in eps]
    turn = c.index % 3
    threads = []
    for ep, _ in eps[turn:] + eps[:turn]:
        threads.append(threading.Thread(target=ep.close))
        threads[-1].start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
    return {"right": right, "ids": [ep.spec.id for ep, _ in eps], "closed": not any(t.is_alive() for t in threads)}


def other_setup_order(c: Context) -> Any:
    """Setups over the same processes in another order on the last one: each of them is compared with the wrong one."""
    mesh = c.mesh((2, c.devices // 2), ("data", "expert"))
    axes = ("expert", "data") if c.index == c.processes - 1 else ("data", "expert")
    return [raised(lambda axis=axis: moonep.setup(mesh, axis, config(c))) for axis in axes]


def exception(c: Context) -> Any:
    """An exception leaves the body on every process: the domain is closed, the exception stays."""
    kept: list[moonep.Domain] = []

    def body() -> None:
        with setup(c) as ep:
            kept.append(ep)
            raise ValueError("on purpose")

    return {"error": raised(body), "check": raised(kept[0].check), "stop": raised(kept[0].close)}


def cycles(c: Context) -> None:
    """Setup, use and close again and again."""
    step = 10
    with setup(c) as ep:
        works(c, ep)
    counts = []
    for cycle in range(50):
        with setup(c) as ep:
            if cycle % step == 0:
                c.record(f"works in cycle {cycle}", works(c, ep))
        if cycle % step == step - 1:
            time.sleep(1.5)  # idle threads that complete calls leave after a second
            c.barrier()
            counts.append(traces(c))
            c.barrier()
    c.record("traces", counts)


def few_files(c: Context) -> None:
    """With a low limit of open files: setup needs few at a time, and keeps none."""
    with setup(c) as ep:
        c.record("works", works(c, ep))  # JAX, too, opens its sockets now
    c.barrier()
    before = len(os.listdir("/proc/self/fd"))
    with setup(c):
        during = len(os.listdir("/proc/self/fd"))
    c.record("files", {"before": before, "during": during, "after": len(os.listdir("/proc/self/fd"))})


def no_close(c: Context) -> None:
    """The interpreter ends with an open domain in a module."""
    global _kept
    _kept = setup(c)
    c.record("works", works(c, _kept))


def exit_on_one(c: Context) -> None:
    """sys.exit in the last process inside the context; the others only leave it."""
    start = time.monotonic()
    try:
        with setup(c) as ep:
            c.record("works", works(c, ep))
            if c.index == c.processes - 1:
                sys.exit(3)
    finally:
        c.record("seconds", time.monotonic() - start)


def exit_without_close(c: Context) -> None:
    """sys.exit in the last process, which never closes; the others wait for it in close() up to the limit."""
    ep = setup(c)
    c.record("works", works(c, ep))
    if c.index == c.processes - 1:
        os._exit(3)
    start = time.monotonic()
    c.record("close", {"error": raised(ep.close), "seconds": time.monotonic() - start})
    c.shut_down_after(range(1, c.processes - 1))
