"""The oracle, tested from first principles: literal small examples, invariants over the case table, and algebra.

Imports numpy, ml_dtypes, hypothesis and the shared cases; neither JAX nor the native module is used.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import OUTSIDE, ROUTINGS, SHAPES, Shape, routing
from invariants import check_invariants

from moonep_jax import reference as ref

Array = Any  # numpy arrays of any dtype

# Three ranks of one expert and two tokens each, K = 1, T = 6; expert 2 is hot.
LEAN_IDS = np.array([[[1], [2]], [[2], [2]], [[2], [0]]], np.int32)
# Homes 0 and 1 have one row too many each, rank 2 has none, and one slot.
CASCADE_IDS = np.array([[[0], [1]], [[0], [1]], [[0], [1]]], np.int32)
# One token per rank, K = 3, two experts per rank, balanced.
CHAIN_IDS = np.array([[[2, 0, 3]], [[1, 2, 0]]], np.int32)


def assert_fields(p: ref.ReferencePlan, **expected: Any) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(p, name), value, err_msg=name)


def integers(rng: np.random.Generator, *shape: int) -> Array:
    """Small integers as float32: sums and products of them are exact, so transposes can be compared for equality."""
    return rng.integers(-4, 5, size=shape).astype(np.float32)


# ---- literal examples, computed by hand --------------------------------------------------------------------------


def test_recv_rows() -> None:
    assert ref.recv_rows(tokens=2, topk=1, experts=3, ranks=3, token_padding=2) == 4
    assert ref.recv_rows(tokens=7, topk=2, experts=48, ranks=8, token_padding=128) == 1664  # 14 + 127 * 12 = 1538
    assert ref.recv_rows(tokens=5, topk=3, experts=4, ranks=2, token_padding=1) == 15
    assert ref.recv_rows(tokens=5, topk=3, experts=4, ranks=2, token_padding=8, planner="home") == 48  # 30 + 7 * 2


def test_lean_plan_by_hand() -> None:
    p = ref.plan(LEAN_IDS, experts=3, token_padding=2)
    assert p.kind == "lean"
    assert_fields(
        p,
        alloc=[[1, 0, 0], [0, 1, 0], [1, 1, 2]],
        home_rows=[1, 1, 4],
        rank_rows=[2, 2, 2],
        slot_expert=[[2], [2], [-1]],
        group_rows=[[1, 1], [1, 1], [2, 0]],
        group_sizes=[[2, 2], [2, 2], [2, 0]],
        # Each rank keeps one own row of expert 2; rank 1's second one goes to rank 2, after rank 2's own.
        src=[[5, -1, 1, -1], [0, -1, 2, -1], [4, 3, -1, -1]],
        dst_rank=[[[1], [0]], [[1], [2]], [[2], [0]]],
        dst_row=[[[0], [2]], [[2], [1]], [[0], [0]]],
        primary=[[0, -1, 2, -1], [0, -1, 2, -1], [0, 1, -1, -1]],
        next=np.full((3, 4), -1),
    )
    check_invariants(p, LEAN_IDS)


def test_cascade_plan_by_hand() -> None:
    p = ref.plan(CASCADE_IDS, experts=3, token_padding=1)
    assert p.kind == "cascade"
    assert_fields(
        p,
        # Rank 0 gives 2 rows although its surplus is 1, and is filled from rank 1.
        alloc=[[1, 0, 2], [1, 2, 0], [0, 0, 0]],
        home_rows=[3, 3, 0],
        rank_rows=[2, 2, 2],
        slot_expert=[[1], [-1], [0]],
        group_rows=[[1, 1], [2, 0], [0, 2]],
        src=[[0, 1], [3, 5], [4, 2]],
        dst_rank=[[[0], [0]], [[2], [1]], [[2], [1]]],
        dst_row=[[[0], [1]], [[1], [0]], [[0], [1]]],
    )
    check_invariants(p, CASCADE_IDS)


def test_home_plan_by_hand() -> None:
    p = ref.plan(LEAN_IDS, experts=3, token_padding=2, planner="home")
    assert p.kind == "home"
    assert_fields(
        p,
        rank_rows=[1, 1, 4],
        slot_expert=[[-1], [-1], [-1]],
        group_sizes=[[2, 0], [2, 0], [4, 0]],
        # Rank 2's own row of expert 2 comes first, then those of ranks 0 and 1.
        src=[[5, *[-1] * 7], [0, *[-1] * 7], [4, 1, 2, 3, *[-1] * 4]],
    )
    check_invariants(p, LEAN_IDS)


def test_chains_by_hand() -> None:
    p = ref.plan(CHAIN_IDS, experts=4, token_padding=1)
    assert p.kind == "balanced"
    assert_fields(
        p,
        src=[[1, 5, 3], [4, 0, 2]],
        primary=[[0, 2, 2], [0, 1, 1]],  # the primary (k = 0) may lie behind the row of a higher k
        next=[[-1, -1, 1], [-1, 2, -1]],
        dst_rank=[[[1, 0, 1]], [[0, 1, 0]]],
        dst_row=[[[1, 0, 2]], [[2, 0, 1]]],
    )


def test_ties_go_to_the_lowest_index() -> None:
    counts = np.array([[6, 6, 0, 0, 0, 0]] + [[0] * 6] * 2)
    alloc, kind = ref.allocate(counts)
    assert kind == "lean"
    np.testing.assert_array_equal(alloc[:2], [[2, 4, 0], [2, 0, 4]])
    with_remainder, _ = ref.allocate(np.array([[8, 0], [0, 3]]))  # T = 11: rank 0 computes 6, rank 1 computes 5
    np.testing.assert_array_equal(with_remainder, [[6, 2], [0, 3]])


def test_dispatch_by_hand() -> None:
    p = ref.plan(LEAN_IDS, experts=3, token_padding=2)
    x = np.arange(1, 13, dtype=np.float32).reshape(3, 2, 2)
    hidden, weights = ref.dispatch(p, x, np.array([[[0.5], [2]], [[3], [4]], [[5], [6]]], np.float32))
    np.testing.assert_array_equal(
        hidden,
        [[[11, 12], [0, 0], [3, 4], [0, 0]], [[1, 2], [0, 0], [5, 6], [0, 0]], [[9, 10], [7, 8], [0, 0], [0, 0]]],
    )
    np.testing.assert_array_equal(weights, [[6, 0, 2, 0], [0.5, 0, 3, 0], [5, 4, 0, 0]])
    _, ones = ref.dispatch(p, x)
    np.testing.assert_array_equal(ones, [[1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]])


def chain_out(k0: float, k1: float, k2: float, dtype: Any) -> tuple[ref.ReferencePlan, Array]:
    """Rows of rank 0's token in CHAIN_IDS: k = 0 and 2 lie on rank 1, k = 1 on rank 0."""
    p = ref.plan(CHAIN_IDS, experts=4, token_padding=1)
    out = np.zeros((2, p.rows, 1), dtype)
    for k, value in enumerate((k0, k1, k2)):
        out[p.dst_rank[0, 0, k], p.dst_row[0, 0, k]] = value
    return p, out


def test_dedup_rounds_at_the_destination_and_exact_does_not() -> None:
    p, out = chain_out(256, 1, 1, ml_dtypes.bfloat16)
    # bfloat16 has 8 bits: 257 rounds to 256. dedup rounds 256 + 1, then 256 + 1; exact rounds 258 once.
    assert float(ref.combine(p, out, mode="dedup")[0, 0, 0]) == 256
    assert float(ref.combine(p, out, mode="exact")[0, 0, 0]) == 258
    assert ref.combine(p, out).dtype == out.dtype


def test_order_of_the_fp32_sum() -> None:
    p, out = chain_out(2.0**24, 1, -(2.0**24), np.float32)
    assert ref.combine(p, out, mode="exact")[0, 0, 0] == 0  # (2^24 + 1) - 2^24, and 2^24 + 1 rounds to 2^24
    assert ref.combine(p, out, mode="dedup")[0, 0, 0] == 1  # (2^24 - 2^24) + 1


@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_product_is_rounded_before_the_sum(mode: str) -> None:
    p = ref.plan(np.zeros((1, 1, 2), np.int32), experts=1, token_padding=1)
    a = 1 + 2.0**-12  # a * a = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11 in fp32; an FMA would leave 2^-24
    out = np.array([[[-(1 + 2.0**-11)], [a]]], np.float32)
    y = ref.combine(p, out, np.array([[1, a]], np.float32), mode)
    assert y[0, 0, 0] == 0


@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_sum_starts_from_its_first_row(mode: str) -> None:
    p = ref.plan(np.array([[[0, 0], [-1, -1]]], np.int32), experts=1, token_padding=1)
    y = ref.combine(p, np.full((1, 4, 1), -0.0, np.float32), None, mode)
    assert np.signbit(y[0, 0, 0]) and not np.signbit(y[0, 1, 0])  # -0 stays; an unrouted token gets +0


def test_weights_scale_in_fp32_before_any_rounding() -> None:
    p = ref.plan(np.zeros((1, 1, 1), np.int32), experts=1, token_padding=1)
    out = np.full((1, 1, 1), 1 + 2.0**-7, ml_dtypes.bfloat16)
    for mode in ("dedup", "exact"):
        y = ref.combine(p, out, np.full((1, 1), 1 + 2.0**-8, np.float32), mode)
        assert float(y[0, 0, 0]) == 1 + 2.0**-6  # the weight rounded to bfloat16 would be 1, and leave 1 + 2^-7


def test_dense_by_hand() -> None:
    one = np.ones((2, 1, 1))
    x = np.array([[2.0], [1.0]])
    y = ref.dense_moe(x, np.array([[0, 1], [-1, 2]]), np.array([[0.5, 0.25], [1, 1]]), one, one, 3 * one)
    silu = 2 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(y, [[0.75 * silu * 2 * 3], [0]], rtol=1e-15)
    twice = ref.dense_moe(x, np.array([[0, 0], [0, 5]]), np.ones((2, 2)), one, one, one)
    once = ref.dense_moe(x, np.array([[0], [0]]), np.ones((2, 1)), one, one, one)
    np.testing.assert_allclose(twice, once * [[2], [1]])


def test_reduce_grad_order_and_rounding() -> None:
    ids = np.zeros((3, 4, 1), np.int32)  # everything to expert 0: ranks 1 and 2 hold it in their slot
    p = ref.plan(ids, experts=3, token_padding=1)
    assert_fields(p, slot_expert=[[-1], [0], [0]])
    ct = np.zeros((3, 2, 1), np.float32)
    ct[0, 0], ct[1, 1], ct[2, 1] = 1, 2.0**24, -(2.0**24)
    np.testing.assert_array_equal(ref.reduce_grad(p, ct), [[[0]], [[0]], [[0]]])  # (1 + 2^24) - 2^24 = 0 in fp32
    ct[0, 0], ct[1, 1], ct[2, 1] = 256, 1, 1
    assert float(ref.reduce_grad(p, ct.astype(ml_dtypes.bfloat16))[0, 0, 0]) == 258


def test_metrics() -> None:
    assert ref.maxvio(np.array([[1, 0, 3, 0], [1, 0, 3, 0]])) == 2
    assert ref.maxvio(np.zeros((2, 4))) == 0
    assert ref.rank_max_over_mean(np.array([6, 2])) == 1.5


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"got experts=6, ranks=4"):
        ref.recv_rows(8, 2, 6, 4, 8)
    with pytest.raises(ValueError, match="ranks=0"):
        ref.recv_rows(8, 2, 6, 0, 8)
    with pytest.raises(ValueError, match="unknown planner; got 'slack'"):
        ref.allocate(np.ones((2, 2), np.int64), "slack")
    p = ref.plan(LEAN_IDS, 3)
    with pytest.raises(ValueError, match="unknown mode"):
        ref.combine(p, np.zeros((3, p.rows, 1), np.float32), mode="fast")


# ---- field cases 1, 2, 4, 5, 7 -----------------------------------------------------------------------------------


def run_layer(ids: Array, experts: int, mode: str, seed: int = 0, padding: int = 8) -> tuple[Array, Array, Array]:
    """(y by dispatch, prefetch, SwiGLU per group and combine; y of the dense layer; x), all with float32 inputs."""
    rng = np.random.default_rng(seed)
    ranks, s, topk = ids.shape
    epn, h, f = experts // ranks, 7, 5
    x = rng.standard_normal((ranks, s, h)).astype(np.float32)
    scale = rng.random((ranks, s, topk), np.float32)
    gate, up = (rng.standard_normal((experts, h, f)).astype(np.float32) for _ in range(2))
    down = rng.standard_normal((experts, f, h)).astype(np.float32)
    p = ref.plan(ids, experts, padding)
    hidden, weights = ref.dispatch(p, x, scale)
    gates, ups, downs = (ref.prefetch(p, w.reshape(ranks, epn, *w.shape[1:])) for w in (gate, up, down))
    out = np.full(hidden.shape, np.nan, np.float32)  # rows in no group stay NaN: combine must not read them
    for d in range(ranks):
        start = 0
        for g, size in enumerate(p.group_sizes[d]):
            rows = slice(start, start + size)
            start += size
            ones = np.ones((size, 1))
            out[d, rows] = ref.dense_moe(
                hidden[d, rows], np.zeros((size, 1)), ones, gates[d, g][None], ups[d, g][None], downs[d, g][None]
            )
    y = ref.combine(p, out, weights, mode)
    dense = ref.dense_moe(x.reshape(-1, h), ids.reshape(-1, topk), scale.reshape(-1, topk), gate, up, down)
    return y, dense.reshape(x.shape), x


def assert_layer(ids: Array, experts: int) -> None:
    for mode in ("dedup", "exact"):
        y, dense, _ = run_layer(ids, experts, mode)
        np.testing.assert_allclose(y, dense, rtol=1e-4, atol=1e-4)
        unrouted = ~((ids >= 0) & (ids < experts)).any(axis=-1)
        assert (y[unrouted] == 0).all()


@pytest.mark.parametrize("name", ROUTINGS)
def test_layer_equals_dense(name: str) -> None:
    for shape in SHAPES:
        if shape.R in (1, 3, 4, 8):
            assert_layer(routing(name, shape, seed=1), shape.E)


def test_padded_row_of_minus_ones() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(4, size=(2, 8, 2)).astype(np.int32)
    ids[1, 3] = -1
    assert_layer(ids, 4)
    p = ref.plan(ids, 4)
    ct = rng.standard_normal((2, p.rows, 8)).astype(np.float32)
    dx, dw = ref.dispatch_grad(p, ct, ct[..., 0])
    assert (dx[1, 3] == 0).all() and (dw[1, 3] == 0).all()
    assert (dx[1, 2] != 0).all()


def test_padded_total_fits_with_many_small_segments() -> None:
    ranks, experts, s, topk, padding = 8, 48, 8, 2, 128
    bound = ref.recv_rows(s, topk, experts, ranks, padding)
    one_real = np.full((ranks, s, topk), -1, np.int32)
    one_real[:, 0] = np.random.default_rng(0).integers(experts, size=(ranks, topk))
    check_invariants(ref.plan(one_real, experts, padding), one_real)

    rng = np.random.default_rng(1)
    for i in range(10_000):
        skew = rng.exponential(0.3 + i % 3, experts) ** (1 + i % 4)
        rows = rng.integers(0, s * topk + 1, size=ranks) if i % 2 else np.full(ranks, s * topk)
        alloc, _ = ref.allocate(rng.multinomial(rows, skew / skew.sum()))
        assert (-(-alloc // padding) * padding).sum(axis=0).max() <= bound


def test_same_expert_twice_in_a_token() -> None:
    for name in ("duplicates", "k_same"):
        ids = routing(name, SHAPES[7])
        assert (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any()
        assert_layer(ids, SHAPES[7].E)
    p = ref.plan(np.zeros((1, 1, 3), np.int32), 1)
    assert (p.src >= 0).sum() == 3


@pytest.mark.parametrize("outside", [4, 5, 11, *OUTSIDE])
def test_ids_outside_are_not_routed(outside: int) -> None:
    ids = np.array([[[0, outside], [outside, outside]], [[3, 1], [outside, 2]]], np.int32)
    p, same = ref.plan(ids, 4), ref.plan(np.where(ids == outside, -1, ids), 4)
    check_invariants(p, ids)
    np.testing.assert_array_equal(p.src, same.src)
    assert (p.dst_rank[0, 1] == -1).all()
    assert_layer(ids, 4)


def test_rank_without_tokens_computes_its_share() -> None:
    ids = np.full((4, 2, 4), -1, np.int32)
    ids[0, 0] = [0, 1, 2, 3]
    p = ref.plan(ids, 8)
    assert_fields(p, rank_rows=[1, 1, 1, 1], home_rows=[2, 2, 0, 0])
    assert_layer(ids, 8)


# ---- algebra: gradients are transposes, bits do not depend on what they must not ---------------------------------


@pytest.mark.parametrize("name", ["lognormal_8", "duplicates", "crowded", "out_of_range", "empty_ranks", "unrouted"])
@pytest.mark.parametrize("mode", ["dedup", "exact"])
def test_gradients_are_transposes(name: str, mode: str) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        p = ref.plan(routing(name, shape), shape.E, 8)
        x, topk_weights = integers(rng, shape.R, shape.s, shape.H), integers(rng, shape.R, shape.s, shape.K)
        ct_hidden, ct_weights = integers(rng, shape.R, p.rows, shape.H), integers(rng, shape.R, p.rows)
        hidden, weights = ref.dispatch(p, x, topk_weights)
        dx, dtopk = ref.dispatch_grad(p, ct_hidden, ct_weights, mode)
        assert (hidden * ct_hidden).sum() == (x * dx).sum()
        assert (weights * ct_weights).sum() == (topk_weights * dtopk).sum()

        out, dy = integers(rng, shape.R, p.rows, shape.H), integers(rng, shape.R, shape.s, shape.H)
        y = ref.combine(p, out, weights, mode)
        dout, dweights = ref.combine_grad(p, dy, out, weights)
        assert dweights is not None
        assert (y * dy).sum() == (out * dout).sum() == (weights * dweights).sum()
        plain, none = ref.combine_grad(p, dy, out)
        assert none is None and (ref.combine(p, out, None, mode) * dy).sum() == (out * plain).sum()
        assert (dout[p.src < 0] == 0).all() and (dweights[p.src < 0] == 0).all()

        w, ct = integers(rng, shape.R, shape.epn, 3, 2), integers(rng, shape.R, 2 * shape.epn, 3, 2)
        full = ref.prefetch(p, w)
        assert (full * ct).sum() == (w * ref.reduce_grad(p, ct)).sum()
        assert (full[:, shape.epn :][p.slot_expert < 0] == 0).all()


def test_gradients_ignore_rows_without_a_token() -> None:
    shape = SHAPES[5]
    p = ref.plan(routing("partly_unrouted", shape), shape.E, 8)
    rng = np.random.default_rng(0)
    out = rng.standard_normal((shape.R, p.rows, shape.H)).astype(np.float32)
    weights = rng.random((shape.R, p.rows), np.float32)
    out[p.src < 0], weights[p.src < 0] = np.nan, np.inf
    dout, dweights = ref.combine_grad(p, np.ones((shape.R, shape.s, shape.H), np.float32), out, weights)
    assert dweights is not None
    for a in (ref.combine(p, out, weights), dout, dweights, *ref.dispatch_grad(p, out, weights)):
        assert np.isfinite(a).all()


def test_exact_combine_does_not_depend_on_the_plan() -> None:
    shape = SHAPES[11]
    ids = routing("lognormal_8", shape)
    per_row = np.random.default_rng(0).standard_normal((*ids.shape, shape.H)).astype(ml_dtypes.bfloat16)
    results = []
    for padding, planner in ((1, "exact"), (8, "exact"), (8, "home")):
        p = ref.plan(ids, shape.E, padding, planner)
        out = np.zeros((shape.R, p.rows, shape.H), ml_dtypes.bfloat16)
        out[p.dst_rank, p.dst_row] = per_row
        results.append(ref.combine(p, out, mode="exact"))
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])


def test_chain_of_one_row_is_the_same_in_both_modes() -> None:
    shape = Shape(4, 16, 1, 8, 16)
    p = ref.plan(routing("lognormal_2", shape), shape.E)
    out = np.random.default_rng(0).standard_normal((4, p.rows, 16)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ref.combine(p, out, mode="dedup"), ref.combine(p, out, mode="exact"))
