"""Times the CUDA kernels over real links: the ranks of one process with a GPU each, by the launchers, without XLA.

`python -m benchmarks.nvlink --json FILE [--parts prefetch,rows,decode] [--ranks 8]`. Parts: the prefetch table of 14
configurations, the rows of dispatch and combine, and small calls replayed as CUDA graphs. Ranks beyond the GPUs share
them: a trial of the benchmark, whose figures are of no link.

What is timed: CUDA events around the launches named, on the slowest rank. The L2 caches are flushed before each run
(not between the calls of a graph); all variants of a table's row take turns in one loop, and a copy by the copy engines
of the bytes that cross the link is one of them. GB/s are 1e9 bytes of payload per second, one way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.link_timer import PHASES, WHOLE, Call, Clock, Graphs, Hand, Ranks, Variant  # isort: skip (sets paths)

import gpu_kit
import ml_dtypes
import numpy as np
from cases import Shape, routing

from benchmarks.prefetch_table import PREFETCH, Config, slots_of

BF16 = np.dtype(ml_dtypes.bfloat16)
# Ceilings measured on a pair of H200s, GB/s: copy engine one way, SMs both ways at once, SMs within a device.
ONE_WAY, BOTH_WAYS, LOCAL = 394.0, 351.0, 3740.0
OUTWARD = ("dispatch", "combine_grad")  # rows from their tokens' ranks to the experts'; the others bring sums home
Keep = Callable[[dict[str, Any]], None]


def _slots(config: Config, ranks: int) -> tuple[np.ndarray, list[int]]:
    """slot_expert, and the slots that each rank fetches from rank 0.

    Too few ranks for a configuration hold an expert less often than it asks for: then rank 1 fetches as many different
    experts of rank 0 as it moves in all, so the slots and the bytes are its, and rank 0 has that many experts or more.
    """
    slots = sum(config.fetched)
    if max(config.fetched) < ranks:
        table = slots_of(config.fetched, config.experts // 4 * ranks, ranks)
    else:
        table = np.full((ranks, max(8, slots)), -1, np.int32)
        table[1, :slots] = np.arange(slots)
    return table, [int(n) for n in (table >= 0).sum(1)]


def bench_prefetch(clock: Clock, sms: list[int], runs: int, keep: Keep) -> None:
    """The prefetch table: the send of rank 0 alone. An expert is read once, whatever the number of its slots."""
    ranks = len(clock.ranks)
    for config in PREFETCH:
        table, fetched = _slots(config, ranks)
        h, hp, epn, slots = config.h, config.hp, table.shape[1], sum(fetched)
        bytes_ = 2 * h * hp
        hands = [Hand(sm) for sm in sms]
        of = Ranks(clock, hands, experts=ranks * epn, topk=1, tokens=8, padding=8, hidden=8, row_bytes=16,
                   stage_bytes=epn * bytes_)  # fmt: skip
        where, ticket = of.alike(table), of.alike(np.zeros(1, np.int32))
        weights = of.new((2 * epn, h, hp), BF16)
        call = Call(of, "prefetch", [where, ticket, weights], [weights])

        def copy() -> None:
            for peer, n in enumerate(fetched):
                if n:
                    clock.copy(weights, peer, weights, 0, n * bytes_)

        variants = {str(hand.sms): call.send(hand, who=(0,)) for hand in hands}
        variants["copy"] = Variant(copy, ranks=(0,))
        us = {k: statistics.median(v) for k, v in clock.measure(variants, runs).items()}
        n = slots * bytes_
        keep({"config": config.name, "B": config.columns, "H": h, "Hp": hp, "slots": slots, "wire_MB": n / 1e6,
              "us": us, "GBps": {k: n / t / 1e3 for k, t in us.items()},
              "share": {k: us["copy"] / t for k, t in us.items()}})  # fmt: skip
        of.close()


class Moe(Ranks):
    """Ranks with the plan of a uniform routing; dispatch and combine, forward and backward, on it."""

    def __init__(self, clock: Clock, hands: Sequence[Hand], s: int, h: int, topk: int, experts: int, padding: int):
        super().__init__(clock, hands, experts=experts, topk=topk, tokens=s, padding=padding, hidden=h,
                         row_bytes=2 * h)  # fmt: skip
        n, ranks = self.shape.recv_rows(s), len(clock.ranks)
        self.n = n
        dims = [(s, topk)] * 2 + [(n,)] * 3 + [(2 * experts // ranks,)] * 2 + [(ranks, experts // ranks)]
        dims += [(ranks,)] * 2 + [(1,)]
        plan = [self.new(d, np.int32) for d in dims]
        self.dst_rank, self.primary = plan[0], plan[3]
        few = routing("uniform", Shape(1, min(s, 2048), topk, experts, h))[0]  # to draw each anew takes long
        ids = few[np.random.default_rng(0).integers(len(few), size=(ranks, s))]
        ids = self.put(list(ids))
        self.x, self.hidden = self.new((s, h), BF16), self.new((n, h), BF16)
        w, scale, y = self.new((s, topk), np.float32), self.new((n,), np.float32), self.new((s, h), BF16)
        route, back = [*plan[:5], plan[10]], [plan[0], *plan[2:5], plan[10], self.hidden, scale]
        operands: dict[str, tuple[Any, Any]] = {
            "plan": ([ids], plan),
            "dispatch": ([*route, self.x, w], [self.hidden, scale]),
            "combine": (back, [y]),
            "dispatch_grad": (back, [y, w]),
            "combine_grad": ([*route, self.x], [self.hidden]),
        }
        self.calls = {kind: Call(self, kind, *given) for kind, given in operands.items()}
        self.clock.sync()  # all buffers are filled
        self.calls["plan"].launch(hands[0])
        self.check()


def bench_rows(clock: Clock, sms: list[int], runs: int, keep: Keep) -> None:
    """dispatch and combine of all ranks at once, kernels that send and whole ops, beside all copy engines at once.

    Local bytes are those that are read and written after the last row has come, in a call without overlap: with the
    bytes on the wire, the model of its time. Sends are those of calls in one round.
    """
    ranks = len(clock.ranks)
    hands = [Hand(sm, rounds) for sm in [*sms, 0] for rounds in (1, 3)]
    topk, h, experts = 8, 7168, 256 if ranks < 8 else 896
    for s in (1024, 4096, 8192):
        moe = Moe(clock, hands, s, h, topk, experts, padding=8)
        to = np.stack([b.read() for b in moe.dst_rank])  # [ranks, s, K]
        primaries = [int((b.read() == np.arange(moe.n)).sum()) for b in moe.primary]
        # Rows from a rank to another: its tokens with an expert there.
        rows = np.stack([(to == peer).any(axis=2).sum(axis=1) for peer in clock.ranks], axis=1)
        cross = rows * (1 - np.eye(ranks, dtype=int))
        busiest = int(max(cross.sum(0).max(), cross.sum(1).max()))
        for op in ("dispatch", "combine", "dispatch_grad", "combine_grad"):
            wire = busiest * 2 * h
            after = max(primaries) + moe.n if op in OUTWARD else int(rows.sum(1).max()) + s
            local = after * 2 * h
            model = wire / BOTH_WAYS / 1e3 + local / LOCAL / 1e3

            def copy() -> None:
                for step in range(1, ranks):  # each copy engine goes round its peers, and no two to one
                    for r in clock.ranks:
                        peer = (r + step) % ranks
                        clock.copy(moe.hidden, peer, moe.hidden, r, int(cross[r, peer]) * 2 * h)

            call = moe.calls[op]
            variants = {f"send {hand}": call.send(hand) for hand in hands if hand.rounds == 1}
            variants |= {f"whole {hand}": call.whole(hand) for hand in hands}
            us = {k: statistics.median(v) for k, v in clock.measure(variants | {"copy": Variant(copy)}, runs).items()}
            for hand in hands:
                send, whole = us[f"send {Hand(hand.sms, 1)}"], us[f"whole {hand}"]
                keep({"op": op, "S": s, **hand._asdict(), "wire_MB": wire / 1e6, "local_MB": local / 1e6,
                      "send_us": send, "whole_us": whole, "copy_us": us["copy"], "model_us": model,
                      "over_model": whole / model, "GBps": wire / send / 1e3,
                      "of_one_way": wire / send / 1e3 / ONE_WAY, "of_both_ways": wire / send / 1e3 / BOTH_WAYS,
                      "of_copy": us["copy"] / send})  # fmt: skip
        moe.close()


def bench_decode(clock: Clock, sms: int, runs: int, keep: Keep) -> None:
    """Small calls, capacity and padding to match, one after the other in a graph: microseconds per turn, by replay.

    `empty` is a prefetch that moves nothing: what a call costs that only shakes hands.
    """
    repeats, hand, ranks = 20, Hand(sms), len(clock.ranks)
    sequences = ("plan", "dispatch", "combine", "plan+dispatch", "plan+dispatch+combine")
    for s in (1, 8, 32, 128):
        moe = Moe(clock, [hand], s, 7168, topk=8, experts=256, padding=1)
        idle = Ranks(clock, [hand], experts=ranks, topk=1, tokens=1, padding=1, hidden=8, row_bytes=16, stage_bytes=64)
        slots, ticket = idle.alike(np.full((ranks, 1), -1, np.int32)), idle.alike(np.zeros(1, np.int32))
        leaf = idle.new((2, 16), BF16)
        empty = Call(idle, "prefetch", [slots, ticket, leaf], [leaf])
        clock.sync()
        graphs = {"empty, in phases": Graphs(idle, hand, [(empty, PHASES)], repeats)}
        for name in sequences:
            calls = [moe.calls[op] for op in name.split("+")]
            graphs[f"{name}, in phases"] = Graphs(moe, hand, [(c, PHASES) for c in calls], repeats)
            if any(c.one_launch(hand) for c in calls):
                shortest = [(c, (WHOLE,) if c.one_launch(hand) else PHASES) for c in calls]
                graphs[f"{name}, one launch"] = Graphs(moe, hand, shortest, repeats)
        times = clock.measure({name: g.variant() for name, g in graphs.items()}, runs, flushes=1)
        for name, us in times.items():
            each = sorted(t / repeats for t in us)
            keep({"s": s, "what": name, "us": statistics.median(each), "p90_us": each[int(0.9 * (len(each) - 1))]})
        for g in graphs.values():
            g.close()
        moe.close()
        idle.close()


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    lines = [f"{result['ranks']} ranks on {result['gpus']} x {result['device']}, {result['sms']} SMs", ""]

    def head(cells: list[str]) -> None:
        lines.append("| " + " | ".join(cells) + " |")
        lines.append("|" + "---|" * len(cells))

    if rows := result.get("prefetch"):
        sms = [k for k in rows[0]["us"] if k != "copy"]
        each = [f"{what} {sm} SMs" for sm in sms for what in ("us", "GB/s", "of copy")]
        head(["config", "slots", "wire MB", "copy us", "GB/s", *each])
        for r in rows:
            cells = [r["config"], str(r["slots"]), f"{r['wire_MB']:.1f}"]
            for k in ("copy", *sms):
                cells += [f"{r['us'][k]:.1f}", f"{r['GBps'][k]:.0f}"] + (
                    [f"{r['share'][k]:.2f}"] if k != "copy" else []
                )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if rows := result.get("rows"):
        head(["op", "S", "SMs", "rounds", "wire MB", "send us", "GB/s", "of 394", "of 351", "copy engines us",
              "whole us", "of the model"])  # fmt: skip
        for r in rows:
            cells = [r["op"], str(r["S"]), str(r["sms"] or "default"), str(r["rounds"]), f"{r['wire_MB']:.1f}",
                     f"{r['send_us']:.1f}", f"{r['GBps']:.0f}", f"{r['of_one_way']:.2f}", f"{r['of_both_ways']:.2f}",
                     f"{r['copy_us']:.1f}", f"{r['whole_us']:.1f}", f"{r['over_model']:.2f}"]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if rows := result.get("decode"):
        head(["s", "calls", "us per turn", "p90"])
        lines += [f"| {r['s']} | {r['what']} | {r['us']:.2f} | {r['p90_us']:.2f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures, written after every row")
    parser.add_argument("--parts", default="prefetch,rows,decode")
    parser.add_argument("--ranks", type=int, help="default: one on each GPU")
    parser.add_argument("--runs", type=int, default=11, help="runs of each variant that count")
    parser.add_argument("--show", type=Path, help="print an earlier --json file instead of measuring")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return
    from cuda.bindings import runtime

    properties = gpu_kit.ok(runtime.cudaGetDeviceProperties(0))
    sms = properties.multiProcessorCount
    clock, runs = Clock(options.ranks), options.runs
    result: dict[str, Any] = {"device": properties.name.decode().strip("\0"), "sms": sms, "ranks": len(clock.ranks),
                              "gpus": len(set(clock.device))}  # fmt: skip
    parts: dict[str, Callable[[Keep], None]] = {
        "prefetch": lambda keep: bench_prefetch(clock, [16, 32, 64, sms], runs, keep),
        "rows": lambda keep: bench_rows(clock, [8, 16, 20, 32, 48, 64, sms], runs, keep),
        "decode": lambda keep: bench_decode(clock, sms, 4 * runs, keep),
    }
    for part in options.parts.split(","):
        rows = result[part] = []
        start = time.monotonic()

        def keep(row: dict[str, Any]) -> None:
            rows.append(row)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(result, indent=1))

        parts[part](keep)
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
