"""Times a layer with its calls on XLA's collective stream and off it, in one process on one GPU (one rank).

`python -m benchmarks.collective_stream --json FILE` runs itself twice, with command buffers as JAX ships them and
without, and prints for each size the time of a step off and on the stream and their ratio (above 1: on is slower).
It says, too, how many of the calls XLA put on that stream and into command buffers, and whether the results are equal.

A step is forward and backward of plan, prefetch, dispatch, an elementwise expert and combine. `one`: a step that the
host waits for. `many`: a step of ten in a row. Medians of runs that take turns, off and on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRAPHS = {"default": "", "off": "--xla_gpu_enable_command_buffer="}
TOPK, EXPERTS, COLUMNS, ROW = 8, 32, 32, 10  # columns of an expert's leaf, steps in a row
THUNK = re.compile(r"( *)\d+: (k\w+)(.*)")


def build(domain: Any, mesh: Any, on: bool, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The compiled step: (x, ids, route weights, expert leaf) -> (y, gradients of x, route weights and leaf)."""
    import jax
    from jax.sharding import PartitionSpec as P

    def layer(x: Any, ids: Any, scale: Any, leaf: Any) -> Any:
        d = domain.dispatch(x, ids, scale)
        w = domain.prefetch(d.plan, {"w": leaf})["w"]
        return domain.combine(d.plan, jax.nn.silu(d.hidden) * w[:1, :, 0], d.weights)

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

    def step(x: Any, ids: Any, scale: Any, leaf: Any) -> Any:
        def loss(x: Any, scale: Any, leaf: Any) -> Any:
            y = sharded(x, ids, scale, leaf)
            return (y.astype("float32") ** 2).sum(), y

        (_, y), (dx, dscale, dleaf) = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, scale, leaf)
        return {"y": y, "dx": dx, "dscale": dscale, "dleaf": dleaf}

    os.environ["MOONEP_COLLECTIVE_STREAM"] = str(int(on))  # read while lowering
    try:
        return jax.jit(step).lower(*args).compile()
    finally:
        del os.environ["MOONEP_COLLECTIVE_STREAM"]


def placed(text: str) -> dict[str, int]:
    """Of a dumped sequence of thunks: custom calls, those on a communication stream, those in command buffers."""
    counts = {"calls": 0, "on_stream": 0, "captured": 0}
    parents: list[tuple[int, str]] = []
    for match in filter(None, map(THUNK.match, text.splitlines())):
        indent, kind, rest = len(match[1]), match[2], match[3]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        if kind == "kCustomCall":
            counts["calls"] += 1
            counts["on_stream"] += any("communication_stream" in parent for _, parent in parents)
            counts["captured"] += any(parent.startswith("kCommandBuffer") for _, parent in parents)
        parents.append((indent, kind + rest))
    return counts


def dumped(folder: Path, before: set[Path]) -> dict[str, int]:
    """`placed` of the program that was compiled last; empty where XLA dumps no thunks."""
    new = set(folder.glob("*jit_step*thunk_sequence*.txt")) - before
    final = [path for path in new if "after_thunk_passes" in path.name] or list(new)  # written if a pass changed it
    return placed(final[0].read_text()) if len(final) == 1 else {}


def wall_us(step: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    """Microseconds per step of `count` steps that the host enqueues and then waits for."""
    import jax

    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = step(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e6 / count


def measure(tokens: int, hidden: int, runs: int, dump: Path) -> dict[str, Any]:
    """One size: times off and on, where XLA put the calls, which results are equal bit for bit."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import moonep_jax as moonep

    rng = np.random.default_rng(0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    config = moonep.EPConfig(
        tokens=tokens, hidden=hidden, topk=TOPK, experts=EXPERTS, dtype="bfloat16",
        weights={"w": ((hidden, COLUMNS), "bfloat16")},
    )  # fmt: skip
    args = (
        jnp.asarray(rng.standard_normal((tokens, hidden), np.float32), "bfloat16"),
        jnp.asarray(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)),
        jnp.asarray(rng.random((tokens, TOPK), np.float32)),
        jnp.asarray(rng.standard_normal((EXPERTS, hidden, COLUMNS), np.float32), "bfloat16"),
    )
    with moonep.setup(mesh, "ep", config) as domain:
        steps, places, results = {}, {}, {}
        for name in ("off", "on"):
            before = set(dump.glob("*"))
            steps[name] = build(domain, mesh, name == "on", args)
            places[name] = dumped(dump, before)
            results[name] = {key: np.asarray(value).tobytes() for key, value in steps[name](*args).items()}
            for _ in range(3):
                wall_us(steps[name], args, ROW)
        equal = {key: results["off"][key] == results["on"][key] for key in results["off"]}
        times: dict[str, dict[str, float]] = {}
        for what, count in (("one", 1), ("many", ROW)):
            samples: dict[str, list[float]] = {"off": [], "on": []}
            for run in range(runs):
                for name in ("off", "on") if run % 2 == 0 else ("on", "off"):
                    samples[name].append(wall_us(steps[name], args, count))
            median = {name: statistics.median(taken) for name, taken in samples.items()}
            times[what] = {**median, "ratio": median["on"] / median["off"]}
        domain.check()
    return {"tokens": tokens, "hidden": hidden, "us": times, "thunks": places, "equal": equal}


def child(sizes: list[tuple[int, int]], runs: int, dump: Path) -> None:
    """Measures all sizes with the XLA flags of this process and writes a line of JSON."""
    import jax

    from moonep_jax import _compat

    if not _compat.has_collective_stream():
        raise SystemExit("collective_stream: XLA does not know the stream; use jax and jaxlib >= 0.11.1")
    rows = [measure(tokens, hidden, runs, dump) for tokens, hidden in sizes]
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}))


def run(graphs: str, sizes: str, runs: int) -> dict[str, Any]:
    """`child` in a process of its own; XLA reads its flags once."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS[graphs]} --xla_dump_to={dump}"
        environment = os.environ | {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "benchmarks.collective_stream", "--child", dump]
        command += ["--sizes", sizes, "--runs", str(runs)]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(graphs: str, row: dict[str, Any]) -> None:
    """Prints one size."""
    for what, us in row["us"].items():
        print(
            f"command buffers {graphs:8} s={row['tokens']:<5} H={row['hidden']:<5} {what:5}"
            f" off {us['off']:9.1f} us  on {us['on']:9.1f} us  on/off {us['ratio']:.3f}"
        )
    for name, counts in row["thunks"].items():
        print(f"  {name:3} {', '.join(f'{key} {value}' for key, value in counts.items()) or 'no thunks dumped'}")
    # y and dx are the calls' own; the other gradients are sums by XLA, whose order may depend on its fusions.
    print(f"  same bits: {', '.join(f'{key} {value}' for key, value in row['equal'].items())}", flush=True)


def main() -> int:
    """Returns 1 if results differ that may not; times fail nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--sizes", default="128x1024,4096x4096", help="tokens x hidden, separated by commas")
    parser.add_argument("--runs", type=int, default=40, help="samples per median")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        sizes = [(int(s), int(h)) for s, h in (size.split("x") for size in options.sizes.split(","))]
        child(sizes, options.runs, options.child)
        return 0
    report, wrong = {}, False
    for graphs in GRAPHS:
        report[graphs] = run(graphs, options.sizes, options.runs)
        for row in report[graphs]["rows"]:
            show(graphs, row)
            wrong |= not (row["equal"]["y"] and row["equal"]["dx"])
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
