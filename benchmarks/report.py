"""Runs the benchmarks that need no GPU and writes one page: `python -m benchmarks.report --out FOLDER`.

Each benchmark is a process of its own, one after the other, since their flags and devices differ. FOLDER gets a
README.md, and a JSON file and a picture of each. Under ten minutes on two cores; on a machine that does something else
the figures are worth little, and the page says what the machine was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

flags.DEFINE_string("out", None, "folder for the page, the raw figures and the pictures", required=True)
flags.DEFINE_list("only", None, "names of the benchmarks to run; the page keeps what an earlier run left of the others")
FLAGS = flags.FLAGS
ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """A section of the page: the benchmark and its arguments, and what a reader should know before the tables."""

    name: str
    module: str
    arguments: tuple[str, ...]
    title: str
    about: str


PARTS = (
    Part(
        "moe",
        "bench_moe",
        ("--repeats=15", "--maxvio=0,2,8,16", "--routings=one_home"),
        "One MoE layer beside its peers, 8 ranks",
        "512 tokens a rank: GEMMs outweigh the copies of expert weights. `ring` is the exact peer; all_to_all is exact "
        "with room for everything, and drops with a capacity. What ours takes longer where a load is uneven is for the "
        "larger part in its GEMMs: `experts as planned` has the same groups, smaller ones and those of replicas, and "
        "no exchange. The rest is copies of moved experts and of their gradients.",
    ),
    Part(
        "moe_4",
        "bench_moe",
        ("--devices=4", "--repeats=5", "--maxvio=0,8", "--routings="),
        "The same on 4 ranks",
        "Fewer ranks: a ring gathers less, and moves less than ours when nothing is uneven.",
    ),
    Part(
        "moe_small",
        "bench_moe",
        ("--tokens=128", "--hidden=512", "--repeats=5", "--maxvio=0,8", "--routings="),
        "Where ours does not win: few tokens for large experts",
        "32 rows an expert: copying the weights of moved experts costs what the rows save that it evens out.",
    ),
    Part(
        "memory",
        "bench_memory",
        (),
        "Rows and bytes",
        "",
    ),
    Part(
        "planner",
        "bench_planner",
        (),
        "Plans: time, quality, when they pay",
        "",
    ),
    Part(
        "ops",
        "bench_ops",
        ("--sweeps=tokens,decode", "--repeats=7"),
        "Each op by itself",
        "",
    ),
    Part(
        "prefetch",
        "bench_prefetch",
        ("--repeats=7",),
        "The prefetch table, at a quarter of its sizes",
        "",
    ),
    Part(
        "setup",
        "bench_setup",
        ("--repeats=7",),
        "Setup, close, compiling, import",
        "",
    ),
)


def run(part: Part, out: Path) -> str:
    """Runs one benchmark; what went wrong, or an empty text."""
    files = [f"--{kind}={out / part.name}.{end}" for kind, end in (("json", "json"), ("page", "md"), ("plot", "png"))]
    start = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.arguments, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    print(f"{part.name}: {time.monotonic() - start:.0f} s, exit code {done.returncode}", flush=True)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-2000:]}"


def section(part: Part, out: Path) -> str:
    """A section of the page from the files of a run."""
    command = " ".join(["python", "-m", f"benchmarks.{part.module}", *part.arguments])
    lines = [f"## {part.title}", "", f"`{command}` - raw figures: [{part.name}.json]({part.name}.json)", "", part.about]
    record = json.loads((out / f"{part.name}.json").read_text())
    lines += ["", (out / f"{part.name}.md").read_text().strip(), "", f"Took {record['seconds']:.0f} s.", ""]
    if (out / f"{part.name}.png").exists():
        lines += [f"![{part.title}]({part.name}.png)", ""]
    return "\n".join(lines)


def machine(records: list[dict[str, Any]]) -> str:
    """What the figures are from, once for the page."""
    m = records[0]["machine"]
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_GiB']} GiB; Python {m['python']}, jax {m['jax']}, "
        f"moonep_jax {m['moonep_jax']}. CPU devices share the cores: times compare what does the same work, and say "
        "nothing about a GPU."
    )


def main(argv: list[str]) -> None:
    """Runs all parts and writes the page."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    unknown = set(FLAGS.only or ()) - {part.name for part in PARTS}
    if unknown:
        raise app.UsageError(f"unknown benchmarks {sorted(unknown)}; known: {[part.name for part in PARTS]}")
    out = Path(FLAGS.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    wrong = {part.name: run(part, out) for part in PARTS if FLAGS.only is None or part.name in FLAGS.only}
    there = [part for part in PARTS if (out / f"{part.name}.json").exists()]
    if there:
        records = [json.loads((out / f"{part.name}.json").read_text()) for part in there]
        seconds = sum(r["seconds"] for r in records)
        head = ["# Benchmarks on CPU devices", "", machine(records), "",
                f"`python -m benchmarks.report` writes this page ({seconds:.0f} s of measuring).", ""]  # fmt: skip
        (out / "README.md").write_text("\n".join([*head, *(section(part, out) for part in there)]))
    for name, text in wrong.items():
        if text:
            print(f"{name} failed, {text}", file=sys.stderr)
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    app.run(main)
