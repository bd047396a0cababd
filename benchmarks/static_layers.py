"""The peers that drop nothing, as whole layers from router logits on, to hold compiling and memory against.

A layer is layer(x [s, H], logits [s, E], params, K) -> [s, H], one rank's part inside shard_map over peers.AXIS. Where
params is None its experts have no GEMM: what is left is the exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import peers
from moonep_jax.grouped_gemm import tiled_dot


def experts(epn: int, params: Any) -> tuple[peers.Params, peers.Gemm]:
    """What a peer takes for its experts; None: silu(x) * x, whatever the expert."""
    if params is None:
        return dict.fromkeys(("gate", "up", "down"), jnp.zeros((epn, 1, 1))), lambda rows, _, sizes: rows
    return params, tiled_dot


def route(logits: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
    """Each token's K experts and their weights."""
    top, ids = jax.lax.top_k(logits.astype(jnp.float32), K)
    return ids, jax.nn.softmax(top, axis=-1)


def _layer(peer: Callable[..., jax.Array], x: jax.Array, logits: jax.Array, params: Any, K: int) -> jax.Array:
    epn = logits.shape[1] // jax.lax.axis_size(peers.AXIS)
    return peer(x, *route(logits, K), *experts(epn, params))


ring = functools.partial(_layer, peers.ring)
worst_case = functools.partial(_layer, functools.partial(peers.all_to_all, factor=None))
