"""What the benchmarks share: flags, devices and processes, timing side by side, records and Markdown tables.

A benchmark is a module with its own flags and a function that returns tables of rows; `kit.main` runs it, on one
process or on `--processes` of this host (for several hosts: --coordinator, --processes and --process on each). Import
this before jax makes its devices. It puts the tests' folder, with the case table, on the path.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Multicast is the whole host's; nothing here may use it.
os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"})
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # of a GPU: the chunk is beside JAX's memory
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Row = dict[str, Any]
Tables = dict[str, list[Row]]

flags.DEFINE_string("json", None, "file for all figures, with the machine that they are from")
flags.DEFINE_string("plot", None, "PNG file for a picture of them")
flags.DEFINE_string("page", None, "Markdown file for what is printed")
flags.DEFINE_integer("devices", 8, "CPU devices of each process", lower_bound=1)
flags.DEFINE_integer("processes", 1, "processes; of this host, unless --coordinator is given", lower_bound=1)
flags.DEFINE_integer("process", None, "this process's number, with --coordinator")
flags.DEFINE_string("coordinator", None, "host:port of process 0, when processes are started elsewhere")
flags.DEFINE_integer("repeats", 15, "runs of each call that count", lower_bound=1)
FLAGS = flags.FLAGS


def main(run: Callable[[], Tables], about: str, show: Callable[[dict[str, Any]], str], plot: Any = None) -> None:
    """Runs a benchmark: parses flags, makes devices, prints `show(record)` and writes --json and --plot.

    Args:
      run: measures; every process runs it, and process 0's tables are kept.
      about: the module's docstring, shown by --help.
      show: a record as Markdown. A record has benchmark, machine, flags, seconds and tables.
      plot: plot(record, path) writes a PNG file; None if the benchmark has no picture.
    """

    def started(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments {argv[1:]}")
        if FLAGS.plot and plot is None:
            raise app.UsageError("this benchmark has no --plot")
        logging.set_verbosity(logging.WARNING)
        if FLAGS.processes > 1 and FLAGS.process is None:
            sys.exit(_launch())
        if FLAGS.processes > 1:
            jax.distributed.initialize(FLAGS.coordinator, FLAGS.processes, FLAGS.process)
        jax.config.update("jax_num_cpu_devices", FLAGS.devices)
        start = time.monotonic()
        tables = run()
        if jax.process_index() == 0:
            name = Path(sys.argv[0]).stem
            own = (sys.argv[0], __name__)
            used = {f.name: f.value for module in own for f in FLAGS.flags_by_module_dict().get(module, [])}
            for where in ("json", "plot", "page"):  # of the machine, not of the run
                used.pop(where, None)
            seconds = round(time.monotonic() - start, 1)
            record = {"benchmark": name, "machine": machine(), "flags": used, "seconds": seconds, "tables": tables}
            page = show(record)
            print(page, flush=True)
            if FLAGS.page:
                Path(FLAGS.page).write_text(page + "\n")
            if FLAGS.json:
                Path(FLAGS.json).write_text(json.dumps(record, indent=1) + "\n")
            if FLAGS.plot:
                plot(record, Path(FLAGS.plot))
        if FLAGS.processes > 1:
            jax.distributed.shutdown()

    sys.modules["__main__"].__doc__ = about
    app.run(started)


def _launch() -> int:
    """Starts --processes copies of this program on the loopback interface, with a GPU each where there are some; the
    first one speaks for all.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{s.getsockname()[1]}"
    command = [*sys.orig_argv, f"--coordinator={where}"]
    workers = [
        subprocess.Popen(
            [*command, f"--process={i}"],
            stdout=None if i == 0 else subprocess.DEVNULL,
            env=os.environ | {"JAX_LOCAL_DEVICE_IDS": str(i)},
        )
        for i in range(FLAGS.processes)
    ]
    try:
        while None in (codes := [w.poll() for w in workers]) and not any(codes):
            time.sleep(0.05)
        return next((c for c in codes if c), 0)
    finally:
        for w in workers:
            w.kill()
            w.wait()


def another_run(module: str, keep: Sequence[str], *more: str) -> Tables:
    """Tables of a run of benchmarks.MODULE in a process of its own, with this run's values of the flags in `keep`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        given = [f"--{name}={FLAGS[name].value}" for name in keep]
        command = [sys.executable, "-m", f"benchmarks.{module}", *given, *more, f"--json={out}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        return json.loads(out.read_text())["tables"]


def machine() -> dict[str, Any]:
    """What the figures are from: processor, cores, memory, devices, versions. No names of hosts."""
    import moonep_jax

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = {line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "moonep_jax": moonep_jax.__version__,
    }


def about(record: Mapping[str, Any]) -> str:
    """One line for the head of a page: the machine and the versions of a record."""
    m = record["machine"]
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_GiB']} GiB; {m['devices']} in {m['processes']} process(es); "
        f"Python {m['python']}, jax {m['jax']}, moonep_jax {m['moonep_jax']}"
    )


# -- arrays and programs over the ranks of a mesh of one axis ----------------------------------------------------------


def put(mesh: jax.sharding.Mesh, array: Any) -> jax.Array:
    """A global array, split along its first axis, from one that every process has."""
    whole = np.asarray(array)
    where = NamedSharding(mesh, P(*mesh.axis_names))
    return jax.make_array_from_callback(whole.shape, where, lambda part: whole[part])


def on_ranks(mesh: jax.sharding.Mesh, body: Callable[..., Any], check_vma: bool = True, **options: Any) -> Any:
    """jit(shard_map) of one rank's function, all split along their first axis; options are jit's."""
    spec = P(*mesh.axis_names)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma), **options)


# -- timing ------------------------------------------------------------------------------------------------------------


def side_by_side(
    calls: Mapping[str, Callable[[], Any]], repeats: int | None = None, warm: int = 2
) -> dict[str, list[float]]:
    """Microseconds of each run of each call, the slowest process's. The calls take turns, so that all of them meet
    the same disturbances; what a call returns is waited for.

    Args:
      calls: by name; the same names, in the same order, on every process.
      repeats: runs that count; None: --repeats.
      warm: runs before those.
    """
    names, times = list(calls), {name: list[float]() for name in calls}
    for turn in range(warm + (FLAGS.repeats if repeats is None else repeats)):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            barrier()
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if turn >= warm:
                times[name].append((time.perf_counter() - start) * 1e6)
    worst = gather([times[name] for name in names]).max(axis=0)
    return {name: [float(t) for t in row] for name, row in zip(names, worst, strict=True)}


def gather(values: Any) -> np.ndarray[Any, Any]:
    """[processes, ...]: every process's array of one shape."""
    array = np.asarray(values)
    if jax.process_count() == 1:
        return array[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))


_meetings = 0


def barrier() -> None:
    """Waits for all processes; no collective of XLA."""
    global _meetings
    if jax.process_count() > 1:
        from jax._src import distributed

        _meetings += 1
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"benchmarks/{_meetings}", 600_000)


def summary(times: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the least of some times, in their unit."""
    ordered = sorted(times)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": statistics.median(ordered), "p90": at(0.9), "p99": at(0.99), "min": ordered[0]}


# -- pictures and tables -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def picture(path: Path, columns: int = 1, layout: str = "tight", **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, one pair of them or a row; saved to a PNG file. options: of matplotlib's figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, layout=layout, **options)
    yield figure, axes
    figure.savefig(path, dpi=120)
    plt.close(figure)


def markdown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A Markdown table. columns: heading -> a format of the row's values, like "{us:.1f}"; a value of None: "-"."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        shown = {k: _Dash() if v is None else v for k, v in row.items()}
        lines.append("| " + " | ".join(form.format(**shown) for form in columns.values()) + " |")
    return "\n".join(lines)


class _Dash:
    """Stands for a value that is not there, in any format."""

    def __format__(self, _: str) -> str:
        return "-"
