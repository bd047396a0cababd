"""What JAX has without this library: expert-parallel layers in their usual forms, and what they hold and send.

Each layer runs on one rank inside shard_map and takes what ours takes: x [s, H], ids [s, K], route weights [s, K],
this rank's expert weights, and the grouped GEMM. Shapes are static, so all but the ones with a capacity hold the worst
case. Permutations are gathers in both directions, which is faster than a gather whose gradient scatters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Shape
from jax import lax

AXIS = "expert"  # of the mesh; levanter asks for this name
Params = Mapping[str, jax.Array]
Gemm = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A layer and its sizes, all static ones as functions of a shape.

    Attributes:
      layer: the layer, as it runs on one rank.
      rows: rows that each rank's experts are given room for.
      moved: rows of H elements that a rank holds beside those: gathered, sent, received, returned.
      kept: of `share` [source, destination], rows by the experts' home, those that are not dropped.
      computed: of `kept` [source, destination], rows of each rank's GEMM.
      crossing: of `kept` [source, destination], rows that reach each rank over a link in a forward dispatch; as many
        leave it in the combine.
    """

    layer: Callable[..., jax.Array]
    rows: Callable[[Shape], int]
    moved: Callable[[Shape], int]
    kept: Callable[[Shape, Array], Array]
    computed: Callable[[Shape, Array], Array]
    crossing: Callable[[Shape, Array], Array]


def swiglu(rows: jax.Array, sizes: jax.Array, params: Params, gemm: Gemm) -> jax.Array:
    """The experts, on rows grouped by expert."""
    inner = jax.nn.silu(gemm(rows, params["gate"], sizes)) * gemm(rows, params["up"], sizes)
    return gemm(inner, params["down"], sizes)


# -- rows to places and back -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def move(rows: jax.Array, source: jax.Array, back: jax.Array, topk: int = 1) -> jax.Array:
    """Row i of the result is rows[source[i] // topk], zero where that is outside.

    back: the inverse of `source`, which the gradient goes by.
    """
    return jnp.take(rows, source // topk, axis=0, mode="fill", fill_value=0)


def _move_fwd(rows: jax.Array, source: jax.Array, back: jax.Array, topk: int) -> tuple[jax.Array, jax.Array]:
    return move(rows, source, back, topk), back


def _move_bwd(topk: int, back: jax.Array, ct: jax.Array) -> tuple[jax.Array, None, None]:
    taken = jnp.take(ct, back, axis=0, mode="fill", fill_value=0)
    return taken.reshape(-1, topk, *ct.shape[1:]).sum(1), None, None


move.defvjp(_move_fwd, _move_bwd)


def inverse(order: jax.Array, length: int, outside: int) -> jax.Array:
    """inverse[order[i]] = i; `outside` elsewhere. Indices of `length` and more are dropped."""
    return jnp.full(length, outside, np.int32).at[order].set(jnp.arange(len(order), dtype=np.int32), mode="drop")


def weigh(rows: jax.Array, w: jax.Array) -> jax.Array:
    """Sums a token's rows by their route weights, in float32."""
    return jnp.einsum("skh,sk->sh", rows.reshape(*w.shape, -1).astype(np.float32), w).astype(rows.dtype)


def local_ids(ids: jax.Array, epn: int) -> jax.Array:
    """Ids of this rank's experts, epn for all others."""
    local = ids - lax.axis_index(AXIS) * epn
    return jnp.where((local >= 0) & (local < epn), local, epn)


def grouped(local: jax.Array, epn: int) -> tuple[jax.Array, jax.Array]:
    """Order that groups rows by their local expert, other rows last; rows per expert."""
    sizes = (local[:, None] == jnp.arange(epn)).sum(0, dtype=np.int32)
    return jnp.argsort(local, stable=True).astype(np.int32), sizes


def experts(rows: jax.Array, local: jax.Array, params: Params, gemm: Gemm) -> jax.Array:
    """Groups rows by expert, applies the experts, and undoes the grouping."""
    order, sizes = grouped(local, len(params["gate"]))
    back = inverse(order, len(order), 0)
    return move(swiglu(move(rows, order, back), sizes, params, gemm), back, order)


# -- the layers --------------------------------------------------------------------------------------------------------


def ring(x: jax.Array, ids: jax.Array, w: jax.Array, params: Params, gemm: Gemm) -> jax.Array:
    """All tokens to all ranks, each computes the rows of its experts, partial sums back."""
    x, ids, w = (lax.all_gather(a, AXIS, tiled=True) for a in (x, ids, w))
    epn = len(params["gate"])
    room = len(x) * min(w.shape[1], epn)
    order, sizes = grouped(local_ids(ids.reshape(-1), epn), epn)
    order = jnp.where(jnp.arange(room) < sizes.sum(), order[:room], ids.size)  # behind the last group: no row
    back = inverse(order, ids.size, room)
    out = swiglu(move(x, order, back, w.shape[1]), sizes, params, gemm)
    return lax.psum_scatter(weigh(move(out, back, order), w), AXIS, tiled=True)


def dense(x: jax.Array, ids: jax.Array, w: jax.Array, params: Params, gemm: Gemm) -> jax.Array:
    """All tokens to all ranks, each computes all of its experts on all of them, partial sums back."""
    del gemm
    x, ids, w = (lax.all_gather(a, AXIS, tiled=True) for a in (x, ids, w))
    epn = len(params["gate"])
    scale = jnp.where(local_ids(ids, epn)[:, :, None] == jnp.arange(epn), w[:, :, None], 0).sum(1)
    gate, up = (jnp.einsum("th,ehf->etf", x, params[name]) for name in ("gate", "up"))
    inner = (jax.nn.silu(gate) * up * scale.T[:, :, None]).astype(x.dtype)
    return lax.psum_scatter(jnp.einsum("etf,efh->th", inner, params["down"]), AXIS, tiled=True)


def capacity(shape: Shape, factor: float | None) -> int:
    """Rows of a pair of ranks: that many times the mean; None: as many as there can be, experts of a token distinct."""
    if factor is None:
        return shape.s * min(shape.K, shape.epn)
    return int(np.ceil(factor * shape.s * shape.K / shape.R))


def all_to_all(
    x: jax.Array, ids: jax.Array, w: jax.Array, params: Params, gemm: Gemm, *, factor: float | None
) -> jax.Array:
    """Rows to ranks in buffers of one size per pair, results back the same way."""
    ranks, epn, n = lax.axis_size(AXIS), len(params["gate"]), ids.size
    room = capacity(Shape(ranks, len(x), w.shape[1], ranks * epn, x.shape[1]), factor)
    flat = ids.reshape(-1)
    rank = flat // epn
    one_hot = rank[:, None] == jnp.arange(ranks)
    place = (jnp.cumsum(one_hot, axis=0) * one_hot).sum(1).astype(np.int32) - 1  # among the rows to this rank
    slot = jnp.where(place < room, rank * room + place, ranks * room)
    source = inverse(slot, ranks * room, n)
    swap = functools.partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
    there = swap(move(x, source, slot, w.shape[1]))
    local = local_ids(swap(jnp.take(flat, source, mode="fill", fill_value=-1)), epn)
    return weigh(move(swap(experts(there, local, params, gemm)), slot, source), w)


def ragged(x: jax.Array, ids: jax.Array, w: jax.Array, params: Params, gemm: Gemm) -> jax.Array:
    """Rows to ranks as many as there are, into a buffer that holds the worst case, and back. Not on CPUs."""
    ranks, epn, n = lax.axis_size(AXIS), len(params["gate"]), ids.size
    room = ranks * len(x) * min(w.shape[1], epn)
    flat, me = ids.reshape(-1), lax.axis_index(AXIS)
    order = jnp.argsort(flat // epn, stable=True).astype(np.int32)
    back = inverse(order, n, 0)
    counts = lax.all_gather(jnp.bincount(flat // epn, length=ranks).astype(np.int32), AXIS)  # [source, destination]
    sent_at = jnp.cumsum(counts, axis=1) - counts  # where a source keeps its rows to a destination
    here_at = jnp.cumsum(counts, axis=0) - counts  # where a destination puts a source's
    there = functools.partial(
        lax.ragged_all_to_all, input_offsets=sent_at[me], send_sizes=counts[me], output_offsets=here_at[me],
        recv_sizes=counts[:, me], axis_name=AXIS,
    )  # fmt: skip
    home = functools.partial(
        lax.ragged_all_to_all, input_offsets=here_at[:, me], send_sizes=counts[:, me], output_offsets=sent_at[:, me],
        recv_sizes=counts[me], axis_name=AXIS,
    )  # fmt: skip
    rows = there(move(x, order, back, w.shape[1]), jnp.zeros((room, x.shape[1]), x.dtype))
    local = local_ids(there(flat[order], jnp.full(room, -1, np.int32)), epn)
    out = home(experts(rows, local, params, gemm), jnp.zeros((n, x.shape[1]), x.dtype))
    return weigh(move(out, back, order), w)


# -- their sizes -------------------------------------------------------------------------------------------------------


def worst_case(shape: Shape) -> int:
    """Rows that one rank's experts can be chosen for, if the experts of a token are distinct."""
    return shape.R * shape.s * min(shape.K, shape.epn)


def _all(shape: Shape, share: Array) -> Array:
    del shape
    return share


def _home_rows(shape: Shape, kept: Array) -> Array:
    del shape
    return kept.sum(0)


def _tokens_of_others(shape: Shape, kept: Array) -> Array:
    del kept
    return np.full(shape.R, (shape.R - 1) * shape.s)


def _with_capacity(factor: float | None) -> Peer:
    return Peer(
        functools.partial(all_to_all, factor=factor),
        rows=lambda shape: shape.R * capacity(shape, factor),
        moved=lambda shape: 4 * shape.R * capacity(shape, factor),
        kept=lambda shape, share: np.minimum(share, capacity(shape, factor)),
        computed=_home_rows,
        crossing=lambda shape, kept: np.full(shape.R, (shape.R - 1) * capacity(shape, factor)),
    )


PEERS: dict[str, Peer] = {
    "ring": Peer(ring, worst_case, lambda shape: 2 * shape.R * shape.s, _all, _home_rows, _tokens_of_others),
    "all_to_all full": _with_capacity(None),
    "all_to_all 1.25": _with_capacity(1.25),
    "dense": Peer(
        dense,
        rows=lambda shape: shape.R * shape.s * shape.epn,
        moved=lambda shape: 2 * shape.R * shape.s,
        kept=_all,
        computed=lambda shape, kept: np.full(shape.R, shape.R * shape.s * shape.epn),
        crossing=_tokens_of_others,
    ),
    "ragged_all_to_all": Peer(
        ragged,
        worst_case,
        moved=lambda shape: 2 * (shape.s * shape.K + worst_case(shape)),
        kept=_all,
        computed=_home_rows,
        crossing=lambda shape, kept: kept.sum(0) - np.diag(kept),
    ),
}


# -- layers of other packages ------------------------------------------------------------------------------------------


def levanter(mesh: jax.sharding.Mesh, gemm: Gemm) -> dict[str, Peer]:
    """Levanter's grug ring with the same grouped GEMM; these layers take global arrays. ImportError if it is absent.

    Its capacity is per rank, a multiple of the mean, and all of it is computed: R times the mean is exact. The weights
    of gate and up are joined first, as it wants them.
    """
    from levanter.grug import grug_moe  # pyright: ignore[reportMissingImports]
    from levanter.grug._moe import ep_ring  # pyright: ignore[reportMissingImports]

    ep_ring.ragged_dot = gemm

    def layer(x: jax.Array, ids: jax.Array, w: jax.Array, params: Params, factor: float) -> jax.Array:
        joined = jnp.concatenate([params["gate"], params["up"]], axis=-1)
        return grug_moe.moe_mlp(
            x, ids, w, joined, params["down"], implementation="ring", mesh=mesh, capacity_factor=factor
        )

    def peer(factor: float) -> Peer:
        def rows(shape: Shape) -> int:
            return max(shape.epn, int(np.ceil(factor * shape.s * shape.K)))

        return Peer(
            functools.partial(layer, factor=factor),
            rows,
            moved=lambda shape: 2 * shape.R * shape.s,
            kept=lambda shape, share: np.minimum(share.sum(0), rows(shape))[None],
            computed=lambda shape, kept: np.full(shape.R, rows(shape)),
            crossing=_tokens_of_others,
        )

    return {"grug ring full": peer(float(mesh.size)), "grug ring 1.25": peer(1.25)}
