"""What a plan is worth, in NumPy: routings of full size, rows over the link, and what moving experts should gain.

Used by bench_planner, which imports kit first; nothing here is timed. A *plan* is what the native planner returns for
all ranks, as a dict of arrays [R, ...]. Notation as in models.py, s tokens per rank of a call; ids are [R, s, K].
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from cases import Shape, lognormal_ids, routing  # pyright: ignore[reportMissingImports]

from benchmarks.models import Machine, Model
from moonep_jax import _ffi_cpu

Array = Any  # NumPy arrays of any dtype
POOL = 2048  # tokens of which the lognormal routings are drawn


def in_reach(name: str, K: int, E: int) -> bool:
    """Whether a routing can have the imbalance of its name: distinct experts bound maxvio by E / K - 1."""
    return not name.startswith("lognormal_") or float(name.removeprefix("lognormal_")) <= E / K - 1


def draw(name: str, R: int, s: int, K: int, E: int) -> Array:
    """ids [R, s, K] of a routing of the case table, cheap enough for large groups.

    uniform and lognormal_* of the table score every expert for every token. Here the first is drawn by rejection (the
    same distribution), and the others draw whole tokens, with replacement, from a pool of the table's own tokens: the
    same popularity, whatever the number of ranks. The routing's own maxvio is printed beside each plan.
    """
    rng = np.random.default_rng([R, s, K, E])
    if name == "uniform":
        return _distinct(rng, R, s, K, E)
    if name.startswith("lognormal_"):
        pool = _pool(K, E, float(name.removeprefix("lognormal_")))
        return pool[rng.integers(len(pool), size=(R, s))]
    return routing(name, Shape(R, s, K, E, 1))


def _distinct(rng: np.random.Generator, R: int, s: int, K: int, E: int) -> Array:
    ids = rng.integers(E, size=(R * s, K), dtype=np.int32)
    again = np.arange(len(ids))
    while len(again):
        ordered = np.sort(ids[again], axis=1)
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        ids[again] = rng.integers(E, size=(len(again), K), dtype=np.int32)
    return ids.reshape(R, s, K)


@functools.cache
def _pool(K: int, E: int, maxvio: float) -> Array:
    """[POOL, K]: tokens of a lognormal routing of this maxvio."""
    return lognormal_ids(np.random.default_rng([E, K]), 1, POOL, K, E, maxvio)[0]


def maxvio(ids: Array, E: int) -> float:
    """Rows of the hottest expert over the mean, less 1."""
    return float(np.bincount(ids.reshape(-1), minlength=E).max() * E / ids.size - 1)


def native_plan(ids: Array, E: int, padding: int = 8) -> dict[str, Any]:
    """The native planner's plan of all ranks, without a domain."""
    ranks, s, topk = ids.shape
    shape = _ffi_cpu.DomainShape(ranks=ranks, experts=E, topk=topk, tokens=s, padding=padding)
    return _ffi_cpu.plan_all(shape, ids)


def allocation(plan: dict[str, Any], E: int) -> Array:
    """alloc [E, R]: rows of each expert computed on each rank, read off a plan's groups."""
    ranks = len(plan["group_rows"])
    epn = E // ranks
    rows, slots = plan["group_rows"], plan["slot_expert"][0].reshape(ranks, epn)
    alloc = np.zeros((E, ranks), np.int64)
    for d in range(ranks):
        alloc[d * epn : (d + 1) * epn, d] = rows[d, :epn]
        used = slots[d] >= 0
        alloc[slots[d][used], d] = rows[d, epn:][used]
    return alloc


def source_order(ids: Array, alloc: Array) -> Array:
    """[R, s, K]: the rank of each assignment under the same allocation, without regard to where rows come from.

    The rows of an expert, listed by source rank, token and k, are handed out in that order: the first alloc[e, 0] to
    rank 0, the next alloc[e, 1] to rank 1, and so on. It is what cumulative sums over a global list of rows give.
    """
    experts, ranks = alloc.shape
    order = np.argsort(ids.reshape(-1), kind="stable")
    dst = np.empty(ids.size, np.int32)
    dst[order] = np.repeat(np.tile(np.arange(ranks), experts), alloc.reshape(-1))
    return dst.reshape(ids.shape)


def link_rows(dst: Array) -> Array:
    """[R]: rows that each rank receives over the link, once per token and rank; dst [R, s, K], all routed."""
    ranks = len(dst)
    ordered = np.sort(dst, axis=2)
    first = np.ones(dst.shape, bool)
    first[:, :, 1:] = ordered[:, :, 1:] != ordered[:, :, :-1]
    return np.bincount(ordered[first & (ordered != np.arange(ranks)[:, None, None])], minlength=ranks)


def quality(ids: Array, E: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Load, moves and traffic of a plan; the traffic also of source-order assignment and of plain EP.

    link keys are rows received per rank, mean and most (_max); twice_link counts every assignment, as without dedup.
    moved_rows is a share of all rows.
    """
    ranks = len(ids)
    epn = E // ranks
    home, after = plan["home_rows"][0], plan["rank_rows"][0]
    used = plan["slot_expert"][0].reshape(ranks, epn) >= 0
    dst = plan["dst_rank"].reshape(ids.shape)
    links = {
        "link": link_rows(dst),
        "source_link": link_rows(source_order(ids, allocation(plan, E))),
        "plain_link": link_rows(ids // epn),
    }
    return {
        "maxvio": maxvio(ids, E),
        "kind": "cascade" if plan["cascade"] else "lean",
        "before": float(home.max() / home.mean()),
        "after": float(after.max() / after.mean()),
        "moved_rows": float(plan["group_rows"][:, epn:].sum() / ids.size),
        "moved_experts": int(used.sum()),
        "slots": epn,
        "slots_max": int(used.sum(axis=1).max()),
        "twice_link": float((dst != np.arange(ranks)[:, None, None]).sum() / ranks),
        **{name: float(rows.mean()) for name, rows in links.items()},
        **{f"{name}_max": int(rows.max()) for name, rows in links.items()},
    }


def break_even(model: Model, machine: Machine) -> dict[str, float]:
    """When a copy of one bf16 expert pays: time to send it, and the rows whose computation takes as long.

    A training step sends the expert once and its bf16 gradient back once, and computes each row three times.
    """
    size = 2 * model.expert_params
    return {
        "expert_MB": size / 1e6,
        "send_us": size / machine.link * 1e6,
        "row_us": model.row_flops / machine.flops * 1e6,
        "forward": size / machine.link / (model.row_flops / machine.flops),
        "forward_peaks": size / machine.peak_link / (model.row_flops / machine.peak_flops),
        "training": 2 * size / machine.link / (3 * model.row_flops / machine.flops),
    }


def payoff(plan: dict[str, Any], model: Model, machine: Machine, scale: float) -> dict[str, float]:
    """What a plan's moves should be worth, forward, by bytes and FLOPs: slowest rank, no other cost.

    Args:
      scale: real tokens per rank over the plan's; rows grow with it, moves do not.

    Returns: us of the hottest rank's GEMMs under plain EP; of every rank's under the plan; of the expert copies on the
    busiest rank (sent or received); how many of the moved experts, and of the rows in them, are above the break-even.
    Traffic of rows is left out: it is less than plain EP's on the hottest rank, and more in sum.
    """
    slots = plan["slot_expert"][0]
    ranks = len(plan["group_rows"])
    epn = len(slots) // ranks
    used = slots.reshape(ranks, epn) >= 0
    rows = plan["group_rows"][:, epn:][used] * scale
    sent = np.bincount(slots[slots >= 0] // epn, minlength=ranks)
    copies = max(int(sent.max()), int(used.sum(axis=1).max()))
    row_us = model.row_flops / machine.flops * 1e6
    worth = rows >= machine.break_even
    return {
        "plain_us": float(plan["home_rows"][0].max() * scale * row_us),
        "ours_us": float(plan["rank_rows"][0].max() * scale * row_us),
        "copies": copies,
        "copies_us": copies * 2 * model.expert_params / machine.link * 1e6,
        "moved": len(rows),
        "worth": float(worth.mean()) if len(rows) else 1.0,
        "worth_rows": float(rows[worth].sum() / rows.sum()) if len(rows) else 1.0,
        "median_rows": float(np.median(rows)) if len(rows) else 0.0,
    }
