"""The MoE layer without parallelism in plain JAX, and random inputs of it: what gradients are compared with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

# Sizes of the layers under test.
TOKENS, HIDDEN, INNER, TOPK, EXPERTS = 12, 8, 6, 2, 8


def config(dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    """EPConfig fields of the layer."""
    weights = {
        "gate": ((HIDDEN, INNER), dtype),
        "up": ((HIDDEN, INNER), dtype),
        "down": ((INNER, HIDDEN), dtype),
    }
    base = {"tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": dtype, "weights": weights}
    return {**base, **fields}


def inputs(tokens: int, seed: int = 0, skew: float = 3.0, dtype: Any = np.float32) -> dict[str, Any]:
    """x, a router and expert weights; `skew` biases the router towards the first experts, the last one gets nothing."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape, np.float32) / np.sqrt(shape[-2])).astype(dtype)

    bias = (skew * np.linspace(1, 0, EXPERTS)).astype(np.float32)
    bias[-1] = -1e4
    return {
        "x": rng.standard_normal((tokens, HIDDEN), np.float32).astype(dtype),
        "router": rng.standard_normal((HIDDEN, EXPERTS), np.float32),
        "bias": bias,
        "params": {
            "gate": normal(EXPERTS, HIDDEN, INNER),
            "up": normal(EXPERTS, HIDDEN, INNER),
            "down": normal(EXPERTS, INNER, HIDDEN),
        },
    }


def logits_of(x: Any, router: Any, bias: Any) -> Any:
    """Router logits in float32."""
    return jnp.dot(x.astype(np.float32), router, precision="highest") + bias[None]


def layer(x: Any, router: Any, bias: Any, params: Any) -> Any:
    """Every expert on every token, weighted: what moe must equal, with the same gradients."""
    top, ids = jax.lax.top_k(logits_of(x, router, bias), TOPK)
    scale = jax.nn.softmax(top, axis=-1)
    weight = (jax.nn.one_hot(ids, EXPERTS) * scale[..., None]).sum(axis=1)
    gate = jnp.einsum("th,ehf->tef", x, params["gate"], precision="highest")
    up = jnp.einsum("th,ehf->tef", x, params["up"], precision="highest")
    out = jnp.einsum("tef,efh->teh", jax.nn.silu(gate) * up, params["down"], precision="highest")
    return (out * weight[..., None]).sum(axis=1)


def specs(x: Any = "ep", params: Any = "ep") -> dict[str, Any]:
    """PartitionSpecs of `inputs`; router and bias are replicated."""
    return {
        "x": P(x),
        "router": P(),
        "bias": P(),
        "params": {"gate": P(params), "up": P(params), "down": P(params)},
    }


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Fails unless all leaves agree within `tolerance` of each leaf's largest element, NaN never."""
    flat_want, tree = jax.tree.flatten(want)
    flat_got, got_tree = jax.tree.flatten(got)
    assert tree == got_tree
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(want)[0]]
    for path, a, b in zip(paths, flat_got, flat_want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, f"{path}: {a.shape}, expected {b.shape}"
        assert np.isfinite(a).all(), f"{path}: not finite"
        error, scale = np.abs(a - b).max(), np.abs(b).max()
        assert error <= tolerance * max(scale, 1e-30), f"{path}: error {error} of {scale}"
