"""How rows travel on the GPU: bulk copies or vectors, one launch or several. All give the oracle's bits.

R ranks on one GPU, through the launchers, without JAX. A spy sees which way each call took.
"""

from __future__ import annotations

from typing import Any, Self

import gpu_kit
import numpy as np
import pytest
from cases import Shape, routing
from gpu_kit import ROUTE, Buffer
from gpu_runs import BF16, Rows, Run, plan_arrays, same, stacked

from moonep_jax import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]
ROW_CALLS = ("dispatch", "combine", "dispatch_grad", "combine_grad")
SENDS = ("dispatch", "combine_grad")
WHOLE_BYTES = 1 << 20  # kWholeBytes in kernels.h


class Spied(Run):
    """A run that notes how the rows of its calls travelled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.whole: dict[str, bool] = {}
        self.bulk: dict[str, bool] = {}

    def __enter__(self) -> Self:
        return self

    def call(
        self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]], before: gpu_kit.Before | None = None
    ) -> None:
        number = gpu_kit.KINDS[kind]
        raw = [a[0].raw for a in args], [r[0].raw for r in rets]
        self.whole[kind] = self.group.ranks[0].whole(number, *raw)
        self.bulk[kind] = self.group.ranks[0].bulk(number, *raw)
        super().call(kind, args, rets, before)

    def saw(self, *, whole: bool, bulk: bool) -> None:
        """Asserts how the row calls went."""
        assert {k: self.whole[k] for k in ROW_CALLS} == dict.fromkeys(ROW_CALLS, whole)
        assert {k: self.bulk[k] for k in SENDS} == dict.fromkeys(SENDS, bulk)

    def put_route(self, plan: reference.ReferencePlan, ticket: int) -> list[list[Buffer]]:
        """The oracle's plan as operands of dispatch and combine_grad."""
        arrays = plan_arrays(plan) | {"ticket": np.full((plan.ranks, 1), ticket)}
        return [self.put(np.ascontiguousarray(arrays[name], np.int32)) for name in ROUTE]


def passes(shape: Shape, padding: int = 1, *args: Any, name: str = "anything", rounds: int = 2, **ways: Any) -> Spied:
    """Runs a routing a few times against the oracle; returns the closed run, for what it saw."""
    with Spied(shape, padding, *args, **ways) as run:
        for seed in range(rounds):
            run.check(name, seed)
    return run


WAYS = {"whole": (True, True), "bulk": (False, True), "vectors": (False, False)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "mode", "planner"),
    [(BF16, "dedup", "exact"), (np.float32, "exact", "home"), (np.float16, "exact", "exact")],
)
def test_every_way_gives_the_same_bits(ranks: int, way: str, dtype: Any, mode: str, planner: str) -> None:
    whole, bulk = WAYS[way]
    shape = Shape(ranks, 7, 3, 8 * ranks, 264)
    for padding in (1, 8):
        run = passes(shape, padding, dtype, mode, planner, whole=whole, bulk=bulk)
        run.saw(whole=whole, bulk=bulk and not whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["uniform", "one_home", "one_expert", "duplicates", "unrouted"])
def test_every_way_any_routing(way: str, name: str) -> None:
    whole, bulk = WAYS[way]
    passes(Shape(4, 33, 6, 16, 128), name=name, whole=whole, bulk=bulk)


@pytest.mark.parametrize("row_bytes", [16, 48, 112, 128, 1040, 4096, 14336, 16384, 16400, 32768, 50000, 65536])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_bulk_copies_of_any_size(row_bytes: int, mode: str) -> None:
    """Rows below, at and above what one stage holds, and more tokens than stages."""
    tokens = 5000 if row_bytes <= 128 else 40
    shape = Shape(2, tokens, 3, 8, row_bytes // 2)
    passes(shape, 8, mode=mode, whole=False, link_blocks=3 if tokens == 40 else 0).saw(whole=False, bulk=True)


@pytest.mark.parametrize("tokens", [*range(1, 20), 50, 101])
def test_bulk_rings_of_any_fill(tokens: int) -> None:
    """One block: its warps get no piece, fewer than they have stages, or several turns of the ring."""
    for width in (8, 7168):
        passes(Shape(2, tokens, 2, 4, width), rounds=1, whole=False, link_blocks=1).saw(whole=False, bulk=True)


@pytest.mark.parametrize("width", [1, 3, 9, 10, 12, 20, 2881, 4100])
@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_bulk_copies_cannot_carry(width: int, whole: bool) -> None:
    passes(Shape(4, 9, 3, 16, width), 8, whole=whole).saw(whole=whole, bulk=False)


@pytest.mark.parametrize("topk", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("way", WAYS)
def test_topk_beyond_a_warp(topk: int, way: str) -> None:
    whole, bulk = WAYS[way]
    passes(Shape(8, 5, topk, 80, 64), whole=whole, bulk=bulk)


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_decode(tokens: int, mode: str) -> None:
    for way in WAYS:
        whole, bulk = WAYS[way]
        passes(Shape(8, tokens, 8, 64, 1024), mode=mode, name="uniform", whole=whole, bulk=bulk, rounds=3)


@pytest.mark.parametrize("row_bytes", [1024, 16384])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_both_sides_of_the_bytes_of_one_launch(row_bytes: int, off: int) -> None:
    """Dispatch counts its N rows; combine those and the returned ones, which here are as many."""
    for kinds, rows in (
        (SENDS, WHOLE_BYTES // row_bytes),
        (("combine", "dispatch_grad"), WHOLE_BYTES // row_bytes // 2),
    ):
        shape = Shape(2, rows + off, 1, 4, row_bytes // 2)
        run = passes(shape, rounds=1)
        assert reference.recv_rows(shape.s, 1, 4, 2, 1) == shape.s
        for kind in kinds:
            assert run.whole[kind] == (off <= 0)


@pytest.mark.parametrize(("blocks", "whole"), [(1, False), (7, False), (8, True), (0, True)])
def test_few_sms_leave_no_room_for_a_cluster(blocks: int, whole: bool) -> None:
    passes(Shape(2, 4, 2, 8, 64), link_blocks=blocks).saw(whole=whole, bulk=not whole)


def test_ways_may_differ_between_calls() -> None:
    """The words and buffers are the same whatever the launches: small and large calls share them in one domain."""
    shapes = Shape(2, 300, 2, 8, 4096), Shape(2, 20, 2, 8, 4096, S=300)
    with Spied(shapes[0], 1) as run:
        for seed in range(6):
            run.shape = shapes[seed % 2]
            run.rows = run.group.shape.recv_rows(run.shape.s)
            run.check("uniform", seed)
            run.saw(whole=seed % 2 == 1, bulk=seed % 2 == 0)


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_operands_off_the_16_byte_grid(offset: int) -> None:
    """x that starts between two vectors goes without bulk copies, and right."""
    shape = Shape(2, 6, 2, 8, 64)
    for whole in (False, True):
        with Spied(shape, whole=whole) as run:
            run.compare(Rows(shape, routing("anything", shape, 1), 1), (offset, 0))
            run.saw(whole=whole, bulk=False)
            run.compare(Rows(shape, routing("anything", shape, 2), 2), (0, offset))
            run.saw(whole=whole, bulk=not whole)


@pytest.mark.parametrize("whole", [False, True])
def test_a_missing_rank_poisons_the_rows(whole: bool) -> None:
    """A rank that never sends: the other gets NaN and an error, and so does its next call, without a wait."""
    shape = Shape(2, 4, 2, 8, 64)
    plan = reference.plan(routing("uniform", shape, 1), shape.E, 1)
    with Spied(shape, 1, whole=whole, timeout_s=0.2) as run:
        operands = [
            *run.put_route(plan, 1),
            run.put(np.ones((2, 4, 64), BF16)),
            run.put(np.ones((2, 4, 2), np.float32)),
        ]
        rank, stream = run.group.ranks[0], int(run.group.streams[0])
        for _ in range(2):
            results = run.blank((plan.rows, 64), BF16, 0)[0], run.blank((plan.rows,), np.float32, 0)[0]
            raw = [o[0].raw for o in operands], [r.raw for r in results]
            assert rank.whole(1, *raw) == whole
            for phase in [len(gpu_kit.PHASES)] if whole else range(len(gpu_kit.PHASES)):
                rank.launch(1, *raw, 1, 0, phase, stream)
            gpu_kit.ok(run.group._runtime.cudaDeviceSynchronize())
            assert "dispatch: missing ranks [1]" in rank.error()
            assert all(np.isnan(r.read().astype(np.float32)).all() for r in results)


@pytest.mark.parametrize("way", WAYS)
def test_calls_in_a_row_reuse_the_buffers(way: str) -> None:
    """100 calls back to back without a host in between: credits hold the fast ranks back."""
    whole, bulk = WAYS[way]
    shape = Shape(4, 16, 4, 16, 512)
    plan = reference.plan(routing("uniform", shape, 3), shape.E, 1)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(4, 16, 512)).astype(BF16) for _ in range(4)]
    with Spied(shape, 1, whole=whole, bulk=bulk) as run:
        route, operands = run.put_route(plan, 1), [run.put(x) for x in xs]
        results = [run.blank((plan.rows, 512), BF16) for _ in range(100)]
        for i, rows in enumerate(results):
            run.call("combine_grad", [*route, operands[i % 4]], [rows])
        run.group.sync()
        for i, rows in enumerate(results):
            same(stacked(rows), reference.dispatch(plan, xs[i % 4])[0])
