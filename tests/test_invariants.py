"""The invariants over the whole case table and over arbitrary ids; and the checker itself, on plans that break them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import BALANCED, LARGE_SHAPES, PADDINGS, ROUTINGS, SHAPES, Shape, lognormal_ids, routing
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_invariants

from moonep_jax import reference as ref

Array = Any  # numpy arrays of any dtype

# Three ranks of one expert and two tokens each, K = 1, T = 6; expert 2 is hot.
LEAN_IDS = np.array([[[1], [2]], [[2], [2]], [[2], [0]]], np.int32)


@pytest.mark.parametrize("name", ROUTINGS)
def test_invariants_over_the_case_table(name: str) -> None:
    for shape in SHAPES:
        ids = routing(name, shape)
        for padding in PADDINGS:
            for planner in ("exact", "home"):
                check_invariants(ref.plan(ids, shape.E, padding, planner), ids)


def test_the_case_table_reaches_every_kind() -> None:
    plans = {(n, s): ref.plan(routing(n, s), s.E) for n in ROUTINGS for s in SHAPES}
    assert {p.kind for p in plans.values()} == {"balanced", "lean", "cascade"}
    assert all(plans[n, s].kind == "balanced" for n in BALANCED for s in SHAPES)
    assert plans["crowded", Shape(8, 8, 2, 8, 8)].kind == "cascade"
    assert plans["one_expert", Shape(8, 8, 2, 8, 8)].kind == "lean"
    assert sum((p.src >= 0).sum() % p.ranks != 0 for p in plans.values()) > 30  # T does not divide by R
    assert any(s.s < s.S for s in SHAPES)


def test_routings_are_what_they_say() -> None:
    for shape in SHAPES:
        ids = routing("uniform", shape)
        if shape.K <= shape.E:
            assert (np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all()
        np.testing.assert_array_equal(ids, routing("uniform", shape))
    rng = np.random.default_rng(0)
    for target in (2, 8, 24):
        vio = ref.maxvio(ref.counts_of(lognormal_ids(rng, 8, 64, 2, 64, target), 64))
        assert target <= vio < 1.15 * target


@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_many_ranks(shape: Shape) -> None:
    kinds = set()
    for name in ("uniform", "lognormal_8", "crowded", "padded_tails"):
        ids = routing(name, shape)
        p = ref.plan(ids, shape.E)
        kinds.add(p.kind)
        check_invariants(p, ids)
    assert {"lean", "cascade"} <= kinds


def test_lean_moves_only_surplus_and_cascade_fills_from_one_home() -> None:
    for name in ROUTINGS:
        for shape in SHAPES:
            counts = ref.counts_of(routing(name, shape), shape.E)
            alloc, kind = ref.allocate(counts)
            by_home = alloc.reshape(shape.R, shape.epn, shape.R).sum(axis=1)  # [home, destination]
            moved = by_home - np.diag(np.diag(by_home))
            surplus = by_home.sum(axis=1) - ref.capacities(int(counts.sum()), shape.R)
            if kind == "lean":
                np.testing.assert_array_equal(moved.sum(axis=1), np.maximum(surplus, 0))
                np.testing.assert_array_equal(moved.sum(axis=0), np.maximum(-surplus, 0))
            elif kind == "cascade":
                assert ((moved > 0).sum(axis=0) <= 1).all()


def _swap(a: Array, i: Any, j: Any) -> Array:
    b = a.copy()
    b[i], b[j] = a[j], a[i]
    return b


def _put(a: Array, index: Any, value: int) -> Array:
    b = a.copy()
    b[index] = value
    return b


@pytest.mark.parametrize(
    ("field", "change", "invariant"),
    [
        ("alloc", lambda a: _put(a, (2, 0), 0), "conserved per expert"),
        ("alloc", lambda a: _swap(a, (2, 0), (2, 2)), "rank_rows counts"),
        ("home_rows", lambda a: a + 1, "plain EP"),
        ("kind", lambda _: "balanced", "kind is balanced"),
        ("group_sizes", lambda a: a + 2, "padded to token_padding"),
        ("slot_expert", lambda a: _put(a, (0, 0), 1), "ascending id"),
        ("group_rows", lambda a: _swap(a, (2, 0), (2, 1)), "padded to token_padding"),
        ("dst_rank", lambda a: _put(a, (0, 0, 0), -1), "routed ids get a row"),
        ("dst_row", lambda a: _put(a, (0, 0, 0), 4), "in range"),
        ("src", lambda a: _swap(a, (2, 0), (2, 1)), "src inverts dst"),
        ("src", lambda a: _put(a, (2, 3), 0), "unique"),
        ("next", lambda a: _put(a, (2, 0), 1), "next links"),
        ("primary", lambda a: _put(a, (2, 1), 0), "primary is the row"),
    ],
)
def test_the_checker_names_the_violated_invariant(field: str, change: Any, invariant: str) -> None:
    p = ref.plan(LEAN_IDS, experts=3, token_padding=2)
    with pytest.raises(ValueError, match=invariant):
        check_invariants(dataclasses.replace(p, **{field: change(getattr(p, field))}), LEAN_IDS)


def rewired(p: ref.ReferencePlan, a: tuple[int, int], b: tuple[int, int]) -> ref.ReferencePlan:
    """The plan with the tokens in rows a and b, given as (rank, row), exchanged; K = 1, so chains stay right."""
    src = _swap(p.src, a, b)
    dst_rank, dst_row = p.dst_rank.reshape(-1).copy(), p.dst_row.reshape(-1).copy()
    rank, row = np.nonzero(src >= 0)
    dst_rank[src[rank, row]], dst_row[src[rank, row]] = rank, row
    return dataclasses.replace(
        p, src=src, dst_rank=dst_rank.reshape(p.dst_rank.shape), dst_row=dst_row.reshape(p.dst_row.shape)
    )


def test_the_checker_knows_order_and_locality() -> None:
    p = ref.plan(LEAN_IDS, experts=3, token_padding=2)
    with pytest.raises(ValueError, match="own rows come first"):
        check_invariants(rewired(p, (2, 0), (2, 1)), LEAN_IDS)
    with pytest.raises(ValueError, match="keeps min"):  # rank 0's row of expert 2 against rank 1's
        check_invariants(rewired(p, (0, 2), (1, 2)), LEAN_IDS)
    with pytest.raises(ValueError, match="first of their source"):  # rank 1 keeps its second row, sends its first
        check_invariants(rewired(p, (1, 2), (2, 1)), LEAN_IDS)
    with pytest.raises(ValueError, match="group of their expert"):
        check_invariants(rewired(p, (0, 0), (0, 2)), LEAN_IDS)
    # Home 0's expert is chosen by rank 0 alone: rows leave for ranks 1 and 2 in order.
    ids = np.array([[[0]] * 3, [[-1]] * 3, [[-1]] * 3], np.int32)
    q = ref.plan(ids, experts=3, token_padding=2)
    np.testing.assert_array_equal(q.dst_rank, [[[0], [1], [2]], [[-1]] * 3, [[-1]] * 3])
    with pytest.raises(ValueError, match="fill destinations in rank order"):
        check_invariants(rewired(q, (1, 0), (2, 0)), ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_invariants_of_arbitrary_ids(data: st.DataObject) -> None:
    ranks, epn = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    s, topk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    size = ranks * s * topk
    ids = np.array(data.draw(st.lists(st.integers(-1, ranks * epn), min_size=size, max_size=size)), np.int32)
    ids = ids.reshape(ranks, s, topk)
    for planner in ("exact", "home"):
        padding = data.draw(st.sampled_from((1, 2, 8, 128)))
        check_invariants(ref.plan(ids, ranks * epn, padding, planner), ids)


def test_fuzz_over_seeds() -> None:
    kinds = set()
    for seed in range(100):
        for shape in SHAPES[3:14:2]:
            ids = routing("anything", shape, seed)
            p = ref.plan(ids, shape.E, PADDINGS[seed % 3])
            check_invariants(p, ids)
            kinds.add(p.kind)
    assert {"lean", "cascade"} <= kinds
