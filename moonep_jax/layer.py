"""A whole MoE layer: top-k routing, dispatch, SwiGLU experts by a grouped GEMM, combine. Built on ops.py alone.

The grouped GEMM is pluggable because its best form differs: `jax.lax.ragged_dot` multiplies every group by every row,
on CPUs and GPUs alike. On CPUs grouped_gemm.py is taken, on GPUs Tokamax's kernel if it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonep_jax import checks, ops
from moonep_jax.errors import OpError, message
from moonep_jax.grouped_gemm import tiled_dot
from moonep_jax.spec import DomainSpec

GroupedGemm = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """lhs [m, k] by rhs [g, k, n] -> [m, n] through jax.lax.ragged_dot; group_sizes [g] int32.

    The weights of empty groups are masked: the lowering multiplies them too, and a slot that is not in use may hold
    any bytes, NaN included.
    """
    used = (group_sizes > 0)[:, None, None]
    return jax.lax.ragged_dot(lhs, jnp.where(used, rhs, jnp.zeros_like(rhs)), group_sizes)


def default_grouped_gemm(platform: str) -> GroupedGemm:
    """The grouped GEMM that `moe` uses when none is given: tiled_dot on CPU, Tokamax on GPU where installed."""
    if platform == "cpu":
        return tiled_dot
    if importlib.util.find_spec("tokamax") is not None:
        return _tokamax()
    _warn_slow()
    return ragged_dot


@functools.cache
def _tokamax() -> GroupedGemm:
    import tokamax  # pyright: ignore[reportMissingImports]

    return lambda lhs, rhs, group_sizes: tokamax.ragged_dot(lhs, rhs, group_sizes)


@functools.cache  # once per process
def _warn_slow() -> None:
    warnings.warn(
        "moonep_jax: Tokamax is not installed, so ep.moe uses jax.lax.ragged_dot, which is many times slower on a "
        "GPU; install tokamax or pass grouped_gemm",
        stacklevel=4,
    )


def _check_declared(spec: DomainSpec) -> None:
    """The leaves' shapes follow from the config: params are held against what it declares by prefetch."""
    declared, h = spec.config.weights, spec.config.hidden
    shapes = {name: leaf.shape for name, leaf in declared.items() if name in ("gate", "up", "down")}
    f = shapes.get("gate", (0, 0))[-1]
    want = {"gate": (h, f), "up": (h, f), "down": (f, h)}
    if shapes != want:
        fix = (
            'declare weights={"gate": ((H, F), dtype), "up": ((H, F), dtype), "down": ((F, H), dtype)}, H hidden, F any'
        )
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or f"leaves {list(declared)}"
        expected = f"gate ({h}, F), up ({h}, F), down (F, {h})"
        raise OpError(message("moe", "EPConfig.weights declare another layer", got, expected, fix))


def moe(
    spec: DomainSpec,
    x: Any,
    router_logits: Any,
    params: Mapping[str, Any],
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    channel: int = 0,
    grouped_gemm: GroupedGemm | None = None,
) -> jax.Array:
    """See Domain.moe."""
    checks.axes_bound("moe", spec)
    s = checks.tokens("moe", "x", x, spec)
    x = checks.array(
        "moe", "x", x, (s, spec.config.hidden), spec.config.dtype, "pass this rank's tokens, a row for each"
    )
    if getattr(router_logits, "shape", None) != (s, spec.config.experts):
        fix = "pass one logit per token and expert"
        got = getattr(router_logits, "shape", type(router_logits).__name__)
        raise OpError(message("moe", "router_logits do not fit", got, (s, spec.config.experts), fix))
    if not isinstance(params, Mapping) or set(params) != {"gate", "up", "down"}:
        got = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        fix = "pass this rank's expert weights under these names"
        raise OpError(message("moe", "bad params", got, "a dict of gate, up and down", fix))
    _check_declared(spec)
    top, ids = jax.lax.top_k(router_logits.astype(np.float32), spec.config.topk)
    d = ops.dispatch(spec, x, ids.astype(np.int32), jax.nn.softmax(top, axis=-1), channel=channel)
    w = ops.prefetch(spec, d.plan, params)
    gemm = default_grouped_gemm(spec.topology.platform) if grouped_gemm is None else grouped_gemm
    inner = activation(gemm(d.hidden, w["gate"], d.group_sizes)) * gemm(d.hidden, w["up"], d.group_sizes)
    out = gemm(inner, w["down"], d.group_sizes)
    return ops.combine(spec, d.plan, out.astype(spec.config.dtype), d.weights)
