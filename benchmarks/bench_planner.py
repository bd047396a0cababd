"""Plans: how long they take, how good they are, and from which load on they pay. `python -m benchmarks.bench_planner`

Five tables:

* **the op** - `ep.plan` jitted on this mesh (all devices; several processes with --processes), from the call until
  every rank has its arrays, beside the bookkeeping without which no expert-parallel layer can send a row: a stable
  sort of the rank's ids, their counts, an all_gather of the counts, and offsets. Each is one program; they take turns.
* **the native planner's time** - the decision and the placement of *all* ranks' rows by one thread, without a domain,
  beside a stable `np.argsort` of the same ids. "One rank" is its R-th part: a rank decides for all, places its own.
* **quality** of the same plans. Link rows are rows that a rank receives from others, once per token and rank ("without
  dedup": once per assignment). "Source order" has the same allocation, but hands each expert's rows out in the order of
  their source ranks (benchmarks/plan_quality.py); "plain EP" moves nothing.
* **break-even** - rows above which a copy of an expert pays, from bytes and FLOPs alone; nothing is measured.
* **payoff** - the plans held against it: what share of the moved experts is above, and the predicted time of the GEMMs
  of the slowest rank. Rows are scaled to --train_tokens per rank.

All but the first are made on a single process only. A lognormal routing that a model's K of E experts cannot reach is
left out, and so are group sizes that do not divide E.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import moonep_jax as moonep
from benchmarks import kit
from benchmarks import plan_quality as pq
from benchmarks.models import BY_NAME, MACHINES, MODELS

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["E64", *BY_NAME], "models of benchmarks/models.py; E64 is 64 experts, 8 a token")
flags.DEFINE_list("ranks", ["2", "8", "32", "64", "128"], "sizes of the group in the tables of plans")
flags.DEFINE_list(
    "routings", ["uniform", "lognormal_2", "lognormal_8", "lognormal_24", "one_home", "crowded"], "of tests/cases.py"
)
flags.DEFINE_integer("tokens", 4096, "tokens per rank, at most", lower_bound=1)
flags.DEFINE_integer("group_tokens", 32768, "tokens of a group in the tables of plans, at most", lower_bound=1)
flags.DEFINE_integer("train_tokens", 4096, "tokens per rank in the table of payoffs", lower_bound=1)
flags.DEFINE_list("show_ranks", ["8", "64"], "group sizes in the printed table of quality; --json has all of them")
flags.DEFINE_integer("plan_repeats", 3, "timed runs of each native plan", lower_bound=1)


def run() -> kit.Tables:
    """All tables."""
    tables = {"op": op_times()}
    if jax.process_count() == 1:
        tables["plans"], tables["payoff"] = plans()
        tables["break_even"] = [
            {"model": m.name, "machine": g.name, "mean_rows": FLAGS.train_tokens * 8 * m.K / m.E, **pq.break_even(m, g)}
            for m in MODELS
            for g in MACHINES
        ]
    return tables


def sizes(name: str) -> tuple[int, int]:
    """(E, K) of a --models entry."""
    return (64, 8) if name == "E64" else (BY_NAME[name].E, BY_NAME[name].K)


# -- the op ------------------------------------------------------------------------------------------------------------


def op_times() -> list[kit.Row]:
    """ep.plan on all devices beside XLA's bookkeeping, for each model whose experts divide by them."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    ranks, rows = mesh.size, list[kit.Row]()
    for name in FLAGS.models:
        E, K = sizes(name)
        if E % ranks:
            continue
        for s in sorted({min(128, FLAGS.tokens), FLAGS.tokens}):
            config = moonep.EPConfig(tokens=s, hidden=8, topk=K, experts=E, dtype=jnp.bfloat16)
            with moonep.setup(mesh, "ep", config) as ep:
                for routing in FLAGS.routings[:2]:
                    ids = pq.draw(routing, ranks, s, K, E)
                    given = kit.put(mesh, ids)
                    times = kit.side_by_side(_programs(ep, mesh, E, given))
                    ours, xla = (kit.summary(times[n]) for n in ("plan", "xla"))
                    rows.append(
                        {"model": name, "E": E, "K": K, "R": ranks, "s": s, "routing": routing}
                        | {"p50": ours["p50"], "p90": ours["p90"], "xla_p50": xla["p50"], "xla_p90": xla["p90"]}
                        | {"ratio": ours["p50"] / xla["p50"], "us": times}
                    )
    return rows


def _programs(ep: moonep.Domain, mesh: jax.sharding.Mesh, E: int, ids: jax.Array) -> dict[str, Callable[[], Any]]:
    def bookkeeping(ids: jax.Array) -> Any:
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jax.lax.all_gather(jnp.zeros(E, np.int32).at[flat].add(1), "ep")
        return order, jnp.cumsum(counts, axis=0) - counts, jnp.cumsum(counts.sum(axis=0))

    def program(body: Callable[[jax.Array], Any]) -> Callable[[], Any]:
        def local(ids: jax.Array) -> Any:
            return jax.tree.map(lambda a: a[None], body(ids[0]))

        step = kit.on_ranks(mesh, local, check_vma=False)
        return lambda: step(ids)

    return {"plan": program(ep.plan), "xla": program(bookkeeping)}


# -- plans without a domain --------------------------------------------------------------------------------------------


def plans() -> tuple[list[kit.Row], list[kit.Row]]:
    """Time and quality of the native planner, and the payoff of its moves."""
    rows, payoffs = list[kit.Row](), list[kit.Row]()
    for name in FLAGS.models:
        E, K = sizes(name)
        for ranks in map(int, FLAGS.ranks):
            if E % ranks:
                continue
            s = min(FLAGS.tokens, max(1, FLAGS.group_tokens // ranks))
            for routing in (r for r in FLAGS.routings if pq.in_reach(r, K, E)):
                ids = pq.draw(routing, ranks, s, K, E)
                plan = pq.native_plan(ids, E)
                flat = ids.reshape(-1)
                times = kit.side_by_side(
                    {
                        "plan": lambda: pq.native_plan(ids, E)["cascade"],
                        "sort": lambda: np.argsort(flat, kind="stable"),
                    },
                    repeats=FLAGS.plan_repeats,
                    warm=0,
                )
                ours, sort = (kit.summary(times[n]) for n in ("plan", "sort"))
                case = {"model": name, "E": E, "K": K, "R": ranks, "s": s, "routing": routing}
                rows.append(
                    case
                    | {"ms_p50": ours["p50"] / 1e3, "ms_p90": ours["p90"] / 1e3, "sort_ms": sort["p50"] / 1e3}
                    | {"us_per_rank": ours["p50"] / ranks, "us": times}
                    | pq.quality(ids, E, plan)
                )
                if name in BY_NAME:
                    payoffs += [
                        case | {"machine": g.name} | pq.payoff(plan, BY_NAME[name], g, FLAGS.train_tokens / s)
                        for g in MACHINES
                    ]
    return rows, payoffs


# -- the page ----------------------------------------------------------------------------------------------------------

OP = {
    "model": "{model}",
    "E": "{E}",
    "K": "{K}",
    "R": "{R}",
    "tokens per rank": "{s}",
    "routing": "{routing}",
    "plan us p50": "{p50:.0f}",
    "p90": "{p90:.0f}",
    "XLA's bookkeeping us p50": "{xla_p50:.0f}",
    "p90 ": "{xla_p90:.0f}",
    "ratio": "{ratio:.2f}",
}
TIMES = {
    "model": "{model}",
    "E": "{E}",
    "K": "{K}",
    "R": "{R}",
    "tokens per rank": "{s}",
    "slowest routing": "{routing}",
    "plan": "{kind}",
    "all ranks ms p50": "{ms_p50:.2f}",
    "p90": "{ms_p90:.2f}",
    "one rank us": "{us_per_rank:.0f}",
    "argsort ms p50": "{sort_ms:.2f}",
    "one rank, of argsort": "{of_sort:.2f}",
}
PLANS = {
    "model": "{model}",
    "R": "{R}",
    "routing": "{routing}",
    "maxvio": "{maxvio:.2f}",
    "max/mean plain EP": "{before:.2f}",
    "max/mean": "{after:.4f}",
    "plan": "{kind}",
    "rows moved %": "{moved_percent:.1f}",
    "experts moved": "{moved_experts}",
    "most slots used": "{slots_max} of {slots}",
    "link rows per rank": "{link:.0f}",
    "source order": "{source_link:.0f}",
    "plain EP": "{plain_link:.0f}",
    "of source order": "{of_source:.3f}",
    "without dedup": "{twice_link:.0f}",
    "worst rank": "{link_max}",
    "worst, plain EP": "{plain_link_max}",
}
BREAK_EVEN = {
    "model": "{model}",
    "GPU": "{machine}",
    "expert MB": "{expert_MB:.0f}",
    "to send it us": "{send_us:.0f}",
    "us of 1000 rows": "{us_1000:.0f}",
    "break-even rows, forward": "{forward:.0f}",
    "at data-sheet peaks": "{forward_peaks:.0f}",
    "training step": "{training:.0f}",
    "mean rows of an expert, R = 8": "{mean_rows:.0f}",
    "maxvio that one copy needs": "{needs:.1f}",
}
PAYOFF = {
    "model": "{model}",
    "R": "{R}",
    "routing": "{routing}",
    "experts moved": "{moved}",
    "median rows in one": "{median_rows:.0f}",
    "above break-even %": "{worth_percent:.0f}",
    "of the moved rows %": "{worth_rows_percent:.0f}",
    "plain EP us": "{plain_us:.0f}",
    "ours us": "{ours_us:.0f}",
    "copies us": "{copies_us:.0f}",
    "gain, copies hidden": "{hidden:.2f}",
    "copies exposed": "{exposed:.2f}",
}


def show(record: dict[str, Any]) -> str:
    """The tables as Markdown."""
    tables, parts = record["tables"], [kit.about(record)]
    parts += ["### The plan op", kit.markdown(tables["op"], OP)]
    if "plans" in tables:
        groups: dict[tuple[str, int], list[kit.Row]] = {}
        for row in tables["plans"]:
            groups.setdefault((row["model"], row["R"]), []).append(row)
        slowest = [max(rows, key=lambda row: row["ms_p50"]) for rows in groups.values()]
        rows = [row | {"of_sort": row["us_per_rank"] / row["sort_ms"] / 1e3} for row in slowest]
        parts += ["### Time of the native planner", kit.markdown(rows, TIMES)]
        rows = [
            row | {"moved_percent": 100 * row["moved_rows"], "of_source": _share(row["link"], row["source_link"])}
            for row in tables["plans"]
            if str(row["R"]) in record["flags"]["show_ranks"]
        ]
        parts += ["### Quality of the plans", kit.markdown(rows, PLANS)]
        rows = [
            row | {"us_1000": 1000 * row["row_us"], "needs": max(0.0, row["forward"] / row["mean_rows"] - 1)}
            for row in tables["break_even"]
        ]
        parts += ["### Predicted: when one copy of an expert pays", kit.markdown(rows, BREAK_EVEN)]
        parts += [f"{g.name}: {g.source}." for g in MACHINES]
        rows = [_gains(row) for row in tables["payoff"] if _shown(row, record)]
        parts += [f"### Predicted: what the plans pay on {MACHINES[0].name}, forward", kit.markdown(rows, PAYOFF)]
    return "\n\n".join(parts)


def _shown(row: kit.Row, record: dict[str, Any]) -> bool:
    return row["machine"] == MACHINES[0].name and str(row["R"]) in record["flags"]["show_ranks"]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _gains(row: kit.Row) -> kit.Row:
    return row | {
        "worth_percent": 100 * row["worth"],
        "worth_rows_percent": 100 * row["worth_rows"],
        "hidden": row["plain_us"] / max(row["ours_us"], row["copies_us"]),
        "exposed": row["plain_us"] / (row["ours_us"] + row["copies_us"]),
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Left: link rows of each plan over those of source order. Right: predicted gain over plain EP by imbalance."""
    with kit.picture(path, 2, figsize=(12, 4.5)) as (_, (left, right)):
        tables = record["tables"]
        for name in dict.fromkeys(row["routing"] for row in tables["plans"]):
            own = [r for r in tables["plans"] if r["routing"] == name and r["source_link"]]
            left.plot([r["R"] for r in own], [r["link"] / r["source_link"] for r in own], "o", alpha=0.7, label=name)
        left.set(xscale="log", xlabel="ranks", ylabel="rows over the link, of source order's")
        left.set_xscale("log", base=2)
        left.axhline(1, color="grey", linewidth=0.8)
        left.legend(fontsize=8)
        pay = [_gains(r) for r in tables["payoff"] if r["machine"] == MACHINES[0].name]
        for name in dict.fromkeys(row["model"] for row in pay):
            own = [r for r in pay if r["model"] == name]
            right.plot(
                [r["plain_us"] / r["ours_us"] for r in own], [r["exposed"] for r in own], "o", alpha=0.6, label=name
            )
        right.set(xscale="log", yscale="log", xlabel="rank max/mean under plain EP")
        right.set_ylabel(f"predicted gain, {MACHINES[0].name}, copies exposed")
        right.axhline(1, color="grey", linewidth=0.8)
        right.legend(fontsize=8)


if __name__ == "__main__":
    kit.main(run, __doc__ or "", show, plot)
