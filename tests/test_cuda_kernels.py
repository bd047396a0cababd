"""The CUDA kernels against the oracle: R ranks on one GPU, through the launchers, without JAX.

`-k sanitizer` is the small set for compute-sanitizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import gpu_kit
import numpy as np
import pytest
from cases import PADDINGS, ROUTINGS, SHAPES, Shape, routing
from gpu_kit import BACK, ROUTE, Buffer
from gpu_runs import BF16, Rows, Run, check_weights, plan_arrays, same, stacked

from moonep_jax import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not gpu_kit.available(), reason="needs a GPU, the CUDA module and cuda-python"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("dtype", "mode", "planner"), [(BF16, "dedup", "exact"), (np.float32, "exact", "home")])
def test_rows_equal_the_oracle(shape: Shape, padding: int, dtype: Any, mode: str, planner: str) -> None:
    with Run(shape, padding, dtype, mode, planner) as run:
        for seed, name in enumerate(ROUTINGS):
            run.check(name, seed)


@pytest.mark.parametrize("hidden", [1, 7, 8, 64, 1536, 2880, 7168])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_any_width(hidden: int, dtype: Any, mode: str) -> None:
    with Run(Shape(4, 24, 3, 8, hidden), 8, dtype, mode) as run:
        run.check("duplicates", 1)


@pytest.mark.parametrize("topk", [1, 9, 22, 32, 33, 64])
def test_any_topk(topk: int) -> None:
    with Run(Shape(4, 40, topk, 16, 16), 1) as run:
        run.check("anything", topk)


@pytest.mark.parametrize(
    "shape", [Shape(8, 1024, 8, 256, 64), Shape(2, 4096, 8, 64, 32), Shape(8, 2048, 16, 896, 8)], ids=str
)
@pytest.mark.parametrize("name", ["uniform", "one_home", "one_expert", "anything"])
def test_many_tiles(shape: Shape, name: str) -> None:
    with Run(shape) as run:
        run.check(name, 5)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Shape(72, 48, 4, 288, 8), "lognormal_8"),
        (Shape(72, 300, 8, 288, 8), "one_home"),
        (Shape(33, 64, 2, 66, 8), "crowded"),
        (Shape(64, 8192, 8, 128, 8), "uniform"),  # so many rows that the planner compares with wider numbers
    ],
    ids=str,
)
def test_plans_of_many_ranks(shape: Shape, name: str) -> None:
    ids = routing(name, shape, 3)
    with Run(shape) as run:
        plan = run.blank_plan()
        run.call("plan", [run.put(ids)], list(plan.values()))
        run.group.sync()
        for array, want in plan_arrays(reference.plan(ids, shape.E, 8)).items():
            same(stacked(plan[array]), want, array)


@pytest.mark.parametrize(
    ("dtype", "leaf", "stage"),
    [(BF16, (96, 40), 1 << 30), (np.float32, (33, 5), 64), (np.float16, (7,), 640), (np.int8, (3, 3), 64)],
)
@pytest.mark.parametrize("full", [False, True])
def test_weights_equal_the_oracle(dtype: Any, leaf: tuple[int, ...], stage: int, full: bool) -> None:
    shape, leaves = Shape(4, 32, 2, 16, 8), [leaf, (5, *leaf)]
    most = shape.epn * sum(-(-int(np.prod(d)) * np.dtype(dtype).itemsize // 64) * 64 for d in leaves)
    with Run(shape, stage_bytes=max(64 * shape.epn, min(stage, most))) as run:
        for seed, name in enumerate(("uniform", "one_home", "crowded", "unrouted", "one_expert")):
            check_weights(run, name, seed, leaves, dtype, full)


# -- counters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", [Shape(4, 48, 3, 8, 16), Shape(8, 1024, 8, 64, 16)], ids=str)
def test_counters_are_those_of_the_oracles_plans(shape: Shape, whole: bool) -> None:
    """Rounds of one call are one call."""
    with Run(shape, whole=whole, stage_bytes=64 * shape.epn) as run:
        rows, link_rows, moved = np.zeros((3, shape.R), np.int64)
        names = ("uniform", "one_home", "duplicates", "unrouted", "crowded")
        for seed, name in enumerate(names):
            case = Rows(shape, routing(name, shape, seed), seed)
            run.launch(case)
            check_weights(run, name, seed, [(96, 4)], np.float32, False)  # in rounds
            src, primary = case.want["src"], case.want["primary"]
            own = src // (shape.s * shape.K) == np.arange(shape.R)[:, None]
            rows += case.want["rank_rows"][0]
            link_rows += ((src >= 0) & ~own & (primary == np.arange(src.shape[1]))).sum(axis=1)
            moved += (case.want["slot_expert"][0] >= 0).sum(axis=1)
        run.group.sync()
        for rank, counters in enumerate(r.counters() for r in run.group.ranks):
            assert counters["calls"] == dict.fromkeys(gpu_kit.KINDS, len(names))
            assert (counters["rows"], counters["link_rows"]) == (rows[rank], link_rows[rank])
            assert counters["moved_experts"] == moved[rank]
            assert all(0 <= ns < 10**10 for ns in counters["wait_ns"].values())


# -- grids -------------------------------------------------------------------------------------------------------------

BLOCKS = (1, 2, 3, 5, 7, 13, 31, 61, 97, 127, 131, 132)
GRIDS = list(zip(BLOCKS, reversed(BLOCKS), strict=True))


@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_any_number_of_sms(mode: str) -> None:
    shape = Shape(2, 1024, 4, 16, 1024)  # work for more blocks than there are SMs
    case = Rows(shape, routing("duplicates", shape, 3), 3, mode=mode)
    for link, local in GRIDS:
        with Run(shape, mode=mode, link_blocks=link, local_blocks=local) as run:
            run.compare(case, what=f"with {link} and {local} blocks")


@pytest.mark.parametrize("full", [False, True])
def test_any_number_of_sms_for_weights(full: bool) -> None:
    shape, leaves = Shape(4, 32, 2, 16, 8), [(256, 512), (33, 5)]
    for link, local in GRIDS:
        with Run(shape, stage_bytes=1 << 20, link_blocks=link, local_blocks=local) as run:
            check_weights(run, "one_home", 2, leaves, BF16, full)


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "offsets"),
    [*((BF16, o) for o in ((2, 2), (4, 4), (8, 8), (2, 0), (0, 8))), (np.float32, (4, 4)), (np.float32, (8, 0))],
)
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_rows_at_any_address(dtype: Any, offsets: tuple[int, int], mode: str) -> None:
    shape = Shape(3, 40, 4, 12, 136)
    case = Rows(shape, routing("duplicates", shape, 4), 4, dtype=dtype, mode=mode)
    with Run(shape, dtype=dtype, mode=mode) as run:
        run.compare(case, offsets)


@pytest.mark.parametrize(("dtype", "offset"), [(BF16, 2), (BF16, 4), (BF16, 8), (np.float32, 4), (np.int8, 1)])
@pytest.mark.parametrize("full", [False, True])
def test_weights_at_any_address(dtype: Any, offset: int, full: bool) -> None:
    with Run(Shape(4, 32, 2, 16, 8), stage_bytes=1 << 16) as run:
        check_weights(run, "one_home", 1, [(96, 40), (8,)], dtype, full, offset)


# -- sizes: offsets beyond 2^31 and 2^32 -------------------------------------------------------------------------------

PERIOD = 4093  # no power of two: a row that is 2^31 or 2^32 bytes off has another content


def _enough_memory() -> None:
    from cuda.bindings import runtime

    free, _ = gpu_kit.ok(runtime.cudaMemGetInfo())
    if free < 60e9:
        pytest.skip(f"needs 60 GB of GPU memory, {free / 1e9:.0f} are free")


def _pattern(width: int, seed: int) -> np.ndarray:
    """[PERIOD, width] bfloat16 values of either sign between 1/8 and 32."""
    rng = np.random.default_rng(seed)
    sign = rng.integers(2, size=(PERIOD, width), dtype=np.uint16) << 15
    return (rng.integers(0x3E00, 0x4200, (PERIOD, width), np.uint16) | sign).view(BF16)


def _chosen(rows: int, row_bytes: int) -> list[int]:
    """The first and the last row, those around each multiple of 2^31 bytes, and 200 more."""
    marks = [at // row_bytes + d for at in range(1 << 31, rows * row_bytes, 1 << 31) for d in (-1, 0, 1)]
    some = np.random.default_rng(0).integers(rows, size=200).tolist()
    return sorted({0, rows - 1, *some, *(m for m in marks if m < rows)})


def _summed(x: np.ndarray, w: Iterable[np.float32], to: list[int]) -> np.ndarray:
    """combine of a token whose rows are all x: a chain per destination, then their sum."""
    wide, chains = x.astype(np.float32), {}
    for scale, rank in zip(w, to, strict=True):
        chains.setdefault(rank, []).append(wide * scale)
    parts = [functools.reduce(np.add, chain).astype(BF16).astype(np.float32) for chain in chains.values()]
    return functools.reduce(np.add, parts).astype(BF16)


@pytest.mark.parametrize(("topk", "tokens"), [(1, 266_240), (2, 133_120)])
def test_rows_beyond_2_to_the_31_elements(topk: int, tokens: int) -> None:
    _enough_memory()
    shape = Shape(2, tokens, topk, 4, 8192)
    ids = routing("two_hot", shape)
    p = reference.plan(ids, shape.E, 8)
    w = np.random.default_rng(1).random(ids.shape, np.float32)
    pattern = _pattern(shape.H, 2)
    token = lambda rank, t: pattern[(t + 1000 * rank) % PERIOD]  # noqa: E731
    with Run(shape) as run:
        assert run.rows * shape.H > 1 << 31
        plan = run.blank_plan()
        x, y = (run.blank((tokens, shape.H), BF16) for _ in range(2))
        hidden, weights = run.blank((run.rows, shape.H), BF16), run.blank((run.rows,), np.float32)
        for rank in range(shape.R):
            x[rank].tile(np.roll(pattern, -1000 * rank, axis=0))
        run.call("plan", [run.put(ids)], list(plan.values()))
        run.call("dispatch", [*(plan[name] for name in ROUTE), x, run.put(w)], [hidden, weights])
        run.call("combine", [*(plan[name] for name in BACK), hidden, weights], [y])
        run.group.sync()
        for name, want in plan_arrays(p).items():
            same(stacked(plan[name]), want, name)
        for rank in range(shape.R):
            rows, src = _chosen(run.rows, 2 * shape.H), np.asarray(p.src[rank], np.int64)
            empty = np.zeros(shape.H, BF16)
            want = [token(*divmod(src[i] // topk, tokens)) if src[i] >= 0 else empty for i in rows]
            same(hidden[rank].read_rows(rows), np.stack(want), f"hidden of rank {rank}")
            same(weights[rank].read(), np.where(src >= 0, w.reshape(-1)[src], 0), f"weights of rank {rank}")
            rows = _chosen(tokens, 2 * shape.H)
            want = [_summed(token(rank, t), w[rank, t], p.dst_rank[rank, t].tolist()) for t in rows]
            same(y[rank].read_rows(rows), np.stack(want), f"y of rank {rank}")


def test_a_leaf_beyond_2_to_the_31_elements() -> None:
    _enough_memory()
    width, length = 4096, (1 << 31) // 4096 + 16  # one expert of one leaf
    patterns = [_pattern(width, 3), _pattern(width, 4)]
    at = lambda rank, row: patterns[rank][row % PERIOD]  # noqa: E731
    with Run(Shape(2, 8, 1, 2, 8), stage_bytes=2 * width * length) as run:
        slots, ticket = run.put(np.array([[[-1], [0]]] * 2, np.int32)), run.put(np.ones((2, 1), np.int32))
        leaf = run.blank((2, length, width), BF16)
        rows = _chosen(length, 2 * width)
        slot = [length + i for i in rows]  # the same rows of the slot's expert

        for rank in range(2):
            leaf[rank].tile(patterns[rank])
        run.call("prefetch", [slots, ticket, leaf], [leaf])
        run.group.sync()
        same(leaf[1].read_rows(slot), np.stack([at(0, i) for i in rows]), "the slot")
        same(leaf[0].read_rows(slot), np.stack([at(0, i) for i in slot]), "the unused slot")
        for rank in range(2):
            same(leaf[rank].read_rows(rows), np.stack([at(rank, i) for i in rows]), f"own expert of rank {rank}")

        leaf[1].tile(patterns[1])
        run.call("reduce_grad", [slots, ticket, leaf], [leaf])
        run.group.sync()
        home, replica = (np.stack([at(r, i) for i in of]).astype(np.float32) for r, of in ((0, rows), (1, slot)))
        same(leaf[0].read_rows(rows), (home + replica).astype(BF16), "the gradient")
        assert not leaf[1].read_rows(slot).any()
        same(leaf[1].read_rows(rows), np.stack([at(1, i) for i in rows]), "the other expert's gradient")


# -- calls in flight ---------------------------------------------------------------------------------------------------


def test_many_calls_in_flight() -> None:
    """No host sync between 200 times five calls; in turn, a rank is late to copy out what its peers sent."""
    from moonep_jax import _ffi_cuda

    turns, shape = 200, Shape(3, 48, 4, 12, 256)
    rng = np.random.default_rng(0)
    ids = np.stack([routing("anything", shape, i) for i in range(turns)], axis=1)  # [R, turns, s, K]
    w = rng.random(ids.shape, np.float32)
    x = [rng.normal(size=(shape.R, turns, shape.s, shape.H)).astype(BF16) for _ in range(2)]
    with Run(shape, whole=False) as run:
        ids_d, w_d, x_d = run.put(ids), run.put(w), [run.put(a) for a in x]
        plans = run.blank_plan(count=(turns,))
        hidden = [run.blank((turns, run.rows, shape.H), BF16) for _ in range(2)]
        weights = [run.blank((turns, run.rows), np.float32) for _ in range(2)]
        y = [run.blank((turns, shape.s, shape.H), BF16) for _ in range(2)]
        busy = run.blank((16 << 20,), np.uint8)

        def late(rank: int) -> gpu_kit.Before:
            def before(phase: str, r: int) -> None:
                if phase == "local" and r == rank:  # about 0.3 ms on one SM; the others stay free for the peers
                    to, since, stream = busy[r].pointer, busy[r - 1].pointer, int(run.group.streams[r])
                    _ffi_cuda.copy(to, since, busy[r].nbytes, 1, stream)

            return before

        for i in range(turns):
            part = lambda buffers, i=i: [b.part(i) for b in buffers]  # noqa: E731
            plan: dict[str, list[Buffer]] = {name: part(buffers) for name, buffers in plans.items()}
            run.call("plan", [part(ids_d)], list(plan.values()))
            route, back = [plan[name] for name in ROUTE], [plan[name] for name in BACK]
            # The second call of a kind must wait for the late rank's credit.
            for j in range(2):
                rets = [part(hidden[j]), part(weights[j])]
                run.call("dispatch", [*route, part(x_d[j]), part(w_d)], rets, None if j else late(i % shape.R))
            for j in range(2):
                args = [*back, part(hidden[j]), part(weights[j])]
                run.call("combine", args, [part(y[j])], None if j else late((i + 1) % shape.R))
        run.group.sync()
        got = [[stacked(a[j]) for a in (hidden, weights, y)] for j in range(2)]
        for i in range(turns):
            p = reference.plan(ids[:, i], shape.E, 8)
            for j in range(2):
                rows, scale = reference.dispatch(p, x[j][:, i], w[:, i])
                for array, want in zip(got[j], (rows, scale, reference.combine(p, rows, scale)), strict=True):
                    same(array[:, i], want, f"turn {i}, call {j}")


def test_a_peer_may_be_one_plan_ahead() -> None:
    """A rank ends a plan and sends the next one before the others look for its first word, which is gone by then."""
    shape = Shape(3, 48, 4, 12, 8)
    with Run(shape, whole=False) as run:
        ids = [routing("anything", shape, seed) for seed in range(2)]
        plans = [run.blank_plan() for _ in ids]
        first, second = (
            {
                r: gpu_kit.Call("plan", args, rets, site)
                for r, (args, rets) in enumerate(
                    zip(gpu_kit.by_rank([run.put(ids[site])]), gpu_kit.by_rank(plans[site].values()), strict=True)
                )
            }
            for site in range(2)
        )
        others = lambda calls: {r: calls[r] for r in (1, 2)}  # noqa: E731
        run.group.enqueue(first, ("send",))
        run.group.enqueue({0: first[0]}, ("wait", "local"))
        run.group.enqueue({0: second[0]}, ("send",))
        run.group.sync()
        run.group.enqueue(others(first), ("wait", "local"))
        run.group.enqueue(others(second), ("send",))
        run.group.enqueue(second, ("wait", "local"))
        run.group.sync()
        for of_rank, plan in zip(ids, plans, strict=True):
            for name, want in plan_arrays(reference.plan(of_rank, shape.E, 8)).items():
                same(stacked(plan[name]), want, name)


# -- for compute-sanitizer: everything once, small ---------------------------------------------------------------------

SMALL = [(BF16, "dedup", "exact"), (np.float32, "exact", "home")]
# One launch for a call; several, in one round or in all.
LAUNCHES = [{"whole": True}, {"whole": False, "rounds": 1}, {"whole": False, "rounds": 3}]


@pytest.mark.parametrize("launches", LAUNCHES, ids=["whole", "one_round", "rounds"])
@pytest.mark.parametrize(("dtype", "mode", "planner"), SMALL)
def test_sanitizer_rows(dtype: Any, mode: str, planner: str, launches: dict[str, bool]) -> None:
    with Run(Shape(2, 16, 2, 4, 72), 8, dtype, mode, planner, timeout_s=120.0, **launches) as run:
        run.check("partly_unrouted", 0)


@pytest.mark.parametrize("full", [False, True])
def test_sanitizer_weights(full: bool) -> None:
    with Run(Shape(2, 16, 2, 4, 8), stage_bytes=256, timeout_s=120.0) as run:
        check_weights(run, "one_home", 0, [(24, 8), (5,)], BF16, full)


@pytest.mark.parametrize("launches", LAUNCHES, ids=["whole", "one_round", "rounds"])
@pytest.mark.parametrize(("dtype", "mode", "planner"), SMALL)
def test_sanitizer_unwritten_rows(
    dtype: Any, mode: str, planner: str, launches: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For initcheck: only control blocks are filled, so it sees reads of what no kernel has written.

    All ids are routed: the returned weights of a token are read together, and those of unrouted ids then not used.
    """
    monkeypatch.setattr(gpu_kit, "FILL", False)
    with Run(Shape(2, 16, 2, 4, 72), 8, dtype, mode, planner, timeout_s=120.0, **launches) as run:
        run.check("uniform", 0)


@pytest.mark.parametrize("full", [False, True])
def test_sanitizer_unwritten_weights(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kit, "FILL", False)
    with Run(Shape(2, 16, 2, 4, 8), stage_bytes=256, timeout_s=120.0) as run:
        check_weights(run, "one_home", 0, [(24, 8), (5,)], BF16, full)
