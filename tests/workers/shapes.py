"""Worker of test_shapes: a whole MoE layer, forward and backward, on every kind of mesh, against the dense result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from workers import Context

NAMES = ("data", "expert")
# Name -> mesh shape, axis names, EP axes, order of the devices, axis type, dtype of rows and weights. Always 4 devices.
MESHES: dict[str, tuple[Any, ...]] = {
    "one_axis": ((4,), ("ep",), "ep", None, AxisType.Auto, "float32"),
    "second_axis": ((2, 2), NAMES, "expert", None, AxisType.Auto, "float32"),
    "first_axis": ((2, 2), NAMES, "data", None, AxisType.Auto, "float32"),
    "both_axes": ((2, 2), NAMES, ("data", "expert"), None, AxisType.Auto, "float32"),
    "both_axes_swapped": ((2, 2), NAMES, ("expert", "data"), None, AxisType.Auto, "float32"),
    "four_groups_of_one": ((4, 1), NAMES, "expert", None, AxisType.Auto, "float32"),
    "permuted": ((4,), ("ep",), "ep", (2, 0, 3, 1), AxisType.Auto, "float32"),
    "permuted_groups": ((2, 2), NAMES, "expert", (3, 0, 2, 1), AxisType.Auto, "float32"),
    "explicit": ((4,), ("ep",), "ep", None, AxisType.Explicit, "float32"),
    "explicit_groups": ((2, 2), NAMES, "expert", None, AxisType.Explicit, "float32"),
    "bfloat16": ((4,), ("ep",), "ep", None, AxisType.Auto, "bfloat16"),
    "bfloat16_groups": ((2, 2), NAMES, "data", None, AxisType.Auto, "bfloat16"),
}


def run(c: Context) -> None:
    with np.load(c.args["data"]) as file:
        data = {name: file[name] for name in file.files}
    for name in MESHES:
        c.case(name, lambda name=name: _one_layer(c, name, data))
    c.case("two_domains", lambda: _two_domains(c, data))


def config(data: dict[str, np.ndarray], devices: int, dtype: Any) -> moonep.EPConfig:
    experts, hidden, wide = data["gate"].shape
    weights = {"gate": ((hidden, wide), dtype), "up": ((hidden, wide), dtype), "down": ((wide, hidden), dtype)}
    return moonep.EPConfig(
        tokens=len(data["x"]) // devices, hidden=hidden, topk=2, experts=experts, dtype=dtype, weights=weights
    )


def layer(ep: moonep.Domain, x: Any, router: Any, params: Any, channel: int = 0) -> Any:
    logits = x.astype(np.float32) @ router
    return ep.moe(x, logits, params, channel=channel)


def _errors(c: Context, prefix: str, got: Any, data: dict[str, np.ndarray]) -> dict[str, float]:
    """Error of y and of each gradient, by name."""
    y, (dx, drouter, dparams) = got
    arrays = {"y": y, "dx": dx, "drouter": drouter, **{f"d{name}": g for name, g in dparams.items()}}
    return {name: c.error(array, data[prefix + name]) for name, array in arrays.items()}


def _one_layer(c: Context, name: str, data: dict[str, np.ndarray]) -> dict[str, float]:
    shape, names, axes, order, axis_type, dtype = MESHES[name]
    mesh = c.mesh(shape, names, order, axis_type)
    tokens, experts = P(names), P(axes)
    specs = (tokens, P(), {leaf: experts for leaf in ("gate", "up", "down")})
    params = {leaf: c.put(data[leaf].astype(dtype), mesh, experts) for leaf in ("gate", "up", "down")}
    x = c.put(data["x"].astype(dtype), mesh, tokens)
    ct = c.put(data["ct"].astype(dtype), mesh, tokens)
    with moonep.setup(mesh, axes, config(data, c.devices, dtype)) as ep:
        moe = jax.shard_map(
            lambda x, router, params: layer(ep, x, router, params), mesh=mesh, in_specs=specs, out_specs=tokens
        )

        @jax.jit
        def step(x: Any, router: Any, params: Any, ct: Any) -> Any:
            y, back = jax.vjp(moe, x, router, params)
            return y, back(ct)

        got = jax.block_until_ready(step(x, c.put(data["router"], mesh, P()), params, ct))
        return _errors(c, f"{dtype}/", got, data)


def _two_domains(c: Context, data: dict[str, np.ndarray]) -> dict[str, float]:
    """Two domains over different axes of one mesh, used in turns in one step: rows, columns, rows again."""
    mesh = c.mesh((2, 2), NAMES)
    tokens = P(NAMES)
    cfg = config(data, c.devices, np.float32)
    with moonep.setup(mesh, "data", cfg) as rows, moonep.setup(mesh, "expert", cfg) as columns:
        specs = tuple({leaf: P(axis) for leaf in ("gate", "up", "down")} for axis in NAMES)

        def model(x: Any, router: Any, first: Any, second: Any) -> Any:
            x = x + layer(rows, x, router, first, channel=0)
            x = x + layer(columns, x, router, second, channel=1)
            return x + layer(rows, x, router, first, channel=2)

        mapped = jax.shard_map(model, mesh=mesh, in_specs=(tokens, P(), *specs), out_specs=tokens)

        @jax.jit
        def step(x: Any, router: Any, first: Any, second: Any, ct: Any) -> Any:
            y, back = jax.vjp(mapped, x, router, first, second)
            dx, drouter, dfirst, dsecond = back(ct)
            return y, (dx, drouter, jax.tree.map(jnp.asarray, {**dfirst, **{f"{k}2": v for k, v in dsecond.items()}}))

        first = {leaf: c.put(data[leaf], mesh, P("data")) for leaf in ("gate", "up", "down")}
        second = {leaf: c.put(data[f"{leaf}2"], mesh, P("expert")) for leaf in ("gate", "up", "down")}
        x, ct = (c.put(data[name], mesh, tokens) for name in ("x", "ct"))
        got = jax.block_until_ready(step(x, c.put(data["router"], mesh, P()), first, second, ct))
        return _errors(c, "two_domains/", got, data)
