"""Planted corruption: one bit of one result of one op, flipped on one rank, in every program traced from then on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonep_jax import primitives


def flip(monkeypatch: Any, op: str, result: int, rank: int, index: tuple[int, ...], bit: int) -> None:
    """The first call of `op` that is traced returns its `result` with one bit of the element at `index` flipped.

    Later calls of the op are left alone: what a check sends again is not what it checks.
    """
    real, seen = primitives.call, []

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        results = list(real(name, *args, **kwargs))
        if name == op and not seen:
            seen.append(name)
            array = results[result]
            unsigned = np.dtype(f"uint{8 * array.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(array, unsigned)
            mask = np.zeros(array.shape, unsigned)
            mask[index] = 1 << bit
            flipped = jax.lax.bitcast_convert_type(bits ^ mask, array.dtype)
            results[result] = jnp.where(jax.lax.axis_index("ep") == rank, flipped, array)
        return results

    monkeypatch.setattr(primitives, "call", call)
