"""One mixture-of-experts layer, ours beside what JAX has, while the load on experts gets more and more uneven.

`python -m benchmarks.bench_moe [--json FILE] [--plot FILE]`; small: `--tokens 16 --hidden 16 --ffn 8 --experts 16
--devices 4 --maxvio 0,2 --routings one_home --repeats 1`.

The layer takes tokens, expert ids and route weights, and does all that follows: bring rows to experts, SwiGLU by a
grouped GEMM, bring results back, weigh and sum. Timed are jitted programs, until all devices are done: forward, and
forward with the gradients of tokens, route weights and expert weights. All layers have the same inputs, weights, ids
and grouped GEMM, in the same process; layers and routings take turns in one loop, so each figure met the same
disturbances as all others. Two are no layers, but their GEMMs without any exchange: "experts alone" those of an even
load, a lower bound, and "experts as planned" those of the rows and replicas that ours has.
Devices of a CPU share its cores: there a rank with more rows than others delays the others less than on hardware where
each has its own, so the rows of the busiest rank stand beside the times.

Columns
  dropped         rows of the forward pass that a capacity left out
  error           largest difference to float64 on the same inputs, relative to the largest value: of the output, and
                  the worst of the gradients
  rows held       rows of each rank's GEMM buffers; busiest: rows with a token on the rank that has most
  MB held         what a rank's forward pass holds: GEMM buffers, rows * (2 H + 3 F) elements, and the exchange's:
                  ours: the domain's shared memory and 2 E/R experts; ring, grug ring, dense: 2 R S rows; all_to_all:
                  4 R C rows of capacity C per pair of ranks; ragged_all_to_all: 2 (S K + rows held)
  MB of XLA       temporary memory of a device's forward-and-backward program, as XLA says, and with ours the domain's
  link rows       rows that reach the busiest rank over links in one dispatch; as many leave it in the combine
  link MB         those rows there and back, and the weights of moved experts: all of a forward pass
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import kit  # first: it prepares what jax and the case table need

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from cases import Shape, lognormal_ids, routing
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from benchmarks import peers
from moonep_jax import reference
from moonep_jax.layer import default_grouped_gemm

flags.DEFINE_integer("tokens", 512, "tokens of each rank", lower_bound=1)
flags.DEFINE_integer("hidden", 256, "elements of a token", lower_bound=1)
flags.DEFINE_integer("ffn", 128, "inner size of an expert", lower_bound=1)
flags.DEFINE_integer("experts", 64, "experts of all ranks", lower_bound=1)
flags.DEFINE_integer("topk", 2, "experts of a token; experts / topk - 1 bounds maxvio", lower_bound=1)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of tokens and weights")
flags.DEFINE_list("maxvio", ["0", "0.2", "1", "2", "4", "8", "16"], "rows of the hottest expert / mean - 1")
flags.DEFINE_list("routings", ["crowded", "one_home"], "more routings, by their names in the case table")
flags.DEFINE_list("leave_out", ["dense"], "layers not to measure; dense costs experts / topk times the GEMMs")
flags.DEFINE_bool("errors", True, "compare results with float64 on the host")
FLAGS = flags.FLAGS

SIZES = ("dropped", "held_rows", "busiest_rows", "held_MB", "link_rows", "link_MB")
OURS, ALONE, PLANNED = "ours", "experts alone", "experts as planned"
EP = P(peers.AXIS)
Array = np.ndarray[Any, Any]


def ours(ep: moonep.Domain, x: Any, ids: Any, w: Any, params: peers.Params, gemm: peers.Gemm) -> jax.Array:
    """The layer on the library's ops."""
    d = ep.dispatch(x, ids, w)
    out = peers.swiglu(d.hidden, d.group_sizes, ep.prefetch(d.plan, params), gemm)
    return ep.combine(d.plan, out, d.weights)


def alone(x: Any, ids: Any, w: Any, params: peers.Params, gemm: peers.Gemm) -> jax.Array:
    """The experts on as many rows as a rank has under an even load; the rows come from nowhere."""
    del ids
    epn, topk = len(params["gate"]), w.shape[1]
    sizes = np.diff(np.arange(epn + 1) * len(x) * topk // epn).astype(np.int32)
    out = peers.swiglu(jnp.repeat(x, topk, axis=0), jnp.asarray(sizes), params, gemm)
    return peers.weigh(out, w)


def planned(x: Any, sizes: Any, w: Any, params: peers.Params, gemm: peers.Gemm, *, held: int) -> jax.Array:
    """The experts on `held` rows of given group sizes, replicas' weights included; the rows come from nowhere."""
    rows = jnp.repeat(x, w.shape[1], axis=0)
    rows = jnp.pad(rows, ((0, held - len(rows)), (0, 0)))
    return peers.weigh(peers.swiglu(rows, sizes, params, gemm)[: w.size], w)


class Problem:
    """Inputs of a size, on all devices; what results must be."""

    def __init__(self, mesh: jax.sharding.Mesh, shape: Shape, ffn: int, dtype: Any) -> None:
        self.mesh, self.shape, self.ffn, self.dtype = mesh, shape, ffn, np.dtype(dtype)
        rng = np.random.default_rng(0)
        tokens, (h, f, e) = shape.R * shape.s, (shape.H, ffn, shape.E)

        def normal(*dims: int) -> Array:
            return (rng.standard_normal(dims, np.float32) / np.sqrt(dims[-2])).astype(dtype)

        self.x, self.ct = normal(tokens, h), normal(tokens, h)
        w = rng.uniform(0.2, 1.0, (tokens, shape.K)).astype(np.float32)
        self.w = w / w.sum(1, keepdims=True)
        self.params = {"gate": normal(e, h, f), "up": normal(e, h, f), "down": normal(e, f, h)}
        self._floats = jax.tree.map(functools.partial(kit.put, mesh), (self.x, self.w, self.params, self.ct))

    def arguments(self, ids: Array) -> tuple[Any, ...]:
        """Operands of all programs: x, ids, w, params, ct."""
        x, w, params, ct = self._floats
        return x, kit.put(self.mesh, ids.reshape(-1, self.shape.K)), w, params, ct

    def planned_arguments(self, ids: Array) -> tuple[Any, ...]:
        """The same for `planned`: group sizes in place of ids, and the weights of each rank's experts and replicas."""
        x, w, _, ct = self._floats
        plan = reference.plan(ids, self.shape.E)
        own = np.arange(self.shape.E).reshape(self.shape.R, -1)
        # Weights of unused slots are not read.
        held = np.concatenate([own, np.maximum(plan.slot_expert, 0)], axis=1).reshape(-1)
        params = {name: kit.put(self.mesh, p[held]) for name, p in self.params.items()}
        return x, kit.put(self.mesh, np.asarray(plan.group_sizes, np.int32).reshape(-1)), w, params, ct

    def compile(self, layer: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
        """The layer's two programs. `layer` works on global arrays."""

        def forward(x: Any, ids: Any, w: Any, params: Any, ct: Any) -> Any:
            del ct
            return layer(x, ids, w, params)

        def both(x: Any, ids: Any, w: Any, params: Any, ct: Any) -> Any:
            y, back = jax.vjp(lambda x, w, params: layer(x, ids, w, params), x, w, params)
            return y, *back(ct)

        return {name: jax.jit(f).lower(*args).compile() for name, f in (("forward", forward), ("both", both))}

    def sharded(self, layer: Callable[..., Any], gemm: peers.Gemm) -> Callable[..., Any]:
        """A layer of one rank as one of all ranks."""
        body = functools.partial(layer, gemm=gemm)
        return jax.shard_map(body, mesh=self.mesh, in_specs=EP, out_specs=EP, check_vma=False)

    def expected(self, ids: Array) -> tuple[Any, ...]:
        """y and the gradients of x, w and params, in float64, an expert at a time."""
        x, w, ct = (a.astype(np.float64) for a in (self.x, self.w, self.ct))
        y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
        grads = {name: np.zeros_like(p, np.float64) for name, p in self.params.items()}
        flat = ids.reshape(-1, self.shape.K)
        for e in range(self.shape.E):
            t, k = np.nonzero(flat == e)
            gate, up, down = (self.params[name][e].astype(np.float64) for name in ("gate", "up", "down"))
            a, b = x[t] @ gate, x[t] @ up
            sigmoid = 1 / (1 + np.exp(-a))
            inner, scale = a * sigmoid * b, w[t, k][:, None]
            out = inner @ down
            np.add.at(y, t, scale * out)
            dw[t, k] = (ct[t] * out).sum(1)
            dout = scale * ct[t]
            dinner = dout @ down.T
            da, db = dinner * b * sigmoid * (1 + a * (1 - sigmoid)), dinner * a * sigmoid
            np.add.at(dx, t, da @ gate.T + db @ up.T)
            grads["gate"][e], grads["up"][e], grads["down"][e] = x[t].T @ da, x[t].T @ db, inner.T @ dout
        return y, dx, dw, grads


def errors(got: tuple[Any, ...], want: tuple[Any, ...]) -> tuple[float, float]:
    """Relative errors of the output, and of the worst gradient; the worst process's."""

    def error(a: jax.Array, b: Array) -> float:
        apart = [np.abs(np.asarray(s.data, np.float64) - b[s.index]).max() for s in a.addressable_shards]
        return float(np.max(apart) / np.abs(b).max())

    each = kit.gather(jax.tree.leaves(jax.tree.map(error, got, want))).max(axis=0)
    return float(each[0]), float(each[1:].max())


def ids_of(shape: Shape) -> dict[str, Array]:
    """The routings, by name: those of the sweep first."""
    found = {}
    for target in map(float, FLAGS.maxvio):
        rng = np.random.default_rng(int(1000 * target))
        args = (rng, shape.R, shape.s, shape.K, shape.E)
        found[f"maxvio {target:g}"] = lognormal_ids(*args, target) if target else routing("balanced", shape)
    found |= {name: routing(name, shape) for name in FLAGS.routings}
    for name, ids in found.items():
        if np.bincount(ids.reshape(-1) // shape.epn).max() > peers.worst_case(shape):
            raise app.UsageError(f"{name} repeats experts within a token: more rows than ring has room for")
    return found


def our_sizes(problem: Problem, ids: Array, shared_bytes: int) -> kit.Row:
    """What our layer computes, holds and sends with a routing."""
    shape, expert = problem.shape, 3 * problem.shape.H * problem.ffn
    plan = reference.plan(ids, shape.E)
    source = plan.src // (shape.s * shape.K)  # of rows with a token
    first = (plan.src >= 0) & (plan.primary == np.arange(plan.src.shape[1]))
    crossing = (first & (source != np.arange(shape.R)[:, None])).sum(1)
    moved, held = (plan.slot_expert >= 0).sum(1), plan.src.shape[1]
    elements = held * (2 * shape.H + 3 * problem.ffn) + 2 * shape.epn * expert
    sent = (2 * crossing * shape.H + moved * expert).max()
    figures = (0.0, held, int(plan.rank_rows.max()), elements, int(crossing.max()), int(sent))
    row = _in_bytes(problem, dict(zip(SIZES, figures, strict=True)))
    return row | {"held_MB": row["held_MB"] + shared_bytes / 1e6}


def sizes(problem: Problem, name: str, peer: peers.Peer, ids: Array) -> kit.Row:
    """What a peer drops, computes, holds and sends with a routing."""
    shape = problem.shape
    share = np.array([np.bincount(row.reshape(-1) // shape.epn, minlength=shape.R) for row in ids])
    kept, held = peer.kept(shape, share), peer.rows(shape)
    crossing = int(peer.crossing(shape, kept).max())
    width = 3 * problem.ffn if name == "dense" else 2 * shape.H + 3 * problem.ffn  # dense reads the tokens in place
    elements = held * width + peer.moved(shape) * shape.H
    dropped = float(1 - kept.sum() / share.sum())
    figures = (dropped, held, int(peer.computed(shape, kept).max()), elements, crossing, 2 * crossing * shape.H)
    return _in_bytes(problem, dict(zip(SIZES, figures, strict=True)))


def _in_bytes(problem: Problem, row: kit.Row) -> kit.Row:
    return {k: v * problem.dtype.itemsize / 1e6 if k.endswith("MB") else v for k, v in row.items()}


def run() -> kit.Tables:
    """Measures all layers under all routings."""
    devices = jax.devices()
    if FLAGS.experts % len(devices):
        raise app.UsageError(f"{FLAGS.experts} experts do not divide among {len(devices)} devices")
    shape = Shape(len(devices), FLAGS.tokens, FLAGS.topk, FLAGS.experts, FLAGS.hidden)
    # Explicit: grug's layers ask for it, the others do not care.
    mesh = jax.sharding.Mesh(np.array(devices), (peers.AXIS,), axis_types=(jax.sharding.AxisType.Explicit,))
    routings = ids_of(shape)
    problem = Problem(mesh, shape, FLAGS.ffn, FLAGS.dtype)
    weights = {name: (p.shape[1:], FLAGS.dtype) for name, p in problem.params.items()}
    config = moonep.EPConfig(
        tokens=shape.s, hidden=shape.H, topk=shape.K, experts=shape.E, dtype=FLAGS.dtype, weights=weights
    )
    gemm = default_grouped_gemm(devices[0].platform)
    with moonep.setup(mesh, peers.AXIS, config) as ep:
        shared = ep.stats()["bytes_per_rank"]["total"]
        layers = {OURS: functools.partial(ours, ep)} | {n: p.layer for n, p in peers.PEERS.items()} | {ALONE: alone}
        layers[PLANNED] = functools.partial(planned, held=config.recv_rows(shape.R, shape.s))
        if devices[0].platform == "cpu":
            del layers["ragged_all_to_all"]  # XLA has it on GPUs and TPUs only
        whole = {name: problem.sharded(layer, gemm) for name, layer in layers.items()}
        others, absent = {}, []
        try:
            others = peers.levanter(mesh, gemm)
        except ImportError as e:
            absent.append({"layer": "levanter's grug ring", "why": f"not installed ({e})"})
        if importlib.util.find_spec("transformer_engine") is None:
            absent.append({"layer": "TransformerEngine EP", "why": "not installed"})
        known = peers.PEERS | others
        whole, programs = whole | {name: peer.layer for name, peer in others.items()}, {}
        usual = {name: problem.arguments(ids) for name, ids in routings.items()}
        arguments = {(name, PLANNED): problem.planned_arguments(ids) for name, ids in routings.items()}
        some = next(iter(routings))  # sizes are the same for all
        for name in (n for n in whole if n not in FLAGS.leave_out):
            try:
                programs[name] = problem.compile(whole[name], arguments.get((some, name), usual[some]))
            except Exception as e:  # a peer that this JAX cannot compile is a result, too
                absent.append({"layer": name, "why": f"{type(e).__name__}: {str(e)[:200]}"})
        calls = {
            (routed, name, part): functools.partial(program, *arguments.get((routed, name), args))
            for routed, args in usual.items()
            for name, parts in programs.items()
            for part, program in parts.items()
        }
        times = kit.side_by_side({"/".join(key): call for key, call in calls.items()})
        p50 = {key: kit.summary(times["/".join(key)])["p50"] for key in calls}
        rows = []
        for routed, ids in routings.items():
            want = problem.expected(ids) if FLAGS.errors else None
            counts = np.bincount(ids.reshape(-1), minlength=shape.E)
            home = counts.reshape(shape.R, -1).sum(1)
            for name, parts in programs.items():
                row: kit.Row = {"routing": routed, "layer": name, "maxvio": reference.maxvio(counts)}
                row["home_max_over_mean"] = reference.rank_max_over_mean(home)
                for part in parts:
                    timed = kit.summary(times["/".join((routed, name, part))])
                    row |= {f"{part}_{k}_ms": v / 1e3 for k, v in timed.items()}
                    first = p50.get((routed, OURS, part))
                    row[f"{part}_ratio"] = first and timed["p50"] / first
                row["error_y"] = row["error_gradients"] = None
                if want is not None and name not in (ALONE, PLANNED):
                    row["error_y"], row["error_gradients"] = errors(calls[routed, name, "both"](), want)
                if name == OURS:
                    row |= our_sizes(problem, ids, shared)
                else:
                    row |= sizes(problem, name, known[name], ids) if name in known else dict.fromkeys(SIZES)
                temporary = parts["both"].memory_analysis().temp_size_in_bytes
                row["temporary_MB"] = (temporary + (shared if name == OURS else 0)) / 1e6
                rows.append(row)
        ep.check()
    return {"layers": rows, "absent": absent}


def show(record: dict[str, Any]) -> str:
    """The record as Markdown: times of all layers by routing, then everything."""
    rows, f = record["tables"]["layers"], record["flags"]
    layers, first = list(dict.fromkeys(r["layer"] for r in rows)), rows[0]["routing"]
    times = {(r["routing"], r["layer"]): r["both_p50_ms"] for r in rows}
    columns = {"routing": "{routing}", "maxvio": "{maxvio:.1f}", "fullest home / mean": "{home_max_over_mean:.1f}"}
    columns |= {f"{name} (ms)": f"{{ms_{i}:.1f}}" for i, name in enumerate(layers, 1)}
    columns[f"{layers[0]} / its {first}"] = "{own:.2f}"
    brief = []
    for r in (r for r in rows if r["layer"] == layers[0]):
        mine = {f"ms_{i}": times[r["routing"], name] for i, name in enumerate(layers, 1)}
        brief.append({**r, **mine, "own": mine["ms_1"] / times[first, layers[0]]})
    every = {
        "routing": "{routing}", "layer": "{layer}",
        "forward p50 (ms)": "{forward_p50_ms:.1f}", "p90 (ms)": "{forward_p90_ms:.1f}", "/ ours": "{forward_ratio:.2f}",
        "with gradients p50 (ms)": "{both_p50_ms:.1f}", "p90 (ms) ": "{both_p90_ms:.1f}", "/ ours ": "{both_ratio:.2f}",
        "dropped": "{dropped:.1%}", "error": "{error_y:.0e}", "of gradients": "{error_gradients:.0e}",
        "rows held": "{held_rows}", "busiest": "{busiest_rows}", "MB held": "{held_MB:.1f}",
        "MB of XLA": "{temporary_MB:.1f}", "link rows": "{link_rows}", "link MB": "{link_MB:.1f}",
    }  # fmt: skip
    return "\n\n".join((
        kit.about(record),
        f"{f['tokens']} tokens per rank, hidden {f['hidden']}, expert width {f['ffn']}, {f['experts']} experts, "
        f"{f['topk']} of them per token, {f['dtype']}; medians of {f['repeats']} runs.",
        "Forward with gradients:", kit.markdown(brief, columns), kit.markdown(rows, every),
        "\n".join(f"{r['layer']}: {r['why']}" for r in record["tables"]["absent"]),
    ))  # fmt: skip


def plot(record: dict[str, Any], path: Path) -> None:
    """Time and rows of the busiest rank over maxvio, by layer."""
    rows = [r for r in record["tables"]["layers"] if r["routing"].startswith("maxvio")]
    with kit.picture(path, 2, "constrained", figsize=(11, 4.2)) as (figure, axes):
        panels = (("both_p50_ms", "forward with gradients (ms)"), ("busiest_rows", "rows of the busiest rank"))
        for axis, (key, label) in zip(axes, panels, strict=True):
            for name in dict.fromkeys(r["layer"] for r in rows):
                points = [(r["maxvio"], r[key]) for r in rows if r["layer"] == name and r[key] is not None]
                if points:
                    style = {"linewidth": 2.5} if name == OURS else {"linewidth": 1, "linestyle": "--"}
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
            axis.set(xlabel="maxvio", ylabel=label, yscale="log")
            axis.set_xscale("symlog", linthresh=1)
            axis.grid(alpha=0.3, which="both")
        axes[0].legend(fontsize=8)
        figure.suptitle(f"One MoE layer on {record['machine']['devices']}")


if __name__ == "__main__":
    flags.FLAGS.set_default("repeats", 5)  # of 7 + 2 routings, 6 layers, 2 programs
    kit.main(run, __doc__ or "", show, plot)
