"""Worker of test_faults: in every phase of a domain's life a rank is killed, stopped, exits, raises or skips a call.

Processes 0 and 1 survive; the third rank is the victim. A victim that dies is gone for good, so each phase of `dying`
has a process of its own for it, which waits for its turn. The victim's rank differs from phase to phase.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import moonep_jax as moonep
from moonep_jax.exchange import Exchange
from workers import Context, raised, variables
from workers.each_op import OPS, EachOp, alive, wait_for_state

PHASES = ("setup", *OPS, "close")
INSIDE = ("dispatch inside", "reduce_grad inside")  # the victim has made the call, and dies while it runs
FIRST_S = 60.0  # of first calls, and of setups and closes that nothing happens to
LIMIT_S = 2.0  # of a call, and of a close in error
SETUP_S = 4.0  # of setup and close where something happens in them
STOPPED_S = 6.0  # of a rank in a program that has collectives of XLA, too
STEP = "handles"  # of setup: chunks exist everywhere, and nobody has a peer's


class Case:
    """One phase with one victim, as one of the three processes sees it."""

    def __init__(self, c: Context, phase: str, victim: int, turn: int):
        self.c, self.phase, self.victim = c, phase, victim
        self.rank = turn % 3
        self.survivors = [0, 1]
        order = [0, 1]
        order.insert(self.rank, victim)
        self.members = sorted(order)
        devices = {d.process_index: d for d in jax.devices()}
        self.mesh = jax.sharding.Mesh(np.array([devices[i] for i in order]), ("ep",))
        self.fault: str = c.args["fault"]
        self.at: EachOp | None = None

    @property
    def is_victim(self) -> bool:
        return self.c.index == self.victim

    def meet(self) -> None:
        self.c.barrier(150, self.members)

    def set_up(self, limit_s: float = FIRST_S) -> EachOp:
        """A domain with little to move. Kernels and handlers are the same for more."""
        with variables(MOONEP_SETUP_TIMEOUT_S=limit_s):
            self.at = EachOp(
                self.c, LIMIT_S, FIRST_S, mesh=self.mesh, tokens=32, hidden=64, leaf=(16, 16),
                capture_plan=self.c.args.get("graphs", False),
            )  # fmt: skip
        return self.at

    def close(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """How long closing takes, and what it raises; nobody else need take part."""
        assert self.at is not None
        start = time.monotonic()
        with variables(MOONEP_SETUP_TIMEOUT_S=limit_s):
            error = raised(self.at.ep.close)
        return {"error": error, "close_s": time.monotonic() - start}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What survivors do while the victim stands still: process 0 lets it go on when both are done."""
        if self.fault != "stop":
            yield
            return
        pid = int((self.c.out / f"{self.victim}.pid").read_text())
        if self.phase != "setup":  # where it stands still in the middle of what all do
            wait_for_state(pid, "T")
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                self.c.barrier(30, self.survivors)
            if self.c.index == 0:
                wait_for_state(pid, "T")
                os.kill(pid, signal.SIGCONT)


def dying(c: Context) -> None:
    """Faults "kill" and "exit"; process 2 + i is the victim of phase i."""
    for turn, phase in enumerate(_phases(c)):
        if c.index in (0, 1, 2 + turn):
            _case(c, phase, 2 + turn, turn)
        if c.index == 2 + turn:
            return
    c.shut_down_after([1])


def passing(c: Context) -> None:
    """Faults "stop", "raise" and "skip", from which the victim comes back."""
    for turn, phase in enumerate(_phases(c)):
        _case(c, phase, 2, turn + c.args.get("first", 0))
    c.barrier()
    c.shut_down_after([1, 2])


def _phases(c: Context) -> list[str]:
    return c.args.get("phases") or list(PHASES)


def _case(c: Context, phase: str, victim: int, turn: int) -> None:
    case = Case(c, phase, victim, turn)
    if case.is_victim:
        (c.out / f"{victim}.pid").write_text(str(os.getpid()))
    body = {"setup": _in_setup, "close": _in_close}.get(phase, _in_call)
    case.meet()
    # Only these two come back from it; SystemExit passes through.
    c.case(phase, lambda: {"rank": case.rank, "victim": case.is_victim, **body(case)})


def _do(fault: str) -> None:
    """What happens to the victim, where that is no exception."""
    if fault == "kill":
        time.sleep(0.3)  # the others wait for it by then
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit":
        sys.exit(0)
    elif fault == "raise":
        raise ValueError("on purpose")


def _seen(error: dict[str, Any] | None, start: float, **more: Any) -> dict[str, Any]:
    """What a survivor reports of a phase that is not a call."""
    seconds = time.monotonic() - start
    return {"check": error, "seconds": seconds, "alive": alive(jax.local_devices()[0]), **more}


def _in_setup(case: Case) -> dict[str, Any]:
    def set_up() -> None:
        case.set_up(SETUP_S)

    case.set_up()  # what is slow the first time
    case.close(FIRST_S)
    case.meet()
    if not case.is_victim:
        with case.watched():
            start = time.monotonic()
            report = _seen(raised(set_up), start)
        if case.fault == "skip":
            case.meet()
        return report
    if case.fault == "skip":
        case.meet()  # the others have reported; it comes late
        return {"error": raised(set_up)}
    gather = Exchange.all_gather

    def all_gather(self: Exchange, step: str, payload: bytes, *parse: Any) -> dict[int, Any]:
        if step == STEP:
            _do(case.fault)
        return gather(self, step, payload, *parse)

    Exchange.all_gather = all_gather  # this process's only
    try:
        return {"error": raised(set_up)}
    finally:
        Exchange.all_gather = gather


def _in_close(case: Case) -> dict[str, Any]:
    at = case.set_up()
    at.warm(OPS[:1])
    at.barrier()
    if not case.is_victim:
        with case.watched():
            start = time.monotonic()
            closed = case.close(SETUP_S)
            report = _seen(closed["error"], start, close_s=closed["close_s"], closed_check=raised(at.ep.check))
        if case.fault == "skip":
            case.meet()
        return report
    if case.fault == "skip":
        case.meet()
    elif case.fault == "raise":
        return {"error": raised(lambda: _leave_with(at))}
    else:
        _do(case.fault)
    return case.close(SETUP_S)


def _leave_with(at: EachOp) -> None:
    with at.ep:
        _do("raise")


def _in_call(case: Case) -> dict[str, Any]:
    op, inside = case.phase.split()[0], "inside" in case.phase
    at = case.set_up()
    if op == "cond":
        at.add(op, functools.partial(_branch, at.ep), ["x", "ids", "flag"])
        at.values["flag"] = _flags(case, 3 * [1])
        at.warm([op])
        at.values["flag"] = _flags(case, [int(r != case.rank) for r in range(3)])
    else:
        place = OPS.index(op)
        at.warm(OPS if inside else OPS[: place + 1])
    for _ in range(3 if case.c.args.get("graphs") else 0):
        at.run(op)  # until it is captured
    at.barrier()
    if case.is_victim:
        return _victim(case, at, op, inside)
    with case.watched():
        if inside:
            time.sleep(LIMIT_S / 2)
        report = at.until_error((OPS[place:] + OPS) if inside else (op,))
    if case.fault == "skip":
        at.barrier()  # it comes late
    closed = case.close()
    return {**report, "close_s": closed["close_s"], "close_error": closed["error"]}


def _victim(case: Case, at: EachOp, op: str, inside: bool) -> dict[str, Any]:
    if inside:  # on a thread: a launch may wait for its program
        threading.Thread(target=at.start, args=(op,), daemon=True).start()
        time.sleep(LIMIT_S / 4)
    if case.fault == "raise":
        with variables(MOONEP_SETUP_TIMEOUT_S=LIMIT_S):
            return {"error": raised(lambda: _leave_with(at))}
    missed = None
    if case.fault == "skip":
        missed = raised(lambda: at.run(op)) if op == "cond" else None
        at.barrier()
    else:
        _do(case.fault)
    return {"missed": missed, **at.until_error((op,)), **case.close()}


def _flags(case: Case, flags: Sequence[int]) -> jax.Array:
    return case.c.put(np.array(flags, np.int32).reshape(3, 1), case.mesh, jax.sharding.PartitionSpec("ep"))


def _branch(ep: moonep.Domain, x: Any, ids: Any, flag: Any) -> Any:
    """The ops in a branch that a rank may not take."""

    def exchange() -> Any:
        d = ep.dispatch(x, ids)
        return ep.combine(d.plan, d.hidden)

    return jax.lax.cond(flag[0] > 0, exchange, lambda: 0 * x)


# -- process 0, which keeps jax.distributed's service ------------------------------------------------------------------


def zero(c: Context) -> None:
    """Process 0 is the victim, in dispatch. Nothing that needs its service works any more then."""
    devices = {d.process_index: d for d in jax.devices()}
    mesh = jax.sharding.Mesh(np.array([devices[i] for i in (1, 0, 2)]), ("ep",))
    fault = c.args["fault"]
    if c.index == 0:
        (c.out / "0.pid").write_text(str(os.getpid()))
    with variables(MOONEP_SETUP_TIMEOUT_S=LIMIT_S + 1):
        at = EachOp(c, 1.0, FIRST_S, mesh=mesh, tokens=32, hidden=64, leaf=(16, 16))
        at.warm(OPS[:2])
        at.barrier()
        if c.index == 0:
            c.record("turn", True)
            _do(fault)
        pid = int((c.out / "0.pid").read_text())
        if fault == "stop":
            wait_for_state(pid, "T")
        report = at.until_error(("dispatch",))
        start = time.monotonic()
        error = raised(at.ep.close)
        c.record("dispatch", {**report, "rank": 1, "victim": False, "close_s": time.monotonic() - start,
                              "close_error": error})  # fmt: skip
        started = time.monotonic()
        again = raised(lambda: EachOp(c, 1.0, FIRST_S, mesh=mesh, tokens=32, hidden=64, leaf=(16, 16)))
        c.record("setup", {"rank": 1, "victim": False, **_seen(again, started)})
    (c.out / f"{c.index}.reported").touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all((c.out / f"{i}.reported").exists() for i in (1, 2)):
        time.sleep(0.05)
    if fault == "stop" and c.index == 1:
        os.kill(pid, signal.SIGKILL)
    time.sleep(30)  # JAX ends us


# -- beside XLA's own collectives --------------------------------------------------------------------------------------


def mixed(c: Context) -> None:
    """A program of psum and MoE calls, launched again and again; the last process dies or stops after a few."""
    mesh, r = c.mesh(), c.devices
    config = moonep.EPConfig(tokens=32, hidden=64, topk=2, experts=4 * r, dtype=np.float32, timeout_s=LIMIT_S,
                             first_call_timeout_s=FIRST_S)  # fmt: skip
    spec = jax.sharding.PartitionSpec("ep")
    ep = moonep.setup(mesh, "ep", config)

    def body(x: Any, ids: Any) -> Any:
        if c.args["first"] == "psum":
            x = x + jax.lax.psum(x, "ep")
        d = ep.dispatch(x, ids)
        y = ep.combine(d.plan, d.hidden)
        return y + jax.lax.psum(y, "ep")

    rng = np.random.default_rng(0)
    args = [c.put(rng.normal(size=(r * 32, 64)).astype(np.float32), mesh, spec),
            c.put(rng.integers(0, 4 * r, (r * 32, 2)).astype(np.int32), mesh, spec)]  # fmt: skip
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)).lower(*args).compile()
    if c.index == c.processes - 1:
        (c.out / "last.pid").write_text(str(os.getpid()))
    c.barrier()
    run: Callable[[], Any] = lambda: jax.block_until_ready(step(*args))  # noqa: E731
    for _ in range(5):
        run()
    c.barrier()
    pid, last, fault = int((c.out / "last.pid").read_text()), c.processes - 1, c.args["fault"]
    if c.index == last:
        _do(fault)
    else:
        wait_for_state(pid, "TZX")
    if c.index == 0 and fault == "stop":
        threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()
    start = time.monotonic()
    ran = raised(run)
    c.record("ran", {"error": ran, "seconds": time.monotonic() - start, "check": raised(ep.check)})
    start = time.monotonic()
    with variables(MOONEP_SETUP_TIMEOUT_S=2 * STOPPED_S if fault == "stop" else LIMIT_S):
        error = raised(ep.close)
    c.record("close", {"error": error, "close_s": time.monotonic() - start})
    c.shut_down_after(range(1, last if fault == "kill" else c.processes))
