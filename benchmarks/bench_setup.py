"""What a domain costs beside its calls: setup, close, memory, compiling, import. `python -m benchmarks.bench_setup`

Four tables:

* **setup** - `moonep.setup` and `close` on 1 to --devices devices of one process, and, by programs of their own, on
  --also_processes processes of 2 devices; the slowest process. Beside it: compiling and running a new program that is
  one psum on the same devices, in turns - the least that any program of that mesh costs. Memory: bytes per rank that
  setup names (`stats()`), and the pages of all ranks' chunks that the process has in its page table after setup, and
  after one step of every op at full size: memory comes with its first use.
* **domains** - 1 to 16 domains alive at once: the first and the last one's setup, and the time of a plan on the first.
* **jit** - a MoE layer: the process's first, the same jitted function again, a new function over the same domain, and
  one over another domain of equal config; from the call of jax.jit to the first result, and trace, lower and compile
  apart. Beside it the exact layer of plain JAX (all_gather, psum_scatter; benchmarks/static_layers.py).
* **import** - fresh interpreters: `import jax`, then `import moonep_jax`.

The last three are made on a single process only.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import moonep_jax as moonep
from benchmarks import kit, peers, static_layers

FLAGS = flags.FLAGS
FLAGS.set_default("devices", 16)
flags.DEFINE_list("also_processes", ["2", "4"], "numbers of processes that are tried in programs of their own")
flags.DEFINE_list("domains", ["1", "4", "16"], "numbers of domains alive at once")
flags.DEFINE_integer("tokens", 512, "tokens per rank", lower_bound=1)
flags.DEFINE_integer("hidden", 1024, "hidden size", lower_bound=1)
flags.DEFINE_integer("width", 512, "width of an expert", lower_bound=1)
flags.DEFINE_integer("jit_repeats", 3, "functions that are compiled after the first", lower_bound=0)
flags.DEFINE_integer("imports", 5, "fresh interpreters", lower_bound=1)
EXPERTS, TOPK = 64, 8


def run() -> kit.Tables:
    """All tables."""
    if jax.process_count() > 1:
        return {"setup": [setup_row(jax.device_count())]}
    sizes = [r for r in (1, 2, 4, 8, 16, 32, 64) if r <= jax.device_count()]
    tables = {"import": imports(), "jit": jit_rows(), "setup": [setup_row(r) for r in sizes]}
    tables["domains"] = domain_rows()
    for processes in FLAGS.also_processes if jax.default_backend() == "cpu" else ():
        tables["setup"] += of_processes(int(processes))
    return tables


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    """A mesh over the first devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[:ranks]), (peers.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def config(tokens: int, hidden: int, width: int) -> moonep.EPConfig:
    """64 experts of three leaves, 8 a token."""
    leaf = jnp.bfloat16
    weights = {"gate": ((hidden, width), leaf), "up": ((hidden, width), leaf), "down": ((width, hidden), leaf)}
    return moonep.EPConfig(tokens=tokens, hidden=hidden, topk=TOPK, experts=EXPERTS, dtype=leaf, weights=weights)


on_ranks = functools.partial(kit.on_ranks, check_vma=False)


# -- setup, close and memory -------------------------------------------------------------------------------------------


def resident(ep: moonep.Domain) -> int:
    """Bytes of a domain's shared memory that are in this process's page table; on GPUs all of it is there."""
    total = ep.stats()["bytes_per_rank"]["total"]
    if ep.spec.topology.platform != "cpu":
        return total * len(ep._shared.address)
    page = resource.getpagesize()
    count = 0
    with open("/proc/self/pagemap", "rb") as pages:
        for address in ep._shared.address.values():
            pages.seek(address // page * 8)
            entries = np.frombuffer(pages.read(total // page * 8), np.uint64)
            count += int((entries >> np.uint64(63)).sum())  # bit 63: present
    return count * page


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def setup_row(ranks: int) -> kit.Row:
    """Setup and close on the first `ranks` devices, and what they hold."""
    mesh, fixed = mesh_of(ranks), config(FLAGS.tokens, FLAGS.hidden, FLAGS.width)
    moonep.setup(mesh, peers.AXIS, fixed).close()  # the process's first one pays for others
    taken: dict[str, list[float]] = {"setup": [], "close": [], "psum": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        kit.barrier()
        begin = time.perf_counter()
        result = call()
        taken[name].append((time.perf_counter() - begin) * 1e3)
        return result

    one = kit.put(mesh, np.ones(ranks, np.float32))
    for i in range(FLAGS.repeats):
        ep = timed("setup", lambda: moonep.setup(mesh, peers.AXIS, fixed))
        timed("close", ep.close)
        # A constant of its own: nothing that was compiled before can be taken.
        body = functools.partial(lambda i, x: jax.lax.psum(x * (i + ranks * 1000), peers.AXIS), i)
        timed("psum", lambda: jax.block_until_ready(on_ranks(mesh, body)(one)))
    before = threads()
    with moonep.setup(mesh, peers.AXIS, fixed) as ep:
        started = threads() - before
        named = ep.stats()["bytes_per_rank"]["total"]
        after_setup = resident(ep)
        jax.block_until_ready(every_op(ep, mesh)())
        after_step = resident(ep)
    worst = {name: kit.summary(kit.gather(ms).max(axis=0).tolist()) for name, ms in taken.items()}
    return {
        "ranks": ranks,
        "processes": jax.process_count(),
        **{f"{name}_{p}": summary[p] for name, summary in worst.items() for p in ("p50", "p90")},
        "ratio": worst["setup"]["p50"] / worst["psum"]["p50"],
        "named_MiB": named / 2**20,
        "all_MiB": ranks * named / 2**20,
        "setup_MiB": float(kit.gather(after_setup).max()) / 2**20,
        "step_MiB": float(kit.gather(after_step).max()) / 2**20,
        "threads": started,
        "ms": taken,
    }


def every_op(ep: moonep.Domain, mesh: jax.sharding.Mesh) -> Callable[[], Any]:
    """A jitted call that moves rows and weights both ways, without a GEMM; one rank is loaded so that experts move."""
    ranks, fixed = ep.spec.ranks, ep.spec.config
    ids = np.tile(np.arange(TOPK, dtype=np.int32), (ranks * fixed.tokens, 1))
    x = np.ones((ranks * fixed.tokens, fixed.hidden), fixed.dtype)
    leaves = {name: np.ones((EXPERTS, *leaf.shape), leaf.dtype) for name, leaf in fixed.weights.items()}

    def body(ids: jax.Array, x: jax.Array, leaves: dict[str, jax.Array]) -> Any:
        p = ep.plan(ids)
        d, back = jax.vjp(lambda x: ep.dispatch(x, ids, plan=p).hidden, x)
        w, reduce = jax.vjp(lambda leaves: ep.prefetch(p, leaves), leaves)
        return ep.combine(p, d), back(d), reduce(w)

    step = on_ranks(mesh, body)
    given = jax.tree.map(functools.partial(kit.put, mesh), (ids, x, leaves))
    return lambda: step(*given)


def of_processes(processes: int) -> list[kit.Row]:
    """The setup table of this program on several processes."""
    keep = ("tokens", "hidden", "width", "repeats")
    return kit.another_run("bench_setup", keep, f"--processes={processes}", "--devices=2")["setup"]


# -- many domains ------------------------------------------------------------------------------------------------------


def domain_rows() -> list[kit.Row]:
    """Domains alive at once on 8 devices, or on all if there are fewer."""
    mesh = mesh_of(min(8, jax.device_count()))
    ranks, rows = mesh.size, list[kit.Row]()
    fixed = config(FLAGS.tokens, FLAGS.hidden, FLAGS.width)
    ids = kit.put(mesh, np.random.default_rng(0).integers(EXPERTS, size=(ranks * FLAGS.tokens, TOPK), dtype=np.int32))
    for count in map(int, FLAGS.domains):
        before = threads()
        last, alive = list[float](), list[moonep.Domain]()
        for _ in range(count):
            begin = time.perf_counter()
            alive.append(moonep.setup(mesh, peers.AXIS, fixed))
            last.append((time.perf_counter() - begin) * 1e3)
        plan = on_ranks(mesh, lambda ids: alive[0].plan(ids).dst_row)
        named = alive[0].stats()["bytes_per_rank"]["total"]
        times = kit.summary(kit.side_by_side({"plan": lambda: plan(ids)})["plan"])
        started, present = threads() - before, sum(map(resident, alive))
        begin = time.perf_counter()
        for domain in alive:
            domain.close()
        closing = (time.perf_counter() - begin) * 1e3 / count
        rows.append(
            {"domains": count, "ranks": ranks, "first_ms": last[0], "last_ms": last[-1], "close_ms": closing}
            | {"plan_p50": times["p50"], "plan_p90": times["p90"]}
            | {"threads": started, "named_MiB": named / 2**20, "MiB": present / 2**20 / count / ranks}
        )
    return rows


# -- compiling ---------------------------------------------------------------------------------------------------------


def jit_rows() -> list[kit.Row]:
    """Times to the first result of a layer, ours and plain JAX's."""
    mesh = mesh_of(min(8, jax.device_count()))
    s, H, F = 32, 64, 64
    rng = np.random.default_rng(0)
    shapes = {"x": (s * mesh.size, H), "logits": (s * mesh.size, EXPERTS)}
    x, logits = (
        kit.put(mesh, rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)) for shape in shapes.values()
    )
    leaves = {"gate": (EXPERTS, H, F), "up": (EXPERTS, H, F), "down": (EXPERTS, F, H)}
    params = {
        n: kit.put(mesh, rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)) for n, shape in leaves.items()
    }
    jax.block_until_ready(on_ranks(mesh, lambda x: jax.lax.psum(x, peers.AXIS))(x))  # XLA's own first time

    def layer(ep: moonep.Domain | None) -> Callable[..., jax.Array]:
        if ep is None:
            return functools.partial(static_layers.ring, K=TOPK)
        return lambda x, logits, params: ep.moe(x, logits, params)

    def function(ep: moonep.Domain | None, backward: bool) -> Any:
        forward = layer(ep)

        def loss(*args: Any) -> jax.Array:
            return jnp.sum(forward(*args).astype(jnp.float32) ** 2)

        return on_ranks(mesh, (lambda *args: jax.grad(loss, argnums=(0, 2))(*args)) if backward else forward)

    rows = list[kit.Row]()
    kinds = ("first", "new function", "another domain", "again")
    with moonep.setup(mesh, peers.AXIS, config(s, H, F)) as a, moonep.setup(mesh, peers.AXIS, config(s, H, F)) as b:
        for backward in (False, True):
            spent: dict[tuple[str, str], list[dict[str, float]]] = {}
            for turn in range(1 + FLAGS.jit_repeats):
                for name, domain in (("ours", a), ("plain", None)):
                    kind = "new function" if turn else "first"
                    f = function(domain, backward)
                    spent.setdefault((name, kind), []).append(_stages(f, x, logits, params))
                    jax.block_until_ready(f(x, logits, params))
                    begin = time.perf_counter()
                    jax.block_until_ready(f(x, logits, params))
                    total = (time.perf_counter() - begin) * 1e3
                    spent.setdefault((name, "again"), []).append({"total": total})
                if turn:
                    f = function(b, backward)
                    spent.setdefault(("ours", "another domain"), []).append(_stages(f, x, logits, params))
            for kind in kinds:
                row: kit.Row = {"pass": "forward and backward" if backward else "forward", "kind": kind}
                for name in ("ours", "plain"):
                    found = spent.get((name, kind), [])
                    for stage in ("trace", "lower", "compile", "total"):
                        times = kit.summary([one[stage] for one in found]) if found and stage in found[0] else None
                        row |= {
                            f"{name}_{stage}": times and times["p50"],
                            f"{name}_{stage}_p90": times and times["p90"],
                        }
                rows.append(row)
    return rows


def _stages(f: Any, *args: Any) -> dict[str, float]:
    """ms of tracing, lowering, compiling a jitted function, and of all with its first run."""
    marks = [time.perf_counter()]
    traced = f.trace(*args)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    jax.block_until_ready(compiled(*args))
    marks.append(time.perf_counter())
    trace, lower, compiling = (1e3 * (b - a) for a, b in itertools.pairwise(marks[:4]))
    return {"trace": trace, "lower": lower, "compile": compiling, "total": 1e3 * (marks[-1] - marks[0])}


def imports() -> list[kit.Row]:
    """Import times of fresh interpreters."""
    code = (
        "import time; a = time.perf_counter(); import jax; b = time.perf_counter(); import moonep_jax; "
        "print(b - a, time.perf_counter() - b)"
    )
    found = list[list[float]]()
    for _ in range(FLAGS.imports + 1):  # the first one fills the caches of files
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
        found.append([1e3 * float(s) for s in done.stdout.split()])
    ours, alone = (kit.summary([pair[i] for pair in found[1:]]) for i in (1, 0))
    row = {"jax_p50": alone["p50"], "jax_p90": alone["p90"], "ours_p50": ours["p50"], "ours_p90": ours["p90"]}
    return [row | {"share": ours["p50"] / alone["p50"], "ms": found}]


# -- the page ----------------------------------------------------------------------------------------------------------

SETUP = {
    "ranks": "{ranks}",
    "processes": "{processes}",
    "setup ms p50": "{setup_p50:.1f}",
    "p90": "{setup_p90:.1f}",
    "close ms p50": "{close_p50:.1f}",
    "p90 ": "{close_p90:.1f}",
    "a new psum program ms p50": "{psum_p50:.1f}",
    "p90  ": "{psum_p90:.1f}",
    "setup / psum": "{ratio:.2f}",
    "MiB of a rank": "{named_MiB:.2f}",
    "MiB of all": "{all_MiB:.1f}",
    "present after setup": "{setup_MiB:.2f}",
    "after every op": "{step_MiB:.1f}",
    "threads": "{threads}",
}
DOMAINS = {
    "domains": "{domains}",
    "ranks of each": "{ranks}",
    "first setup ms": "{first_ms:.1f}",
    "last setup ms": "{last_ms:.1f}",
    "close ms each": "{close_ms:.1f}",
    "plan on the first us p50": "{plan_p50:.0f}",
    "p90": "{plan_p90:.0f}",
    "threads": "{threads}",
    "MiB of a rank": "{named_MiB:.2f}",
    "present after a plan": "{MiB:.2f}",
}
JIT = {
    "layer": "{pass}",
    "function": "{kind}",
    "ours ms p50": "{ours_total:.1f}",
    "p90": "{ours_total_p90:.1f}",
    "trace": "{ours_trace:.0f}",
    "lower": "{ours_lower:.0f}",
    "compile": "{ours_compile:.0f}",
    "plain JAX ms p50": "{plain_total:.1f}",
    "p90 ": "{plain_total_p90:.1f}",
    "trace ": "{plain_trace:.0f}",
    "lower ": "{plain_lower:.0f}",
    "compile ": "{plain_compile:.0f}",
    "ours / plain": "{ratio:.2f}",
}
IMPORT = {
    "import jax ms p50": "{jax_p50:.0f}",
    "p90": "{jax_p90:.0f}",
    "then import moonep_jax ms p50": "{ours_p50:.0f}",
    "p90 ": "{ours_p90:.0f}",
    "of jax": "{share:.2f}",
}


def show(record: dict[str, Any]) -> str:
    """The tables as Markdown."""
    tables, parts = record["tables"], [kit.about(record)]
    parts += ["### Setup and close", kit.markdown(tables["setup"], SETUP)]
    if "jit" in tables:
        rows = [
            row | {"ratio": row["ours_total"] / row["plain_total"] if row["plain_total"] else None}
            for row in tables["jit"]
        ]
        parts += ["### Domains alive at once", kit.markdown(tables["domains"], DOMAINS)]
        parts += ["### To the first result of a jitted layer", kit.markdown(rows, JIT)]
        parts += ["### Import", kit.markdown(tables["import"], IMPORT)]
    return "\n\n".join(parts)


def plot(record: dict[str, Any], path: Path) -> None:
    """Setup, close and a psum program over the number of ranks; a line for each number of processes."""
    with kit.picture(path, figsize=(7, 4.5)) as (_, axes):
        single = [row for row in record["tables"]["setup"] if row["processes"] == 1]
        for name, label in (("setup", "setup"), ("close", "close"), ("psum", "compile and run a psum")):
            axes.plot(
                [r["ranks"] for r in single], [r[f"{name}_p50"] for r in single], "o-", label=f"{label}, 1 process"
            )
        for row in record["tables"]["setup"]:
            if row["processes"] > 1:
                axes.plot(row["ranks"], row["setup_p50"], "s", label=f"setup, {row['processes']} processes")
        axes.set(xlabel="ranks", ylabel="ms, p50", yscale="log")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8)


if __name__ == "__main__":
    kit.main(run, __doc__ or "", show, plot)
