"""One run of the demo, in each of its processes: trains both ways, step by step, and has process 0 report."""

from __future__ import annotations

import argparse
import platform
import time

import jax
import numpy as np

import moonep_jax as moonep
from moonep_jax.demo import model, report, text, train
from moonep_jax.demo.progress import Progress


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments (see launch.py) say; the exit code. Collective over the processes."""
    first = jax.process_index() == 0
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    data = text.corpus()
    with moonep.setup(mesh, "ep", model.config()) as ep:
        if first:
            print(_headline(ep, len(data), args.skew), flush=True)
        here = train.ExpertParallel(ep, mesh, args.seed, args.skew)
        # One process does it: it is the same everywhere.
        dense = train.Dense(args.seed, args.skew) if first else None
        result = report.Result()
        with Progress(args.steps, args.quiet or not first) as progress:
            for step in range(args.steps):
                batch = text.batch(data, model.SEQUENCES, model.LENGTH, args.seed, step)
                start = time.perf_counter()
                loss, facts = here.step(batch)
                middle = time.perf_counter()
                if dense is not None:
                    result.add(loss, facts, *dense.step(batch))
                    result.seconds += np.array([middle - start, time.perf_counter() - middle])
                progress.step(step + 1, f"loss {loss:.3f}")
        params = here.params()
    if dense is None:
        return 0
    result.compare_params(params, dense.params())
    print(report.summary(result), flush=True)
    if args.plot is not None:
        report.plot(result, args.plot)
        print(f"\nplot: {args.plot}", flush=True)
    return 0 if result.passed() else 1


def _headline(ep: moonep.Domain, characters: int, skew: float) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(model.init(0)))
    stats = ep.stats()
    processes = "1 process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
    facts = {
        "text": f"pydoc_data.topics of Python {platform.python_version()}, {characters:,} characters",
        "model": f"{model.LAYERS} MoE layers, {model.EXPERTS} experts, top-{model.TOPK}, {count:,} parameters, float32",
        "ranks": f"{model.RANKS} CPU devices in {processes}, {ep.spec.config.tokens} tokens each per step",
        "memory": f"{stats['bytes_per_rank']['total']:,} bytes per rank, shared as {stats['memory'][0]!r}",
        "router": f"skew {skew:g}" if skew else "free (see --skew)",
    }
    return "\n".join(["moonep_jax demo", *(f"  {name:<8}{fact}" for name, fact in facts.items())])
