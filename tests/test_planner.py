"""The native planner and row placement against the oracle, for all ranks at once and without a domain."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cases import BALANCED, LARGE_SHAPES, OUTSIDE, PADDINGS, ROUTINGS, SHAPES, Shape, routing
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_invariants
from steps import same_bits

from moonep_jax import _ffi_cpu
from moonep_jax import reference as ref

# Of a plan, the arrays that are per rank, and those that all ranks hold alike.
PER_RANK = ("dst_rank", "dst_row", "src", "primary", "next", "group_sizes", "group_rows")
ALIKE = ("slot_expert", "home_rows", "rank_rows")


def native_plan(ids: Any, shape: Shape, padding: int, planner: str) -> dict[str, Any]:
    domain = _ffi_cpu.DomainShape(
        ranks=shape.R, experts=shape.E, topk=shape.K, tokens=shape.S, padding=padding, home=planner == "home"
    )
    return _ffi_cpu.plan_all(domain, np.ascontiguousarray(ids, np.int32))


def compare(ids: Any, shape: Shape, padding: int, planner: str) -> str:
    """Native arrays equal the oracle's and keep every invariant; returns the kind of plan."""
    want = ref.plan(ids, shape.E, padding, planner)
    got = native_plan(ids, shape, padding, planner)
    arrays = {}
    for name in PER_RANK:
        arrays[name] = got[name].reshape(getattr(want, name).shape)
    for name in ALIKE:
        stacked = got[name].reshape(shape.R, *getattr(want, name).shape)
        assert (stacked == stacked[0]).all(), f"{name} differs between ranks"
        arrays[name] = stacked[0]
    for name, array in arrays.items():
        same_bits(array, getattr(want, name), name)
    assert got["cascade"] == (want.kind == "cascade")
    check_invariants(dataclasses.replace(want, **arrays, alloc=alloc_of(arrays, shape)), ids)
    return want.kind


def alloc_of(arrays: dict[str, Any], shape: Shape) -> Any:
    """alloc [E, R], read off the native groups."""
    alloc = np.zeros((shape.E, shape.R), np.int64)
    epn = shape.epn
    for d in range(shape.R):
        alloc[d * epn : (d + 1) * epn, d] = arrays["group_rows"][d, :epn]
        used = arrays["slot_expert"][d] >= 0
        alloc[arrays["slot_expert"][d][used], d] = arrays["group_rows"][d, epn:][used]
    return alloc


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_routing(shape: Shape, padding: int) -> None:
    kinds = Counter()
    for planner in ("exact", "home"):
        for name in ROUTINGS:
            ids = routing(name, shape)
            try:
                kind = compare(ids, shape, padding, planner)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"{name}, planner {planner}: {error}") from None
            kinds[kind] += 1
            if planner == "exact" and name in BALANCED:
                assert kind == "balanced", name
    assert kinds["home"] == len(ROUTINGS)
    assert shape.R == 1 or kinds["lean"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_large_shapes(shape: Shape) -> None:
    """Tables of 64 to 128 ranks."""
    for planner in ("exact", "home"):
        for name in ("lognormal_2", "one_expert", "crowded", "padded_tails", "anything"):
            compare(routing(name, shape), shape, 8, planner)


def test_both_exact_plans_are_met() -> None:
    """The comparison would be worth little if the table led to one of the two algorithms only."""
    kinds = Counter(
        "cascade" if native_plan(routing(name, shape), shape, 8, "exact")["cascade"] else "other"
        for shape in SHAPES
        for name in ROUTINGS
    )
    lean = sum(ref.plan(routing("lognormal_8", shape), shape.E).kind == "lean" for shape in SHAPES)
    assert kinds["cascade"] >= 10
    assert lean >= 5


@pytest.mark.parametrize("planner", ["exact", "home"])
def test_random_seeds(planner: str) -> None:
    """`anything` and `crowded` under many seeds: random popularity, repeats, padding and stray ids at once."""
    kinds = Counter()
    for shape in SHAPES:
        for seed in range(1, 16):
            for name in ("anything", "crowded"):
                kinds[compare(routing(name, shape, seed), shape, PADDINGS[seed % 3], planner)] += 1
    if planner == "exact":
        assert min(kinds["lean"], kinds["cascade"]) > 10, kinds


@st.composite
def routings(draw: Any) -> tuple[Shape, Any, int]:
    ranks, epn = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    shape = Shape(ranks, draw(st.integers(1, 6)), draw(st.integers(1, 5)), ranks * epn, 1)
    hot = draw(st.lists(st.integers(0, shape.E - 1), min_size=1, max_size=3))
    an_id = st.one_of(st.sampled_from(hot), st.integers(0, shape.E - 1), st.sampled_from([shape.E, *OUTSIDE]))
    size = ranks * shape.s * shape.K
    flat = draw(st.lists(an_id, min_size=size, max_size=size))
    ids = np.array(flat, np.int32).reshape(ranks, shape.s, shape.K)
    return shape, ids, draw(st.sampled_from([1, 2, 8, 64]))


@pytest.mark.parametrize("planner", ["exact", "home"])
def test_any_ids(planner: str) -> None:
    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(routings())
    def check(case: tuple[Shape, Any, int]) -> None:
        shape, ids, padding = case
        compare(ids, shape, padding, planner)

    check()


def test_every_split_of_few_rows() -> None:
    """All routings of 3 ranks x 2 tokens to 3 experts, 729 of them, and all of 2 x 1 x 2 to 4 experts, 256."""
    for shape in (Shape(3, 2, 1, 3, 1), Shape(2, 1, 2, 4, 1)):
        size = shape.R * shape.s * shape.K
        for code in range(shape.E**size):
            flat = np.array([code // shape.E**i % shape.E for i in range(size)], np.int32)
            compare(flat.reshape(shape.R, shape.s, shape.K), shape, 1, "exact")


def test_padded_total_never_passes_the_buffer() -> None:
    """E = 48, padding 128, 10,000 routings: one real token and seven pads per rank, and anything at all."""
    shape = Shape(8, 8, 6, 48, 1)
    rng = np.random.default_rng(0)
    rows = ref.recv_rows(8, 6, 48, 8, 128)
    for i in range(10_000):
        if i % 10:
            ids = np.full((8, 8, 6), -1, np.int32)
            ids[:, 0] = rng.integers(48, size=(8, 6))
        else:
            ids = ROUTINGS["anything"](rng, 8, 8, 6, 48)
        sizes = native_plan(ids, shape, 128, "exact")["group_sizes"]
        assert sizes.sum(axis=1).max() <= rows


def test_domain_shape_agrees_on_rows() -> None:
    for planner in ("exact", "home"):
        for shape in SHAPES + LARGE_SHAPES:
            for padding in PADDINGS:
                domain = _ffi_cpu.DomainShape(
                    ranks=shape.R,
                    experts=shape.E,
                    topk=shape.K,
                    tokens=shape.S,
                    padding=padding,
                    home=planner == "home",
                )
                for s in {1, shape.s, shape.S}:
                    want = ref.recv_rows(s, shape.K, shape.E, shape.R, padding, planner)
                    assert domain.recv_rows(s) == want


def test_ids_that_do_not_fit_the_shape_are_refused() -> None:
    shape = Shape(2, 3, 2, 4, 1)
    for bad in ((3, 3, 2), (2, 3, 1)):
        with pytest.raises(ValueError, match="do not fit the shape"):
            native_plan(np.zeros(bad, np.int32), shape, 1, "exact")
