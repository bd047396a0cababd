"""The prefetch table: 14 configurations of how often rank 0's experts are fetched, through `Domain.prefetch` under jit.

`python -m benchmarks.bench_prefetch [--devices 4] [--processes 2]`, on the CPU devices of one or more processes or on
the GPUs that there are; `--streams`: on one GPU with its ranks as streams and without XLA (benchmarks.loopback). Full
sizes on GPU; on CPU both sides of the weights are divided by --scale. Experts per rank are the table's for 4 ranks.

What is timed: wall time until the slowest rank has every slot filled, from a barrier of all processes. A leaf is
[2*epn, H, Hp] bfloat16 and filled in place, so what is moved is the slots. "call": one jitted call. "worst us": one of
--loop calls of one program, which takes JAX's dispatch out; the caches are as the call before left them. Data counts
slots * H * Hp * 2 bytes read and written, BW = Data / worst us, CommBW = BW / 2: the bytes that leave rank 0. Beside
each: as many bytes read and written once by a plain XLA pass in the same run, taking turns: on GPU by every rank in its
own memory, on CPU by all ranks together. B are the table's slot columns; here a rank has as many as it has experts.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from benchmarks import kit, rank_programs  # isort: skip (they set what must be set before jax starts)

import jax
import numpy as np
from absl import flags

import moonep_jax as moonep
from benchmarks.prefetch_table import PREFETCH, Config, slots_of

FLAGS = flags.FLAGS
FLAGS.set_default("devices", 4)
flags.DEFINE_integer("ranks", None, "ranks; default: all devices", lower_bound=2)
flags.DEFINE_integer("scale", None, "divides H and Hp; default: 1, on CPU 4", lower_bound=1)
flags.DEFINE_list("configs", [c.name for c in PREFETCH], "configurations of the table")
flags.DEFINE_list("num_sms", ["32"], "on GPU: SMs of the kernels that send; a row for each")
flags.DEFINE_integer("loop", 8, "calls of a program", lower_bound=1)
flags.DEFINE_bool("streams", False, "ranks are streams of one GPU, and no XLA")


def measure(mesh: jax.sharding.Mesh, config: Config, scale: int, sms: int | None) -> kit.Row:
    """One row of the table."""
    ranks, epn, loop = mesh.size, config.experts // 4, FLAGS.loop
    experts, h, hp = epn * ranks, max(1, config.h // scale), max(1, config.hp // scale)
    slots, one = sum(config.fetched), 2 * h * hp
    settings = moonep.EPConfig(tokens=8, hidden=8, topk=1, experts=experts, num_sms=sms,
                               weights={"w": ((h, hp), "bfloat16")})  # fmt: skip
    with moonep.setup(mesh, "ep", settings) as ep:
        ids = kit.put(mesh, np.zeros((ranks * 8, 1), np.int32))
        plan = kit.on_ranks(mesh, ep.plan)(ids)
        table = np.tile(slots_of(config.fetched, experts, ranks), (ranks, 1))  # every rank's copy
        plan = dataclasses.replace(plan, slot_expert=kit.put(mesh, table))
        leaf = rank_programs.Box(rank_programs.full(mesh, (2 * epn, h, hp), "bfloat16"))
        body = functools.partial(_prefetch, ep)
        op = rank_programs.Op(mesh, body, leaf, [plan], rank_programs.replaced, in_place=True, loop=loop)
        share = ranks if jax.default_backend() == "cpu" else 1  # ranks on CPUs share one memory
        copy = rank_programs.copy(mesh, slots * one // share, loop)
        calls = rank_programs.both("prefetch", op) | rank_programs.both("copy", copy)
        us = rank_programs.side_by_side(calls, loop)
        ep.check()
    worst, plain, data = us["prefetch/program"], us["copy/program"], 2 * slots * one
    bw = data / worst["p50"] / 1e3
    return {"config": config.name, "R": ranks, "E": experts, "B": config.columns, "H": h, "Hp": hp, "SMs": sms,
            "slots": slots, "data_MB": data / 1e6, "worst_us": worst["p50"], "p90_us": worst["p90"],
            "BW_GBps": bw, "CommBW_GBps": bw / 2, "call_us": us["prefetch/call"]["p50"],
            "call_p90_us": us["prefetch/call"]["p90"], "copy_us": plain["p50"], "copy_p90_us": plain["p90"],
            "copy_call_us": us["copy/call"]["p50"], "of_copy": plain["p50"] / worst["p50"]}  # fmt: skip


def _prefetch(ep: moonep.Domain, leaf: jax.Array, plan: moonep.Plan) -> jax.Array:
    return ep.prefetch(plan, {"w": leaf})["w"]


def run() -> kit.Tables:
    """All configurations asked for that these ranks can be."""
    if unknown := set(FLAGS.configs) - {c.name for c in PREFETCH}:
        raise SystemExit(f"--configs: unknown {sorted(unknown)}; there are {[c.name for c in PREFETCH]}")
    if FLAGS.streams:
        return {"streams": _streams()}
    cpu = jax.default_backend() == "cpu"
    mesh = rank_programs.mesh_of(FLAGS.ranks or jax.device_count())
    scale = FLAGS.scale or (4 if cpu else 1)
    tables: kit.Tables = {"prefetch": [], "left_out": []}
    for config in (c for c in PREFETCH if c.name in FLAGS.configs):
        if max(config.fetched) >= mesh.size:
            tables["left_out"].append({"config": config.name, "needs_ranks": 1 + max(config.fetched)})
            continue
        for sms in [None] if cpu else [int(n) for n in FLAGS.num_sms]:
            tables["prefetch"].append(measure(mesh, config, scale, sms))
    return tables


def _streams() -> list[kit.Row]:
    """The kernels alone; before JAX starts the GPU, whose memory it would take."""
    from benchmarks import gpu_timer, loopback  # isort: skip (they set what must be set before CUDA starts)

    import gpu_kit
    from cuda.bindings import runtime

    every = gpu_kit.ok(runtime.cudaGetDeviceProperties(0)).multiProcessorCount
    result: dict[str, Any] = {}
    loopback.bench_prefetch(loopback.Bench(gpu_timer.Timer(FLAGS.repeats), every, None, result), [16, 32, every])
    return result["prefetch"]


COLUMNS = {
    "config": "{config}", "E": "{E}", "B": "{B}", "H": "{H}", "Hp": "{Hp}", "SMs": "{SMs}", "slots": "{slots}",
    "Data MB": "{data_MB:.2f}", "worst us p50": "{worst_us:.1f}", "p90": "{p90_us:.1f}",
    "BW GB/s": "{BW_GBps:.2f}", "CommBW GB/s": "{CommBW_GBps:.2f}", "call us p50": "{call_us:.1f}",
    "copy us p50": "{copy_us:.1f}", "copy / worst": "{of_copy:.2f}",
}  # fmt: skip


def show(record: dict[str, Any]) -> str:
    """The table in Markdown."""
    tables = record["tables"]
    if rows := tables.get("streams"):
        from benchmarks import loopback_report

        sms = max(int(k.rsplit("_", 1)[1]) for k in rows[0] if k.startswith("send_us_"))
        return loopback_report.table({"device": record["machine"]["devices"], "sms": sms, "prefetch": rows})
    lines = [kit.about(record), "", kit.markdown(tables["prefetch"], COLUMNS)]
    if rows := tables["left_out"]:
        lines += ["", "Left out: " + ", ".join(f"{r['config']} (needs {r['needs_ranks']} ranks)" for r in rows) + "."]
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Bandwidth over size, and the plain copy's."""
    if rows := record["tables"].get("streams"):
        from benchmarks import loopback_report

        loopback_report.plot({"device": record["machine"]["devices"], "prefetch": rows}, path)
        return
    with kit.picture(path, figsize=(8, 5)) as (_, axes):
        rows = sorted(record["tables"]["prefetch"], key=lambda r: r["data_MB"])
        for sms in sorted({r["SMs"] for r in rows}, key=str):
            some = [r for r in rows if r["SMs"] == sms]
            size, suffix = [r["data_MB"] for r in some], "" if sms is None else f", {sms} SMs"
            axes.plot(size, [r["BW_GBps"] for r in some], "o", label=f"prefetch in a program{suffix}")
            axes.plot(size, [r["data_MB"] / r["call_us"] * 1e3 for r in some], "^", label=f"prefetch, one call{suffix}")
            axes.plot(size, [r["data_MB"] / r["copy_us"] * 1e3 for r in some], "kx", label=f"plain copy{suffix}")
        title = f"prefetch, {rows[0]['R']} ranks: {record['machine']['devices']}"
        axes.set(xscale="log", xlabel="MB read and written", ylabel="GB/s read and written", title=title)
        axes.set_ylim(bottom=0)
        axes.legend()


if __name__ == "__main__":
    kit.main(run, __doc__ or "", show, plot)
