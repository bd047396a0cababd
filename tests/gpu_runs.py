"""Whole calls of ranks on one GPU beside the oracle: operands, expected values, launches. For tests; needs gpu_kit."""

from __future__ import annotations

from typing import Any

import gpu_kit
import ml_dtypes
import numpy as np
from cases import Shape, routing
from gpu_kit import BACK, PLAN_ARRAYS, ROUTE, Buffer, by_rank

from moonep_jax import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
Plan = dict[str, list[Buffer]]


def stacked(buffers: list[Buffer]) -> np.ndarray:
    return np.stack([b.read() for b in buffers])


def same(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Bit equality."""
    view = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    np.testing.assert_array_equal(got.view(view), np.ascontiguousarray(want, got.dtype).view(view), err_msg=what)


class Rows:
    """A routing, operands for all ops that move rows, and what the oracle makes of them (`want`, by name)."""

    def __init__(self, shape: Shape, ids: np.ndarray, seed: int, padding: int = 8, dtype: Any = BF16,
                 mode: str = "dedup", planner: str = "exact") -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        plan = reference.plan(ids, shape.E, padding, planner)
        r, s, k, h = shape.R, shape.s, shape.K, shape.H
        self.ids = ids
        self.x = rng.normal(size=(r, s, h)).astype(dtype)
        self.w = rng.random((r, s, k), np.float32)
        self.out = rng.normal(size=(r, plan.rows, h)).astype(dtype)
        self.out[np.asarray(plan.src) < 0] = np.nan
        self.ct_w = rng.random((r, plan.rows), np.float32)
        self.want: dict[str, np.ndarray] = plan_arrays(plan)
        self.want["hidden"], self.want["weights"] = reference.dispatch(plan, self.x, self.w)
        self.want["y"] = reference.combine(plan, self.out, self.want["weights"], mode)
        self.want["dx"], self.want["dw"] = reference.dispatch_grad(plan, self.out, self.ct_w, mode)
        self.want["rows"] = self.want["hidden"]  # combine_grad moves x as dispatch does


def plan_arrays(plan: reference.ReferencePlan) -> dict[str, np.ndarray]:
    """The oracle's plan with the ranks in front of every array."""
    arrays = {name: np.asarray(getattr(plan, name)) for name in PLAN_ARRAYS[:-1]}
    for name in ("slot_expert", "home_rows", "rank_rows"):  # equal on all ranks
        arrays[name] = np.broadcast_to(arrays[name], (plan.ranks, *arrays[name].shape))
    return arrays


class Run(gpu_kit.Pool):
    """A group, its buffers (poisoned with NaN), and the ops on it."""

    def __init__(self, shape: Shape, padding: int = 8, dtype: Any = BF16, mode: str = "dedup", planner: str = "exact",
                 **options: Any) -> None:  # fmt: skip
        super().__init__(shape.R)
        self.shape, self.padding, self.dtype = shape, padding, np.dtype(dtype)
        self.mode, self.planner = mode, planner
        options.setdefault("stage_bytes", 64 * shape.epn)
        self.group = gpu_kit.Group(
            shape.R,
            experts=shape.E,
            topk=shape.K,
            tokens=shape.S,
            padding=padding,
            home=planner == "home",
            exact=mode == "exact",
            hidden=shape.H,
            row_bytes=shape.H * self.dtype.itemsize,
            **options,
        )
        self.rows = self.group.shape.recv_rows(shape.s)

    def __exit__(self, *_: object) -> None:
        self.group.close()
        super().__exit__()

    def blank_plan(self, fill: int = 0xFF, count: tuple[int, ...] = ()) -> Plan:
        """Room for a plan, or for `count` of them."""
        s, n = self.shape, self.rows
        dims = [(s.s, s.K)] * 2 + [(n,)] * 3 + [(2 * s.epn,)] * 2 + [(s.R, s.epn), (s.R,), (s.R,), (1,)]
        return {n: self.blank((*count, *d), np.int32, fill) for n, d in zip(PLAN_ARRAYS, dims, strict=True)}

    def call(
        self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]], before: gpu_kit.Before | None = None
    ) -> None:
        """One op on all ranks: each operand and each result is a list with a buffer for each rank."""
        self.group.launch(kind, by_rank(args), by_rank(rets), before or (lambda phase, rank: None))

    def launch(self, case: Rows, offsets: tuple[int, int] = (0, 0)) -> Plan:
        """All ops on rows; results by name. Row arrays start `offsets` (operands, results) bytes past a vector."""
        s, n, (at_in, at_out) = self.shape, self.rows, offsets
        plan = self.blank_plan()
        self.call("plan", [self.put(case.ids)], list(plan.values()))
        route, back = [plan[name] for name in ROUTE], [plan[name] for name in BACK]
        x, out = self.put(case.x, at_in), self.put(case.out, at_in)
        hidden, rows = (self.blank((n, s.H), self.dtype, offset=at_out) for _ in range(2))
        y, dx = (self.blank((s.s, s.H), self.dtype, offset=at_out) for _ in range(2))
        weights, dw = self.blank((n,), np.float32), self.blank((s.s, s.K), np.float32)
        self.call("dispatch", [*route, x, self.put(case.w)], [hidden, weights])
        self.call("combine", [*back, out, weights], [y])
        self.call("dispatch_grad", [*back, out, self.put(case.ct_w)], [dx, dw])
        self.call("combine_grad", [*route, x], [rows])
        return {**plan, "hidden": hidden, "weights": weights, "y": y, "dx": dx, "dw": dw, "rows": rows}

    def compare(self, case: Rows, offsets: tuple[int, int] = (0, 0), what: str = "") -> None:
        """Runs all ops on rows; every array has the oracle's bits, and tickets are equal."""
        got = self.launch(case, offsets)
        self.group.sync()
        for name, want in case.want.items():
            same(stacked(got[name]), want, f"{name} {what}")
        tickets = stacked(got["ticket"])
        assert (tickets == tickets[0]).all() and tickets[0, 0] >= 0

    def check(self, name: str, seed: int) -> None:
        """The same for a named routing."""
        ids = routing(name, self.shape, seed)
        self.compare(Rows(self.shape, ids, seed, self.padding, self.dtype, self.mode, self.planner), what=name)


def check_weights(run: Run, name: str, seed: int, leaves: list[tuple[int, ...]], dtype: Any, full: bool,
                  offset: int = 0) -> None:  # fmt: skip
    """prefetch and reduce_grad of leaves [epn, *leaf], or [2*epn, *leaf] in place, have the oracle's bits."""
    shape, r, epn = run.shape, run.shape.R, run.shape.epn
    rng = np.random.default_rng(seed)
    want = reference.plan(routing(name, shape, seed), shape.E, run.padding)
    table = np.asarray(want.slot_expert, np.int32)
    used = table >= 0
    head = [run.put(np.broadcast_to(table, (r, *table.shape))), run.put(np.full((r, 1), seed + 1, np.int32))]

    own = [(rng.normal(size=(r, epn, *leaf)) * 9).astype(dtype) for leaf in leaves]
    given = [np.concatenate([w, np.full_like(w, 7)], axis=1) if full else w for w in own]
    args = [run.put(a, offset) for a in given]
    rets = args if full else [run.put(np.full((r, 2 * epn, *leaf), 3, dtype), offset) for leaf in leaves]
    run.call("prefetch", [*head, *args], rets)
    run.group.sync()
    for w, got in zip(own, rets, strict=True):
        expected = np.array(reference.prefetch(want, w))
        if full:
            expected[:, epn:][~used] = 7
        same(stacked(got), expected, f"prefetch {name}")
    if np.dtype(dtype) == np.int8:  # no gradient
        return

    cts = [rng.normal(size=(r, 2 * epn, *leaf)).astype(dtype) for leaf in leaves]
    args = [run.put(ct, offset) for ct in cts]
    rets = args if full else [run.put(np.full((r, epn, *leaf), 3, dtype), offset) for leaf in leaves]
    run.call("reduce_grad", [*head, *args], rets)
    run.group.sync()
    for ct, buffers in zip(cts, rets, strict=True):
        got = stacked(buffers)
        same(got[:, :epn], reference.reduce_grad(want, ct), f"reduce_grad {name}")
        if full:
            assert not got[:, epn:][used].any()
            same(got[:, epn:][~used], ct[:, epn:][~used], f"reduce_grad {name}")
