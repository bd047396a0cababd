"""Rows that a rank must have room for, and bytes. `python -m benchmarks.bench_memory`

* **rows** and **bytes**, computed, for each model, group size and number of tokens: this library's from its own layout
  functions (EPConfig.recv_rows, the native DomainShape's chunk, and the shapes that the ops give when traced on an
  abstract mesh of that size); the others' from their definitions:

  - worst case: a static exchange that drops nothing, R * S * min(K, E/R) rows (`all_to_all` or
    `lax.ragged_all_to_all` with room for any routing, TransformerEngine's expert parallelism);
  - ring: all_gather of the R * S tokens, of which a rank then makes the rows of its own experts, again up to
    min(K, E/R) a token;
  - capacity 1.25: E/R experts with 1.25 times the mean load each; what does not fit is *dropped* (drops of the
    routings are counted here, with an expert's capacity shared by all sources, the kind form).

  Bytes of the others are their receive buffers only. Ours are everything: the symmetric chunk, once per domain however
  many layers use it, and what the ops return in a layer - rows, plan, and weights in slots.
* **measured** on this machine's CPU devices, a small layer of each kind, forward and backward, with experts that have
  no GEMM, so that the exchange and its buffers are left, and with SwiGLU experts: XLA's own account per device
  (`memory_analysis`), beside it ours with the chunk, and the growth of the peak of resident memory from compiled to
  run, of all devices, in a process of its own for each layer (benchmarks/static_layers.py).

Where E is no multiple of R, idle experts fill it up.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import PartitionSpec as P

import moonep_jax as moonep
from benchmarks import kit, peers, static_layers
from benchmarks import plan_quality as pq
from benchmarks.models import BY_NAME, MODELS, Model
from moonep_jax import backends, native, ops
from moonep_jax.errors import ConfigError
from moonep_jax.spec import DomainSpec
from moonep_jax.topology import Group, Member, Topology

FLAGS = flags.FLAGS
flags.DEFINE_list("models", list(BY_NAME), "models of benchmarks/models.py")
flags.DEFINE_list("ranks", ["8", "16", "32", "64", "72"], "sizes of the group")
flags.DEFINE_list("show_ranks", ["8", "64", "72"], "sizes in the printed tables; --json has all of them")
flags.DEFINE_list("tokens", ["128", "4096"], "tokens per rank")
flags.DEFINE_list("drops", ["uniform", "lognormal_2", "lognormal_8"], "routings whose drops are counted")
flags.DEFINE_integer("group_tokens", 32768, "tokens of a group that are drawn for that, at most", lower_bound=1)
flags.DEFINE_integer("stage_MB", 256, "EPConfig.stage_bytes of the second chunk", lower_bound=1)
flags.DEFINE_integer("layer_tokens", 128, "measured layer: tokens per device", lower_bound=1)
flags.DEFINE_integer("layer_hidden", 128, "measured layer: hidden size", lower_bound=1)
flags.DEFINE_integer("layer_experts", 64, "measured layer: experts, 8 a token", lower_bound=8)
flags.DEFINE_bool("peaks", True, "measure peaks in processes of their own, too")
flags.DEFINE_enum("peak_of", None, ["ours", "worst_case", "ring"], "only this layer's peak, of this process")
flags.DEFINE_bool("gemm", True, "with --peak_of: SwiGLU experts")
CAPACITY = 1.25
LAYERS = ("ours", "worst_case", "ring")


def run() -> kit.Tables:
    """Computed and measured tables."""
    if FLAGS.peak_of:
        return {"peak": [peak(FLAGS.peak_of, FLAGS.gemm)]}
    rows = [
        row
        for tokens in map(int, FLAGS.tokens)
        for model in map(BY_NAME.__getitem__, FLAGS.models)
        for ranks in map(int, FLAGS.ranks)
        if (row := computed(model, ranks, tokens)) is not None
    ]
    return {"computed": rows, "measured": measured()}


# -- computed ----------------------------------------------------------------------------------------------------------


def computed(model: Model, ranks: int, tokens: int) -> kit.Row | None:
    """Rows and bytes of one rank; None if there are fewer experts than ranks."""
    experts = model.experts_on(ranks)
    if experts is None:
        return None
    epn, item = experts // ranks, 2
    fixed = {"tokens": tokens, "hidden": model.H, "topk": model.K, "experts": experts, "dtype": jnp.bfloat16}
    config = moonep.EPConfig(**fixed, weights=model.weights(jnp.bfloat16))
    capped = moonep.EPConfig(**fixed, weights=model.weights(jnp.bfloat16), stage_bytes=FLAGS.stage_MB * 2**20)
    rows = {
        "ours": config.recv_rows(ranks),
        "worst": ranks * tokens * min(model.K, epn),
        "ring": ranks * tokens,
        "ring_made": ranks * tokens * min(model.K, epn),
        "capacity": epn * _room(model, ranks, tokens, experts),
    }
    return {
        "model": model.name,
        "R": ranks,
        "S": tokens,
        "E": experts,
        "padded": experts != model.E,
        **rows,
        **{f"{name}_bytes": count * model.H * item for name, count in rows.items()},
        **traced_bytes(config, ranks),
        "own_weights_bytes": epn * config.expert_bytes,
        "chunk_cpu": chunk("cpu", config, ranks),
        "chunk_gpu": chunk("gpu", config, ranks),
        "chunk_cpu_capped": chunk("cpu", capped, ranks),
        "chunk_gpu_capped": chunk("gpu", capped, ranks),
        "dropped": {name: dropped(name, model, ranks, tokens, experts) for name in FLAGS.drops},
    }


def chunk(platform: str, config: moonep.EPConfig, ranks: int) -> dict[str, int] | None:
    """Bytes of each part of a rank's symmetric chunk; None where the backend is not built or cannot hold it."""
    try:
        backend: Any = types.SimpleNamespace(module=native.module(platform))  # all that domain_shape asks of one
        return backends.domain_shape(backend, config, ranks).chunk_bytes()
    except ConfigError:
        return None


def traced_bytes(config: moonep.EPConfig, ranks: int) -> dict[str, int]:
    """Bytes of what the ops of a layer return on one rank, traced on an abstract mesh: no devices are needed."""
    members = tuple(Member(r, r, 0) for r in range(ranks))
    topology = Topology(("ep",), (), ranks, (Group(0, (), members),), "cpu")
    spec = DomainSpec(0, config, topology)
    epn = spec.experts_per_rank

    def body(x: jax.Array, ids: jax.Array, weights: dict[str, jax.Array]) -> Any:
        d = ops.dispatch(spec, x, ids)
        w = ops.prefetch(spec, d.plan, weights)
        return {"rows": (d.hidden, d.weights), "plan": d.plan, "weights": w, "y": ops.combine(spec, d.plan, d.hidden)}

    mesh = jax.sharding.AbstractMesh((ranks,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    given = (
        jax.ShapeDtypeStruct((ranks * config.tokens, config.hidden), config.dtype),
        jax.ShapeDtypeStruct((ranks * config.tokens, config.topk), np.int32),
        {n: jax.ShapeDtypeStruct((ranks * epn, *leaf.shape), leaf.dtype) for n, leaf in config.weights.items()},
    )
    shapes = jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), *given)
    total = {name: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(part)) for name, part in shapes.items()}
    own = epn * sum(leaf.nbytes for leaf in config.weights.values())
    each = {name: count // ranks for name, count in total.items()}
    return {
        "rows_result": each["rows"],
        "plan_result": each["plan"],
        "slots_result": each["weights"] - own,
        "y_result": each["y"],
    }


def _room(model: Model, ranks: int, tokens: int, experts: int) -> int:
    """Rows of each expert with capacity 1.25."""
    return -int(-CAPACITY * ranks * tokens * model.K // experts)


@functools.cache
def dropped(name: str, model: Model, ranks: int, tokens: int, experts: int) -> float | None:
    """Share of a routing's rows that do not fit capacity 1.25; None: the routing is out of reach."""
    if not pq.in_reach(name, model.K, experts):
        return None
    drawn = min(tokens, max(1, FLAGS.group_tokens // ranks))
    ids = pq.draw(name, ranks, drawn, model.K, experts)
    count = np.bincount(ids.reshape(-1), minlength=experts)
    return float(np.maximum(count - _room(model, ranks, drawn, experts), 0).sum() / ids.size)


# -- measured ----------------------------------------------------------------------------------------------------------


def layer_config(gemm: bool) -> moonep.EPConfig:
    """Of the measured layer."""
    H, E = FLAGS.layer_hidden, FLAGS.layer_experts
    weights = Model("measured", H, H // 2, E, 8).weights(jnp.float32) if gemm else None
    return moonep.EPConfig(tokens=FLAGS.layer_tokens, hidden=H, topk=8, experts=E, dtype=jnp.float32, weights=weights)


def with_layer(name: str, gemm: bool, use: Callable[[Any, Any, int], kit.Row]) -> kit.Row:
    """use(compiled gradient step, its arguments, bytes of the symmetric chunk of a rank) of a layer on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), (peers.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    c = layer_config(gemm)
    rng = np.random.default_rng(0)

    def split(*shape: int) -> jax.Array:
        return kit.put(mesh, rng.standard_normal(shape, np.float32))

    n = mesh.size * c.tokens
    args = (
        split(n, c.hidden),
        split(n, c.experts),
        {k: split(c.experts, *leaf.shape) for k, leaf in c.weights.items()} or None,
    )

    def step(layer: Callable[..., jax.Array]) -> Any:
        def loss(x: jax.Array, logits: jax.Array, params: Any) -> jax.Array:
            return jnp.sum(layer(x, logits, params) ** 2)

        body = jax.grad(loss, argnums=(0, 1, 2))
        return kit.on_ranks(mesh, body, check_vma=False).lower(*args).compile()

    if name == "ours":
        with moonep.setup(mesh, peers.AXIS, c) as ep:
            layer = ep.moe if gemm else functools.partial(exchange_only, ep)
            return use(step(layer), args, ep.stats()["bytes_per_rank"]["total"])
    return use(step(functools.partial(getattr(static_layers, name), K=c.topk)), args, 0)


def exchange_only(ep: moonep.Domain, x: jax.Array, logits: jax.Array, _: None) -> jax.Array:
    """ep.moe with experts that have no GEMM."""
    d = ep.dispatch(x, *static_layers.route(logits, ep.spec.config.topk))
    params, gemm = static_layers.experts(ep.spec.experts_per_rank, None)
    return ep.combine(d.plan, peers.swiglu(d.hidden, d.group_sizes, params, gemm), d.weights)


def measured() -> list[kit.Row]:
    """XLA's account of each layer in this process, and the peaks of processes of their own."""

    def account(compiled: Any, _: Any, chunk: int) -> kit.Row:
        found = compiled.memory_analysis()
        names = {"temp": "temp_size", "arguments": "argument_size", "results": "output_size"}
        return {key: getattr(found, f"{field}_in_bytes") for key, field in names.items()} | {"chunk": chunk}

    rows = list[kit.Row]()
    for gemm in (False, True):
        for name in LAYERS:
            found = with_layer(name, gemm, account) | (_peak_of(name, gemm) if FLAGS.peaks else {"peak": None})
            rows.append({"layer": name, "gemm": gemm} | found)
    return rows


def peak(name: str, gemm: bool) -> kit.Row:
    """Growth of this process's resident memory over a compiled step and two runs of it: its peak."""

    def grow(compiled: Any, args: Any, _: int) -> kit.Row:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        before = _resident("VmHWM")
        for _ in range(2):
            jax.block_until_ready(compiled(*args))
        return {"peak": _resident("VmHWM") - before}

    return with_layer(name, gemm, grow)


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _peak_of(name: str, gemm: bool) -> kit.Row:
    keep = ("devices", "layer_tokens", "layer_hidden", "layer_experts")
    return kit.another_run("bench_memory", keep, f"--peak_of={name}", f"--gemm={gemm}")["peak"][0]


# -- the page ----------------------------------------------------------------------------------------------------------

ROWS = {
    "model": "{model}",
    "S": "{S}",
    "R": "{R}",
    "E": "{E}",
    "rows ours": "{ours}",
    "worst case": "{worst}",
    "/ ours": "{worst_ratio:.1f}",
    "ring: tokens": "{ring}",
    "ring: rows made": "{ring_made}",
    "/ ours ": "{ring_ratio:.1f}",
    "capacity 1.25": "{capacity}",
    "/ ours  ": "{capacity_ratio:.2f}",
    "dropped % uniform": "{drop_uniform:.1f}",
    "lognormal_2": "{drop_lognormal_2:.1f}",
    "lognormal_8": "{drop_lognormal_8:.1f}",
}
BYTES = {
    "model": "{model}",
    "S": "{S}",
    "R": "{R}",
    "MB: rows ours": "{ours_MB:.0f}",
    "worst case": "{worst_MB:.0f}",
    "ring: tokens": "{ring_MB:.0f}",
    "ring: rows made": "{made_MB:.0f}",
    "capacity 1.25": "{capacity_MB:.0f}",
    "ours: chunk CPU": "{cpu_MB:.0f}",
    "of it weights": "{stage_MB:.0f}",
    "chunk GPU": "{gpu_MB:.0f}",
    "chunk GPU, stage_bytes {stage} MB": "{gpu_capped_MB:.0f}",
    "slots of a layer": "{slots_MB:.0f}",
    "plan": "{plan_MB:.2f}",
    "own experts": "{own_MB:.0f}",
}
MEASURED = {
    "layer": "{layer}",
    "experts": "{experts}",
    "XLA temporary MB": "{temp_MB:.2f}",
    "arguments": "{arguments_MB:.2f}",
    "results": "{results_MB:.2f}",
    "symmetric chunk": "{chunk_MB:.2f}",
    "temporary and chunk": "{sum_MB:.2f}",
    "/ ours": "{sum_ratio:.2f}",
    "peak growth of the process MB": "{peak_MB:.0f}",
    "/ ours ": "{peak_ratio:.2f}",
}


def show(record: dict[str, Any]) -> str:
    """The tables as Markdown."""
    used, tables = record["flags"], record["tables"]
    parts = [kit.about(record)]
    if "computed" not in tables:
        return "\n\n".join([*parts, str(tables["peak"][0])])
    rows = [_derived(row) for row in tables["computed"] if str(row["R"]) in used["show_ranks"]]
    heads = {key.format(stage=used["stage_MB"]): form for key, form in BYTES.items()}
    own = {row["gemm"]: row for row in tables["measured"] if row["layer"] == "ours"}
    found = [
        row
        | {f"{k}_MB": _mb(row[k]) for k in ("temp", "arguments", "results", "chunk", "peak")}
        | {"sum_MB": (row["temp"] + row["chunk"]) / 1e6, "experts": "SwiGLU" if row["gemm"] else "no GEMM"}
        | {"sum_ratio": (row["temp"] + row["chunk"]) / (own[row["gemm"]]["temp"] + own[row["gemm"]]["chunk"])}
        | {"peak_ratio": row["peak"] / own[row["gemm"]]["peak"] if row["peak"] else None}
        for row in tables["measured"]
    ]
    layer = f"{used['layer_tokens']} tokens per device, H {used['layer_hidden']}, {used['layer_experts']} experts, K 8"
    parts += ["### Rows per rank", kit.markdown(rows, ROWS)]
    parts += ["### Bytes per rank, bf16", kit.markdown(rows, heads)]
    parts += [f"### Measured: one layer, forward and backward, float32, {layer}", kit.markdown(found, MEASURED)]
    return "\n\n".join(parts)


def _mb(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def _derived(row: kit.Row) -> kit.Row:
    def total(name: str) -> float | None:
        return _mb(row[name] and row[name]["total"])

    drops = {f"drop_{n}": None for n in ("uniform", "lognormal_2", "lognormal_8")}
    drops |= {f"drop_{n}": None if share is None else 100 * share for n, share in row["dropped"].items()}
    return (
        row
        | {f"{n}_ratio": row[key] / row["ours"] for n, key in (("worst", "worst"), ("ring", "ring_made"))}
        | {"capacity_ratio": row["capacity"] / row["ours"]}
        | {f"{n}_MB": _mb(row[f"{n}_bytes"]) for n in ("ours", "worst", "ring", "capacity")}
        | {"made_MB": _mb(row["ring_made_bytes"]), "own_MB": _mb(row["own_weights_bytes"])}
        | {"cpu_MB": total("chunk_cpu"), "gpu_MB": total("chunk_gpu"), "gpu_capped_MB": total("chunk_gpu_capped")}
        | {"stage_MB": _mb(row["chunk_cpu"]["slots"]), "slots_MB": _mb(row["slots_result"])}
        | {"plan_MB": _mb(row["plan_result"])}
        | drops
    )


def plot(record: dict[str, Any], path: Path) -> None:
    """Rows per rank over R, at the largest number of tokens: solid ours, dashed worst case, one colour per model."""
    rows = record["tables"]["computed"]
    most = max(row["S"] for row in rows)
    with kit.picture(path, figsize=(9, 5)) as (_, axes):
        for i, model in enumerate(m.name for m in MODELS):
            own = [row for row in rows if row["model"] == model and row["S"] == most]
            if own:
                ranks = [row["R"] for row in own]
                axes.plot(ranks, [row["ours"] for row in own], "o-", color=f"C{i}", label=f"{model}, here")
                axes.plot(ranks, [row["worst"] for row in own], "^--", color=f"C{i}", label=f"{model}, worst case")
        gathered = sorted({(row["R"], row["ring"]) for row in rows if row["S"] == most})
        axes.plot(*zip(*gathered, strict=True), ":", color="black", label="tokens of an all_gather")
        axes.set(yscale="log", xlabel="ranks", ylabel=f"rows that a rank must hold, {most} tokens per rank")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))


if __name__ == "__main__":
    kit.main(run, __doc__ or "", show, plot)
