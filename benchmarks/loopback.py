"""Times the CUDA kernels without NVLink: R ranks as R streams of one process on one GPU, through the same launchers.

Prints the prefetch table of 14 configurations, dispatch and combine as shares of a plain copy, and plan and decode
times. Every figure stands beside the copy of the same run. `python -m benchmarks.loopback --json FILE`.

What is timed: CUDA events around the launches named, median of the runs, inputs larger than the L2 cache or the cache
flushed before each run. `send` of a rank runs while no other kernel does. Ranks that are timed alone (plan, decode)
find their peers' words already posted: R ranks on one GPU would share its SMs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import gpu_kit  # (after the path is set; it also sets CUDA_DEVICE_MAX_CONNECTIONS)
import ml_dtypes
import numpy as np
from cases import Shape, routing

from moonep_jax import reference

BF16 = np.dtype(ml_dtypes.bfloat16)

# name, experts of 4 ranks, slot columns, H, Hp, how often each of rank 0's experts is fetched
PREFETCH = [
    ("slots_1", 32, 14, 3584, 3072, [1]),
    ("slots_2", 32, 14, 3584, 3072, [1, 1]),
    ("slots_3", 32, 14, 3584, 3072, [2, 1]),
    ("slots_5", 32, 14, 3584, 3072, [3, 2]),
    ("ramp_0_3", 32, 14, 3584, 3072, [0, 1, 2, 3, 0, 1, 2, 3]),
    ("mixed", 32, 14, 3584, 3072, [3, 0, 2, 1, 3, 0, 2, 1]),
    ("heavy", 32, 14, 3584, 3072, [3, 3, 2, 3, 1, 0, 2, 3]),
    ("full_3x8", 32, 14, 3584, 3072, [3] * 8),
    ("dense_B8", 32, 8, 3584, 3072, [2, 1, 3, 1, 2, 3, 1, 2]),
    ("epn4_full", 16, 14, 3584, 3072, [3] * 4),
    ("epn16_mixed", 64, 16, 3584, 3072, [3, 2, 1, 0] * 4),
    ("thin_7168x128", 32, 16, 7168, 128, [3, 0, 2, 1, 3, 0, 2, 1]),
    ("tall_1024x3072", 32, 14, 1024, 3072, [3, 0, 2, 1, 3, 0, 2, 1]),
    ("tiny_512x512", 32, 16, 512, 512, [3, 3, 2, 3, 1, 0, 2, 3]),
]


class Timer:
    """Events on a stream; flushes the cache before each run."""

    def __init__(self, runs: int = 15) -> None:
        from cuda.bindings import runtime

        self._runtime, self._runs = runtime, runs
        self._flush = gpu_kit.Buffer((1 << 30,), np.uint8)
        self._events = [gpu_kit.ok(runtime.cudaEventCreate()) for _ in range(2)]

    def us(self, stream: Any, timed: Callable[[], None], before: Callable[[], None] = lambda: None,
           after: Callable[[], None] = lambda: None) -> float:  # fmt: skip
        """Median microseconds of `timed`; before and after run each time, outside the clock."""
        times = []
        for i in range(self._runs + 3):
            before()
            gpu_kit.ok(self._runtime.cudaDeviceSynchronize())
            # Flushes the cache, and keeps the stream busy while the host enqueues what is timed.
            gpu_kit.ok(self._runtime.cudaMemsetAsync(self._flush.pointer, i % 256, self._flush.nbytes, stream))
            gpu_kit.ok(self._runtime.cudaEventRecord(self._events[0], stream))
            timed()
            gpu_kit.ok(self._runtime.cudaEventRecord(self._events[1], stream))
            gpu_kit.ok(self._runtime.cudaDeviceSynchronize())
            after()
            times.append(gpu_kit.ok(self._runtime.cudaEventElapsedTime(*self._events)) * 1e3)
        return statistics.median(times[3:])

    def memcpy(self, nbytes: int) -> float:
        """Microseconds of cudaMemcpyAsync of nbytes on the device."""
        a, b = gpu_kit.Buffer((nbytes,), np.uint8), gpu_kit.Buffer((nbytes,), np.uint8)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        run = lambda: gpu_kit.ok(self._runtime.cudaMemcpyAsync(b.pointer, a.pointer, nbytes, kind, 0))  # noqa: E731
        us = self.us(0, run)
        a.free(), b.free()
        return us

    def copy(self, nbytes: int, blocks: int) -> float:
        """Microseconds of a plain copy kernel of nbytes."""
        from moonep_jax import _ffi_cuda

        a, b = gpu_kit.Buffer((nbytes,), np.uint8), gpu_kit.Buffer((nbytes,), np.uint8)
        us = self.us(0, lambda: _ffi_cuda.copy(b.pointer, a.pointer, nbytes, blocks, 0))
        a.free(), b.free()
        return us


def slots_of(fetched: list[int], experts: int, ranks: int) -> np.ndarray:
    """slot_expert [ranks, epn]: expert e of rank 0 in slots of ranks 1 .. fetched[e]."""
    epn = experts // ranks
    slots = np.full((ranks, epn), -1, np.int32)
    used = [0] * ranks
    for e, count in enumerate(fetched):
        for i in range(count):
            r = 1 + (e + i) % (ranks - 1)
            slots[r, used[r]] = e
            used[r] += 1
    return slots


def bench_prefetch(timer: Timer, sms: list[int]) -> list[dict[str, Any]]:
    """The prefetch table: the send of rank 0 alone (slots filled), and the whole op."""
    rows = []
    for name, experts, columns, h, hp, fetched in PREFETCH:
        ranks, epn, bytes_ = 4, experts // 4, h * hp * 2
        moved = sum(fetched)
        row: dict[str, Any] = {"config": name, "E": experts, "B": columns, "H": h, "Hp": hp, "slots": moved,
                               "data_MB": 2 * moved * bytes_ / 1e6}  # fmt: skip
        row["memcpy_us"] = timer.memcpy(moved * bytes_)
        slot_expert = slots_of(fetched, experts, ranks)
        for sm in sms:
            group = gpu_kit.Group(ranks, experts=experts, topk=1, tokens=8, padding=8, hidden=8, row_bytes=16,
                                  stage_bytes=epn * bytes_, link_blocks=sm)  # fmt: skip
            slots = gpu_kit.Buffer.of(slot_expert)
            ticket = gpu_kit.Buffer.of(np.zeros(1, np.int32))
            weights = [gpu_kit.Buffer((2 * epn, h, hp), BF16) for _ in range(ranks)]
            args = [[slots, ticket, w] for w in weights]
            rets = [[w] for w in weights]  # in place
            raw = [([b.raw for b in a], [b.raw for b in o]) for a, o in zip(args, rets, strict=True)]

            def phase(number: int, who: range, group: Any = group, raw: Any = raw) -> None:
                for r in who:
                    group.ranks[r].launch(3, *raw[r], 1, 0, number, int(group.streams[r]))

            everyone, others = range(ranks), range(1, ranks)

            def finish(phase: Any = phase, group: Any = group) -> None:
                phase(1, others)
                phase(2, everyone)
                phase(3, everyone)
                group.sync()

            send = timer.us(group.streams[0], lambda: phase(1, range(1)), lambda: phase(0, everyone), finish)
            row[f"send_us_{sm}"] = send
            row[f"BW_GBps_{sm}"] = row["data_MB"] / send * 1e3
            row[f"copy_us_{sm}"] = timer.copy(moved * bytes_, sm)
            group.close()
            for b in (slots, ticket, *weights):
                b.free()
        rows.append(row)
        print(row, flush=True)
    return rows


def bench_rows(timer: Timer, sms: int, s: int, h: int, ranks: int, experts: int, topk: int) -> list[dict[str, Any]]:
    """Each kernel of dispatch and combine on rank 0, against a plain copy with the same SMs and bytes."""
    rows = []
    for name in ("uniform", "one_home"):
        for mode in ("dedup", "exact"):
            shape = Shape(ranks, s, topk, experts, h)
            group = gpu_kit.Group(ranks, experts=experts, topk=topk, tokens=s, padding=8, hidden=h, row_bytes=2 * h,
                                  exact=mode == "exact", stage_bytes=0)  # fmt: skip
            ids = routing(name, shape, 0)
            want = reference.plan(ids, experts, 8)
            n, epn = want.rows, experts // ranks
            dims = [(s, topk)] * 2 + [(n,)] * 3 + [(2 * epn,)] * 2 + [(ranks, epn), (ranks,), (ranks,), (1,)]
            plans = [[gpu_kit.Buffer(d, np.int32) for d in dims] for _ in range(ranks)]
            made = [b for p in plans for b in p]

            def new(shape_: tuple[int, ...], dtype: Any, made: list[Any] = made) -> list[gpu_kit.Buffer]:
                buffers = [gpu_kit.Buffer(shape_, dtype, fill=0x3C) for _ in range(ranks)]
                made.extend(buffers)
                return buffers

            x, w = new((s, h), BF16), new((s, topk), np.float32)
            hidden, weights, y = new((n, h), BF16), new((n,), np.float32), new((s, h), BF16)
            idb = [gpu_kit.Buffer.of(i) for i in ids]
            made += idb
            group.launch("plan", [[b] for b in idb], plans)
            group.sync()
            calls = {
                "dispatch": (1, [[*p[:5], p[10], x[r], w[r]] for r, p in enumerate(plans)],
                             [[hidden[r], weights[r]] for r in range(ranks)]),
                "combine": (2, [[p[0], p[2], p[3], p[4], p[10], hidden[r], weights[r]] for r, p in enumerate(plans)],
                            [[y[r]] for r in range(ranks)]),
            }  # fmt: skip
            row_bytes = 2 * h
            primaries = int((np.asarray(want.primary[0]) == np.arange(n)).sum())
            held = int((np.asarray(want.src[0]) >= 0).sum())
            to = np.sort(np.asarray(want.dst_rank[0]), axis=1)
            sent = int((to[:, 0] >= 0).sum() + ((to[:, 1:] != to[:, :-1]) & (to[:, 1:] >= 0)).sum())
            moved = {  # bytes read plus written by rank 0
                ("dispatch", 1): (s + sent) * row_bytes,
                ("dispatch", 3): (primaries + n) * row_bytes,
                ("combine", 1): (held + (held if mode == "exact" else primaries)) * row_bytes,
                ("combine", 3): ((s * topk if mode == "exact" else sent) + s) * row_bytes,
            }
            for op, (kind, args, rets) in calls.items():
                raw = [([b.raw for b in a], [b.raw for b in o]) for a, o in zip(args, rets, strict=True)]

                def phase(number: int, who: range, kind: int = kind, raw: Any = raw, group: Any = group) -> None:
                    for r in who:
                        group.ranks[r].launch(kind, *raw[r], 1, 0, number, int(group.streams[r]))

                everyone, others = range(ranks), range(1, ranks)

                def after_send(phase: Any = phase, group: Any = group) -> None:
                    phase(1, others), phase(2, everyone), phase(3, everyone), group.sync()

                def before_local(phase: Any = phase) -> None:
                    phase(0, everyone), phase(1, everyone), phase(2, everyone)

                def after_local(phase: Any = phase, group: Any = group) -> None:
                    phase(3, others), group.sync()

                for number, part, before, after in (
                    (1, "send", lambda phase=phase: phase(0, everyone), after_send),
                    (3, "local", before_local, after_local),
                ):
                    us = timer.us(group.streams[0], lambda: phase(number, range(1)), before, after)
                    nbytes = moved[op, number]
                    copy = timer.copy(nbytes // 32 * 16, sms if part == "send" else 2 * sms)
                    rows.append({"op": op, "part": part, "mode": mode, "routing": name, "us": us, "bytes": nbytes,
                                 "GBps": nbytes / us / 1e3, "copy_us": copy, "share": copy / us})  # fmt: skip
                    print(rows[-1], flush=True)
            group.close()
            for b in made:
                b.free()
    return rows


def bench_alone(timer: Timer, kind: str, ranks: int, experts: int, s: int, topk: int, h: int, name: str, padding: int,
                ) -> dict[str, Any]:  # fmt: skip
    """One rank with its peers' words posted: begin to end of plan, dispatch or combine."""
    shape = Shape(ranks, s, topk, experts, h)
    ids = routing(name, shape, 0)
    group = gpu_kit.Group(ranks, experts=experts, topk=topk, tokens=s, padding=padding, hidden=h, row_bytes=2 * h)
    epn, n = experts // ranks, group.shape.recv_rows(s)
    dims = [(s, topk)] * 2 + [(n,)] * 3 + [(2 * epn,)] * 2 + [(ranks, epn), (ranks,), (ranks,), (1,)]
    plans = [[gpu_kit.Buffer(d, np.int32) for d in dims] for _ in range(ranks)]
    idb = [gpu_kit.Buffer.of(i) for i in ids]
    group.launch("plan", [[b] for b in idb], plans)  # twice: both halves of the ids buffer hold everybody's ids
    group.launch("plan", [[b] for b in idb], plans)
    group.sync()
    p = plans[0]
    x, w = gpu_kit.Buffer((s, h), BF16, fill=0x3C), gpu_kit.Buffer((s, topk), np.float32, fill=0x3C)
    hidden, weights = gpu_kit.Buffer((n, h), BF16, fill=0x3C), gpu_kit.Buffer((n,), np.float32, fill=0x3C)
    y = gpu_kit.Buffer((s, h), BF16)
    number, args, rets = {
        "plan": (0, [idb[0]], p),
        "dispatch": (1, [*p[:5], p[10], x, w], [hidden, weights]),
        "combine": (2, [p[0], p[2], p[3], p[4], p[10], hidden, weights], [y]),
    }[kind]
    raw = [b.raw for b in args], [b.raw for b in rets]
    stream = int(group.streams[0])

    def run() -> None:
        for phase in range(4):
            group.ranks[0].launch(number, *raw, 7, 0, phase, stream)

    post = lambda: group.ranks[0].prepost(number, *raw, 7, stream)  # noqa: E731
    launch = lambda phase: group.ranks[0].launch(number, *raw, 7, 0, phase, stream)  # noqa: E731
    us = timer.us(group.streams[0], run, post, group.sync)
    local = timer.us(group.streams[0], lambda: launch(3), lambda: (post(), launch(0), launch(1), launch(2)), group.sync)
    group.close()
    for b in (x, w, hidden, weights, y, *idb, *(b for q in plans for b in q)):
        b.free()
    return {"op": kind, "R": ranks, "E": experts, "s": s, "K": topk, "routing": name, "us": us, "local_us": local}


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    lines = [f"{result['device']}, {result['sms']} SMs", ""]
    if rows := result.get("prefetch"):
        sms = [int(k.rsplit("_", 1)[1]) for k in rows[0] if k.startswith("send_us_")]
        head = ["config", "E", "B", "H", "Hp", "slots", "Data MB"]
        head += [f"{what} {sm} SMs" for sm in sms for what in ("us", "BW", "CommBW")] + ["memcpy us", "BW"]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for r in rows:
            cells = [r["config"], r["E"], r["B"], r["H"], r["Hp"], r["slots"], f"{r['data_MB']:.2f}"]
            for sm in sms:
                bw = r["data_MB"] / r[f"send_us_{sm}"] * 1e3
                cells += [f"{r[f'send_us_{sm}']:.1f}", f"{bw:.0f}", f"{bw / 2:.0f}"]
            cells += [f"{r['memcpy_us']:.1f}", f"{r['data_MB'] / r['memcpy_us'] * 1e3:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    if rows := result.get("rows"):
        lines += ["| op | part | mode | routing | us | MB moved | GB/s | share of a copy |", "|" + "---|" * 8]
        for r in rows:
            figures = f"{r['us']:.1f} | {r['bytes'] / 1e6:.0f} | {r['GBps']:.0f} | {r['share']:.2f} |"
            lines.append(f"| {r['op']} | {r['part']} | {r['mode']} | {r['routing']} | {figures}")
        lines.append("")
    if rows := result.get("plan", []) + result.get("decode", []):
        lines += ["| op | R | E | s | K | routing | us | local part us |", "|" + "---|" * 8]
        for r in rows:
            cells = [r["op"], r["R"], r["E"], r["s"], r["K"], r["routing"], f"{r['us']:.1f}", f"{r['local_us']:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Bandwidth of the prefetch table over its size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(result["prefetch"], key=lambda r: r["data_MB"])
    figure, axes = plt.subplots(figsize=(8, 5))
    size = [r["data_MB"] for r in rows]
    for key in [k for k in rows[0] if k.startswith("send_us_")]:
        label = f"prefetch send, {key.rsplit('_', 1)[1]} SMs"
        axes.plot(size, [r["data_MB"] / r[key] for r in rows], marker="o", label=label)
    axes.plot(size, [r["data_MB"] / r["memcpy_us"] for r in rows], "k--", label="cudaMemcpyAsync")
    axes.set(xscale="log", xlabel="MB read + written", ylabel="TB/s read + written", title=result["device"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--parts", default="prefetch,rows,plan,decode")
    parser.add_argument("--plot", type=Path, help="PNG file for the prefetch table")
    parser.add_argument("--show", type=Path, help="print (and plot) an earlier --json file instead of measuring")
    options = parser.parse_args()
    if options.show:
        result = json.loads(options.show.read_text())
        print(table(result))
        if options.plot:
            plot(result, options.plot)
        return
    from cuda.bindings import runtime

    properties = gpu_kit.ok(runtime.cudaGetDeviceProperties(0))
    sms = properties.multiProcessorCount
    timer = Timer()
    result: dict[str, Any] = {"device": properties.name.decode().strip("\0"), "sms": sms}
    parts = options.parts.split(",")
    if "prefetch" in parts:
        result["prefetch"] = bench_prefetch(timer, [16, 32, sms])
    if "rows" in parts:
        result["rows"] = bench_rows(timer, sms, 4096, 7168, 4, 256, 8)
    if "plan" in parts:
        result["plan"] = []
        for ranks, experts, s, topk in ((8, 256, 4096, 8), (8, 896, 8192, 8), (8, 896, 8192, 16), (72, 288, 4096, 8)):
            for name in ("uniform", "lognormal_8", "one_home"):
                result["plan"].append(bench_alone(timer, "plan", ranks, experts, s, topk, 8, name, 8))
                print(result["plan"][-1], flush=True)
    if "decode" in parts:
        result["decode"] = []
        for s in (1, 8, 32, 128):
            for kind in ("plan", "dispatch", "combine"):
                result["decode"].append(bench_alone(timer, kind, 8, 256, s, 8, 7168, "uniform", 1))
                print(result["decode"][-1], flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
