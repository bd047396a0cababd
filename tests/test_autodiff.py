"""Gradients of whole layers against a dense one, under every way a program may be written around the ops.

The buffers are poisoned (conftest.py), so a row that nobody wrote would show as NaN. float32 results agree within 1e-5
of the largest element; bfloat16 ones within 2 % of float32 dense ones.
"""

from __future__ import annotations

import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

R = 4
WEIGHT = np.linspace(-1, 1, dense.HIDDEN, dtype=np.float32)  # of the loss, so that cotangents differ


def by_moe(ep: Any) -> Any:
    return lambda x, router, bias, params: ep.moe(x, dense.logits_of(x, router, bias), params)


def by_hand(ep: Any, full: bool = False) -> Any:
    """The layer written with the ops; `full`: the weights come as [2*epn] leaves."""

    def layer(x: Any, router: Any, bias: Any, params: Any) -> Any:
        top, ids = jax.lax.top_k(dense.logits_of(x, router, bias), dense.TOPK)
        p = ep.plan(ids.astype(np.int32))
        d = ep.dispatch(x, ids.astype(np.int32), jax.nn.softmax(top, axis=-1), plan=p)
        if full:
            params = {name: jnp.concatenate([w, jnp.zeros_like(w)]) for name, w in params.items()}
        w = ep.prefetch(p, params)
        gate = jax.lax.ragged_dot(d.hidden, w["gate"], d.group_sizes)
        up = jax.lax.ragged_dot(d.hidden, w["up"], d.group_sizes)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], d.group_sizes)
        return ep.combine(p, out, d.weights)

    return layer


def sharded(layer: Any, mesh: Any = None, check_vma: bool = True, x: Any = "ep") -> Any:
    specs = dense.specs(x)
    mesh = mesh or make_mesh((R,), ("ep",))
    return jax.shard_map(layer, mesh=mesh, in_specs=tuple(specs.values()), out_specs=specs["x"], check_vma=check_vma)


def loss_of(layer: Any, a: Any) -> Any:
    y = layer(a["x"], a["router"], a["bias"], a["params"])
    return (y.astype(np.float32) ** 2 * WEIGHT[None]).sum(), y


def value_and_grads(layer: Any) -> Any:
    """a -> (y, gradients of x, router, bias and expert weights)."""

    def run(a: Any) -> Any:
        (_, y), grads = jax.value_and_grad(functools.partial(loss_of, layer), has_aux=True)(a)
        return y, grads

    return run


expected = jax.jit(value_and_grads(dense.layer))


@pytest.mark.parametrize(
    ("kind", "wrap", "check_vma"),
    [
        ("moe", "jit", True),
        ("moe", "jit", False),
        ("hand", "jit", True),
        ("full", "jit", False),
        ("full", "jit", True),
        ("moe", "checkpoint", False),
        ("hand", "checkpoint", True),
        ("moe", "nested jit", True),
        ("full", "nested jit", False),
    ],
)
def test_layer(make_domain: Any, kind: str, wrap: str, check_vma: bool) -> None:
    ep = make_domain(R, **dense.config())
    layer = by_moe(ep) if kind == "moe" else by_hand(ep, full=kind == "full")
    if wrap == "checkpoint":
        layer = jax.checkpoint(layer)
    elif wrap == "nested jit":
        layer = jax.jit(layer)
    step = jax.jit(value_and_grads(sharded(layer, check_vma=check_vma)))
    for seed, skew in ((0, 0.0), (1, 3.0), (2, 30.0)):
        a = dense.inputs(R * dense.TOKENS, seed, skew)
        y, grads = step(a)
        dense.close((y, grads), expected(a))
        for name, grad in grads["params"].items():
            assert not np.asarray(grad[-1]).any(), f"{name}: the gradient of an expert without rows is not zero"


@pytest.mark.parametrize(("combine", "planner"), [("exact", "exact"), ("dedup", "home")])
def test_modes(make_domain: Any, combine: str, planner: str) -> None:
    ep = make_domain(R, **dense.config(combine=combine, planner=planner, token_padding=1))
    a = dense.inputs(R * dense.TOKENS)
    dense.close(jax.jit(value_and_grads(sharded(by_moe(ep))))(a), expected(a))


@pytest.mark.parametrize("ranks", [1, 8])
def test_other_rank_counts(make_domain: Any, ranks: int) -> None:
    ep = make_domain(ranks, **dense.config())
    a = dense.inputs(ranks * dense.TOKENS)
    mesh = make_mesh((ranks,), ("ep",))
    dense.close(jax.jit(value_and_grads(sharded(by_moe(ep), mesh)))(a), expected(a))


def test_without_jit(make_domain: Any) -> None:
    """Eager shard_map: every op is a program of its own."""
    ep = make_domain(R, **dense.config())
    a = dense.inputs(R * dense.TOKENS)
    dense.close(value_and_grads(sharded(by_hand(ep)))(a), expected(a))


def test_bfloat16(make_domain: Any) -> None:
    """Against the dense layer in float32 on the same bfloat16 numbers: 2 % of the largest element."""
    ep = make_domain(R, **dense.config("bfloat16"))
    a = dense.inputs(R * dense.TOKENS, dtype=jnp.bfloat16)
    y, grads = jax.jit(value_and_grads(sharded(by_moe(ep))))(a)
    assert y.dtype == grads["x"].dtype == grads["params"]["up"].dtype == jnp.bfloat16
    wide = jax.tree.map(lambda v: np.asarray(v, np.float32), a)
    dense.close((y, grads), expected(wide), tolerance=2e-2)


def deep(layer: Any, policy: str) -> Any:
    """A residual stack of layers in lax.scan; the layers' inputs lead with the axis of layers."""

    def body(x: Any, layer_inputs: Any) -> Any:
        router, bias, params = layer_inputs
        return x + layer(x, router, bias, params), None

    if policy == "remat":
        body = jax.checkpoint(body)
    elif policy == "save dots":
        body = jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)
    return lambda x, router, bias, params: jax.lax.scan(body, x, (router, bias, params))[0]


def stack(layers: int, ranks: int = R) -> Any:
    one = [dense.inputs(ranks * dense.TOKENS, seed) for seed in range(layers)]
    many = jax.tree.map(lambda *v: np.stack(v), *one)
    return {**many, "x": one[0]["x"]}


expected_deep = jax.jit(value_and_grads(deep(dense.layer, "plain")))


@pytest.mark.parametrize(
    ("policy", "check_vma"), [("plain", True), ("remat", True), ("remat", False), ("save dots", True)]
)
def test_scan_over_layers(make_domain: Any, policy: str, check_vma: bool) -> None:
    ep = make_domain(R, **dense.config())
    in_specs = (P("ep"), P(), P(), P(None, "ep"))
    mesh = make_mesh((R,), ("ep",))
    model = jax.shard_map(
        deep(by_moe(ep), policy), mesh=mesh, in_specs=in_specs, out_specs=P("ep"), check_vma=check_vma
    )
    a = stack(3)
    want = expected_deep(a)
    dense.close(jax.jit(value_and_grads(model))(a), want, tolerance=3e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_on_channels_of_their_own(make_domain: Any, remat: bool) -> None:
    """Three unrolled layers, with and without recomputation; each has a channel."""
    ep = make_domain(R, **dense.config())

    def model(x: Any, router: Any, bias: Any, params: Any) -> Any:
        for i in range(3):

            def layer(x: Any, i: int = i) -> Any:
                logits = dense.logits_of(x, router[i], bias[i])
                return x + ep.moe(x, logits, {name: w[i] for name, w in params.items()}, channel=i)

            x = (jax.checkpoint(layer) if remat else layer)(x)
        return x

    mesh = make_mesh((R,), ("ep",))
    step = jax.shard_map(model, mesh=mesh, in_specs=(P("ep"), P(), P(), P(None, "ep")), out_specs=P("ep"))
    a = stack(3)
    want = expected_deep(a)
    dense.close(jax.jit(value_and_grads(step))(a), want, tolerance=3e-5)


def test_training_with_donation(make_domain: Any) -> None:
    """Five steps of gradient descent, parameters donated: the same weights as the dense program's."""
    ep = make_domain(R, **dense.config())
    mesh = make_mesh((R,), ("ep",))

    def train(layer: Any) -> Any:
        def step(params: Any, rest: Any) -> Any:
            grads = jax.grad(lambda p: loss_of(layer, {**rest, "params": p})[0])(params)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

        return jax.jit(step, donate_argnums=(0,))

    a = dense.inputs(R * dense.TOKENS)
    rest = {"x": a["x"], "router": a["router"], "bias": a["bias"]}
    ours = jax.device_put(a["params"], NamedSharding(mesh, P("ep")))
    theirs = jax.device_put(a["params"])
    step, dense_step = train(sharded(by_moe(ep))), train(dense.layer)
    for _ in range(5):
        before = ours
        ours = jax.block_until_ready(step(ours, rest))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        theirs = dense_step(theirs, rest)
    dense.close(ours, theirs)


def test_x_alone_and_weights_alone(make_domain: Any) -> None:
    """Gradients of one operand, the others being constants: zero and symbolic cotangents take the same way."""
    ep = make_domain(R, **dense.config())
    a = dense.inputs(R * dense.TOKENS)
    want = expected(a)[1]
    layer = sharded(by_moe(ep))
    for name in ("x", "router", "params"):

        def loss(value: Any, name: str = name) -> Any:
            return loss_of(layer, {**a, name: value})[0]

        dense.close(jax.jit(jax.grad(loss))(a[name]), want[name])


def test_weights_of_dispatch_are_optional_in_combine(make_domain: Any) -> None:
    """Weights applied by the caller, not by combine: the same layer and gradients."""
    ep = make_domain(R, **dense.config())

    def layer(x: Any, router: Any, bias: Any, params: Any) -> Any:
        top, ids = jax.lax.top_k(dense.logits_of(x, router, bias), dense.TOPK)
        d = ep.dispatch(x, ids.astype(np.int32), jax.nn.softmax(top, axis=-1))
        w = ep.prefetch(d.plan, params)
        dot = functools.partial(jax.lax.ragged_dot, group_sizes=d.group_sizes)
        out = dot(jax.nn.silu(dot(d.hidden, w["gate"])) * dot(d.hidden, w["up"]), w["down"])
        return ep.combine(d.plan, out * d.weights[:, None])

    a = dense.inputs(R * dense.TOKENS)
    dense.close(jax.jit(value_and_grads(sharded(layer)))(a), expected(a))
