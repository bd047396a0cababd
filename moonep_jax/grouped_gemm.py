"""A grouped GEMM for CPUs in plain JAX: rows times their group's matrix, at the cost of the rows. Touches no memory.

`lax.ragged_dot` on a CPU multiplies every group's matrix by every row. Here loops go over the groups that hold rows,
and in each over tiles of its rows: dynamic trip counts, so the gradients are written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moonep_jax import checks

C = TypeVar("C")

# Rows of a tile: large ones as long as they are full, small ones for the rest of a group. A GEMM of fewer rows runs
# below half of the speed, and what a group's last tile computes beyond its end is for nothing.
_TILES = (128, 32)


def tiled_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """lhs [m, k] by rhs [g, k, n] -> [m, n]; the rows of a group follow those of the group before.

    Rows behind the last group give zeros and take zeros as gradient, whatever they hold. The matrix of an empty group
    is not read; its gradient is zero. Sums are float32 or wider. Differentiable in reverse, in lhs and rhs.

    Args:
      lhs: rows, of any float dtype.
      rhs: a matrix per group.
      group_sizes: [g] int32, their sum at most m.
    """
    return _dot(*checks.vary_together((jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes))))


@jax.custom_vjp
def _dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _rows(lhs, rhs, group_sizes, contract=1)


def _dot_fwd(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _dot(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _dot_bwd(residuals: tuple[jax.Array, ...], ct: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, group_sizes = residuals
    dlhs = _rows(ct, rhs, group_sizes, contract=2).astype(lhs.dtype)
    return dlhs, _matrices(lhs, ct, group_sizes).astype(rhs.dtype), None


_dot.defvjp(_dot_fwd, _dot_bwd)


def _rows(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contract: int) -> jax.Array:
    """Each row times its group's matrix, over that axis of rhs; rows of no group are zero."""
    m, dtype = len(lhs), jnp.result_type(lhs, rhs)

    def group(g: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(rhs, g, keepdims=False)

        def tile(first: jax.Array, rows: int, out: jax.Array) -> jax.Array:
            at = jnp.minimum(first, m - rows)
            dot = lax.dot_general(
                lax.dynamic_slice_in_dim(lhs, at, rows), matrix, (((1,), (contract - 1,)), ((), ())),
                preferred_element_type=_wide(dtype),
            )  # fmt: skip
            # Rows beyond the group's end are overwritten by the groups behind it; rows before `first`, which are in
            # the last tile of the buffer, are done.
            old = lax.dynamic_slice_in_dim(out, at, rows)
            new = jnp.where((at + jnp.arange(rows) >= first)[:, None], dot.astype(dtype), old)
            return lax.dynamic_update_slice_in_dim(out, new, at, 0)

        return _over_tiles(start, end, m, tile, out)

    out = _over_groups(sizes, group, _zeros((m, rhs.shape[3 - contract]), dtype, lhs))
    return jnp.where((jnp.arange(m) < sizes.sum())[:, None], out, jnp.zeros_like(out))


def _matrices(lhs: jax.Array, ct: jax.Array, sizes: jax.Array) -> jax.Array:
    """Per group the product of its rows of lhs, transposed, with those of ct."""
    m, wide = len(lhs), _wide(jnp.result_type(lhs, ct))
    shape = (lhs.shape[1], ct.shape[1])

    def group(g: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        def tile(first: jax.Array, rows: int, total: jax.Array) -> jax.Array:
            at = jnp.minimum(first, m - rows)
            row = at + jnp.arange(rows)
            held = ((row >= first) & (row < end))[:, None]
            # Both: zero times another group's NaN is NaN.
            a, b = (jnp.where(held, lax.dynamic_slice_in_dim(v, at, rows), 0) for v in (lhs, ct))
            return total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=wide)

        total = _over_tiles(start, end, m, tile, _zeros(shape, wide, lhs))
        return lax.dynamic_update_index_in_dim(out, total.astype(ct.dtype), g, 0)

    return _over_groups(sizes, group, _zeros((len(sizes), *shape), ct.dtype, lhs))


def _over_groups(sizes: jax.Array, body: Callable[[jax.Array, jax.Array, jax.Array, C], C], carry: C) -> C:
    """carry = body(group, start, end, carry) for each group that holds rows, in order."""
    ends = jnp.cumsum(sizes)
    used = jnp.argsort(sizes == 0, stable=True)

    def step(i: jax.Array, carry: C) -> C:
        g = used[i]
        return body(g, ends[g] - sizes[g], ends[g], carry)

    return lax.fori_loop(0, jnp.sum(sizes > 0), step, carry)


def _over_tiles(start: jax.Array, end: jax.Array, room: int, body: Callable[[jax.Array, int, C], C], carry: C) -> C:
    """carry = body(first row, rows, carry) for tiles that cover the rows from start to end, in order.

    The last tile may reach beyond the end, and beyond all `room` rows; no tile is larger than those.
    """

    def step(start: jax.Array, rows: int, i: jax.Array, carry: C) -> C:
        return body(start + i * rows, rows, carry)

    for rows in (min(tile, room) for tile in _TILES):
        beyond = 0 if rows > _TILES[-1] else rows - 1
        count = (end - start + beyond) // rows
        carry = lax.fori_loop(0, count, functools.partial(step, start, rows), carry)
        start = start + count * rows
    return carry


def _wide(dtype: np.dtype) -> np.dtype:
    """What sums of this dtype are kept in."""
    return jnp.promote_types(dtype, np.float32)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`: a loop's carry keeps its type."""
    return checks.vary_together((jnp.zeros(shape, dtype), like))[0]
