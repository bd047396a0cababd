"""Times the CUDA kernels without NVLink: R ranks as R streams of one process on one GPU, through the same launchers.

Prints plan and decode times, dispatch, combine, prefetch and reduce_grad as shares of a plain copy, and the prefetch
table of 14 configurations. Every figure stands beside the copy of the same run. `python -m benchmarks.loopback --json
FILE`; the file is written after every figure, so a run that is cut keeps what it has.

What is timed: CUDA events around the launches named, median of the runs, inputs larger than the L2 cache or the cache
flushed before each run. A phase of a rank runs while no other kernel does. Ranks that are timed alone (plan, decode)
find their peers' words already posted: R ranks on one GPU would share its SMs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import gpu_timer, loopback_report  # (gpu_timer adds the tests' folder to the path)

# isort: split
import gpu_kit
import ml_dtypes
import numpy as np
from cases import Shape, routing
from gpu_kit import BACK, PLAN_ARRAYS, ROUTE, Buffer, by_rank

from benchmarks.prefetch_table import PREFETCH, slots_of

BF16 = np.dtype(ml_dtypes.bfloat16)

# R, E, s, K; the largest group first, so that a run that is cut has it.
PLANS = [(72, 288, 4096, 8), (8, 256, 4096, 8), (8, 896, 8192, 8), (8, 896, 8192, 16)]

Put = Callable[..., Any]


class Bench:
    """A timer, the device's SM count, and what was measured so far."""

    def __init__(self, timer: gpu_timer.Timer, sms: int, path: Path | None, result: dict[str, Any]) -> None:
        self.timer, self.sms, self._path, self.result = timer, sms, path, result

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Keeps, prints and saves one row of figures."""
        self.result.setdefault(part, []).append(row)
        print(row, flush=True)
        self.save()

    def save(self) -> None:
        """Writes the JSON file, if one is asked for."""
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.result, indent=1))

    def add_part(self, part: str, row: dict[str, Any], us: float, nbytes: int, blocks: int) -> None:
        """Keeps the time of a phase that must read and write nbytes in all, beside a plain copy by as many blocks."""
        copy = self.timer.copy(nbytes // 32 * 16, blocks)
        figures = {"blocks": blocks, "us": us, "bytes": nbytes, "GBps": nbytes / us / 1e3, "copy_us": copy}
        self.add(part, {**row, **figures, "share": copy / us})


@contextlib.contextmanager
def ranks_of(ranks: int, **shape: Any) -> Iterator[tuple[gpu_kit.Group, gpu_kit.Pool]]:
    """A group and a pool for its buffers; both are freed at the end."""
    group = gpu_kit.Group(ranks, **shape)
    with contextlib.closing(group), gpu_kit.Pool(ranks) as pool:
        yield group, pool


def ids_of(name: str, shape: Shape) -> np.ndarray:
    """ids [R, s, K]. Routings by popularity repeat 2048 tokens: drawing each anew takes minutes for large groups."""
    if name == "one_home":
        return routing(name, shape)
    few = routing(name, Shape(1, 2048, shape.K, shape.E, shape.H))[0]
    return few[np.random.default_rng(0).integers(len(few), size=(shape.R, shape.s))]


def plan_dims(shape: Shape, rows: int) -> list[tuple[int, ...]]:
    """Shapes of a plan's arrays."""
    s, epn = shape, shape.epn
    return [(s.s, s.K)] * 2 + [(rows,)] * 3 + [(2 * epn,)] * 2 + [(s.R, epn), (s.R,), (s.R,), (1,)]


def bench_prefetch(bench: Bench, sms: list[int]) -> None:
    """The prefetch table: the send of rank 0 alone (slots filled)."""
    for name, experts, columns, h, hp, fetched in PREFETCH:
        ranks, epn, bytes_ = 4, experts // 4, h * hp * 2
        moved = sum(fetched)
        row: dict[str, Any] = {"config": name, "E": experts, "B": columns, "H": h, "Hp": hp, "slots": moved,
                               "data_MB": 2 * moved * bytes_ / 1e6}  # fmt: skip
        row["memcpy_us"] = bench.timer.memcpy(moved * bytes_)
        for sm in sms:
            with ranks_of(ranks, experts=experts, topk=1, tokens=8, padding=8, hidden=8, row_bytes=16,
                          stage_bytes=epn * bytes_, link_blocks=sm) as (group, pool):  # fmt: skip
                slots = pool.put(np.broadcast_to(slots_of(fetched, experts, ranks), (ranks, ranks, epn)))
                leaf = pool.blank((2 * epn, h, hp), BF16)
                args = by_rank([slots, pool.blank((1,), np.int32, fill=0), leaf])
                send = bench.timer.part(group, "prefetch", args, by_rank([leaf]), 0, "send")  # in place
            row[f"send_us_{sm}"] = send
            row[f"BW_GBps_{sm}"] = row["data_MB"] / send * 1e3
            row[f"copy_us_{sm}"] = bench.timer.copy(moved * bytes_, sm)
        bench.add("prefetch", row)


def bench_weights(bench: Bench, ranks: int, blocks: int, epn: int = 8, h: int = 3584, hp: int = 3072) -> None:
    """Every expert of rank 0 has a replica on every other rank: expand of prefetch, stage and pull of reduce_grad.

    Leaves [epn] become [2*epn] and back. Bytes: expand reads and writes own experts and used slots, and zeroes unused
    ones; stage reads and writes the used slots; pull reads each own expert and its replicas once, and writes it.
    """
    one, replicas = h * hp * 2, ranks - 1
    used = epn if replicas else 0  # slots of every rank but 0
    local = 2 * blocks
    with ranks_of(ranks, experts=epn * ranks, topk=1, tokens=8, padding=8, hidden=8, row_bytes=16,
                  stage_bytes=epn * one, link_blocks=blocks, local_blocks=local) as (group, pool):  # fmt: skip
        table = slots_of([replicas] * epn, epn * ranks, ranks)
        head = [pool.put(np.broadcast_to(table, (ranks, *table.shape))), pool.blank((1,), np.int32, fill=0)]
        own, full = pool.blank((epn, h, hp), BF16, fill=0x3C), pool.blank((2 * epn, h, hp), BF16, fill=0x3C)
        narrow, wide = by_rank([own]), by_rank([full])
        there, back = by_rank([*head, own]), by_rank([*head, full])
        row = {"R": ranks, "mode": "", "routing": "all_slots"}

        us = bench.timer.part(group, "prefetch", there, wide, ranks - 1, "local")
        nbytes = (2 * epn + 2 * used + (epn - used)) * one
        bench.add_part("weights", {"op": "prefetch", "part": "expand", **row}, us, nbytes, local)
        if used:
            us = bench.timer.part(group, "reduce_grad", back, narrow, ranks - 1, "send")
            bench.add_part("weights", {"op": "reduce_grad", "part": "stage", **row}, us, 2 * used * one, local)
        us = bench.timer.part(group, "reduce_grad", back, narrow, 0, "local")
        nbytes = epn * (2 + replicas) * one
        bench.add_part("weights", {"op": "reduce_grad", "part": "pull", **row}, us, nbytes, blocks)


def bench_rows(bench: Bench, shape: Shape, name: str, mode: str) -> None:
    """Each data kernel of dispatch and combine on rank 0, against a plain copy with the same SMs and bytes."""
    s, topk, h, sms = shape.s, shape.K, shape.H, bench.sms
    with ranks_of(shape.R, experts=shape.E, topk=topk, tokens=s, padding=8, hidden=h, row_bytes=2 * h,
                  exact=mode == "exact", rounds=1) as (group, pool):  # fmt: skip
        n = group.shape.recv_rows(s)
        new: Put = lambda *dims, dtype=BF16: pool.blank(dims, dtype, fill=0x3C)  # noqa: E731
        plan = {k: pool.blank(d, np.int32) for k, d in zip(PLAN_ARRAYS, plan_dims(shape, n), strict=True)}
        group.launch("plan", by_rank([pool.put(ids_of(name, shape))]), by_rank(plan.values()))
        group.sync()
        x, w = new(s, h), new(s, topk, dtype=np.float32)
        hidden, weights, y = new(n, h), new(n, dtype=np.float32), new(s, h)
        calls = {
            "dispatch": ([*(plan[k] for k in ROUTE), x, w], [hidden, weights]),
            "combine": ([*(plan[k] for k in BACK), hidden, weights], [y]),
        }
        primary, src, to = (plan[k][0].read() for k in ("primary", "src", "dst_rank"))
        first, own = primary == np.arange(n), (src >= 0) & (src < s * topk)
        primaries, held = int(first.sum()), int((src >= 0).sum())
        at_home, others = int((first & own).sum() + own.sum()) + n - held, (src >= s * topk)
        to = np.sort(to, axis=1)
        sent = int((to[:, 0] >= 0).sum() + ((to[:, 1:] != to[:, :-1]) & (to[:, 1:] >= 0)).sum())
        exact = mode == "exact"
        moved = {  # rows read plus written by rank 0; rows that need no peer are copied out while others are sent
            ("dispatch", "send"): s + sent - int((first & own).sum()) + at_home,
            ("dispatch", "local"): int((first & others).sum() + others.sum()),
            ("combine", "send"): held + (held if exact else primaries),
            ("combine", "local"): (s * topk if exact else sent) + s,
        }
        for (op, part), rows in moved.items():
            args, rets = calls[op]
            us = bench.timer.part(group, op, by_rank(args), by_rank(rets), 0, part)
            row = {"R": shape.R, "op": op, "part": part, "mode": mode, "routing": name}
            bench.add_part("rows", row, us, rows * 2 * h, sms if part == "send" else 2 * sms)


def bench_alone(bench: Bench, part: str, kind: str, shape: Shape, name: str, padding: int) -> None:
    """One rank with its peers' words posted: begin to end of plan, dispatch or combine."""
    s, k, h = shape.s, shape.K, shape.H
    with ranks_of(shape.R, experts=shape.E, topk=k, tokens=s, padding=padding, hidden=h,
                  row_bytes=2 * h) as (group, pool):  # fmt: skip
        n = group.shape.recv_rows(s)
        plans = {a: pool.blank(d, np.int32) for a, d in zip(PLAN_ARRAYS, plan_dims(shape, n), strict=True)}
        ids = pool.put(ids_of(name, shape))
        for _ in range(2):  # both halves of the ids buffer hold everybody's ids
            group.launch("plan", by_rank([ids]), by_rank(plans.values()))
        group.sync()
        plan: dict[str, Buffer] = {a: buffers[0] for a, buffers in plans.items()}
        with gpu_kit.Pool(1) as own:
            new: Put = lambda *dims, dtype=BF16: own.blank(dims, dtype, fill=0x3C)[0]  # noqa: E731
            hidden, weights = new(n, h), new(n, dtype=np.float32)
            args, rets = {
                "plan": lambda: ([ids[0]], list(plan.values())),
                "dispatch": lambda: ([*(plan[a] for a in ROUTE), new(s, h), new(s, k, dtype=np.float32)],
                                     [hidden, weights]),
                "combine": lambda: ([*(plan[a] for a in BACK), hidden, weights], [new(s, h)]),
            }[kind]()  # fmt: skip
            call = gpu_kit.Call(kind, args, rets, site=7)
            rank, stream, number, raw = group.ranks[0], group.streams[0], gpu_kit.KINDS[kind], call.raw
            everything, first, last = (
                group.prepared({0: call}, phases) for phases in (None, gpu_kit.PHASES[:-1], ("local",))
            )

            def post() -> None:
                rank.prepost(number, *raw, call.site, int(stream))

            def post_and_first() -> None:
                post()
                first()

            us = bench.timer.us(stream, everything, post, group.sync)
            local = bench.timer.us(stream, last, post_and_first, group.sync)
    row = {"op": kind, "R": shape.R, "E": shape.E, "s": s, "K": k, "routing": name}
    bench.add(part, {**row, "us": us, "local_us": local})


def measure(bench: Bench, part: str) -> None:
    """One part of the benchmark."""
    if part == "plan":
        for ranks, experts, s, topk in PLANS:
            for name in ("uniform", "lognormal_8", "one_home"):
                bench_alone(bench, part, "plan", Shape(ranks, s, topk, experts, 8), name, 8)
    elif part == "decode":
        for s in (1, 8, 32, 128):
            for kind in ("plan", "dispatch", "combine"):
                bench_alone(bench, part, kind, Shape(8, s, 8, 256, 7168), "uniform", 1)
    elif part == "rows":
        for ranks in (4, 1, 2, 8):
            for name in ("uniform", "one_home") if ranks == 4 else ("uniform",):
                for mode in ("dedup", "exact"):
                    bench_rows(bench, Shape(ranks, 4096, 8, 256, 7168), name, mode)
    elif part == "weights":
        for ranks in (4, 1, 2, 8):
            for blocks in (32, bench.sms) if ranks == 4 else (bench.sms,):
                bench_weights(bench, ranks, blocks)
    elif part == "prefetch":
        bench_prefetch(bench, [16, 32, bench.sms])
    else:
        raise SystemExit(f"loopback: unknown part; got {part!r}, expected some of {PARTS}; name them in --parts")


PARTS = "plan,rows,weights,prefetch,decode"


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--plot", type=Path, help="PNG file for the prefetch table")
    parser.add_argument("--show", type=Path, help="print (and plot) an earlier --json file instead of measuring")
    options = parser.parse_args()
    if options.show:
        result = json.loads(options.show.read_text())
    else:
        from cuda.bindings import runtime

        properties = gpu_kit.ok(runtime.cudaGetDeviceProperties(0))
        sms = properties.multiProcessorCount
        result = {"device": properties.name.decode().strip("\0"), "sms": sms, "seconds": {}}
        bench = Bench(gpu_timer.Timer(), sms, options.json, result)
        for part in options.parts.split(","):
            start = time.monotonic()
            measure(bench, part)
            result["seconds"][part] = time.monotonic() - start
            bench.save()
    print(loopback_report.table(result))
    if options.plot:
        loopback_report.plot(result, options.plot)


if __name__ == "__main__":
    main()
