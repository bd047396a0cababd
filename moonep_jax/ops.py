"""plan, dispatch, combine and prefetch with their gradients: pure functions of arrays, called inside shard_map.

Backward: dispatch' moves rows as combine does, combine' as dispatch does (with the saved plan), prefetch' is
reduce_grad. Every op checks its operands (checks.py), casts them together, and binds primitives (primitives.py).
Notation as in spec.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moonep_jax import checks, debug, primitives
from moonep_jax.errors import OpError, message
from moonep_jax.spec import PLAN_ARRAYS, Dispatched, DomainSpec, Plan


def plan(spec: DomainSpec, topk_ids: Any, channel: int = 0) -> Plan:
    """See Domain.plan."""
    checks.axes_bound("plan", spec)
    channel = checks.channel("plan", channel)
    s = checks.tokens("plan", "topk_ids", topk_ids, spec)
    fix = "pass the top-k expert ids of this rank's tokens as int32"
    topk_ids = checks.array("plan", "topk_ids", topk_ids, (s, spec.config.topk), np.int32, fix)
    topk_ids = checks.cast_together(spec, jax.lax.stop_gradient(topk_ids))
    k, ranks, epn = spec.config.topk, spec.ranks, spec.experts_per_rank
    n = spec.config.recv_rows(ranks, s)
    shapes = [(s, k), (s, k), (n,), (n,), (n,), (2 * epn,), (2 * epn,), (ranks, epn), (ranks,), (ranks,), (1,)]
    results = [(shape, np.int32) for shape in shapes]
    captured = spec.config.capture_plan and spec.topology.platform == "gpu"
    arrays = primitives.call("plan", [topk_ids], results, spec=spec, channel=channel, captured=captured)
    p = Plan(**dict(zip(PLAN_ARRAYS, arrays, strict=True)), domain=spec.id)
    p = debug.plan(spec, topk_ids, p) if spec.debug else p
    return jax.tree.map(lambda a: checkpoint_name(a, "moonep_plan"), p)


def _route(p: Plan) -> list[jax.Array]:
    """The plan's operands of dispatch and combine_grad, in the order of xla_ffi/common/operands.h."""
    return [p.dst_rank, p.dst_row, p.src, p.primary, p.next, p.ticket]


# -- dispatch ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(spec: DomainSpec, p: Plan, x: jax.Array, topk_weights: jax.Array) -> Any:
    results = [((p.rows, x.shape[1]), x.dtype), ((p.rows,), np.float32)]
    return primitives.call("dispatch", [*_route(p), x, topk_weights], results, spec=spec)


def _dispatch_fwd(spec: DomainSpec, p: Plan, x: jax.Array, topk_weights: jax.Array) -> tuple[list[jax.Array], Plan]:
    return _dispatch(spec, p, x, topk_weights), p


def _dispatch_bwd(spec: DomainSpec, p: Plan, cotangents: list[jax.Array]) -> tuple[None, jax.Array, jax.Array]:
    ct_hidden, ct_weights = cotangents
    operands = [p.dst_rank, p.src, p.primary, p.next, p.ticket, ct_hidden, ct_weights]
    results = [((p.tokens, ct_hidden.shape[1]), ct_hidden.dtype), (p.dst_rank.shape, np.float32)]
    dx, dtopk_weights = primitives.call("dispatch_grad", operands, results, spec=spec)
    if spec.debug:
        dx, dtopk_weights = debug.dispatch_grad(spec, p, operands, dx, dtopk_weights)
    return None, dx, dtopk_weights


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def dispatch(
    spec: DomainSpec, x: Any, topk_ids: Any, topk_weights: Any = None, p: Plan | None = None, channel: int = 0
) -> Dispatched:
    """See Domain.dispatch."""
    checks.axes_bound("dispatch", spec)
    channel = checks.channel("dispatch", channel)
    s = checks.tokens("dispatch", "x", x, spec)
    k, h = spec.config.topk, spec.config.hidden
    x = checks.array("dispatch", "x", x, (s, h), spec.config.dtype, "cast or reshape x to EPConfig's dtype and hidden")
    fix = "pass the top-k expert ids of x's tokens as int32"
    topk_ids = checks.array("dispatch", "topk_ids", topk_ids, (s, k), np.int32, fix)
    if topk_weights is None:
        topk_weights = jnp.ones((s, k), np.float32)
    fix = "pass one float32 weight per expert id"
    topk_weights = checks.array("dispatch", "topk_weights", topk_weights, (s, k), np.float32, fix)
    if p is None:
        p = plan(spec, topk_ids, channel)
    checked = checks.plan("dispatch", p, spec)
    if checked.tokens != s:
        fix = "use the plan of the same batch"
        raise OpError(message("dispatch", "the plan has another number of tokens", checked.tokens, s, fix))
    cast, x, topk_weights = checks.cast_together(spec, (checked, x, topk_weights))
    rows: Any = _dispatch(spec, cast, x, topk_weights)
    hidden, weights = debug.dispatch(spec, cast, x, topk_ids, topk_weights, *rows) if spec.debug else rows
    return Dispatched(hidden, weights, cast.group_sizes, cast)


# -- combine -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(spec: DomainSpec, p: Plan, out: jax.Array, weights: jax.Array | None) -> jax.Array:
    scale = jnp.ones_like(p.src, np.float32) if weights is None else weights
    operands = [p.dst_rank, p.src, p.primary, p.next, p.ticket, out, scale]
    (y,) = primitives.call("combine", operands, [((p.tokens, out.shape[1]), out.dtype)], spec=spec)
    return debug.combine(spec, p, operands, y) if spec.debug else y


def _combine_fwd(spec: DomainSpec, p: Plan, out: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, Any]:
    # `out` is needed for the weights' gradient only.
    return _combine(spec, p, out, weights), (p, None if weights is None else (out, weights))


def _combine_bwd(spec: DomainSpec, residuals: Any, dy: jax.Array) -> tuple[None, jax.Array, jax.Array | None]:
    p, weighted = residuals
    (rows,) = primitives.call("combine_grad", [*_route(p), dy], [((p.rows, dy.shape[1]), dy.dtype)], spec=spec)
    if spec.debug:
        rows = debug.combine_grad(spec, p, dy, rows)
    if weighted is None:
        return None, rows, None
    out, weights = weighted
    wide = rows.astype(np.float32)
    # Rows without a token hold whatever the model left there, NaN included.
    held = p.src >= 0
    dot = jnp.sum(wide * out.astype(np.float32), axis=1)
    scale = jnp.where(held, weights, 0.0)
    return None, (wide * scale[:, None]).astype(out.dtype), jnp.where(held, dot, 0.0)


_combine.defvjp(_combine_fwd, _combine_bwd)


def combine(spec: DomainSpec, p: Plan, out: Any, weights: Any = None) -> jax.Array:
    """See Domain.combine."""
    checks.axes_bound("combine", spec)
    p = checks.plan("combine", p, spec)
    fix = "pass the experts' outputs, row for row as dispatch returned them (d.hidden)"
    out = checks.array("combine", "out", out, (p.rows, spec.config.hidden), spec.config.dtype, fix)
    if weights is not None:
        fix = "pass d.weights of the same dispatch, or None"
        weights = checks.array("combine", "weights", weights, (p.rows,), np.float32, fix)
    p, out, weights = checks.cast_together(spec, (p, out, weights))
    return _combine(spec, p, out, weights)


# -- prefetch ----------------------------------------------------------------------------------------------------------


def _leaf_calls(spec: DomainSpec, kind: str, p: Plan, leaves: list[jax.Array], out_rows: list[int]) -> list[jax.Array]:
    results = [((rows, *leaf.shape[1:]), leaf.dtype) for leaf, rows in zip(leaves, out_rows, strict=True)]
    aliases = [(i + 2, i) for i, (leaf, rows) in enumerate(zip(leaves, out_rows, strict=True)) if leaf.shape[0] == rows]
    return primitives.call(kind, [p.slot_expert, p.ticket, *leaves], results, spec=spec, aliases=aliases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefetch(spec: DomainSpec, p: Plan, leaves: list[jax.Array]) -> list[jax.Array]:
    full = _leaf_calls(spec, "prefetch", p, leaves, [2 * spec.experts_per_rank] * len(leaves))
    return debug.prefetch(spec, p, leaves, full) if spec.debug else full


def _prefetch_fwd(spec: DomainSpec, p: Plan, leaves: list[jax.Array]) -> tuple[list[jax.Array], Any]:
    return _prefetch(spec, p, leaves), (p, tuple(leaf.shape[0] for leaf in leaves))


def _prefetch_bwd(spec: DomainSpec, residuals: Any, cotangents: list[Any]) -> tuple[None, list[Any]]:
    p, rows = residuals
    floats = [i for i, ct in enumerate(cotangents) if ct.dtype != jax.dtypes.float0]
    grads: list[Any] = [None] * len(cotangents)
    if bad := sorted({str(cotangents[i].dtype) for i in floats} - {"float32", "float16", "bfloat16"}):
        fix = "keep the weights in one of these, or stop their gradient"
        raise OpError(message("reduce_grad", "a leaf's dtype has no gradient", bad, "float32, float16, bfloat16", fix))
    if floats:
        given, sizes = [cotangents[i] for i in floats], [rows[i] for i in floats]
        summed = _leaf_calls(spec, "reduce_grad", p, given, sizes)
        if spec.debug:
            summed = debug.reduce_grad(spec, p, summed, _leaf_calls(spec, "reduce_grad", p, given, sizes))
        for i, grad in zip(floats, summed, strict=True):
            grads[i] = grad
    return None, grads


_prefetch.defvjp(_prefetch_fwd, _prefetch_bwd)


def prefetch(spec: DomainSpec, p: Plan, weights: Mapping[str, Any]) -> dict[str, jax.Array]:
    """See Domain.prefetch."""
    checks.axes_bound("prefetch", spec)
    p = checks.plan("prefetch", p, spec)
    declared = spec.config.weights
    if not isinstance(weights, Mapping) or not weights or (set(weights) - set(declared)):
        got = sorted(map(str, weights)) if isinstance(weights, Mapping) else type(weights).__name__
        fix = "name the leaves as in EPConfig.weights, which is where they are declared, or declare these"
        raise OpError(message("prefetch", "unknown weights", got, f"a dict of leaves out of {list(declared)}", fix))
    epn = spec.experts_per_rank
    leaves = {}
    for name in sorted(weights):
        leaf = weights[name]
        full = getattr(leaf, "ndim", 0) > 0 and leaf.shape[0] == 2 * epn
        fix = f"pass what EPConfig.weights says of this rank's experts, [{epn}, ...], or [{2 * epn}, ...] to be filled"
        shape = (2 * epn if full else epn, *declared[name].shape)
        leaves[name] = checks.array("prefetch", f"weights[{name!r}]", leaf, shape, declared[name].dtype, fix)
    p, leaves = checks.cast_together(spec, (p, leaves))
    return dict(zip(leaves, _prefetch(spec, p, list(leaves.values())), strict=True))
