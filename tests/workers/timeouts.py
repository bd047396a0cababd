"""Worker of test_timeouts: ranks that are late, absent, in another branch, of another shape or without a good plan; a
domain for each.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from workers import Context, raised

S, K, H = 4, 2, 4
EP = P("ep")


class Case:
    """One domain over all devices and one compiled step: a rank whose flag is 0 skips the whole MoE part, or, with
    `poison`, makes its calls with a plan whose ticket is -1.

    XLA:CPU runs a program of few flops on the launching thread when the process has one device: the launch waits, and
    raises what fails. `tiny` steps are such programs, the others do some more work.
    """

    def __init__(
        self, c: Context, ep: moonep.Domain, mesh: jax.sharding.Mesh, tokens: int, tiny: bool, poison: bool = False
    ):
        self.c, self.ep, self.mesh, self.tokens = c, ep, mesh, tokens
        eye = np.eye(32, dtype=np.float32)

        def exchange(x: Any, ids: Any, flag: Any) -> Any:
            plan = ep.plan(ids)
            if poison:
                plan = dataclasses.replace(plan, ticket=jax.numpy.where(flag[0] > 0, plan.ticket, -1))
            d = ep.dispatch(x, ids, plan=plan)
            return ep.combine(d.plan, d.hidden)

        def model(x: Any, ids: Any, flag: Any) -> Any:
            if not tiny:
                x = x * (eye * x[0, 0] @ eye)[0, 0]
            if poison:
                return exchange(x, ids, flag)
            return jax.lax.cond(flag[0, 0] > 0, lambda: exchange(x, ids, flag), lambda: 0 * x)

        self._args = [self._put(np.ones((c.devices * tokens, H), np.float32)), self._put(self._ids())]
        step = jax.jit(jax.shard_map(model, mesh=mesh, in_specs=EP, out_specs=EP))
        self._step = step.lower(*self._args, self._flags(())).compile()
        c.barrier()

    def _put(self, array: np.ndarray) -> jax.Array:
        return self.c.put(array, self.mesh, EP)

    def _ids(self) -> np.ndarray:
        return np.arange(self.c.devices * self.tokens * K, dtype=np.int32).reshape(-1, K) % (2 * self.c.devices)

    def _flags(self, skip: tuple[int, ...]) -> jax.Array:
        return self._put(np.array([[0.0 if r in skip else 1.0] for r in range(self.c.devices)], np.float32))

    def start(self, *skip: int) -> jax.Array:
        return self._step(*self._args, self._flags(skip))

    def ranks(self) -> list[int]:
        """The ranks of this process."""
        return [r for r, d in enumerate(self.mesh.devices.flat) if d.process_index == self.c.index]

    def step(self, *skip: int) -> None:
        """One awaited step; a wrong value is an error, too."""
        y = jax.block_until_ready(self.start(*skip))
        for index, value in self.c.local(y):
            rank = index[0].start // self.tokens if index[0].start else 0
            if not np.array_equal(value, np.full_like(value, 0 if rank in skip else K)):
                raise AssertionError(f"wrong rows on rank {rank}: {value}")

    def after(self) -> dict[str, Any]:
        """What still works in a process whose domain is in error."""
        later = raised(self.step)
        alive = float(jax.jit(lambda x: (x @ x).sum())(np.ones((8, 8), np.float32)))
        check, stats = raised(self.ep.check), raised(self.ep.stats)
        start = time.monotonic()
        self.ep.close()
        return {
            "later": later,
            "alive": alive == 512.0,
            "check": check,
            "stats": stats,
            "close_s": time.monotonic() - start,
            "closed_check": raised(self.ep.check),
        }


@contextmanager
def case(
    c: Context,
    timeout_s: float = 2.0,
    first_call_timeout_s: float = 60.0,
    tokens: int = S,
    tiny: bool = False,
    poison: bool = False,
) -> Iterator[Case]:
    mesh = c.mesh()
    limits = {"timeout_s": timeout_s, "first_call_timeout_s": first_call_timeout_s}
    cfg = moonep.EPConfig(tokens=S, hidden=H, topk=K, experts=2 * c.devices, dtype=np.float32, **limits)
    with moonep.setup(mesh, "ep", cfg) as ep:
        yield Case(c, ep, mesh, tokens, tiny, poison)


def run(c: Context) -> None:
    cases: list[Callable[[Context], Any]] = [skipped, skipped_tiny, poisoned_plan, close_in_flight, closed_in_op]
    if c.processes > 1:
        cases += [late, slow_first_call, other_shapes, closed_by_others]
    for f in cases:
        c.case(f.__name__, functools.partial(f, c))


def _steps(at: Case, count: int = 4) -> None:
    for _ in range(count):
        at.step()


def skipped(c: Context, tiny: bool = False) -> Any:
    """Rank 1 takes another branch in the fifth step."""
    with case(c, tiny=tiny) as at:
        _steps(at)
        error = raised(lambda: at.step(1))
        c.barrier()
        return {"error": error, "ranks": at.ranks(), **at.after()}


def skipped_tiny(c: Context) -> Any:
    """The same in a program that XLA runs on the launching thread."""
    return skipped(c, tiny=True)


def poisoned_plan(c: Context) -> Any:
    """Rank 1 passes on a plan that is none; the limit is far."""
    with case(c, timeout_s=60.0, poison=True) as at:
        _steps(at)
        return {"error": raised(lambda: at.step(1)), **at.after()}


def late(c: Context) -> Any:
    """The last process sleeps longer than the limit before its fifth step."""
    with case(c) as at:
        _steps(at)
        if c.index == c.processes - 1:
            time.sleep(6)
        error = raised(at.step)
        return {"error": error, **at.after()}


def slow_first_call(c: Context) -> Any:
    """Longer than timeout_s before the first call is fine, as if that process still compiled."""
    with case(c, timeout_s=1.5) as at:
        if c.index == c.processes - 1:
            time.sleep(4)
        error = raised(at.step)
        c.barrier()
        return {"error": error, "later": raised(lambda: _steps(at))}


def other_shapes(c: Context) -> Any:
    """The last process has a shorter batch."""
    with case(c, first_call_timeout_s=8.0, tokens=S - 1 if c.index == c.processes - 1 else S) as at:
        return {"error": raised(at.step), **at.after()}


def close_in_flight(c: Context) -> Any:
    """close() while the calls wait for a rank that skipped."""
    with case(c, timeout_s=60.0) as at:
        _steps(at)
        y = at.start(1)
        c.barrier()
        start = time.monotonic()
        at.ep.close()
        seconds = time.monotonic() - start
        return {"error": raised(lambda: jax.block_until_ready(y)), "ranks": at.ranks(), "close_s": seconds}


def closed_in_op(c: Context) -> Any:
    """A program compiled before close() and run after it."""
    with case(c) as at:
        at.step()
        at.ep.close()
        at.ep.close()  # once more does nothing
        return {"compiled": raised(at.step), "traced": raised(lambda: at.ep.plan(np.zeros((S, K), np.int32)))}


def closed_by_others(c: Context) -> Any:
    """An exception takes the last process out of its step and through close(), while the others wait for it."""
    at = None
    start = time.monotonic()

    def body() -> None:
        nonlocal at
        with case(c, timeout_s=60.0) as at:
            _steps(at)
            if c.index == c.processes - 1:
                raise ValueError("on purpose")
            at.step()

    error = raised(body)
    return {"error": error, "seconds": time.monotonic() - start, "closed": at is not None and at.ep._closed}


def leave(c: Context) -> None:
    """The last process exits without a word; the others report, and end as usual."""
    with case(c, timeout_s=4.0) as at:
        _steps(at, 2)
        if c.index == c.processes - 1:
            os._exit(0)
        error = raised(at.step)
        c.record("leave", {"error": error, **at.after()})
    c.shut_down_after(range(1, c.processes - 1))
