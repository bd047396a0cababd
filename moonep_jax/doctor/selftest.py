"""The self-test: every op and its gradient once, on all devices as one EP group, compared with the oracle.

Collective over the processes; each compares what its own devices computed.
"""

from __future__ import annotations

import time
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import moonep_jax as moonep
from moonep_jax import reference
from moonep_jax.doctor.kind import mesh_of_all
from moonep_jax.doctor.rows import Row
from moonep_jax.errors import MoonEPError

_S, _K, _H, _F = 64, 2, 32, 16  # tokens per rank, experts per token, hidden, columns of a weight
_LIMIT_S: Final = 60.0
Arrays = dict[str, Any]


def row() -> Row:
    """Runs it."""
    start = time.monotonic()
    mesh = mesh_of_all()
    try:
        wrong = _differences(mesh)
    except (MoonEPError, jax.errors.JaxRuntimeError, ValueError) as error:
        fix = "see what the text names, and the rows above"
        return Row("selftest", "failure", f"{type(error).__name__}: {error}", fix, data={"passed": False, "wrong": []})
    seconds = time.monotonic() - start
    data = {"passed": not wrong, "wrong": wrong, "seconds": round(seconds, 2)}
    about = f"plan, dispatch, prefetch, combine and gradients on {mesh.size} rank(s), {seconds:.1f} s"
    if wrong:
        fix = "do not use this build here; report it with the output of `doctor --json`"
        return Row("selftest", "failure", f"{about}: {', '.join(wrong)} differ from the oracle", fix, data=data)
    return Row("selftest", "ok", f"{about}: equal to the oracle", data=data)


def _differences(mesh: jax.sharding.Mesh) -> list[str]:
    ranks = mesh.size
    experts = 2 * ranks
    config = moonep.EPConfig(
        tokens=_S,
        hidden=_H,
        topk=_K,
        experts=experts,
        dtype="float32",
        weights={"w": ((_H, _F), "float32")},
        timeout_s=_LIMIT_S,
        first_call_timeout_s=_LIMIT_S,
    )
    arrays = _inputs(ranks, experts)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    with moonep.setup(mesh, "ep", config) as ep:
        operands = {n: jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for n, a in arrays.items()}
        got = jax.block_until_ready(_step(ep, mesh)(operands))
        ep.check()
        # While the domain is open: comparing takes time, and close() is collective.
        return _compare(got, _expected(arrays, experts))


def _inputs(ranks: int, experts: int) -> Arrays:
    """Operands of all ranks, alike in every process; most tokens go to expert 0, so that rows and experts move."""
    rng = np.random.default_rng(0)
    hot = rng.random((ranks, _S, _K)) < 0.6

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    rows = reference.recv_rows(_S, _K, experts, ranks, 8)
    return {
        "ids": np.where(hot, 0, rng.integers(-1, experts, hot.shape)).astype(np.int32),
        "x": normal(ranks, _S, _H),
        "weights": normal(ranks, _S, _K),
        "w": normal(ranks, experts // ranks, _H, _F),
        "ct_hidden": normal(ranks, rows, _H),
        "ct_weights": normal(ranks, rows),
        "out": normal(ranks, rows, _H),
        "dy": normal(ranks, _S, _H),
        "ct_w": normal(ranks, 2 * experts // ranks, _H, _F),
    }


def _step(ep: moonep.Domain, mesh: jax.sharding.Mesh) -> Any:
    def body(a: Arrays) -> Arrays:
        a = {name: value[0] for name, value in a.items()}
        p = ep.plan(a["ids"])

        def dispatch(x: Any, weights: Any) -> Any:
            d = ep.dispatch(x, a["ids"], weights, p)
            return d.hidden, d.weights

        (hidden, weights), dispatch_vjp = jax.vjp(dispatch, a["x"], a["weights"])
        y, combine_vjp = jax.vjp(lambda out: ep.combine(p, out), a["out"])
        w, prefetch_vjp = jax.vjp(lambda w: ep.prefetch(p, {"w": w})["w"], a["w"])
        dx, dweights = dispatch_vjp((a["ct_hidden"], a["ct_weights"]))
        results = {
            "plan": p.src,
            "dispatch": hidden,
            "dispatch weights": weights,
            "combine": y,
            "prefetch": w,
            "dispatch_grad": dx,
            "dispatch_grad weights": dweights,
            "combine_grad": combine_vjp(a["dy"])[0],
            "reduce_grad": prefetch_vjp(a["ct_w"])[0],
        }
        return {name: value[None] for name, value in results.items()}

    spec = PartitionSpec("ep")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


def _expected(a: Arrays, experts: int) -> Arrays:
    p = reference.plan(a["ids"], experts)
    hidden, weights = reference.dispatch(p, a["x"], a["weights"])
    dx, dweights = reference.dispatch_grad(p, a["ct_hidden"], a["ct_weights"])
    return {
        "plan": p.src,
        "dispatch": hidden,
        "dispatch weights": weights,
        "combine": reference.combine(p, a["out"]),
        "prefetch": reference.prefetch(p, a["w"]),
        "dispatch_grad": dx,
        "dispatch_grad weights": dweights,
        "combine_grad": reference.combine_grad(p, a["dy"], a["out"])[0],
        "reduce_grad": reference.reduce_grad(p, a["ct_w"]),
    }


def _compare(got: Arrays, want: Arrays) -> list[str]:
    """Results of this process's devices that do not have the oracle's bits."""
    return [
        name
        for name, array in got.items()
        if any(np.asarray(s.data).tobytes() != want[name][s.index].tobytes() for s in array.addressable_shards)
    ]
