"""Worker of test_cuda_domain: the ops on ranks that share one GPU, one process each, against the oracle."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Shape, routing
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from moonep_jax import reference as ref
from moonep_jax.layer import ragged_dot
from moonep_jax.spec import PLAN_ARRAYS
from workers import Context, raised

LEAVES = {"gate": (24, 40), "up": (24, 40), "down": (40, 24)}


def run(c: Context) -> None:
    """All cases, or those named."""
    for name in c.args.get("cases", CASES):
        c.case(name, functools.partial(CASES[name], c))


def _jit(mesh: jax.sharding.Mesh, body: Any, check_vma: bool = True, **options: Any) -> Any:
    """jit(shard_map) of one rank's function; operands and results lead with the ranks."""

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], args)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
    return jax.jit(mapped, **options)


def _differs(c: Context, got: Any, want: Any) -> list[str]:
    """Names of the arrays of which this process's shard has other bytes than the oracle's."""
    wrong = []
    for name, array in got.items():
        for index, value in c.local(array):
            expected = np.ascontiguousarray(np.asarray(want[name])[index].astype(value.dtype))
            if value.tobytes() != expected.tobytes():
                wrong.append(f"{name}: {np.count_nonzero(value != expected)} of {value.size} elements")
    return wrong


ROUTINGS = ("uniform", "one_home", "duplicates", "unrouted", "out_of_range", "crowded")


def _rows(
    c: Context,
    dtype: str,
    mode: str,
    check_vma: bool = True,
    size: tuple[int, int] = (48, 40),
    routings: Sequence[str] = ROUTINGS,
) -> list[str]:
    mesh, r, (s, h) = c.mesh(), c.devices, size
    shape = Shape(r, s, 3, 4 * r, h)
    wrong: list[str] = []
    config = moonep.EPConfig(tokens=s, hidden=h, topk=3, experts=4 * r, dtype=jnp.dtype(dtype), combine=mode)
    with moonep.setup(mesh, "ep", config) as ep:

        def body(x: Any, ids: Any, w: Any, ct_h: Any, ct_w: Any, out: Any, dy: Any) -> Any:
            p = ep.plan(ids)
            dispatch = lambda x, w: (lambda d: (d.hidden, d.weights))(ep.dispatch(x, ids, w, p))  # noqa: E731
            (hidden, weights), back = jax.vjp(dispatch, x, w)
            y, combine_back = jax.vjp(functools.partial(ep.combine, p), out, weights)
            dx, dw = back((ct_h, ct_w))
            plan = {name: getattr(p, name) for name in PLAN_ARRAYS if name != "ticket"}
            return {
                **plan,
                "hidden": hidden,
                "weights": weights,
                "y": y,
                "dx": dx,
                "dw": dw,
                "dout": combine_back(dy)[0],
            }

        step = _jit(mesh, body, check_vma)
        for seed, name in enumerate(routings):
            rng = np.random.default_rng(seed)
            ids = routing(name, shape, seed)
            p = ref.plan(ids, 4 * r, 8)
            x, dy = (rng.normal(size=(r, s, h)).astype(dtype) for _ in range(2))
            out, ct_h = (rng.normal(size=(r, p.rows, h)).astype(dtype) for _ in range(2))
            out[np.asarray(p.src) < 0] = np.nan
            w, ct_w = rng.random((r, s, 3), np.float32), rng.random((r, p.rows), np.float32)
            got = step(*(c.put(a, mesh, P("ep")) for a in (x, ids, w, ct_h, ct_w, out, dy)))
            want = {}
            for array in PLAN_ARRAYS[:-1]:
                value = np.asarray(getattr(p, array))
                shared = array in ("slot_expert", "home_rows", "rank_rows")  # one value for all ranks
                want[array] = np.broadcast_to(value, (r, *value.shape)) if shared else value
            want["hidden"], want["weights"] = ref.dispatch(p, x, w)
            want["y"] = ref.combine(p, out, want["weights"], mode)
            want["dx"], want["dw"] = ref.dispatch_grad(p, ct_h, ct_w, mode)
            want["dout"] = ref.combine_grad(p, dy, out, want["weights"])[0]
            wrong += [f"{name}: {w}" for w in _differs(c, got, want)]
    return wrong


def _weights(c: Context, full: bool) -> list[str]:
    mesh, r, epn = c.mesh(), c.devices, 4
    shape = Shape(r, 32, 2, epn * r, 8)
    leaves = {name: (dims, jnp.bfloat16) for name, dims in LEAVES.items()}
    config = moonep.EPConfig(tokens=32, hidden=8, topk=2, experts=epn * r, weights=leaves, stage_bytes=epn * 1024)
    wrong: list[str] = []
    with moonep.setup(mesh, "ep", config) as ep:

        def body(ids: Any, weights: Any, ct: Any) -> Any:
            p = ep.plan(ids)
            out, back = jax.vjp(functools.partial(ep.prefetch, p), weights)
            return {**{f"w_{k}": v for k, v in out.items()}, **{f"g_{k}": v for k, v in back(ct)[0].items()}}

        step = _jit(mesh, body)
        for seed, name in enumerate(("one_home", "uniform", "unrouted", "crowded")):
            rng = np.random.default_rng(seed)
            ids = routing(name, shape, seed)
            p = ref.plan(ids, epn * r, 8)
            own = {k: rng.normal(size=(r, epn, *d)).astype(jnp.bfloat16) for k, d in LEAVES.items()}
            ct = {k: rng.normal(size=(r, 2 * epn, *d)).astype(jnp.bfloat16) for k, d in LEAVES.items()}
            given = {k: np.concatenate([w, np.full_like(w, 7)], axis=1) for k, w in own.items()} if full else own
            put = lambda tree: jax.tree.map(lambda a: c.put(a, mesh, P("ep")), tree)  # noqa: E731
            got = step(put(ids), put(given), put(ct))
            unused = np.asarray(p.slot_expert) < 0
            want = {}
            for k in LEAVES:
                want[f"w_{k}"] = np.array(ref.prefetch(p, own[k]))
                want[f"g_{k}"] = np.asarray(ref.reduce_grad(p, ct[k]))
                if full:
                    want[f"w_{k}"][:, epn:][unused] = 7
                    slots = np.where(unused[..., None, None], ct[k][:, epn:], np.zeros((), jnp.bfloat16))
                    want[f"g_{k}"] = np.concatenate([want[f"g_{k}"], slots], axis=1)
            wrong += [f"{name}: {w}" for w in _differs(c, got, want)]
    return wrong


def _model(c: Context, layers: int) -> Any:
    """Domain, a loss over `layers` layers that share a channel, and arguments."""
    mesh, r, h, f, e, s = c.mesh(), c.devices, 24, 40, 4 * c.devices, 64
    leaves = {name: (dims, jnp.float32) for name, dims in LEAVES.items()}
    config = moonep.EPConfig(tokens=s, hidden=h, topk=2, experts=e, dtype=jnp.float32, weights=leaves)
    ep = moonep.setup(mesh, "ep", config)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(r * s, h)).astype(np.float32)
    router = rng.normal(size=(layers, h, e)).astype(np.float32)
    router[:, :, 0] += 0.5
    params = {k: (rng.normal(size=(layers, e, *d)) * 0.2).astype(np.float32) for k, d in LEAVES.items()}
    del f
    return mesh, ep, x, router, params


def _dense(x: Any, router: Any, params: Any) -> Any:
    """The same layers without parallelism, in float64 NumPy: outputs only."""
    for i in range(len(router)):
        logits = x @ router[i].astype(np.float64)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :2]
        top = np.take_along_axis(logits, ids, axis=1)
        w = np.exp(top - top.max(axis=1, keepdims=True))
        w /= w.sum(axis=1, keepdims=True)
        x = x + ref.dense_moe(x, ids, w, *(params[k][i].astype(np.float64) for k in ("gate", "up", "down")))
    return x


def _layer(c: Context) -> dict[str, float]:
    mesh, ep, x, router, params = _model(c, 1)
    with ep, jax.default_matmul_precision("highest"):
        layer = jax.shard_map(
            lambda x, router, params: x + ep.moe(x, jnp.dot(x, router), params, grouped_gemm=ragged_dot),
            mesh=mesh, in_specs=(P("ep"), P(), P("ep")), out_specs=P("ep"),
        )  # fmt: skip
        args = (c.put(x, mesh, P("ep")), c.put(router[0], mesh, P()),
                {k: c.put(v[0], mesh, P("ep")) for k, v in params.items()})  # fmt: skip
        y = jax.jit(layer)(*args)
        return {"y": c.error(y, _dense(x.astype(np.float64), router, params))}


def _scan(c: Context) -> dict[str, Any]:
    """Layers in a scan with remat, forward and backward: finite gradients, the dense output, equal bits twice."""
    mesh, ep, x, router, params = _model(c, 3)

    def body(x: Any, router: Any, params: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, p: Any) -> Any:
            return x + ep.moe(x, jnp.dot(x, p[0]), p[1], grouped_gemm=ragged_dot), None

        return jax.lax.scan(layer, x, (router, params))[0]

    with ep, jax.default_matmul_precision("highest"):
        model = jax.shard_map(
            body, mesh=mesh, in_specs=(P("ep"), P("ep"), P(None, "ep")), out_specs=P("ep")
        )  # fmt: skip
        # The router leads with the ranks and is the same on each: its gradient needs no collective.
        routers = np.broadcast_to(router, (c.devices, *router.shape)).reshape(-1, *router.shape[1:])
        args = (c.put(x, mesh, P("ep")), c.put(routers, mesh, P("ep")),
                {k: c.put(v, mesh, P(None, "ep")) for k, v in params.items()})  # fmt: skip

        @jax.jit
        def step(*args: Any) -> Any:
            y, back = jax.vjp(model, *args)
            return y, back(y)

        first, second = (jax.block_until_ready(step(*args)) for _ in range(2))
        shards = [[v for _, v in c.local(a)] for tree in (first, second) for a in jax.tree.leaves(tree)]
        half = len(shards) // 2
        repeat = all(a.tobytes() == b.tobytes() for p, q in zip(shards[:half], shards[half:], strict=True)
                     for a, b in zip(p, q, strict=True))  # fmt: skip
        return {
            "y": c.error(first[0], _dense(x.astype(np.float64), router, params)),
            "finite": all(np.isfinite(v).all() for s in shards for v in s),
            "repeat": repeat,
        }


def _replays(c: Context) -> list[str]:
    """100 runs of one program with new inputs: a captured graph must not freeze anything."""
    mesh, r = c.mesh(), c.devices
    shape = Shape(r, 32, 2, 4 * r, 16)
    wrong = []
    config = moonep.EPConfig(tokens=32, hidden=16, topk=2, experts=4 * r, dtype=jnp.float32, capture_plan=True)
    with moonep.setup(mesh, "ep", config) as ep:

        def body(x: Any, ids: Any) -> Any:
            d = ep.dispatch(x, ids)
            return {"hidden": d.hidden, "y": ep.combine(d.plan, d.hidden)}

        step = _jit(mesh, body)
        for seed in range(c.args.get("replays", 100)):
            rng = np.random.default_rng(seed)
            ids = routing("anything", shape, seed)
            x = rng.normal(size=(r, 32, 16)).astype(np.float32)
            got = step(c.put(x, mesh, P("ep")), c.put(ids, mesh, P("ep")))
            p = ref.plan(ids, 4 * r, 8)
            hidden = ref.dispatch(p, x)[0]
            wrong += [f"{seed}: {w}" for w in _differs(c, got, {"hidden": hidden, "y": ref.combine(p, hidden)})]
        # Counted on the device: replays of a graph count like any other call.
        calls, want = ep.stats()["calls"], c.args.get("replays", 100) * c.local_devices
        counted = {op: calls[op] for op in ("plan", "dispatch", "combine")}
        wrong += [] if set(counted.values()) == {want} else [f"stats: {counted}, expected {want} each"]
    return wrong


def _donation(c: Context) -> list[str]:
    """Rows and a [2*epn] leaf go from step to step in donated buffers; without donation operands stay as they are."""
    mesh, r, epn = c.mesh(), c.devices, 4
    shape = Shape(r, 32, 2, epn * r, 16)
    config = moonep.EPConfig(tokens=32, hidden=16, topk=2, experts=epn * r, dtype=jnp.float32,
                             weights={"w": ((24, 40), jnp.bfloat16)})  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.normal(size=(r, 32, 16)).astype(np.float32)
    w = rng.normal(size=(r, 2 * epn, 24, 40)).astype(jnp.bfloat16)
    wrong = []
    with moonep.setup(mesh, "ep", config) as ep:

        def body(x: Any, leaf: Any, ids: Any) -> Any:
            d = ep.dispatch(x, ids)
            return {"x": ep.combine(d.plan, d.hidden), "w": ep.prefetch(d.plan, {"w": leaf})["w"]}

        donating, keeping = _jit(mesh, body, donate_argnums=(0, 1)), _jit(mesh, body)
        state = {"x": c.put(x, mesh, P("ep")), "w": c.put(w, mesh, P("ep"))}
        for seed in range(4):
            ids = routing("one_home", shape, seed)
            p = ref.plan(ids, epn * r, 8)
            before, want = {"x": x, "w": w}, np.array(ref.prefetch(p, w[:, :epn]))
            want[:, epn:][p.slot_expert < 0] = w[:, epn:][p.slot_expert < 0]
            x, w = ref.combine(p, ref.dispatch(p, x)[0]), want
            routed = c.put(ids, mesh, P("ep"))
            kept = keeping(state["x"], state["w"], routed)
            wrong += [f"{seed} kept: {text}" for text in _differs(c, kept, {"x": x, "w": w})]
            wrong += [f"{seed} operand: {text}" for text in _differs(c, state, before)]
            given, state = state, donating(state["x"], state["w"], routed)
            wrong += [f"{seed} donated: {text}" for text in _differs(c, state, {"x": x, "w": w})]
            wrong += [f"{seed}: {name} was not donated" for name, array in given.items() if not array.is_deleted()]
    return wrong


def _remat(c: Context) -> list[str]:
    """dispatch alone under jax.checkpoint: the backward pass makes that call again; the gradient is the oracle's."""
    mesh, r = c.mesh(), c.devices
    shape = Shape(r, 32, 2, 4 * r, 16)
    config = moonep.EPConfig(tokens=32, hidden=16, topk=2, experts=4 * r, dtype=jnp.float32)
    wrong = []
    with moonep.setup(mesh, "ep", config) as ep:

        def body(x: Any, ids: Any, dy: Any) -> Any:
            p = ep.plan(ids)
            route = jax.checkpoint(lambda x: ep.dispatch(x, ids, plan=p).hidden)
            y, back = jax.vjp(lambda x: ep.combine(p, jnp.square(route(x))), x)
            return {"y": y, "dx": back(dy)[0]}

        step = _jit(mesh, body)
        for seed, name in enumerate(("uniform", "one_home", "duplicates")):
            rng = np.random.default_rng(seed)
            ids = routing(name, shape, seed)
            x, dy = (rng.normal(size=(r, 32, 16)).astype(np.float32) for _ in range(2))
            got = step(*(c.put(a, mesh, P("ep")) for a in (x, ids, dy)))
            p = ref.plan(ids, 4 * r, 8)
            hidden, rows = ref.dispatch(p, x)[0], ref.dispatch(p, dy)[0]
            want = {"y": ref.combine(p, hidden * hidden), "dx": ref.dispatch_grad(p, rows * (2 * hidden))[0]}
            wrong += [f"{name}: {text}" for text in _differs(c, got, want)]
    return wrong


CASES: dict[str, Any] = {
    "rows_float32_dedup": functools.partial(_rows, dtype="float32", mode="dedup"),
    "rows_bfloat16_exact": functools.partial(_rows, dtype="bfloat16", mode="exact"),
    "rows_float16_dedup": functools.partial(_rows, dtype="float16", mode="dedup", check_vma=False),
    # Large enough to be sent in rounds: kRoundBytes in gpu_launch.cc.
    "rows_in_rounds": functools.partial(
        _rows, dtype="float32", mode="dedup", size=(768, 8192), routings=("uniform", "one_home")
    ),
    "weights_own": functools.partial(_weights, full=False),
    "weights_full": functools.partial(_weights, full=True),
    "donation": _donation,
    "remat": _remat,
    "layer": _layer,
    "scan_remat": _scan,
    "replays": _replays,
}


def missing(c: Context) -> None:
    """For each kind of call, a domain in which the last process leaves before it: the others name it and go on."""
    for kind in ("plan", "dispatch", "combine", "prefetch", "dispatch_grad", "combine_grad", "reduce_grad"):
        c.case(kind, functools.partial(_leaves_before, c, kind))
    c.case("close", lambda: _closes_early(c))


def _closes_early(c: Context) -> Any:
    """All close together while a call that the last process does not make is in flight: close() says what it found."""
    mesh, r = c.mesh(), c.devices
    config = moonep.EPConfig(tokens=8, hidden=8, topk=1, experts=r, dtype=jnp.float32, timeout_s=1.5,
                             first_call_timeout_s=60.0)  # fmt: skip
    ep = moonep.setup(mesh, "ep", config)
    plan, ids = _jit(mesh, ep.plan), c.put(np.zeros((r, 8, 1), np.int32), mesh, P("ep"))
    jax.block_until_ready(plan(ids))
    c.barrier()
    if c.index < c.processes - 1:
        plan(ids)
    return raised(ep.close)


def _leaves_before(c: Context, kind: str) -> Any:
    mesh, r, epn = c.mesh(), c.devices, 2
    config = moonep.EPConfig(tokens=8, hidden=8, topk=1, experts=epn * r, dtype=jnp.float32,
                             weights={"w": ((16,), jnp.float32)}, timeout_s=1.5, first_call_timeout_s=60.0)  # fmt: skip
    with moonep.setup(mesh, "ep", config) as ep:
        n = config.recv_rows(r, 8)
        shapes = {"x": (8, 8), "rows": (n, 8), "own": (epn, 16), "all": (2 * epn, 16)}
        a = {name: c.put(np.ones((r, *dims), np.float32), mesh, P("ep")) for name, dims in shapes.items()}
        ids = c.put(np.zeros((r, 8, 1), np.int32), mesh, P("ep"))
        dispatch = lambda p, ids: lambda x: ep.dispatch(x, ids, plan=p).hidden  # noqa: E731
        prefetch = lambda p: lambda w: ep.prefetch(p, {"w": w})["w"]  # noqa: E731
        # What a backward pass does not need of the forward one, XLA drops: each of these is one call of the kind.
        bodies: dict[str, Any] = {
            "plan": lambda p, ids, a: jnp.where(ep.plan(ids).ticket < 0, jnp.nan, 0.0),
            "dispatch": lambda p, ids, a: dispatch(p, ids)(a["x"]),
            "combine": lambda p, ids, a: ep.combine(p, a["rows"]),
            "prefetch": lambda p, ids, a: prefetch(p)(a["own"]),
            "dispatch_grad": lambda p, ids, a: jax.vjp(dispatch(p, ids), a["x"])[1](a["rows"])[0],
            "combine_grad": lambda p, ids, a: jax.vjp(functools.partial(ep.combine, p), a["rows"])[1](a["x"])[0],
            "reduce_grad": lambda p, ids, a: jax.vjp(prefetch(p), a["own"])[1](a["all"])[0],
        }
        plan, op = _jit(mesh, ep.plan), _jit(mesh, bodies[kind])
        p = plan(ids)
        step = lambda: jax.block_until_ready(op(p, ids, a))  # noqa: E731
        step()
        c.barrier()
        found: dict[str, Any] = {}
        if c.index < c.processes - 1:
            # The call itself returns: its kernels gave up, and filled the result with NaN.
            found["poisoned"] = all(np.isnan(value).all() for _, value in c.local(step()))
            found["check"], found["stats"] = raised(ep.check), raised(ep.stats)
            found["later"] = raised(lambda: jax.block_until_ready(plan(ids)))
            found["alive"] = float(jnp.arange(5.0).sum())
        c.barrier()
        start = time.monotonic()
        ep.close()
        return {**found, "closed": time.monotonic() - start}
