"""prefetch and reduce_grad against the oracle: forms of leaves, dtypes, odd shapes, stages, aliasing and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import ROUTINGS, Shape, routing
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steps import call, per_rank, same_bits

import moonep_jax as moonep
from moonep_jax import reference as ref

BF16 = ml_dtypes.bfloat16
SHAPES = [Shape(2, 6, 3, 4, 8), Shape(4, 8, 2, 16, 8), Shape(3, 5, 2, 3, 8), Shape(8, 8, 2, 8, 8)]
# Sizes that are odd in bytes, of one element, with five axes, and some that no 64-byte window divides.
LEAVES = {
    "scalar": ((), np.float32),
    "one": ((1,), BF16),
    "odd": ((3, 5), np.float16),
    "long": ((129,), np.float32),
    "deep": ((2, 1, 3, 2), BF16),
}
FROZEN = {
    "bytes": ((7,), np.int8),
    "ids": ((2, 3), np.int32),
    "mask": ((5,), np.bool_),
    "small": ((9,), ml_dtypes.float8_e4m3fn),
}


def make_leaf(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    if np.dtype(dtype).kind == "b":
        return rng.random(shape) < 0.5
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-100, 100, size=shape).astype(dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def make_leaves(rng: np.random.Generator, R: int, rows: int, leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: make_leaf(rng, (R, rows, *shape), dtype) for name, (shape, dtype) in sorted(leaves.items())}


def domain_of(make_domain: Any, shape: Shape, leaves: dict[str, Any], **fields: Any) -> Any:
    return make_domain(
        shape.R,
        tokens=shape.S,
        hidden=shape.H,
        topk=shape.K,
        experts=shape.E,
        dtype="float32",
        weights=leaves,
        **fields,
    )


def forward(ep: Any) -> Any:
    return per_rank(ep, lambda ids, w: ep.prefetch(ep.plan(ids), w))


def backward(ep: Any) -> Any:
    """(ids, leaves, cotangents of the results) -> gradients of the leaves."""

    def body(ids: Any, w: Any, ct: Any) -> Any:
        p = ep.plan(ids)
        return jax.vjp(lambda w: ep.prefetch(p, w), w)[1](ct)[0]

    return per_rank(ep, body)


def fill(p: ref.ReferencePlan, given: Any) -> Any:
    """The oracle's [2*epn] form: unused slots keep the caller's bytes."""
    epn = p.slot_expert.shape[1]
    full = ref.prefetch(p, given[:, :epn])
    return np.where(unused(p, given), given, full)


def unused(p: ref.ReferencePlan, leaf: Any) -> Any:
    """Marks the rows of a [R, 2*epn, ..] leaf that are slots not in use."""
    epn = p.slot_expert.shape[1]
    rows = np.concatenate([np.zeros((p.ranks, epn), bool), p.slot_expert < 0], axis=1)
    return rows.reshape(*rows.shape, *([1] * (leaf.ndim - 2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_oracle(make_domain: Any, shape: Shape) -> None:
    """Both forms, forward and backward, every routing; equal bit for bit."""
    leaves = {**LEAVES, **FROZEN}
    ep = domain_of(make_domain, shape, leaves)
    run, run_back = forward(ep), backward(ep)
    epn = shape.epn
    used = 0
    for number, name in enumerate(ROUTINGS):
        ids = routing(name, shape)
        p = ref.plan(ids, shape.E)
        used += int((p.slot_expert >= 0).sum())
        rng = np.random.default_rng(number)
        w = make_leaves(rng, shape.R, epn, leaves)
        full = make_leaves(rng, shape.R, 2 * epn, leaves)
        for key, got in call(run, ids, w).items():
            same_bits(got, ref.prefetch(p, w[key]), f"{name}: {key}")
        for key, got in call(run, ids, full).items():
            same_bits(got, fill(p, full[key]), f"{name}: {key} in place")
        floats = {key: full[key] for key in LEAVES}
        ct = make_leaves(rng, shape.R, 2 * epn, LEAVES)
        for key, got in call(run_back, ids, {k: w[k] for k in LEAVES}, ct).items():
            same_bits(got, ref.reduce_grad(p, ct[key]), f"{name}: gradient of {key}")
        for key, got in call(run_back, ids, floats, ct).items():
            want = np.where(unused(p, ct[key]), ct[key], np.zeros_like(ct[key]))  # a slot in use was overwritten
            want[:, :epn] = ref.reduce_grad(p, ct[key])
            same_bits(got, want, f"{name}: gradient of {key} in place")
    assert used > 10


def test_the_smallest_stages_give_the_same_bits(make_domain: Any) -> None:
    """From 64 bytes per own expert up, whether or not windows cut leaves: rounds change nothing."""
    shape = SHAPES[1]
    for stage in (64 * shape.epn, 65 * shape.epn, 128 * shape.epn, 704 * shape.epn, 10**6, None):
        ep = domain_of(make_domain, shape, LEAVES, stage_bytes=stage)
        run, run_back = forward(ep), backward(ep)
        for name in ("one_expert", "crowded", "lognormal_8", "unrouted"):
            ids = routing(name, shape)
            p = ref.plan(ids, shape.E)
            rng = np.random.default_rng(3)
            w = make_leaves(rng, shape.R, shape.epn, LEAVES)
            ct = make_leaves(rng, shape.R, 2 * shape.epn, LEAVES)
            for key, got in call(run, ids, w).items():
                same_bits(got, ref.prefetch(p, w[key]), f"{name}: {key} with stage_bytes={stage}")
            for key, got in call(run_back, ids, w, ct).items():
                same_bits(got, ref.reduce_grad(p, ct[key]), f"{name}: gradient of {key} with stage_bytes={stage}")
        slots = ep.stats()["bytes_per_rank"]["slots"]
        assert slots >= min(stage or 10**6, shape.epn * ep.spec.config.expert_bytes)


def test_reduce_grad_sums_in_float32_and_rounds_once(make_domain: Any) -> None:
    """1 and many 2**-9 in bfloat16: rounding after each replica would lose them all."""
    shape = Shape(8, 16, 2, 8, 8)
    ep = domain_of(make_domain, shape, {"w": ((4,), BF16)})
    ids = routing("one_expert", shape)
    p = ref.plan(ids, shape.E)
    hot = int(ids[0, 0, 0])
    assert (p.slot_expert[np.arange(8) != hot, 0] == hot).all()
    ct = np.full((8, 2, 4), 2.0**-9).astype(BF16)
    ct[hot, 0] = 1
    grads = call(backward(ep), ids, {"w": np.zeros((8, 1, 4), BF16)}, {"w": ct})["w"]
    assert (grads[hot] == np.float32(1 + 7 * 2.0**-9).astype(BF16)).all()
    assert (grads[hot] > 1).all()


def test_leaves_without_a_gradient_ride_along(make_domain: Any) -> None:
    """Integer leaves before and between float ones in one call: each float leaf gets its own gradient."""
    shape = SHAPES[1]
    leaves = {"a": ((2,), np.int8), "b": ((3,), np.float32), "c": ((5,), np.int32), "d": ((3,), np.float32)}
    floats = ("b", "d")
    ep = domain_of(make_domain, shape, leaves)
    ids = routing("lognormal_8", shape)
    p = ref.plan(ids, shape.E)
    rng = np.random.default_rng(0)
    w = make_leaves(rng, shape.R, shape.epn, leaves)
    scale = make_leaves(rng, shape.R, 2 * shape.epn, {name: leaves[name] for name in floats})

    def body(ids: Any, w: Any, scale: Any) -> Any:
        def loss(given: Any) -> Any:
            full = ep.prefetch(ep.plan(ids), {**w, **given})
            return sum((full[name] * scale[name]).sum() for name in floats), (full["a"], full["c"])

        return jax.grad(loss, has_aux=True)({name: w[name] for name in floats})

    grads, (a, c) = call(per_rank(ep, body), ids, w, scale)
    for name in floats:
        same_bits(grads[name], ref.reduce_grad(p, scale[name]), f"gradient of {name}")
    same_bits(a, ref.prefetch(p, w["a"]), "int8 leaf")
    same_bits(c, ref.prefetch(p, w["c"]), "int32 leaf")

    def all_leaves(ids: Any, w: Any, scale: Any) -> Any:
        def loss(w: Any) -> Any:
            full = ep.prefetch(ep.plan(ids), w)
            return sum((full[name] * scale[name]).sum() for name in floats)

        grads = jax.grad(loss, allow_int=True)(w)
        assert grads["a"].dtype == grads["c"].dtype == jax.dtypes.float0
        return {name: grads[name] for name in floats}

    for name, grad in call(per_rank(ep, all_leaves), ids, w, scale).items():
        same_bits(grad, ref.reduce_grad(p, scale[name]), f"gradient of {name} beside float0 ones")


@pytest.mark.parametrize("names", [("deep",), ("long", "one"), tuple(sorted(LEAVES))], ids=len)
def test_subsets_of_the_leaves(make_domain: Any, names: tuple[str, ...]) -> None:
    shape = SHAPES[0]
    ep = domain_of(make_domain, shape, LEAVES)
    ids = routing("one_home", shape)
    p = ref.plan(ids, shape.E)
    w = make_leaves(np.random.default_rng(0), shape.R, shape.epn, {n: LEAVES[n] for n in names})
    got = call(forward(ep), ids, w)
    assert set(got) == set(names)
    for name in names:
        same_bits(got[name], ref.prefetch(p, w[name]), name)


def test_mixed_forms_in_one_call(make_domain: Any) -> None:
    shape = SHAPES[1]
    leaves = {"a": ((3,), np.float32), "b": ((2,), BF16)}
    ep = domain_of(make_domain, shape, leaves)
    ids = routing("staircase", shape)
    p = ref.plan(ids, shape.E)
    rng = np.random.default_rng(5)
    a = make_leaf(rng, (shape.R, shape.epn, 3), np.float32)
    b = make_leaf(rng, (shape.R, 2 * shape.epn, 2), BF16)
    got = call(forward(ep), ids, {"a": a, "b": b})
    same_bits(got["a"], ref.prefetch(p, a), "a")
    same_bits(got["b"], fill(p, b), "b")


@pytest.mark.parametrize("donate", [False, True])
def test_a_full_leaf_as_argument(make_domain: Any, donate: bool) -> None:
    """Donated or not, the result is right; the caller's array is unchanged where it was not donated."""
    shape = SHAPES[1]
    ep = domain_of(make_domain, shape, {"w": ((33,), np.float32)})
    ids = routing("lognormal_8", shape)
    p = ref.plan(ids, shape.E)
    w = make_leaf(np.random.default_rng(0), (shape.R * 2 * shape.epn, 33), np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: shape.R]), ("ep",))
    step = jax.jit(
        jax.shard_map(
            lambda ids, w: ep.prefetch(ep.plan(ids), {"w": w})["w"], mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
        ),
        donate_argnums=(1,) if donate else (),
    )
    sharding = NamedSharding(mesh, P("ep"))
    given = jax.device_put(w, sharding)
    got = step(jax.device_put(ids.reshape(-1, shape.K), sharding), given)
    want = fill(p, w.reshape(shape.R, 2 * shape.epn, 33))
    same_bits(got, want.reshape(w.shape), "w")
    assert given.is_deleted() == donate
    if not donate:
        same_bits(given, w, "the argument")


def test_unused_slots_are_zero_or_kept(make_domain: Any) -> None:
    """A balanced routing moves no row: slots of an [epn] leaf are zero, those of a [2*epn] leaf keep NaN and all."""
    shape = SHAPES[1]
    ep = domain_of(make_domain, shape, {"w": ((5,), np.float32)})
    ids = routing("balanced", shape)
    w = make_leaf(np.random.default_rng(0), (shape.R, shape.epn, 5), np.float32)
    got = call(forward(ep), ids, {"w": w})["w"]
    same_bits(got[:, shape.epn :], np.zeros_like(w), "slots")
    full = np.concatenate([w, np.full_like(w, np.nan)], axis=1)
    same_bits(call(forward(ep), ids, {"w": full})["w"], full, "kept slots")


def test_the_stale_rows_of_a_full_leaf_do_not_matter(make_domain: Any) -> None:
    """Rows from epn on of a [2*epn] leaf are ignored: the slots in use do not depend on them, nor do gradients."""
    shape = SHAPES[0]
    ep = domain_of(make_domain, shape, {"w": ((5,), np.float32)})
    ids = routing("one_expert", shape)
    p = ref.plan(ids, shape.E)
    rng = np.random.default_rng(0)
    w = make_leaf(rng, (shape.R, shape.epn, 5), np.float32)
    ct = make_leaf(rng, (shape.R, 2 * shape.epn, 5), np.float32)
    ct = np.where(unused(p, ct), np.float32(np.nan), ct)  # an unused slot's cotangent meets nothing else
    full = np.concatenate([w, np.full_like(w, np.nan)], axis=1)
    got = call(forward(ep), ids, {"w": full})["w"]
    same_bits(np.where(unused(p, got), np.float32(0), got), ref.prefetch(p, w), "w")
    grad = call(backward(ep), ids, {"w": full}, {"w": ct})["w"]
    same_bits(grad[:, : shape.epn], ref.reduce_grad(p, ct), "gradient")
    same_bits(call(backward(ep), ids, {"w": w}, {"w": ct})["w"], ref.reduce_grad(p, ct), "gradient of the short form")


def test_cast_masters_into_the_full_form(make_domain: Any) -> None:
    """The cheap form: bfloat16 weights padded and cast from float32 masters inside the step; gradients reach them."""
    shape = SHAPES[1]
    ep = domain_of(make_domain, shape, {"w": ((6,), BF16)})
    ids = routing("lognormal_8", shape)
    p = ref.plan(ids, shape.E)
    rng = np.random.default_rng(0)
    masters = make_leaf(rng, (shape.R, shape.epn, 6), np.float32)
    scale = make_leaf(rng, (shape.R, 2 * shape.epn, 6), BF16)
    scale[np.broadcast_to(unused(p, scale), scale.shape)] = 0

    def body(ids: Any, masters: Any, scale: Any) -> Any:
        def loss(masters: Any) -> Any:
            w = jnp.pad(masters.astype(BF16), ((0, shape.epn), (0, 0)))
            return (ep.prefetch(ep.plan(ids), {"w": w})["w"] * scale).astype(np.float32).sum()

        return jax.grad(loss)(masters)

    grad = call(per_rank(ep, body), ids, masters, scale)
    same_bits(grad, ref.reduce_grad(p, scale).astype(np.float32), "gradient")


def test_one_rank_and_home_planner_move_nothing(make_domain: Any) -> None:
    for shape, planner in ((Shape(1, 6, 2, 4, 8), "exact"), (SHAPES[1], "home")):
        ep = domain_of(make_domain, shape, LEAVES, planner=planner)
        ids = routing("one_expert", shape)
        rng = np.random.default_rng(0)
        w = make_leaves(rng, shape.R, shape.epn, LEAVES)
        ct = make_leaves(rng, shape.R, 2 * shape.epn, LEAVES)
        for key, got in call(forward(ep), ids, w).items():
            same_bits(got, np.concatenate([w[key], np.zeros_like(w[key])], axis=1), key)
        for key, got in call(backward(ep), ids, w, ct).items():
            same_bits(got, ct[key][:, : shape.epn], f"gradient of {key}")


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_smaller_than_a_byte_are_refused(dtype: str) -> None:
    """XLA packs them two or more to a byte, so that an expert need not start on a byte."""
    with pytest.raises(moonep.ConfigError, match=rf"weights\['w'\]; got dtype {dtype}, expected .*; pack"):
        moonep.EPConfig(tokens=1, hidden=8, topk=1, experts=2, weights={"w": ((4,), getattr(ml_dtypes, dtype))})
