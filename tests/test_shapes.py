"""One MoE layer, forward and backward, gives the dense numbers in every process shape and on every kind of mesh.

The data does not depend on the mesh: 4 devices share the same tokens and experts in every case, so one dense result
serves them all. Expert weights are replicated over the axes that are not EP, so their gradients sum over all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Run, launch, one_fast
from workers.shapes import MESHES

from moonep_jax import reference

pytestmark = pytest.mark.multiprocess

TOKENS, HIDDEN, WIDE, EXPERTS, TOPK = 64, 16, 8, 8, 2
LEAVES = ("gate", "up", "down")
# Largest error relative to the largest value of an array. bfloat16: rows, weights and gradients are rounded to 8 bits
# at each of some five steps, and the dense result is not.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
SHAPES = {"1x4": (1, 4), "4x1": (4, 1), "2x2": (2, 2)}


def _inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    shapes = {"gate": (EXPERTS, HIDDEN, WIDE), "up": (EXPERTS, HIDDEN, WIDE), "down": (EXPERTS, WIDE, HIDDEN)}
    data = {"x": rng.normal(size=(TOKENS, HIDDEN)), "router": rng.normal(size=(HIDDEN, EXPERTS)) / 2}
    data["x"][:, 0] = 1.0
    data["router"][0] = np.linspace(3, -3, EXPERTS)  # low experts are hot: every group of ranks has rows to move
    data["ct"] = rng.normal(size=(TOKENS, HIDDEN))
    for suffix in ("", "2"):
        data |= {leaf + suffix: rng.normal(size=shape) / np.sqrt(shape[1]) for leaf, shape in shapes.items()}
    # Exact in bfloat16, so that both dtypes route alike.
    return {name: value.astype(jnp.bfloat16).astype(np.float32) for name, value in data.items()}


def _ids(x: Any, router: Any) -> np.ndarray:
    return np.asarray(jax.lax.top_k(x @ router, TOPK)[1])


def _dense(x: jax.Array, router: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    top, ids = jax.lax.top_k(x @ router, TOPK)
    gate, up, down = (params[leaf][ids] for leaf in LEAVES)
    inner = jax.nn.silu(jnp.einsum("th,tkhf->tkf", x, gate)) * jnp.einsum("th,tkhf->tkf", x, up)
    return jnp.einsum("tk,tkf,tkfh->th", jax.nn.softmax(top), inner, down)


def _expected(prefix: str, f: Callable[..., jax.Array], ct: np.ndarray, *args: Any) -> dict[str, np.ndarray]:
    y, back = jax.vjp(f, *args)
    dx, drouter, *dparams = back(jnp.asarray(ct))
    named = {"y": y, "dx": dx, "drouter": drouter}
    for suffix, grads in zip(("", "2"), dparams, strict=False):
        named |= {f"d{leaf}{suffix}": grads[leaf] for leaf in LEAVES}
    return {prefix + name: np.asarray(value) for name, value in named.items()}


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = _inputs()
    first, second = ({leaf: jnp.asarray(data[leaf + suffix]) for leaf in LEAVES} for suffix in ("", "2"))
    x, router, ct = data["x"], data["router"], data["ct"]
    one = _expected("", _dense, ct, x, router, first)

    def model(x: jax.Array, router: jax.Array, first: Any, second: Any) -> jax.Array:
        x = x + _dense(x, router, first)
        x = x + _dense(x, router, second)
        return x + _dense(x, router, first)

    for dtype in TOLERANCE:
        data |= {f"{dtype}/{name}": value for name, value in one.items()}
    data |= _expected("two_domains/", model, ct, x, router, first, second)
    path = tmp_path_factory.mktemp("shapes") / "data.npz"
    np.savez(path, **data)
    return path


@pytest.fixture(scope="module", params=one_fast(SHAPES, "2x2"))
def run(request: pytest.FixtureRequest, data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp(request.param)
    return launch("shapes:run", *SHAPES[request.param], out, args={"data": str(data_file)})


@pytest.mark.parametrize("case", [*MESHES, "two_domains"])
def test_layer_equals_dense(run: Run, case: str) -> None:
    tolerance = TOLERANCE[MESHES[case][-1] if case in MESHES else "float32"]
    for process, errors in enumerate(run.of(case)):
        wrong = {name: error for name, error in errors.items() if error > tolerance}
        assert len(errors) >= 6 and not wrong, f"process {process}: {wrong} above {tolerance}; all: {errors}"


def test_processes_end_well(run: Run) -> None:
    run.ended_well()


@pytest.mark.parametrize("ranks", [2, 4])
def test_routing_moves_rows(ranks: int) -> None:
    """The comparison with dense would prove nothing of prefetch and reduce_grad if nobody had foreign experts."""
    data = _inputs()
    counts = reference.counts_of(_ids(data["x"], data["router"]).reshape(ranks, -1, TOPK), EXPERTS)
    assert reference.allocate(counts)[1] in ("lean", "cascade")
