"""Worker of test_matching: stacks of layers under remat and scan, with gradients, against the dense result."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from workers import Context
from workers.matching import EP, Case, H, K, S, case

LAYERS = 3


def run(c: Context) -> None:
    for f in (remat_unrolled, remat_scan, remat_stacks):
        c.case(f.__name__, functools.partial(f, c))


def layer(at: Case, x: Any, ids: Any, weights: Any, scale: Any, channel: int = 0) -> Any:
    """x + sum over k of weights * tanh(x * scale[expert])."""
    d = at.ep.dispatch(x, ids, weights, channel=channel)
    w = at.ep.prefetch(d.plan, {"scale": scale})["scale"]
    rows = jnp.repeat(w, d.group_sizes, axis=0, total_repeat_length=d.hidden.shape[0])
    return x + at.ep.combine(d.plan, jnp.tanh(d.hidden * rows), d.weights)


def dense(x: Any, ids: Any, weights: Any, scale: Any) -> Any:
    return x + jnp.sum(weights[..., None] * jnp.tanh(x[:, None] * scale[ids]), axis=1)


def _inputs(at: Case, stack: int) -> tuple[Any, ...]:
    """x and, by layer: ids, weights, scale. Each layer's differ, so that layers that meet each other's calls show."""
    rng = np.random.default_rng([stack, at.ranks])
    tokens = at.ranks * S
    x = rng.normal(size=(tokens, H)).astype(np.float32)
    ids = [at.ids(stack, level) for level in range(LAYERS)]
    weights = [rng.uniform(0.2, 1, (tokens, K)).astype(np.float32) for _ in range(LAYERS)]
    scales = [rng.normal(size=(at.experts, H)).astype(np.float32) for _ in range(LAYERS)]
    return x, ids, weights, scales


def _gradients(forward: Any, ids: Any, floats: Any) -> Any:
    """Gradients of all floats, and the outputs, of `forward(stacks of (x, ids, weights, scales)) -> list of y`."""

    def loss(floats: Any) -> Any:
        ys = forward([(x, i, w, s) for (x, w, s), i in zip(floats, ids, strict=True)])
        return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

    return jax.grad(loss, has_aux=True)(floats)


def _dense_model(stacks: Any) -> Any:
    ys = []
    for x, ids, weights, scales in stacks:
        for level in range(LAYERS):
            x = dense(x, ids[level], weights[level], scales[level])
        ys.append(x)
    return ys


def _check(at: Case, model: Any, stacks: int, launches: int) -> list[str]:
    """Runs a model forward and backward; what differs from dense."""
    inputs = [_inputs(at, stack) for stack in range(stacks)]
    ids, floats = [i for _, i, _, _ in inputs], [(x, w, s) for x, _, w, s in inputs]
    expected = jax.tree.map(np.asarray, _gradients(_dense_model, ids, floats))
    step = jax.jit(functools.partial(_gradients, jax.shard_map(model, mesh=at.mesh, in_specs=EP, out_specs=EP)))
    placed = jax.tree.map(at.put, (ids, floats))
    bad = []
    for launch in range(launches):
        got = jax.block_until_ready(step(*placed))
        paths = jax.tree_util.tree_leaves_with_path(got)
        for (path, array), whole in zip(paths, jax.tree.leaves(expected), strict=True):
            if not (error := at.c.error(array, whole)) < 1e-5:
                bad.append(f"launch {launch}, {jax.tree_util.keystr(path)}: error {error}")
    return bad


def remat_unrolled(c: Context) -> list[str]:
    """Three layers written out under one jax.checkpoint, a channel each."""
    with case(c, 21) as at:

        @jax.checkpoint
        def stack(x: Any, ids: Any, weights: Any, scales: Any) -> Any:
            for level in range(LAYERS):
                x = layer(at, x, ids[level], weights[level], scales[level], channel=level)
            return x

        return _check(at, lambda given: [stack(*given[0])], stacks=1, launches=5)


def remat_scan(c: Context) -> list[str]:
    """scan over layers with remat of its body: one channel serves all layers."""
    with case(c, 22) as at:

        def stack(x: Any, ids: Any, weights: Any, scales: Any) -> Any:
            body = jax.checkpoint(lambda x, each: (layer(at, x, *each), None))
            each = tuple(jnp.stack(levels) for levels in (ids, weights, scales))
            return jax.lax.scan(body, x, each)[0]

        return _check(at, lambda given: [stack(*given[0])], stacks=1, launches=5)


def remat_stacks(c: Context) -> list[str]:
    """Two independent stacks of one checkpointed layer: lowered once per channel, so each use has its own."""
    with case(c, 23) as at:
        one = jax.checkpoint(functools.partial(layer, at), static_argnums=4)

        def model(given: Any) -> Any:
            ys = []
            for number, (x, ids, weights, scales) in enumerate(given):
                for level in range(LAYERS):
                    x = one(x, ids[level], weights[level], scales[level], number * LAYERS + level)
                ys.append(x)
            return ys

        return _check(at, model, stacks=2, launches=5)
