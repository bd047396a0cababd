"""Each op by itself: plan, dispatch, combine, prefetch and their backward uses, by tokens, ranks, top-k, padding, SMs.

`python -m benchmarks.bench_ops [--devices 8] [--processes 2] [--sweeps tokens,decode]`, on the CPU devices of one or
more processes or on the GPUs that there are. A sweep varies one size from the base case: the first value of each list.

What is timed: wall time until the slowest process has the op's results, from a barrier of all processes; every op is a
compiled program of its own on operands that are there already. "call": one jitted call. "in a program": one of --loop
calls of one program, each of which needs a number of the one before; p50, p90 and p99 are those of the runs' means. A
backward op is the pullback of jax.vjp with the residuals as operands. combine scales the rows by weights, as a layer
does; combine_grad is without the weights' gradient, which is XLA's work. "exact" is EPConfig.combine. prefetch and
reduce_grad work in place on one leaf [2*epn, H, F].

Link: bytes that the busiest rank sends to or receives from other ranks (of plan the ids, which GPUs send in 16 bits),
without headers; wire share: those over the time in a program, as a share of --link_gbps. Beside each op: as many bytes
read and written once by every rank's own plain XLA pass, all at once, in the same run, taking turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import kit, rank_programs  # isort: skip (they set what must be set before jax starts)

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from cases import ROUTINGS, Shape, routing

import moonep_jax as moonep
from benchmarks.rank_programs import Box, Op

FLAGS = flags.FLAGS
SWEEPS = ("tokens", "ranks", "topk", "padding", "sms", "decode")
DECODE = (1, 8, 32, 128)  # tokens, and capacity
DRAWN = 1024  # tokens of a rank that are drawn; larger routings repeat them
# Defaults on CPU and on GPU.
SIZES = {"tokens": (256, 4096), "hidden": (512, 7168), "experts": (64, 256), "width": (64, 2048)}

flags.DEFINE_integer("tokens", None, "S, capacity and most tokens per rank; default: 256, on GPU 4096", lower_bound=1)
flags.DEFINE_integer("hidden", None, "H; default: 512, on GPU 7168", lower_bound=1)
flags.DEFINE_integer("experts", None, "E; default: 64, on GPU 256", lower_bound=1)
flags.DEFINE_integer("width", None, "F of the weights' leaf [H, F]; default: 64, on GPU 2048", lower_bound=1)
flags.DEFINE_list("topk", ["8", "1", "2"], "K")
flags.DEFINE_list("padding", ["8", "1", "128"], "A, token padding")
flags.DEFINE_list("ranks", None, "R; default: all devices and, in one process, powers of two below")
flags.DEFINE_list("num_sms", ["0", "4", "8", "16", "32", "64", "all"], "on GPU: SMs that send; 0: the library's choice")
flags.DEFINE_enum("routing", "lognormal_2", sorted(ROUTINGS), "of the tests' case table")
flags.DEFINE_list("sweeps", list(SWEEPS), "what to vary")
flags.DEFINE_integer("loop", 8, "calls of a program", lower_bound=1)
flags.DEFINE_float("link_gbps", None, "GB/s of a rank's link, one way; default: on CPU a copy's, all ranks at once")


@dataclasses.dataclass(frozen=True)
class Point:
    """Sizes of one measurement; sms 0: the library's choice."""

    shape: Shape
    padding: int
    sms: int
    width: int

    @property
    def recv_rows(self) -> int:
        """Rows of a rank's dispatched buffer."""
        return self.config("dedup").recv_rows(self.shape.R, self.shape.s)

    def config(self, mode: str) -> moonep.EPConfig:
        """Of a domain for it."""
        return moonep.EPConfig(tokens=self.shape.S, hidden=self.shape.H, topk=self.shape.K, experts=self.shape.E,
                               token_padding=self.padding, combine=mode, num_sms=self.sms or None,
                               weights={"w": ((self.shape.H, self.width), "bfloat16")})  # fmt: skip


def points() -> Iterator[tuple[str, Point]]:
    """(sweep, point) of all that are asked for."""
    if unknown := set(FLAGS.sweeps) - set(SWEEPS):
        raise SystemExit(f"--sweeps: unknown {sorted(unknown)}; there are {list(SWEEPS)}")
    on_gpu = jax.default_backend() == "gpu"
    size = {name: given if (given := FLAGS[name].value) else SIZES[name][on_gpu] for name in SIZES}
    s, (topk, *topks), (padding, *paddings) = size["tokens"], map(int, FLAGS.topk), map(int, FLAGS.padding)
    every = jax.devices()[0].core_count if on_gpu else 0
    sms, *more_sms = [every if n == "all" else int(n) for n in FLAGS.num_sms] if on_gpu else [0]
    count = jax.device_count()
    below = [2**i for i in reversed(range(1, count.bit_length())) if 2**i < count] if jax.process_count() == 1 else []
    ranks, *fewer = [int(n) for n in FLAGS.ranks] if FLAGS.ranks else [count, *below]

    def point(s: int = s, S: int = s, R: int = ranks, K: int = topk, A: int = padding, sms: int = sms) -> Point:
        return Point(Shape(R, s, K, size["experts"], size["hidden"], S), A, sms, size["width"])

    swept = {
        "tokens": [point(n) for n in sorted({4**i for i in range(s.bit_length()) if 4**i < s} | {s})],
        "ranks": [point(R=n) for n in fewer],
        "topk": [point(K=n) for n in topks],
        "padding": [point(A=n) for n in paddings],
        "sms": [point(sms=n) for n in more_sms],
        "decode": [point(n, n, A=1) for n in DECODE if n <= s],
    }
    for sweep in SWEEPS:
        yield from ((sweep, p) for p in swept[sweep] if sweep in FLAGS.sweeps)


@functools.cache
def drawn(shape: Shape) -> np.ndarray[Any, Any]:
    """ids [R, s, K] of the routing asked for."""
    return routing(FLAGS.routing, shape)


def ids_of(shape: Shape) -> np.ndarray[Any, Any]:
    """ids [R, s, K], for s that differ the beginnings of one routing."""
    few = drawn(dataclasses.replace(shape, s=min(shape.S, DRAWN), S=0))
    return np.take(few, np.arange(shape.s) % few.shape[1], axis=1)


# -- programs ----------------------------------------------------------------------------------------------------------


class Operands:
    """What the ops of a point work on, for all its domains."""

    def __init__(self, mesh: jax.sharding.Mesh, p: Point) -> None:
        full = functools.partial(rank_programs.full, mesh)
        s, k, h, n, epn = p.shape.s, p.shape.K, p.shape.H, p.recv_rows, p.shape.epn
        self.ids = kit.put(mesh, ids_of(p.shape).reshape(-1, k))
        self.tokens, self.rows = full((s, h), "bfloat16"), full((n, h), "bfloat16")
        self.topk_weights, self.row_weights = full((s, k), "float32", 1 / k), full((n,), "float32", 1 / k)
        self.leaf = Box(full((2 * epn, h, p.width), "bfloat16", 0))  # reduce_grad adds to it in every call


def programs(mesh: jax.sharding.Mesh, ep: moonep.Domain, plan: moonep.Plan, o: Operands) -> dict[str, Op]:
    """All ops of a domain."""
    make, ticket = functools.partial(Op, mesh, loop=FLAGS.loop), Box(jnp.copy(plan.ticket))

    def on_plan(body: Callable[..., Any], *operands: Any) -> Op:
        return make(lambda t, p, *given: body(dataclasses.replace(p, ticket=t), *given), ticket, [plan, *operands])

    def in_place(body: Callable[..., Any]) -> Op:
        return make(body, o.leaf, [plan], follow=rank_programs.replaced, in_place=True)

    def dispatch(p: moonep.Plan, x: Any, ids: Any, w: Any) -> Any:
        d = ep.dispatch(x, ids, w, p)
        return d.hidden, d.weights

    # Of the pullbacks' forward calls nothing is used, so XLA leaves them out.
    def dispatch_grad(p: moonep.Plan, x: Any, ids: Any, w: Any, *ct: Any) -> Any:
        return jax.vjp(lambda x, w: dispatch(p, x, ids, w), x, w)[1](ct)

    def combine_grad(p: moonep.Plan, out: Any, ct: Any) -> Any:
        return jax.vjp(lambda out: ep.combine(p, out), out)[1](ct)

    def prefetch(leaf: Any, p: moonep.Plan) -> Any:
        return ep.prefetch(p, {"w": leaf})["w"]

    def reduce_grad(ct: Any, p: moonep.Plan) -> Any:
        return jax.vjp(lambda leaf: prefetch(leaf, p), jnp.zeros_like(ct))[1](ct)[0]

    def next_ids(ids: Any, p: moonep.Plan) -> Any:
        return ids.at[0, 0].set(jnp.where(p.ticket[0] < 0, -1, ids[0, 0]))  # the same ids: no ticket is below 0

    return {
        "plan": make(lambda ids: ep.plan(ids), Box(jnp.copy(o.ids)), follow=next_ids),
        "dispatch": on_plan(dispatch, o.tokens, o.ids, o.topk_weights),
        "combine": on_plan(ep.combine, o.rows, o.row_weights),
        "prefetch": in_place(prefetch),
        "dispatch_grad": on_plan(dispatch_grad, o.tokens, o.ids, o.topk_weights, o.rows, o.row_weights),
        "combine_grad": on_plan(combine_grad, o.rows, o.tokens),
        "reduce_grad": in_place(reduce_grad),
    }


# -- figures -----------------------------------------------------------------------------------------------------------


def traffic(p: Point, plan: moonep.Plan) -> dict[str, int]:
    """Link bytes of the busiest rank, by op."""
    R, s, k, h, epn = p.shape.R, p.shape.s, p.shape.K, p.shape.H, p.shape.epn
    dst = rank_programs.fetch(plan.dst_rank).reshape(R, s, k)
    slots = rank_programs.fetch(plan.slot_expert).reshape(R, R, epn)[0]
    to = dst[..., None] == np.arange(R)  # [source, token, k, destination]
    homes = np.where(slots[..., None] < 0, -1, slots[..., None] // epn) == np.arange(R)  # [destination, slot, home]

    def busiest(counts: np.ndarray[Any, Any]) -> int:
        crossing = counts * (1 - np.eye(R, dtype=np.int64))
        return int(max(crossing.sum(0).max(), crossing.sum(1).max()))

    rows, weights = 2 * h * busiest(to.any(axis=2).sum(axis=1)), 4 * busiest(to.sum(axis=(1, 2)))
    every, experts = 2 * h * busiest(to.sum(axis=(1, 2))), 2 * h * p.width * busiest(homes.sum(axis=1))
    ids = (2 if jax.default_backend() == "gpu" else 4) * s * k * (R - 1)
    return {
        "plan": ids, "dispatch": rows + weights, "combine": rows, "combine exact": every + weights, "prefetch": experts,
        "dispatch_grad": rows + weights, "dispatch_grad exact": every + weights,
        "combine_grad": rows, "reduce_grad": experts,
    }  # fmt: skip


def measure(p: Point, link_gbps: float) -> list[kit.Row]:
    """A row per op."""
    mesh = rank_programs.mesh_of(p.shape.R)
    operands, ops = Operands(mesh, p), dict[str, Op]()
    with contextlib.ExitStack() as stack:
        for mode in ("dedup", "exact"):
            ep = stack.enter_context(moonep.setup(mesh, "ep", p.config(mode)))
            plan = kit.on_ranks(mesh, ep.plan)(operands.ids)
            made = programs(mesh, ep, plan, operands)
            modal = ("combine", "dispatch_grad")  # those that the mode changes
            ops |= made if mode == "dedup" else {f"{name} exact": made[name] for name in modal}
        link = traffic(p, plan)
        calls: dict[str, Callable[[], Any]] = {}
        for name, op in ops.items():
            calls |= rank_programs.both(name, op)
        for nbytes in sorted({link[name] for name in ops}):
            calls[f"{nbytes}/program"] = rank_programs.copy(mesh, nbytes, FLAGS.loop).program
        us = rank_programs.side_by_side(calls, FLAGS.loop)
        ep.check()
    given = {"R": p.shape.R, "S": p.shape.S, "s": p.shape.s, "K": p.shape.K, "A": p.padding, "SMs": p.sms or None}
    given |= {"E": p.shape.E, "H": p.shape.H, "F": p.width, "routing": FLAGS.routing}
    rows: list[kit.Row] = []
    for name in ops:
        program, copy, nbytes = us[f"{name}/program"], us[f"{link[name]}/program"], link[name]
        share = nbytes / program["p50"] / 1e3 / link_gbps if nbytes else None
        times = {"call_us": us[f"{name}/call"], "program_us": program, "copy_us": copy}
        copies = program["p50"] / copy["p50"] if nbytes else None
        rows.append({"op": name, **given, **times, "link_kB": nbytes / 1e3, "wire_share": share, "copies": copies})
    return rows


def run() -> kit.Tables:
    """All sweeps asked for; each is a table."""
    todo = list(points())
    cpu = jax.default_backend() == "cpu"
    if not (cpu or FLAGS.link_gbps):
        raise SystemExit("--link_gbps: on GPU say what a rank's link carries one way, e.g. 450 for NVLink 4")
    tables: kit.Tables = {"link": []}
    limits: dict[int, float] = {}
    for sweep, p in todo:
        if p.shape.R not in limits:
            mesh = rank_programs.mesh_of(p.shape.R)
            limits[p.shape.R] = FLAGS.link_gbps or rank_programs.copy_gbps(mesh)
            tables["link"].append({"R": p.shape.R, "GBps": limits[p.shape.R], "measured": not FLAGS.link_gbps})
        tables.setdefault(sweep, []).extend(measure(p, limits[p.shape.R]))
    return tables


def _times(heading: str, key: str) -> dict[str, str]:
    return {f"{heading} us p50": f"{{{key}[p50]:.1f}}", "p90" + " " * len(key): f"{{{key}[p90]:.1f}}",
            "p99" + " " * len(key): f"{{{key}[p99]:.1f}}"}  # fmt: skip


COLUMNS = {
    **{name: f"{{{name}}}" for name in ("op", "R", "S", "s", "K", "A", "SMs")},
    **_times("call", "call_us"),
    **_times("in a program", "program_us"),
    "link kB": "{link_kB:.1f}", "wire share": "{wire_share:.3f}", "copy us p50": "{copy_us[p50]:.1f}",
    "op / copy": "{copies:.2f}",
}  # fmt: skip


def show(record: dict[str, Any]) -> str:
    """A Markdown table for each sweep."""
    tables = dict(record["tables"])
    link = ", ".join(
        f"{row['GBps']:.2f} of {row['R']} ranks ({'measured' if row['measured'] else 'given'})"
        for row in tables.pop("link")
    )
    lines = [kit.about(record), "", f"Link of a rank, GB/s: {link}"]
    for sweep, rows in tables.items():
        fixed = ", ".join(f"{name} {rows[0][name]}" for name in ("E", "H", "F", "routing"))
        lines += ["", f"### By {sweep} ({fixed})", "", kit.markdown(rows, COLUMNS)]
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Time in a program over tokens, one line per op, for the largest sweep by tokens (or decode)."""
    tables = record["tables"]
    rows = tables.get("tokens") or tables.get("decode")
    if not rows:
        raise SystemExit("--plot: needs the sweep tokens or decode")
    with kit.picture(path, figsize=(9, 6)) as (_, axes):
        for op in dict.fromkeys(r["op"] for r in rows):
            some = [r for r in rows if r["op"] == op]
            axes.plot([r["s"] for r in some], [r["program_us"]["p50"] for r in some], "o-", label=op)
        some = [r for r in rows if r["op"] == "dispatch"]
        axes.plot([r["s"] for r in some], [r["copy_us"]["p50"] for r in some], "k--", label="copy of dispatch's bytes")
        title = f"{rows[0]['R']} ranks, K {rows[0]['K']}, H {rows[0]['H']}: {record['machine']['devices']}"
        axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="us per call, in a program", title=title)
        axes.legend(fontsize=8)


if __name__ == "__main__":
    kit.main(run, __doc__ or "", show, plot)
