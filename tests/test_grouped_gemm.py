"""grouped_gemm.tiled_dot against NumPy in float64, and its gradients: sizes of groups around the tiles' edges."""

from __future__ import annotations

from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import PartitionSpec as P

from moonep_jax.grouped_gemm import tiled_dot

K, N = 5, 7
SIZES = {
    "none": ([0, 0, 0], 40),
    "one row": ([0, 1, 0], 1),
    "small buffer": ([3, 0, 4, 2], 10),
    "full buffer": ([31, 33, 0, 128, 1, 127, 129], 449),
    "ends in a tile of the buffer's last rows": ([130, 2, 0, 1], 133),
    "with a tail": ([100, 0, 300, 32], 500),
    "one group": ([0, 0, 257, 0], 257),
}


def expected(lhs: Any, rhs: Any, sizes: Any, ct: Any) -> tuple[Any, Any, Any]:
    lhs, rhs, ct = (np.asarray(a, np.float64) for a in (lhs, rhs, ct))
    out, dlhs, drhs = np.zeros_like(ct), np.zeros_like(lhs), np.zeros_like(rhs)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[g] if size else 0
        dlhs[rows] = ct[rows] @ rhs[g].T if size else 0
        drhs[g] = lhs[rows].T @ ct[rows] if size else 0
        start += size
    return out, dlhs, drhs


def both(lhs: Any, rhs: Any, sizes: Any, ct: Any) -> Any:
    out, back = jax.vjp(lambda a, b: tiled_dot(a, b, sizes), lhs, rhs)
    return out, *back(ct)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equals_numpy(name: str, dtype: str) -> None:
    """Empty groups' matrices are NaN, and so are the rows behind the last group, in lhs and in the cotangent."""
    sizes, m = SIZES[name]
    rng = np.random.default_rng(m)
    lhs, rhs, ct = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, K), (len(sizes), K, N), (m, N)))
    tail = (np.arange(m) >= sum(sizes))[:, None]
    empty = (np.array(sizes) == 0)[:, None, None]
    want = expected(lhs, rhs, sizes, ct)
    lhs, rhs, ct = jnp.where(tail, np.nan, lhs), jnp.where(empty, np.nan, rhs), jnp.where(tail, np.nan, ct)
    got = jax.jit(both)(lhs, rhs, jnp.array(sizes, np.int32), ct)
    assert [g.dtype for g in got] == [np.dtype(dtype)] * 3
    dense.close(got, want, 1e-5 if dtype == "float32" else 2e-2)


def test_a_nan_stays_in_its_group() -> None:
    sizes = [40, 3, 90]
    rng = np.random.default_rng(0)
    lhs, rhs, ct = (rng.standard_normal(shape, np.float32) for shape in ((133, K), (3, K, N), (133, N)))
    lhs[41] = np.nan
    ct[42] = np.nan
    out, dlhs, drhs = (np.isfinite(a) for a in both(lhs, rhs, np.array(sizes, np.int32), ct))
    assert (~out.all(axis=1)).nonzero()[0].tolist() == [41]
    assert (~dlhs.all(axis=1)).nonzero()[0].tolist() == [42]
    assert drhs.all(axis=(1, 2)).tolist() == [True, False, True]


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map_with_replicated_matrices(check_vma: bool) -> None:
    """Replicated matrices get the sum of all ranks' gradients where types say so."""
    mesh = make_mesh((2,), ("ep",))
    rng = np.random.default_rng(0)
    lhs, rhs, ct = (rng.standard_normal(shape, np.float32) for shape in ((80, K), (3, K, N), (80, N)))
    sizes = np.array([[30, 0, 6], [0, 40, 0]], np.int32)

    def step(lhs: Any, rhs: Any, sizes: Any, ct: Any) -> Any:
        out, dlhs, drhs = both(lhs, rhs, sizes[0], ct)
        return out, dlhs, drhs if check_vma else jax.lax.psum(drhs, "ep")

    specs = (P("ep"), P(), P("ep"), P("ep"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P("ep"), P()), check_vma=check_vma)
    got = jax.jit(mapped)(lhs, rhs, sizes, ct)
    parts = [expected(lhs[r * 40 :][:40], rhs, sizes[r], ct[r * 40 :][:40]) for r in range(2)]
    want = (*(np.concatenate([p[i] for p in parts]) for i in (0, 1)), parts[0][2] + parts[1][2])
    dense.close(got, want)


def test_costs_rows_not_groups() -> None:
    """No operand of the size of all groups times all rows: what made lax.ragged_dot slow on CPUs."""
    args = (jnp.zeros((512, 64)), jnp.zeros((16, 64, 64)), jnp.zeros(16, np.int32), jnp.zeros((512, 64)))
    memory: Any = jax.jit(both).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 64 * 4 * 4
