"""Worker of test_leaks: setups that succeed and setups that fail, again and again; and ways to leave a program."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

import moonep_jax as moonep
from moonep_jax.exchange import Exchange
from workers import Context, raised, variables
from workers.setups import setup, traces, works


def cycles(c: Context) -> None:
    """`clean` setups that are closed again, then `failing` ones that fail at each step: what each kind leaves.

    The counts are taken after the first tenth and at the end.
    """
    with setup(c) as ep:
        works(c, ep)
    c.record("clean", _measured(c, c.args["clean"], lambda i: setup(c).close()))
    spoilt = _Spoilt(c)
    for step in spoilt.steps:

        def fail(i: int, step: str = step) -> None:
            spoilt.step, spoilt.culprit = step, i % c.processes
            error = raised(lambda: setup(c))
            wanted = "handles'" if step == "handles" else f"step '{step}'"
            assert error is not None and error["type"] == "SetupError" and wanted in error["text"], error
            assert f"process {spoilt.culprit}" in error["text"], error

        c.record(f"failing at: {step}", _measured(c, c.args["failing"], fail))
    spoilt.step = None
    c.record("steps", spoilt.steps)
    with setup(c) as ep:
        c.record("works", works(c, ep))


class _Spoilt:
    """Takes the place of Exchange.all_gather: the culprit says nonsense in a step, once its own part of it is done."""

    def __init__(self, c: Context) -> None:
        self._index, self._gather = c.index, Exchange.all_gather
        self.step: str | None = None
        self.culprit = 0
        self.steps: list[str] = []
        spoilt = self

        def all_gather(exchange: Exchange, step: str, payload: bytes, *parse: Any) -> Any:
            if exchange.op == "setup" and spoilt.step is None:
                spoilt.steps.append(step)
            if exchange.op == "setup" and step == spoilt.step and spoilt.culprit == spoilt._index:
                payload = b"\xff nonsense"
            return spoilt._gather(exchange, step, payload, *parse)

        Exchange.all_gather = all_gather
        setup(c).close()  # learns the steps
        self.steps = self.steps[:]


def _measured(c: Context, count: int, cycle: Callable[[int], None]) -> dict[str, Any]:
    counts, start = [], time.monotonic()
    for i in range(count):
        cycle(i)
        if i in (count // 10, count - 1):
            c.barrier()
            counts.append(_settled(c))
            c.barrier()
    return {"first": counts[0], "last": counts[1], "cycles": count, "seconds": time.monotonic() - start}


def _settled(c: Context) -> dict[str, int]:
    """The traces, once threads that end have ended."""
    found = traces(c)
    while found != (again := _pause(c)):
        found = again
    return found


def _pause(c: Context) -> dict[str, int]:
    time.sleep(0.05)
    return traces(c)


# -- ways to leave -----------------------------------------------------------------------------------------------------


def leave(c: Context) -> None:
    """The last process leaves in the way `how`, the others as usual. `domain` False: the same without the library."""
    last = c.index == c.processes - 1
    start = time.monotonic()
    how: str = c.args["how"]
    if not c.args["domain"]:
        if last:
            _go(how)
        return
    if "inside" in how:
        try:
            with setup(c) as ep:
                c.record("works", works(c, ep))
                if last:
                    _go(how)
        finally:
            c.record("seconds", time.monotonic() - start)
        return
    ep = setup(c)
    c.record("works", works(c, ep))
    if last:
        global _kept
        _kept = ep  # a domain that is dropped warns
        _go(how)
    c.record("close", raised(ep.close))
    c.record("seconds", time.monotonic() - start)


def _go(how: str) -> None:
    if "raise" in how:
        raise ValueError("on purpose")
    if "exit" in how:
        sys.exit(3)


# -- a GPU -------------------------------------------------------------------------------------------------------------

# What undoes something is left out: a call that fails there may keep memory, and nobody can do anything about it.
_CALLS = ("create", "export_fd", "import_fd", "reserve", "map", "set_access", "zero", "write", "read", "granularity",
          "free_bytes")  # fmt: skip


class _FaultyDriver:
    """The real CUDA driver, but the k-th call of one name fails."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.calls: Counter[str] = Counter()
        self.fault: tuple[str, int] | None = None

    def __getattr__(self, name: str) -> Any:
        from moonep_jax.memory.driver import DriverError

        call = getattr(self._driver, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.fault == (name, self.calls[name]):
                raise DriverError(f"injected {name}", 999, "INJECTED")
            return call(*args, **kwargs)

        return counted


def gpu_cycles(c: Context) -> None:
    """`clean` setups, then `failing` ones, in each of which one call of one process's driver fails."""
    from moonep_jax.memory import driver

    real = driver.load()
    faulty = _FaultyDriver(real)
    driver.load = lambda: faulty  # pyright: ignore[reportAttributeAccessIssue]
    config = moonep.EPConfig(tokens=64, hidden=64, topk=2, experts=4 * c.devices)
    mesh = c.mesh()

    def clean(i: int) -> None:
        with moonep.setup(mesh, "ep", config):
            pass

    def counts() -> list[int]:
        c.barrier()
        found = [len(os.listdir("/proc/self/fd")), real.free_bytes(0)]
        c.barrier()
        return found

    def run(count: int, cycle: Callable[[int], None]) -> list[list[int]]:
        found = []
        for i in range(count):
            cycle(i)
            if i in (4, count - 1):  # what the driver keeps for itself is there by then
                found.append(counts())
        return found

    c.record("clean", run(c.args["clean"], clean))
    with variables(MOONEP_MEM_HANDLE_TYPE="fd"):  # no other kind to fall back to
        clean(0)  # asks once whether the device can do this
        faulty.calls.clear()
        clean(0)
        usual = dict(faulty.calls)
        texts: list[str] = []

        def failing(i: int) -> None:
            call = _CALLS[i % len(_CALLS)]
            if i // len(_CALLS) % c.processes == c.index:
                turn = i // (len(_CALLS) * c.processes)
                faulty.fault = (call, 1 + turn % usual[call])
            faulty.calls.clear()
            error = raised(lambda: clean(i))
            faulty.fault = None
            texts.append(f"nothing after {call}" if error is None else f"{error['type']}: {error['text']}")

        c.record("failing", run(c.args["failing"], failing))
        c.record("texts", texts)
    clean(0)
    c.record("works", float(jax.numpy.arange(5.0).sum()) == 10.0)
