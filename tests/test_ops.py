"""plan, dispatch, combine and their gradients, end to end on 1 to 16 local devices, against the oracle.

Each configuration compiles one program and runs 100 routings through it: 2,100 in all. Everything is compared bit for
bit; rows that hold no token are NaN in `out` and in the cotangents, so a row that leaks shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OUTSIDE, ROUTINGS, Shape, routing
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import call, check_step, per_rank, same_bits, whole_step

from moonep_jax import reference as ref

SEEDS = 4


class Config(NamedTuple):
    shape: Shape
    dtype: str
    combine: str
    padding: int
    planner: str = "exact"

    def __str__(self) -> str:
        home = "-home" if self.planner == "home" else ""
        return f"{self.shape}-{self.dtype}-{self.combine}-A{self.padding}{home}"

    def fields(self) -> dict[str, Any]:
        """Fields of the EPConfig."""
        shape = self.shape
        return {
            "tokens": shape.S,
            "hidden": shape.H,
            "topk": shape.K,
            "experts": shape.E,
            "dtype": self.dtype,
            "token_padding": self.padding,
            "combine": self.combine,
            "planner": self.planner,
        }


CONFIGS = [
    Config(Shape(1, 8, 2, 4, 8), "float32", "dedup", 8),
    Config(Shape(1, 5, 1, 1, 7), "bfloat16", "exact", 1),
    Config(Shape(2, 8, 2, 4, 8), "float16", "dedup", 1),  # K = epn
    Config(Shape(2, 6, 3, 4, 7, S=16), "bfloat16", "dedup", 8),  # K > epn, fewer rows than capacity
    Config(Shape(2, 1, 9, 32, 8), "float32", "exact", 128),
    Config(Shape(2, 8, 2, 4, 1536), "bfloat16", "dedup", 8),
    Config(Shape(3, 7, 2, 12, 8), "bfloat16", "exact", 8),
    Config(Shape(3, 5, 1, 3, 7), "float32", "dedup", 1),  # K = epn = 1
    Config(Shape(4, 16, 4, 8, 64), "bfloat16", "dedup", 8),
    Config(Shape(4, 16, 4, 8, 64), "float16", "exact", 1),
    Config(Shape(4, 16, 1, 32, 8), "float32", "dedup", 128),  # K = 1
    Config(Shape(4, 3, 8, 8, 8, S=8), "float16", "dedup", 8),
    Config(Shape(5, 9, 3, 20, 7), "bfloat16", "dedup", 1),
    Config(Shape(8, 16, 4, 64, 64), "bfloat16", "dedup", 8),
    Config(Shape(8, 8, 2, 8, 8), "float32", "exact", 8),  # epn = 1
    Config(Shape(8, 4, 6, 48, 7, S=32), "float16", "dedup", 128),
    Config(Shape(16, 4, 4, 32, 8), "bfloat16", "dedup", 8),
    Config(Shape(16, 8, 8, 128, 8), "float32", "dedup", 1),
    Config(Shape(4, 16, 4, 8, 64), "bfloat16", "dedup", 8, "home"),
    Config(Shape(3, 7, 2, 12, 8), "float32", "exact", 1, "home"),
    Config(Shape(8, 8, 2, 8, 8), "float16", "dedup", 8, "home"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_routing(make_domain: Any, config: Config) -> None:
    shape = config.shape
    ep = make_domain(shape.R, **config.fields())
    step = whole_step(ep)
    kinds = set()
    for seed in range(SEEDS):
        for number, name in enumerate(ROUTINGS):
            ids = routing(name, shape, seed)
            try:
                kinds.add(check_step(step, np.random.default_rng([seed, number]), ids, shape, ep.spec.config))
            except AssertionError as error:
                raise AssertionError(f"{name}, seed {seed}: {error}") from None
    expected = {"home"} if config.planner == "home" else {"balanced"} if shape.R == 1 else {"balanced", "lean"}
    assert kinds - {"cascade"} == expected


@pytest.mark.parametrize(
    "config",
    [Config(Shape(2, 4, k, 64, 8), "bfloat16", "dedup", 8) for k in (16, 22, 31, 32, 33, 64)]
    + [Config(Shape(2, 4, 2, 4, h), "bfloat16", "exact", 8) for h in (1, 63, 2880, 7168)],
    ids=str,
)
def test_any_topk_and_width(make_domain: Any, config: Config) -> None:
    domain = make_domain(config.shape.R, **config.fields())
    step = whole_step(domain)
    for seed, name in enumerate(("uniform", "one_home", "partly_unrouted")):
        rng = np.random.default_rng(seed)
        check_step(step, rng, routing(name, config.shape, seed), config.shape, domain.spec.config)


def test_the_table_is_large_enough_and_meets_the_cascade() -> None:
    assert len(CONFIGS) * len(ROUTINGS) * SEEDS >= 2000
    assert {c.shape.R for c in CONFIGS} == {1, 2, 3, 4, 5, 8, 16}
    kinds = {ref.plan(routing("crowded", c.shape), c.shape.E, c.padding, c.planner).kind for c in CONFIGS}
    assert "cascade" in kinds


@pytest.mark.parametrize("index", [3, 12, 14], ids=lambda i: str(CONFIGS[i]))
def test_any_ids(make_domain: Any, index: int) -> None:
    config = CONFIGS[index]
    shape = config.shape
    ep = make_domain(shape.R, **config.fields())
    step = whole_step(ep)
    size = shape.R * shape.s * shape.K
    an_id = st.one_of(st.integers(0, shape.E - 1), st.sampled_from([shape.E, *OUTSIDE]))
    hot = st.sampled_from([0, shape.E - 1])

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.one_of(st.lists(an_id, min_size=size, max_size=size), st.lists(hot, min_size=size, max_size=size)))
    def check(flat: list[int]) -> None:
        ids = np.array(flat, np.int32).reshape(shape.R, shape.s, shape.K)
        check_step(step, np.random.default_rng(0), ids, shape, ep.spec.config)

    check()


def test_shorter_batches_use_the_same_domain(make_domain: Any) -> None:
    """One domain of capacity 16 serves every s below it."""
    ep = make_domain(2, tokens=16, hidden=8, topk=2, experts=4, dtype="bfloat16")
    step = whole_step(ep)
    for s in (1, 5, 16):
        shape = Shape(2, s, 2, 4, 8, S=16)
        for name in ("uniform", "one_expert", "unrouted"):
            check_step(step, np.random.default_rng(s), routing(name, shape), shape, ep.spec.config)


def test_nothing_routed_gives_zeros_and_no_rows(make_domain: Any) -> None:
    ep = make_domain(4, tokens=4, hidden=8, topk=2, experts=8, dtype="float32")
    ids = np.full((4, 4, 2), -1, np.int32)
    rng = np.random.default_rng(0)
    n = ep.recv_rows()
    nan = np.full((4, n, 8), np.nan, np.float32)
    x = rng.standard_normal((4, 4, 8), np.float32)
    w = rng.standard_normal((4, 4, 2), np.float32)
    got = call(whole_step(ep), x, ids, w, nan, nan[..., 0], nan, x)
    assert not got["plan"].group_sizes.any() and not got["plan"].rank_rows.any()
    assert (got["plan"].src == -1).all() and (got["plan"].dst_row == -1).all()
    for name in ("hidden", "weights", "y", "y_plain", "plain_grad"):
        same_bits(got[name], np.zeros_like(got[name]), name)
    for grad in (*got["dispatch_grads"], *got["combine_grads"]):
        same_bits(grad, np.zeros_like(grad), "gradient")


def test_one_rank_equals_the_dense_sum_bit_for_bit(make_domain: Any) -> None:
    """R = 1: dispatch is a gather, combine the sum over k from k = 0 up, in float32, rounded once."""
    for dtype in (np.float32, jnp.bfloat16):
        ep = make_domain(1, tokens=32, hidden=16, topk=4, experts=8, dtype=dtype)
        rng = np.random.default_rng(7)
        x = rng.standard_normal((1, 32, 16), np.float32).astype(dtype)
        ids = np.stack([rng.permutation(8)[:4] for _ in range(32)]).astype(np.int32)[None]
        w = rng.random((1, 32, 4), np.float32)

        def layer(x: Any, ids: Any, w: Any, ep: Any = ep) -> Any:
            d = ep.dispatch(x, ids, w)
            expert = jnp.repeat(jnp.arange(16), d.group_sizes, total_repeat_length=d.hidden.shape[0])
            return ep.combine(d.plan, d.hidden * (expert + 1).astype(x.dtype)[:, None], d.weights)

        (y,) = call(per_rank(ep, layer), x, ids, w)
        total = None
        for k in range(4):
            row = (x[0] * (ids[0, :, k, None] + 1).astype(dtype)).astype(np.float32) * w[0, :, k, None]
            total = row if total is None else total + row
        assert total is not None
        same_bits(y, total.astype(dtype), str(dtype))


def test_special_values_survive(make_domain: Any) -> None:
    """-0.0, infinities and subnormals take the same way as other numbers, forward and backward."""
    special = np.array([-0.0, 0.0, np.inf, -np.inf, 1e-40, -3e-41, 65504.0, 6e-8], np.float32)
    for dtype in ("float32", "float16", "bfloat16"):
        for combine in ("dedup", "exact"):
            shape = Shape(2, 4, 3, 4, 8)
            ep = make_domain(2, tokens=4, hidden=8, topk=3, experts=4, dtype=dtype, combine=combine)
            ids = routing("duplicates", shape)
            p = ref.plan(ids, 4)
            rng = np.random.default_rng(1)
            with np.errstate(over="ignore"):
                x = rng.choice(special, (2, 4, 8)).astype(ep.spec.config.dtype)
                out = rng.choice(special, (2, p.rows, 8)).astype(ep.spec.config.dtype)

            def body(x: Any, ids: Any, out: Any, ep: Any = ep) -> Any:
                d = ep.dispatch(x, ids)
                return d.hidden, ep.combine(d.plan, out)

            hidden, y = call(per_rank(ep, body), x, ids, out)
            same_bits(hidden, ref.dispatch(p, x)[0], "hidden")
            want = ref.combine(p, out, None, combine)
            assert (np.isnan(y) == np.isnan(want)).all()  # inf - inf; its sign bit is nobody's promise
            same_bits(np.where(np.isnan(y), 0, y), np.where(np.isnan(want), 0, want), "y")

            zeros = np.full_like(out, -0.0)  # a sum that started from 0.0 would lose the sign
            y = call(per_rank(ep, body), x, ids, zeros)[1]
            same_bits(y, np.full_like(y, -0.0), "y of -0.0")


@pytest.mark.parametrize("combine", ["dedup", "exact"])
def test_weights_of_rows_without_a_token_are_not_read(make_domain: Any, combine: str) -> None:
    """NaN there, as in d.weights / d.weights, reaches neither y nor the gradients, which are zero in those rows."""
    shape = Shape(4, 6, 2, 8, 8)
    ep = make_domain(4, tokens=6, hidden=8, topk=2, experts=8, dtype="float32", combine=combine)
    ids = routing("partly_unrouted", shape)
    p = ref.plan(ids, 8)
    rng = np.random.default_rng(0)
    held = p.src >= 0
    out = np.where(held[..., None], rng.standard_normal((4, p.rows, 8), np.float32), np.float32(np.nan))
    weights = np.where(held, rng.standard_normal((4, p.rows), np.float32), np.float32(np.nan))
    dy = rng.standard_normal((4, 6, 8), np.float32)

    def body(ids: Any, out: Any, weights: Any, dy: Any) -> Any:
        p = ep.plan(ids)
        y, vjp = jax.vjp(lambda out, weights: ep.combine(p, out, weights), out, weights)
        return y, vjp(dy)

    y, (dout, dweights) = call(per_rank(ep, body), ids, out, weights, dy)
    same_bits(y, ref.combine(p, out, weights, combine), "y")
    same_bits(dout, ref.combine_grad(p, dy, out, weights)[0], "dout")
    assert np.isfinite(dweights).all() and not dweights[~held].any()
