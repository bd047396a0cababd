"""How rows travel on the GPU: in one launch or several, in one round or in three. All give the oracle's bits.

R ranks on one GPU, through the launchers, without JAX. A spy sees which way each call took.
"""

from __future__ import annotations

from typing import Any, Self

import gpu_kit
import numpy as np
import pytest
from cases import Shape, routing
from gpu_kit import BACK, ROUTE, Buffer
from gpu_runs import BF16, Rows, Run, plan_arrays, same, stacked

from moonep_jax import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]
ROW_CALLS = ("dispatch", "combine", "dispatch_grad", "combine_grad")
SENDS = ("dispatch", "combine_grad")
WHOLE_BYTES = 1 << 20  # kWholeBytes in kernels.h
ROUND_BYTES = 64 << 20  # kRoundBytes in gpu_launch.cc
ROUNDS = 3


class Spied(Run):
    """A run that notes how the rows of its calls travelled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.whole: dict[str, bool] = {}
        self.rounds: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def call(
        self, kind: str, args: list[list[Buffer]], rets: list[list[Buffer]], before: gpu_kit.Before | None = None
    ) -> None:
        number = gpu_kit.KINDS[kind]
        raw = [a[0].raw for a in args], [r[0].raw for r in rets]
        self.whole[kind] = self.group.ranks[0].whole(number, *raw)
        self.rounds[kind] = self.group.ranks[0].rounds(number, *raw)
        super().call(kind, args, rets, before)

    def saw(self, *, whole: bool, rounds: int = 1) -> None:
        """Asserts how the row calls went."""
        assert {k: self.whole[k] for k in ROW_CALLS} == dict.fromkeys(ROW_CALLS, whole)
        assert {k: self.rounds[k] for k in ROW_CALLS} == dict.fromkeys(ROW_CALLS, rounds)

    def put_route(self, plan: reference.ReferencePlan, ticket: int) -> list[list[Buffer]]:
        """The oracle's plan as operands of dispatch and combine_grad."""
        arrays = plan_arrays(plan) | {"ticket": np.full((plan.ranks, 1), ticket)}
        return [self.put(np.ascontiguousarray(arrays[name], np.int32)) for name in ROUTE]


def passes(shape: Shape, padding: int = 1, *args: Any, name: str = "anything", times: int = 2, **ways: Any) -> Spied:
    """Runs a routing a few times against the oracle; returns the closed run, for what it saw."""
    with Spied(shape, padding, *args, **ways) as run:
        for seed in range(times):
            run.check(name, seed)
    return run


WAYS = {"whole": (True, 1), "one_round": (False, 1), "rounds": (False, ROUNDS)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "mode", "planner"),
    [(BF16, "dedup", "exact"), (np.float32, "exact", "home"), (np.float16, "exact", "exact")],
)
def test_every_way_gives_the_same_bits(ranks: int, way: str, dtype: Any, mode: str, planner: str) -> None:
    whole, rounds = WAYS[way]
    shape = Shape(ranks, 7, 3, 8 * ranks, 264)
    for padding in (1, 8):
        run = passes(shape, padding, dtype, mode, planner, whole=whole, rounds=rounds)
        run.saw(whole=whole, rounds=rounds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["uniform", "one_home", "one_expert", "duplicates", "unrouted"])
def test_every_way_any_routing(way: str, name: str) -> None:
    whole, rounds = WAYS[way]
    passes(Shape(4, 33, 6, 16, 128), name=name, whole=whole, rounds=rounds)


@pytest.mark.parametrize("width", [1, 3, 9, 10, 12, 20, 56, 64, 520, 2048, 2881, 4100, 7168, 8192, 8200, 25000, 32768])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_rows_of_any_size(width: int, mode: str) -> None:
    """Odd sizes, and rows below, at and above what a warp has under way at a time."""
    for rounds in (1, ROUNDS):
        passes(Shape(2, 40, 3, 8, width), 8, mode=mode, whole=False, rounds=rounds, link_blocks=3)
    if width <= 4100:
        passes(Shape(4, 9, 3, 16, width), 8, mode=mode)


@pytest.mark.parametrize("tokens", [*range(1, 20), 50, 101])
def test_rounds_of_any_tokens(tokens: int) -> None:
    """Rounds without a token, and pieces that do not come out even."""
    for name in ("anything", "one_home", "unrouted"):
        passes(Shape(3, tokens, 2, 6, 8), name=name, times=1, whole=False, rounds=ROUNDS).saw(
            whole=False, rounds=ROUNDS
        )


@pytest.mark.parametrize("blocks", [(1, 1), (1, 0), (0, 1), (5, 2), (200, 400)])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_more_rows_than_warps(blocks: tuple[int, int], mode: str) -> None:
    shape = Shape(2, 5000 if min(blocks) == 1 else 30000, 3, 8, 8)
    for rounds in (1, ROUNDS):
        passes(shape, 8, mode=mode, times=1, whole=False, rounds=rounds, link_blocks=blocks[0], local_blocks=blocks[1])


def test_rounds_by_the_bytes_of_a_call() -> None:
    """Of the dispatched rows, whatever their number."""
    for off, rounds in ((-1, 1), (0, ROUNDS)):
        shape = Shape(2, ROUND_BYTES // 16384 + off, 1, 4, 8192)
        passes(shape, name="uniform", times=1).saw(whole=False, rounds=rounds)


@pytest.mark.parametrize("topk", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("way", WAYS)
def test_topk_beyond_a_warp(topk: int, way: str) -> None:
    whole, rounds = WAYS[way]
    passes(Shape(8, 5, topk, 80, 64), whole=whole, rounds=rounds)


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_decode(tokens: int, mode: str) -> None:
    for way in WAYS:
        whole, rounds = WAYS[way]
        passes(Shape(8, tokens, 8, 64, 1024), mode=mode, name="uniform", whole=whole, rounds=rounds, times=3)


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
    passes(Shape(2, 4, 2, 8, 64), link_blocks=blocks).saw(whole=whole)


def test_ways_may_differ_between_calls() -> None:
    """The words and buffers are the same whatever the launches: small and large calls share them in one domain."""
    shapes = Shape(2, 300, 2, 8, 4096), Shape(2, 20, 2, 8, 4096, S=300)
    with Spied(shapes[0], 1) as run:
        for seed in range(6):
            run.shape = shapes[seed % 2]
            run.rows = run.group.shape.recv_rows(run.shape.s)
            run.check("uniform", seed)
            run.saw(whole=seed % 2 == 1)


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_operands_off_the_16_byte_grid(offset: int) -> None:
    """Arrays that start between two vectors."""
    shape = Shape(2, 6, 2, 8, 64)
    for whole, rounds in WAYS.values():
        with Spied(shape, whole=whole, rounds=rounds) as run:
            run.compare(Rows(shape, routing("anything", shape, 1), 1), (offset, 0))
            run.compare(Rows(shape, routing("anything", shape, 2), 2), (0, offset))
            run.saw(whole=whole, rounds=rounds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("missing", range(ROUNDS))
def test_a_missing_rank_poisons_the_rows(way: str, missing: int) -> None:
    """A rank that does not send, or no more after some rounds: the other gets NaN in every row and an error, and so
    does its next call, without a wait."""
    whole, rounds = WAYS[way]
    if missing >= rounds:
        pytest.skip("there are no such rounds")
    shape = Shape(2, 8, 2, 8, 64)
    plan = reference.plan(routing("uniform", shape, 1), shape.E, 1)
    back = [np.ascontiguousarray(plan_arrays(plan)[name], np.int32) for name in BACK[:-1]]
    with Spied(shape, 1, whole=whole, rounds=rounds, timeout_s=0.2) as run:
        ticket = run.put(np.full((2, 1), 1, np.int32))
        calls = {
            "dispatch": (
                [*run.put_route(plan, 1), run.put(np.ones((2, 8, 64), BF16)), run.put(np.ones((2, 8, 2), np.float32))],
                [((plan.rows, 64), BF16), ((plan.rows,), np.float32)],
            ),
            "dispatch_grad": (
                [*map(run.put, back), ticket, run.put(np.ones((2, plan.rows, 64), BF16)),
                 run.put(np.ones((2, plan.rows), np.float32))],
                [((8, 64), BF16), ((8, 2), np.float32)],
            ),
        }  # fmt: skip
        first = True
        for kind, (operands, dims) in [*calls.items(), *calls.items()]:
            number = gpu_kit.KINDS[kind]
            results = [[b[r] for b in (run.blank(d, t, 0) for d, t in dims)] for r in range(2)]
            raw = [([o[r].raw for o in operands], [b.raw for b in results[r]]) for r in range(2)]
            assert run.group.ranks[0].whole(number, *raw[0]) == whole
            for round_ in range(rounds):
                present = (0, 1) if first and round_ < missing else (0,)
                for phase in [len(gpu_kit.PHASES)] if whole else range(len(gpu_kit.PHASES)):
                    for r in present:
                        run.group.ranks[r].launch(number, *raw[r], 1, round_, phase, int(run.group.streams[r]))
            gpu_kit.ok(run.group._runtime.cudaDeviceSynchronize())
            assert "dispatch: missing ranks [1]" in run.group.ranks[0].error()
            assert all(np.isnan(b.read().astype(np.float32)).all() for b in results[0]), kind
            first = False


@pytest.mark.parametrize("way", WAYS)
def test_calls_in_a_row_reuse_the_buffers(way: str) -> None:
    """100 calls back to back without a host in between: credits hold the fast ranks back."""
    whole, rounds = WAYS[way]
    shape = Shape(4, 16, 4, 16, 512)
    plan = reference.plan(routing("uniform", shape, 3), shape.E, 1)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(4, 16, 512)).astype(BF16) for _ in range(4)]
    with Spied(shape, 1, whole=whole, rounds=rounds) as run:
        route, operands = run.put_route(plan, 1), [run.put(x) for x in xs]
        results = [run.blank((plan.rows, 512), BF16) for _ in range(100)]
        for i, rows in enumerate(results):
            run.call("combine_grad", [*route, operands[i % 4]], [rows])
        run.group.sync()
        for i, rows in enumerate(results):
            same(stacked(rows), reference.dispatch(plan, xs[i % 4])[0])
