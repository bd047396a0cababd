"""Programs that several op tests run: one jitted step that returns all that a routing gives, compared bit for bit.

Global arrays lead with the axis of ranks, [R, ...], and are split over the mesh axis "ep".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from cases import Shape
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from moonep_jax import reference as ref
from moonep_jax.spec import PLAN_ARRAYS

Array = Any  # NumPy arrays of any dtype
HALF_ULP = 2.0**-24  # largest relative error of one float32 operation


def per_rank(domain: moonep.Domain, body: Callable[..., Any], mesh: jax.sharding.Mesh | None = None) -> Any:
    """jit(shard_map) of `body`, a function of one rank's arrays; operands and results lead with the ranks."""
    mesh = mesh or make_mesh((domain.spec.ranks,), ("ep",))

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], args)))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def call(step: Any, *args: Any) -> Any:
    """Runs a step to its end and brings its results back as NumPy arrays."""
    return jax.tree.map(np.asarray, step(*args))


def same_bits(got: Any, want: Array, what: str) -> None:
    """Fails unless both arrays have the same dtype, shape and bytes: -0.0 is not 0.0 here."""
    got = np.asarray(got)
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if got.tobytes() != np.ascontiguousarray(want).tobytes():
        bits = np.dtype(f"u{got.dtype.itemsize}")
        where = np.argwhere(np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits))
        first = tuple(where[0])
        raise AssertionError(f"{what}: {len(where)} elements differ; at {first} got {got[first]}, want {want[first]}")


def whole_step(domain: moonep.Domain) -> Any:
    """A step that makes a plan and runs every row op on it, forward and backward, with given cotangents."""
    return per_rank(domain, whole_body(domain))


def whole_body(domain: moonep.Domain) -> Callable[..., dict[str, Any]]:
    """One rank's part of `whole_step`."""

    def body(x: Any, ids: Any, topk_weights: Any, ct_hidden: Any, ct_weights: Any, out: Any, dy: Any) -> Any:
        p = domain.plan(ids)

        def dispatch(x: Any, topk_weights: Any) -> Any:
            d = domain.dispatch(x, ids, topk_weights, p)
            return d.hidden, d.weights

        (hidden, weights), dispatch_vjp = jax.vjp(dispatch, x, topk_weights)
        y, combine_vjp = jax.vjp(functools.partial(domain.combine, p), out, weights)
        y_plain, plain_vjp = jax.vjp(functools.partial(domain.combine, p), out)
        return {
            "plan": p,
            "hidden": hidden,
            "weights": weights,
            "y": y,
            "y_plain": y_plain,
            "dispatch_grads": dispatch_vjp((ct_hidden, ct_weights)),
            "combine_grads": combine_vjp(dy),
            "plain_grad": plain_vjp(dy)[0],
        }

    return body


def operands(rng: np.random.Generator, ids: Array, p: ref.ReferencePlan, shape: Shape, dtype: Any) -> dict[str, Array]:
    """Random operands of `whole_step`; rows that hold no token are NaN wherever the caller may leave anything."""

    def normal(*dims: int) -> Array:
        return rng.standard_normal(dims, np.float32)

    held = p.src >= 0
    return {
        "x": normal(shape.R, shape.s, shape.H).astype(dtype),
        "ids": ids,
        "topk_weights": normal(shape.R, shape.s, shape.K),
        "ct_hidden": np.where(held[..., None], normal(shape.R, p.rows, shape.H), np.nan).astype(dtype),
        "ct_weights": np.where(held, normal(shape.R, p.rows), np.float32(np.nan)),
        "out": np.where(held[..., None], normal(shape.R, p.rows, shape.H), np.nan).astype(dtype),
        "dy": normal(shape.R, shape.s, shape.H).astype(dtype),
    }


def check_plan(plan: moonep.Plan, p: ref.ReferencePlan) -> None:
    """A plan's arrays, stacked over ranks, against the oracle's."""
    for name in set(PLAN_ARRAYS) - {"ticket"}:
        want = getattr(p, name)
        if name in ("slot_expert", "home_rows", "rank_rows"):  # every rank holds all of it
            want = np.broadcast_to(want, (p.ranks, *want.shape))
        same_bits(getattr(plan, name), want, name)
    tickets = np.asarray(plan.ticket)
    assert tickets.min() == tickets.max() >= 0, tickets


def check_step(step: Any, rng: np.random.Generator, ids: Array, shape: Shape, config: moonep.EPConfig) -> str:
    """Runs `step` on random operands for a routing and compares everything with the oracle; returns the plan's kind.

    All results are equal bit for bit, except the gradient of combine's weights: XLA sums it over H in float32, in any
    order.
    """
    p = ref.plan(ids, shape.E, config.token_padding, config.planner)
    a = operands(rng, ids, p, shape, config.dtype)
    got = call(step, *a.values())
    check_plan(got["plan"], p)
    hidden, weights = ref.dispatch(p, a["x"], a["topk_weights"])
    same_bits(got["hidden"], hidden, "hidden")
    same_bits(got["weights"], weights, "weights")
    same_bits(got["y"], ref.combine(p, a["out"], weights, config.combine), "y")
    same_bits(got["y_plain"], ref.combine(p, a["out"], None, config.combine), "y without weights")
    dx, dtopk_weights = ref.dispatch_grad(p, a["ct_hidden"], a["ct_weights"], config.combine)
    same_bits(got["dispatch_grads"][0], dx, "dx")
    same_bits(got["dispatch_grads"][1], dtopk_weights, "dtopk_weights")
    dout, dweights = ref.combine_grad(p, a["dy"], a["out"], weights)
    same_bits(got["combine_grads"][0], dout, "dout")
    same_bits(got["plain_grad"], ref.combine_grad(p, a["dy"], a["out"])[0], "dout without weights")
    magnitudes = ref.combine_grad(p, np.abs(a["dy"]), np.abs(a["out"]), weights)[1]
    error = np.abs(got["combine_grads"][1].astype(np.float64) - dweights)
    assert dweights is not None and magnitudes is not None
    assert (error <= (shape.H + 1) * HALF_ULP * magnitudes).all(), f"dweights: error {error.max()}"
    return p.kind
