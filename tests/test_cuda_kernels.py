"""The CUDA kernels against the oracle: R ranks on one GPU, through the launchers, without JAX."""

from __future__ import annotations

from typing import Any

import gpu_kit
import ml_dtypes
import numpy as np
import pytest
from cases import PADDINGS, ROUTINGS, SHAPES, Shape, routing

from moonep_jax import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)


def stacked(buffers: list[gpu_kit.Buffer]) -> np.ndarray:
    return np.stack([b.read() for b in buffers])


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit equality."""
    view = {2: np.uint16, 4: np.uint32, 1: np.uint8}[got.dtype.itemsize]
    np.testing.assert_array_equal(got.view(view), np.asarray(want, got.dtype).view(view))


class Run:
    """One routing through all kernels; device buffers are poisoned with NaN."""

    def __init__(self, shape: Shape, padding: int, dtype: Any = BF16, mode: str = "dedup", planner: str = "exact"):
        self.shape, self.dtype, self.mode, self.planner, self.padding = shape, np.dtype(dtype), mode, planner, padding
        self.group = gpu_kit.Group(
            shape.R,
            experts=shape.E,
            topk=shape.K,
            tokens=max(shape.S, shape.s),
            padding=padding,
            home=planner == "home",
            exact=mode == "exact",
            hidden=shape.H,
            row_bytes=shape.H * self.dtype.itemsize,
            stage_bytes=64 * shape.epn,
        )
        self._made: list[gpu_kit.Buffer] = []

    def put(self, array: np.ndarray) -> list[gpu_kit.Buffer]:
        made = [gpu_kit.Buffer.of(a) for a in array]
        self._made += made
        return made

    def blank(self, shape: tuple[int, ...], dtype: Any) -> list[gpu_kit.Buffer]:
        made = [gpu_kit.Buffer(shape, dtype) for _ in range(self.shape.R)]
        self._made += made
        return made

    def call(self, kind: str, args: list[list[gpu_kit.Buffer]], rets: list[list[gpu_kit.Buffer]]) -> None:
        by_rank = lambda lists: [list(x) for x in zip(*lists, strict=True)]  # noqa: E731
        self.group.launch(kind, by_rank(args), by_rank(rets))

    def check(self, ids: np.ndarray, seed: int) -> None:
        s = self.shape
        rng = np.random.default_rng(seed)
        want = reference.plan(ids, s.E, self.padding, self.planner)
        n = want.rows
        shapes = [(s.s, s.K)] * 2 + [(n,)] * 3 + [(2 * s.epn,)] * 2 + [(s.R, s.epn), (s.R,), (s.R,), (1,)]
        plan = {k: self.blank(d, np.int32) for k, d in zip(gpu_kit.PLAN_ARRAYS, shapes, strict=True)}
        self.call("plan", [self.put(ids)], list(plan.values()))
        x = rng.normal(size=(s.R, s.s, s.H)).astype(self.dtype)
        w = rng.random((s.R, s.s, s.K), np.float32)
        route = [plan[k] for k in ("dst_rank", "dst_row", "src", "primary", "next", "ticket")]
        hidden, weights = self.blank((n, s.H), self.dtype), self.blank((n,), np.float32)
        self.call("dispatch", [*route, self.put(x), self.put(w)], [hidden, weights])
        out = rng.normal(size=(s.R, n, s.H)).astype(self.dtype)
        out[np.asarray(want.src) < 0] = np.nan
        back = [plan[k] for k in ("dst_rank", "src", "primary", "next", "ticket")]
        y = self.blank((s.s, s.H), self.dtype)
        out_d = self.put(out)
        self.call("combine", [*back, out_d, weights], [y])
        dx, dw = self.blank((s.s, s.H), self.dtype), self.blank((s.s, s.K), np.float32)
        ct_w = rng.random((s.R, n), np.float32)
        self.call("dispatch_grad", [*back, out_d, self.put(ct_w)], [dx, dw])
        rows = self.blank((n, s.H), self.dtype)
        self.call("combine_grad", [*route, self.put(x)], [rows])
        self.group.sync()

        for name in gpu_kit.PLAN_ARRAYS[:-1]:
            expected = np.asarray(getattr(want, name))
            got = stacked(plan[name])
            if name in ("slot_expert", "home_rows", "rank_rows"):
                expected = np.broadcast_to(expected, got.shape)
            np.testing.assert_array_equal(got, expected, err_msg=name)
        tickets = stacked(plan["ticket"])
        assert (tickets == tickets[0]).all() and tickets[0, 0] >= 0
        hidden_want, weights_want = reference.dispatch(want, x, w)
        same(stacked(hidden), hidden_want)
        same(stacked(weights), weights_want)
        same(stacked(y), reference.combine(want, out, weights_want, self.mode))
        dx_want, dw_want = reference.dispatch_grad(want, out, ct_w, self.mode)
        same(stacked(dx), dx_want)
        same(stacked(dw), dw_want)
        same(stacked(rows), hidden_want)

    def close(self) -> None:
        self.group.close()
        for buffer in self._made:
            buffer.free()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("dtype", "mode", "planner"), [(BF16, "dedup", "exact"), (np.float32, "exact", "home")])
def test_rows_equal_the_oracle(shape: Shape, padding: int, dtype: Any, mode: str, planner: str) -> None:
    run = Run(shape, padding, dtype, mode, planner)
    try:
        for seed, name in enumerate(ROUTINGS):
            run.check(routing(name, shape, seed), seed)
    finally:
        run.close()


@pytest.mark.parametrize("hidden", [1, 7, 8, 64, 1536, 2880, 7168])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_any_width(hidden: int, dtype: Any, mode: str) -> None:
    shape = Shape(4, 24, 3, 8, hidden)
    run = Run(shape, 8, dtype, mode)
    try:
        run.check(routing("duplicates", shape, 1), 1)
    finally:
        run.close()


@pytest.mark.parametrize("topk", [1, 9, 22, 32, 33, 64])
def test_any_topk(topk: int) -> None:
    shape = Shape(4, 40, topk, 16, 16)
    run = Run(shape, 1)
    try:
        run.check(routing("anything", shape, topk), topk)
    finally:
        run.close()


@pytest.mark.parametrize(
    "shape", [Shape(8, 1024, 8, 256, 64), Shape(2, 4096, 8, 64, 32), Shape(8, 2048, 16, 896, 8)], ids=str
)
@pytest.mark.parametrize("name", ["uniform", "one_home", "one_expert", "anything"])
def test_many_tiles(shape: Shape, name: str) -> None:
    run = Run(shape, 8)
    try:
        run.check(routing(name, shape, 5), 5)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("dtype", "leaf", "stage"),
    [(BF16, (96, 40), 1 << 30), (np.float32, (33, 5), 64), (np.float16, (7,), 640), (np.int8, (3, 3), 64)],
)
@pytest.mark.parametrize("full", [False, True])
def test_weights_equal_the_oracle(dtype: Any, leaf: tuple[int, ...], stage: int, full: bool) -> None:
    shape, padding = Shape(4, 32, 2, 16, 8), 8
    epn = shape.epn
    per_expert = sum(-(-int(np.prod(d)) * np.dtype(dtype).itemsize // 64) * 64 for d in (leaf, (5, *leaf)))
    group = gpu_kit.Group(
        shape.R, experts=shape.E, topk=shape.K, tokens=shape.s, padding=padding, hidden=8, row_bytes=16,
        stage_bytes=max(64 * epn, min(stage, epn * per_expert)),
    )  # fmt: skip
    made: list[gpu_kit.Buffer] = []

    def put(array: np.ndarray) -> list[gpu_kit.Buffer]:
        made.extend(buffers := [gpu_kit.Buffer.of(a) for a in array])
        return buffers

    try:
        for seed, name in enumerate(("uniform", "one_home", "crowded", "unrouted", "one_expert")):
            rng = np.random.default_rng(seed)
            want = reference.plan(routing(name, shape, seed), shape.E, padding)
            slots = put(np.broadcast_to(np.asarray(want.slot_expert), (shape.R, shape.R, epn)).astype(np.int32))
            ticket = put(np.full((shape.R, 1), seed + 1, np.int32))
            leaves = [leaf, (5, *leaf)]
            own = [(rng.normal(size=(shape.R, epn, *d)) * 9).astype(dtype) for d in leaves]
            args = [put(np.concatenate([w, np.full_like(w, 7)], axis=1) if full else w) for w in own]
            rets = args if full else [put(np.full((shape.R, 2 * epn, *d), 3, dtype)) for d in leaves]
            group.launch("prefetch", [[slots[r], ticket[r], *(a[r] for a in args)] for r in range(shape.R)],
                         [[o[r] for o in rets] for r in range(shape.R)])  # fmt: skip
            group.sync()
            for w, o in zip(own, rets, strict=True):
                expected = np.asarray(reference.prefetch(want, w)).copy()
                if full:
                    for r in range(shape.R):
                        for slot in range(epn):
                            if want.slot_expert[r, slot] < 0:
                                expected[r, epn + slot] = 7
                same(stacked(o), expected)
            if np.dtype(dtype) == np.int8:
                continue
            cts = [rng.normal(size=(shape.R, 2 * epn, *d)).astype(dtype) for d in leaves]
            args = [put(c) for c in cts]
            rets = args if full else [put(np.full((shape.R, epn, *d), 3, dtype)) for d in leaves]
            group.launch("reduce_grad", [[slots[r], ticket[r], *(a[r] for a in args)] for r in range(shape.R)],
                         [[o[r] for o in rets] for r in range(shape.R)])  # fmt: skip
            group.sync()
            for ct, o in zip(cts, rets, strict=True):
                got = stacked(o)
                same(got[:, :epn], reference.reduce_grad(want, ct))
                if full:
                    used = np.asarray(want.slot_expert) >= 0
                    assert not got[:, epn:][used].any()
                    same(got[:, epn:][~used], ct[:, epn:][~used])
    finally:
        group.close()
        for buffer in made:
            buffer.free()


def test_a_missing_rank_is_named_by_all() -> None:
    group = gpu_kit.Group(3, experts=6, topk=1, tokens=4, padding=1, hidden=4, row_bytes=16, timeout_s=0.2)
    try:
        ids = [gpu_kit.Buffer.of(np.zeros((4, 1), np.int32)) for _ in range(3)]
        n = group.shape.recv_rows(4)
        shapes = [(4, 1)] * 2 + [(n,)] * 3 + [(4,)] * 2 + [(3, 2), (3,), (3,), (1,)]
        plans = [[gpu_kit.Buffer(d, np.int32) for d in shapes] for _ in range(3)]
        number = gpu_kit.KINDS["plan"]
        for phase in range(4):
            for r in (0, 1):  # rank 2 never calls
                raw = [ids[r].raw], [b.raw for b in plans[r]]
                group.ranks[r].launch(number, *raw, 1, 0, phase, int(group.streams[r]))
        gpu_kit.ok(group._runtime.cudaDeviceSynchronize())
        texts = [group.ranks[r].error() for r in (0, 1)]
        assert all("plan: missing ranks [2]" in t for t in texts), texts
        for r in (0, 1):  # poisoned, and safe
            assert plans[r][-1].read()[0] == -1
            assert not plans[r][5].read().any() and (plans[r][0].read() == -1).all()
    finally:
        group.close()
