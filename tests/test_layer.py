"""ep.moe against the dense layer in float64: routing skew, paddings, activations, and the grouped GEMM's choices."""

from __future__ import annotations

import functools
import importlib.util
import re
import warnings
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

from moonep_jax import layer
from moonep_jax import reference as ref
from moonep_jax.grouped_gemm import tiled_dot

R = 4
T = R * dense.TOKENS


def run(ep: Any, x: Any, logits: Any, params: Any, **options: Any) -> Any:
    mesh = make_mesh((ep.spec.ranks,), ("ep",))
    body = functools.partial(ep.moe, **options)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), P("ep"), P("ep")), out_specs=P("ep")))(
        x, logits, params
    )


def routing_of(logits: Any) -> tuple[Any, Any]:
    """ids and softmax weights of the K largest logits, ties to the lowest expert, in float64."""
    ids = np.argsort(-np.asarray(logits, np.float32), axis=1, kind="stable")[:, : dense.TOPK]
    top = np.take_along_axis(np.asarray(logits, np.float64), ids, axis=1)
    scale = np.exp(top - top.max(axis=1, keepdims=True))
    return ids, scale / scale.sum(axis=1, keepdims=True)


def expected(a: Any, logits: Any) -> Any:
    ids, scale = routing_of(logits)
    return ref.dense_moe(a["x"], ids, scale, **a["params"])


def case(seed: int = 0, skew: float = 1.0, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Inputs, and logits whose spread over experts is `skew`."""
    a = dense.inputs(T, seed, dtype=dtype)
    rng = np.random.default_rng([seed, 1])
    logits = rng.standard_normal((T, dense.EXPERTS)) + skew * rng.standard_normal(dense.EXPERTS)
    return a, logits.astype(np.float32)


@pytest.mark.parametrize("padding", [1, 8, 16, 64, 128])
def test_paddings(make_domain: Any, padding: int) -> None:
    ep = make_domain(R, **dense.config(token_padding=padding))
    for seed, skew in ((0, 0.0), (1, 2.0), (2, 50.0)):
        a, logits = case(seed, skew)
        dense.close(run(ep, a["x"], logits, a["params"]), expected(a, logits))


def test_bfloat16(make_domain: Any) -> None:
    """2 % of the largest element against float64 on the same numbers."""
    ep = make_domain(R, **dense.config("bfloat16"))
    a, logits = case(dtype=jnp.bfloat16)
    y = run(ep, a["x"], logits, a["params"])
    assert y.dtype == jnp.bfloat16
    dense.close(y, expected(a, logits), tolerance=2e-2)


@pytest.mark.parametrize("saved", [False, True])
def test_remat_can_keep_plans(make_domain: Any, saved: bool) -> None:
    """By default a checkpointed layer plans again in its backward pass; plans can be saved by their name."""
    policy = jax.checkpoint_policies.save_only_these_names("moonep_plan") if saved else None
    ep = make_domain(R, **dense.config())
    a = dense.inputs(R * dense.TOKENS)

    def loss(params: Any, x: Any, router: Any) -> Any:
        layer = jax.checkpoint(lambda x, params: ep.moe(x, x @ router, params), policy=policy)
        return jax.lax.psum((layer(x, params) ** 2).sum(), "ep")

    specs = (P("ep"), P("ep"), P())
    mesh = make_mesh((R,), ("ep",))
    f = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    jax.block_until_ready(jax.jit(jax.grad(f))(a["params"], a["x"], a["router"]))
    assert ep.stats()["calls"]["plan"] == R * (1 if saved else 2)


def test_logits_of_half_precision(make_domain: Any) -> None:
    """Top-k and softmax run in float32 whatever the logits' dtype; equal logits go to the lowest expert."""
    ep = make_domain(R, **dense.config())
    a, logits = case()
    logits = jnp.asarray(np.round(logits) + 0.0, jnp.bfloat16)  # many ties; top_k puts -0.0 below 0.0
    dense.close(run(ep, a["x"], logits, a["params"]), expected(a, np.asarray(logits, np.float32)))


def test_one_rank_repeats_and_equals_dense(make_domain: Any) -> None:
    a, logits = case()
    config = dense.config(tokens=T)
    one, many = make_domain(1, **config), make_domain(R, **dense.config())
    dense.close(run(one, a["x"], logits, a["params"]), expected(a, logits))
    dense.close(run(one, a["x"], logits, a["params"]), run(many, a["x"], logits, a["params"]))


def test_shorter_batch(make_domain: Any) -> None:
    ep = make_domain(R, **dense.config(tokens=4 * dense.TOKENS))
    a, logits = case()
    dense.close(run(ep, a["x"], logits, a["params"]), expected(a, logits))


def test_activation(make_domain: Any) -> None:
    ep = make_domain(R, **dense.config())
    a, logits = case()
    y = run(ep, a["x"], logits, a["params"], activation=lambda v: v * 0 + 1)
    ids, scale = routing_of(logits)
    want = np.zeros((T, dense.HIDDEN))
    w = {name: np.asarray(leaf, np.float64) for name, leaf in a["params"].items()}
    for t in range(T):
        for k in range(dense.TOPK):
            e = ids[t, k]
            want[t] += scale[t, k] * (a["x"][t].astype(np.float64) @ w["up"][e] @ w["down"][e])
    dense.close(y, want)


def test_grouped_gemm_is_pluggable(make_domain: Any) -> None:
    """A loop over groups in place of ragged_dot: it sees padded sizes and all rows, and rows of the tail may be NaN."""
    ep = make_domain(R, **dense.config())
    a, logits = case()
    seen = []

    def loop(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        seen.append((lhs.shape, rhs.shape, group_sizes.shape))
        ends = jnp.cumsum(group_sizes)
        row = jnp.arange(lhs.shape[0])
        group = jnp.searchsorted(ends, row, side="right")
        used = jnp.where((group_sizes > 0)[:, None, None], rhs, 0)
        out = jnp.einsum("nk,nkf->nf", lhs, used[jnp.minimum(group, rhs.shape[0] - 1)], precision="highest")
        return jnp.where((row < ends[-1])[:, None], out, jnp.nan)

    dense.close(run(ep, a["x"], logits, a["params"], grouped_gemm=loop), expected(a, logits))
    n, groups = ep.recv_rows(), 2 * dense.EXPERTS // R
    assert seen[0] == ((n, dense.HIDDEN), (groups, dense.HIDDEN, dense.INNER), (groups,))
    assert seen[2] == ((n, dense.INNER), (groups, dense.INNER, dense.HIDDEN), (groups,))


def test_nan_in_unused_slots(make_domain: Any) -> None:
    """[2*epn] leaves whose rows from epn on are NaN: neither y nor a gradient sees it."""
    ep = make_domain(R, **dense.config())
    mesh = make_mesh((R,), ("ep",))
    in_specs = (P("ep"), P("ep"), P("ep"))
    step = jax.shard_map(ep.moe, mesh=mesh, in_specs=in_specs, out_specs=P("ep"))
    epn = dense.EXPERTS // R

    def full(w: Any) -> Any:
        parts = w.reshape(R, epn, *w.shape[1:])
        return np.concatenate([parts, np.full_like(parts, np.nan)], axis=1).reshape(2 * len(w), *w.shape[1:])

    def loss(x: Any, logits: Any, params: Any) -> Any:
        return (step(x, logits, params) ** 2).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for skew in (0.0, 50.0):
        a, logits = case(skew=skew)
        params = {name: full(w) for name, w in a["params"].items()}
        dense.close(jax.jit(step)(a["x"], logits, params), expected(a, logits))
        dx, dlogits, dparams = grads(a["x"], logits, params)
        want = grads(a["x"], logits, a["params"])
        dense.close((dx, dlogits), want[:2])
        for name, grad in dparams.items():
            own = np.asarray(grad).reshape(R, 2 * epn, *grad.shape[1:])[:, :epn].reshape(a["params"][name].shape)
            dense.close(own, want[2][name])


def test_experts_without_rows_that_hold_nan(make_domain: Any) -> None:
    """An own expert that nobody chose may hold NaN too: its group is empty."""
    ep = make_domain(R, **dense.config())
    a, logits = case()
    logits[:, 3] = -1e9
    for w in a["params"].values():
        w[3] = np.nan
    y = run(ep, a["x"], logits, a["params"])
    clean = {name: np.nan_to_num(w) for name, w in a["params"].items()}
    dense.close(y, expected({**a, "params": clean}, logits))


def test_the_default_on_cpu_is_tiled_dot() -> None:
    assert layer.default_grouped_gemm("cpu") is tiled_dot


def test_the_default_on_gpu_without_tokamax_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tokamax" else real(name, *a))
    layer._warn_slow.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert layer.default_grouped_gemm("gpu") is layer.ragged_dot
    assert len(caught) == 1
    assert re.search("Tokamax is not installed.*grouped_gemm", str(caught[0].message))


def test_the_default_on_gpu_with_tokamax(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    real = importlib.util.find_spec
    found = lambda name, *a: types.SimpleNamespace() if name == "tokamax" else real(name, *a)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    fake = types.ModuleType("tokamax")
    fake.ragged_dot = lambda lhs, rhs, group_sizes: ("tokamax", lhs, rhs, group_sizes)  # pyright: ignore
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    layer._tokamax.cache_clear()
    try:
        assert layer.default_grouped_gemm("gpu")(1, 2, 3) == ("tokamax", 1, 2, 3)  # pyright: ignore
    finally:
        layer._tokamax.cache_clear()


def test_ragged_dot_masks_empty_groups_only() -> None:
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((6, 3), np.float32)
    rhs = rng.standard_normal((4, 3, 2), np.float32)
    rhs[1] = np.nan
    sizes = np.array([2, 0, 1, 3], np.int32)
    want = np.concatenate([lhs[:2] @ rhs[0], lhs[2:3] @ rhs[2], lhs[3:] @ rhs[3]])
    dense.close(jax.jit(layer.ragged_dot)(lhs, rhs, sizes), want)
    rhs[2] = np.nan
    assert np.isnan(np.asarray(layer.ragged_dot(lhs, rhs, sizes))[2]).all()
