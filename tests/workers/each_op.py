"""A domain and each op as a compiled program of its own: what workers use that kill, stop or delay a rank in one op.

Rank 0's experts are hot, so that slots are used and every op has something to move.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from workers import Context, raised

OPS = ("plan", "dispatch", "combine", "prefetch", "reduce_grad")
EP = P("ep")


class EachOp:
    """Made on every process of the mesh: sets up, and keeps operands and results by name in `values`."""

    def __init__(
        self,
        c: Context,
        timeout_s: float,
        first_call_timeout_s: float,
        *,
        mesh: jax.sharding.Mesh | None = None,
        tokens: int = 256,
        hidden: int = 1024,
        leaf: tuple[int, int] = (256, 256),
        **fields: Any,
    ):
        """Args: mesh: over one axis; None: all devices. fields: of the EPConfig."""
        self.mesh = c.mesh() if mesh is None else mesh
        self.c, r, epn = c, self.mesh.devices.size, 4
        config = moonep.EPConfig(
            tokens=tokens, hidden=hidden, topk=2, experts=epn * r, dtype=jnp.float32,
            weights={"w": (leaf, jnp.float32)}, timeout_s=timeout_s, first_call_timeout_s=first_call_timeout_s,
            **fields,
        )  # fmt: skip
        self.ep = ep = moonep.setup(self.mesh, "ep", config)
        rng = np.random.default_rng(2)
        shapes = {"x": (r, tokens, hidden), "weights": (r, epn, *leaf), "ct": (r, 2 * epn, *leaf)}
        given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        given["ids"] = rng.integers(0, epn, (r, tokens, 2)).astype(np.int32)
        self.values: dict[str, Any] = {name: c.put(a, self.mesh, EP) for name, a in given.items()}
        self._bodies: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
            "plan": (ep.plan, ("ids",)),
            "dispatch": (lambda p, x, ids: ep.dispatch(x, ids, plan=p).hidden, ("plan", "x", "ids")),
            "combine": (ep.combine, ("plan", "dispatch")),
            "prefetch": (lambda p, w: ep.prefetch(p, {"w": w})["w"], ("plan", "weights")),
            "reduce_grad": (self._reduce_grad, ("plan", "weights", "ct")),
        }
        self._steps: dict[str, Any] = {}
        self.first: dict[str, list[bytes]] = {}  # this process's bytes of each op's first result

    def _reduce_grad(self, p: moonep.Plan, w: Any, ct: Any) -> Any:
        _, back = jax.vjp(functools.partial(self.ep.prefetch, p), {"w": w})
        return back({"w": ct})[0]["w"]

    def barrier(self) -> None:
        """Waits for the mesh's processes."""
        self.c.barrier(members=sorted({d.process_index for d in self.mesh.devices.flat}))

    def add(self, name: str, body: Callable[..., Any], operands: Sequence[str]) -> None:
        """One more program, run like an op: a function of one rank's arrays, given by their names in `values`."""
        self._bodies[name] = body, tuple(operands)

    def prepare(self, op: str) -> None:
        """Compiles an op whose operands are there; the first call must not wait for a compiler."""
        body, names = self._bodies[op]

        def local(*args: Any) -> Any:
            return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], args)))

        step = jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=EP, out_specs=EP))
        self._steps[op] = step.lower(*(self.values[n] for n in names)).compile()
        self.barrier()

    def start(self, op: str) -> Any:
        """Enqueues an op."""
        return self._steps[op](*(self.values[n] for n in self._bodies[op][1]))

    def run(self, op: str) -> list[bytes]:
        """One op, awaited; the bytes of this process's part of its result."""
        return self.finish(op, self.start(op))

    def finish(self, op: str, result: Any) -> list[bytes]:
        """Waits for the result of `start`, and keeps it for the ops behind."""
        self.values[op] = jax.block_until_ready(result)
        return [v.tobytes() for name, a in _arrays(self.values[op]) if name != "ticket" for _, v in self.c.local(a)]

    def warm(self, ops: Sequence[str] = OPS) -> None:
        """Every op once."""
        for op in ops:
            self.prepare(op)
            self.first[op] = self.run(op)

    def until_error(self, ops: Sequence[str]) -> dict[str, Any]:
        """Runs ops until one fails: which, how, how long that took, what still works; and whether those before were
        right (None: there were none)."""
        right: list[bool] = []
        for op in ops:
            start = time.monotonic()
            got: list[bytes] = []
            ran = raised(lambda op=op, got=got: got.extend(self.run(op)))
            check = raised(self.ep.check)
            seconds = time.monotonic() - start
            if ran or check:
                blank = all(set(v) == {0xFF} for v in got) if op != "plan" and not ran else None
                start = time.monotonic()
                later = raised(lambda op=op: self.run(op))
                return {
                    "op": op,
                    "ran": ran,
                    "check": check,
                    "seconds": seconds,
                    "blank": blank,
                    "later": later,
                    "later_s": time.monotonic() - start,
                    "later_check": raised(self.ep.check),
                    "alive": alive(jax.local_devices()[0]),
                    "right": all(right) if right else None,
                    "went_well": list(ops[: len(right)]),
                }
            right.append(op not in self.first or got == self.first[op])
        return {"op": None, "right": all(right), "went_well": list(ops), "alive": alive(jax.local_devices()[0])}

    def close(self) -> float:
        """Seconds that close() takes."""
        start = time.monotonic()
        self.ep.close()
        return time.monotonic() - start


def _arrays(value: Any) -> list[tuple[str, jax.Array]]:
    return [(jax.tree_util.keystr(path).strip("."), a) for path, a in jax.tree_util.tree_leaves_with_path(value)]


_product = jax.jit(lambda a: (a @ a).sum())


def alive(device: jax.Device) -> bool:
    """Whether a device still computes."""
    ones = jax.device_put(jnp.ones((512, 512), np.float32), device)
    return float(_product(ones)) == 512.0**3


def wait_for_state(pid: int, states: str, limit_s: float = 30.0) -> None:
    """Waits until a process is in one of the states of proc(5), or gone."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in states:
            return
        time.sleep(0.02)
    raise TimeoutError(f"process {pid} is not in a state of {states!r} after {limit_s} s")
