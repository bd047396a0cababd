"""Two exact MoE layers of plain JAX, to hold setup, compiling and memory against: `ring` and `worst_case`.

Both drop nothing under any routing and have static shapes, as TransformerEngine's expert parallelism without drops and
levanter's ring do; they are one rank's part, for use inside shard_map over the axis "ep". Experts are SwiGLUs, or a
silu of the rows where params is None: then only the exchange is left. Notation as in models.py, epn = E/R.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from moonep_jax.layer import ragged_dot

Params = Mapping[str, jax.Array] | None


def ring(x: jax.Array, logits: jax.Array, params: Params, K: int) -> jax.Array:
    """all_gather of tokens; each rank computes what its experts were chosen for; psum_scatter of the sums.

    Args: x [s, H]; logits [s, E]; params gate and up [epn, H, F], down [epn, F, H], or None. Returns [s, H].
    """
    weights, ids = _route(logits, K)
    tokens, all_weights, all_ids = (jax.lax.all_gather(a, "ep", tiled=True) for a in (x, weights, ids))
    epn = logits.shape[1] // jax.lax.axis_size("ep")
    rows = _experts(tokens, all_weights, all_ids, epn, params)
    return jax.lax.psum_scatter(rows, "ep", scatter_dimension=0, tiled=True).astype(x.dtype)


def worst_case(x: jax.Array, logits: jax.Array, params: Params, K: int) -> jax.Array:
    """all_to_all of rows, with room for s * min(K, epn) of them from each rank to each; arguments as in `ring`."""
    (s, H), ranks = x.shape, jax.lax.axis_size("ep")
    epn = logits.shape[1] // ranks
    room = s * min(K, epn)
    weights, ids = _route(logits, K)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    to = flat[order] // epn
    starts = jnp.searchsorted(to, jnp.arange(ranks))
    place = to * room + jnp.arange(s * K) - starts[to]

    def exchange(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows.reshape(ranks, room, *rows.shape[1:]), "ep", 0, 0).reshape(rows.shape)

    sent = jnp.zeros((ranks * room, H), x.dtype).at[place].set(x[order // K])
    sent_ids = jnp.full((ranks * room, 1), -1, ids.dtype).at[place, 0].set(flat[order])
    got, got_ids = exchange(sent), exchange(sent_ids)
    out = exchange(_experts(got, jnp.ones(got_ids.shape, jnp.float32), got_ids, epn, params).astype(x.dtype))
    rows = out[place].astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros((s, H), jnp.float32).at[order // K].add(rows).astype(x.dtype)


def _route(logits: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
    top, ids = jax.lax.top_k(logits.astype(jnp.float32), K)
    return jax.nn.softmax(top, axis=-1), ids


def _experts(x: jax.Array, weights: jax.Array, ids: jax.Array, epn: int, params: Params) -> jax.Array:
    """[n, H] float32: the weighted sums of this rank's experts for n tokens; ids, weights [n, k]; others' ids are 0.

    A token has at most epn of its ids here, so n * min(k, epn) rows are enough.
    """
    n, k = ids.shape
    mine = ids.reshape(-1) - jax.lax.axis_index("ep") * epn
    mine = jnp.where((mine >= 0) & (mine < epn), mine, epn)
    order = jnp.argsort(mine, stable=True)[: n * min(k, epn)]
    sizes = jnp.zeros(epn + 1, jnp.int32).at[mine].add(1)[:epn]
    rows = x[order // k]
    if params is None:
        out = jax.nn.silu(rows).astype(jnp.float32)
    else:
        inner = jax.nn.silu(ragged_dot(rows, params["gate"], sizes)) * ragged_dot(rows, params["up"], sizes)
        out = ragged_dot(inner, params["down"], sizes).astype(jnp.float32)
    scale = jnp.where(mine[order] < epn, weights.reshape(-1)[order], 0.0)[:, None]
    return jnp.zeros((n, x.shape[1]), jnp.float32).at[order // k].add(jnp.where(scale != 0, out * scale, 0.0))
