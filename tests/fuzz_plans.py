"""Planner part of the fuzzer: batches of random routings, native plans, and the invariants on whole batches at once.

`check_batch` is the contract's list of invariants without a loop over routings, so that a million of them take minutes;
a sample of each batch is also compared with the oracle, which is slow, and checked by `invariants.check_invariants`,
which shares no code with this file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cases import OUTSIDE, ROUTINGS, Shape
from test_planner import ALIKE, PER_RANK, compare, native_plan

from moonep_jax.reference import recv_rows

Array = Any  # NumPy arrays of any dtype
# Families of cases.py that are cheap enough to be drawn one by one.
FAMILIES = tuple(name for name in ROUTINGS if not name.startswith("lognormal") and name != "padded_tails")
_CACHED = 200_000  # rows of a batch: its arrays stay in the processor's cache
WIDE = "wide"  # a family of its own: one draw for a whole batch


@dataclasses.dataclass(frozen=True)
class Batch:
    """Routings of one shape: ids [B, R, s, K]."""

    shape: Shape
    padding: int
    planner: str
    family: str
    ids: Array


def draw(rng: np.random.Generator, routings: int) -> Batch:
    """A batch of at most `routings`, fewer of large ones: shape, padding, planner, family and ids."""
    ranks = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 16], p=[0.02, 0.17, 0.17, 0.2, 0.12, 0.12, 0.17, 0.03]))
    epn = int(rng.integers(1, 7))
    shape = Shape(ranks, int(rng.integers(1, 9)), int(rng.integers(1, 6)), ranks * epn, 1)
    padding = int(rng.choice([1, 2, 8, 64, 128], p=[0.35, 0.2, 0.35, 0.05, 0.05]))
    planner = "home" if rng.random() < 0.1 else "exact"
    rows = recv_rows(shape.s, shape.K, shape.E, shape.R, padding, planner)
    routings = int(np.clip(_CACHED // (shape.R * rows), 1, routings))
    if rng.random() < 0.15:
        family = str(rng.choice(FAMILIES))
        count = -(-routings // 4)
        size = (shape.R, shape.s, shape.K, shape.E)
        return Batch(shape, padding, planner, family, np.stack([ROUTINGS[family](rng, *size) for _ in range(count)]))
    return Batch(shape, padding, planner, WIDE, _wide(rng, routings, shape))


def _wide(rng: np.random.Generator, b: int, shape: Shape) -> Array:
    """Popularity of every width, between experts and between homes; repeats, padding, stray ids, ranks without rows."""
    r, s, k, e = shape.R, shape.s, shape.K, shape.E
    log_p = rng.uniform(0, 5, (b, 1)) * rng.standard_normal((b, e))
    log_p += np.repeat(rng.uniform(0, 3, (b, 1)) * rng.standard_normal((b, r)), shape.epn, axis=1)
    log_p[rng.random((b, e)) < rng.choice([0, 0.3, 0.8], (b, 1))] -= 20  # experts that nobody likes
    ends = np.cumsum(np.exp(log_p - log_p.max(axis=1, keepdims=True)), axis=1)
    at = rng.random((b, r * s * k)) * ends[:, -1:]
    ids = (at[:, :, None] > ends[:, None, :-1]).sum(axis=2).astype(np.int64).reshape(b, r, s, k)
    whole = (b, 1, 1, 1)
    ids[rng.random(ids.shape) < rng.choice([0, 0, 0.1, 0.7], whole)] = -1
    stray = np.array([e, e + 7, *OUTSIDE])
    mask = rng.random(ids.shape) < rng.choice([0, 0, 0.2], whole)
    ids[mask] = rng.choice(stray, int(mask.sum()))
    ids[rng.random((b, r)) < rng.choice([0, 0, 0.4], (b, 1))] = -1
    return np.ascontiguousarray(ids, np.int32)


def native(batch: Batch) -> dict[str, Array]:
    """The native plans of all routings, stacked: [B, R, ...]; raises unless ranks hold alike what must be alike."""
    plans = [native_plan(ids, batch.shape, batch.padding, batch.planner) for ids in batch.ids]
    arrays = {name: np.stack([p[name] for p in plans]) for name in (*PER_RANK, *ALIKE)}
    for name in ALIKE:
        _require((arrays[name] == arrays[name][:, :1]).all(axis=(1, 2)), f"{name} is equal on all ranks")
        arrays[name] = arrays[name][:, 0]
    arrays["cascade"] = np.array([p["cascade"] for p in plans])
    arrays["slot_expert"] = arrays["slot_expert"].reshape(len(plans), batch.shape.R, batch.shape.epn)
    return arrays


class PlanError(AssertionError):
    """A plan breaks an invariant; `index` is the routing in its batch."""

    def __init__(self, invariant: str, index: int) -> None:
        super().__init__(f"routing {index} of the batch breaks: {invariant}")
        self.index = index


def _require(holds: Array, invariant: str) -> None:
    """holds: booleans that lead with the batch."""
    holds = np.asarray(holds).reshape(len(holds), -1).all(axis=1)
    if not holds.all():
        raise PlanError(invariant, int(np.argmin(holds)))


def check_batch(batch: Batch, p: dict[str, Array]) -> None:
    """Every invariant of the contract on every routing of a batch. Raises PlanError."""
    shape, ids = batch.shape, batch.ids
    b, r, s, k, e, epn = len(ids), shape.R, shape.s, shape.K, shape.E, shape.epn
    per_rank, rows = s * k, p["src"].shape[2]
    flat = ids.reshape(b, r * per_rank).astype(np.int64)
    routed = (flat >= 0) & (flat < e)
    every = np.arange(b)[:, None]
    source = np.arange(r * per_rank) // per_rank

    def table(index: Array, keep: Array, width: int) -> Array:
        """Counts per routing of the kept entries of index [B, n] in [0, width)."""
        offset = np.arange(b)[:, None] * width + index
        return np.bincount(offset[keep], minlength=b * width).reshape(b, width)

    expert = np.where(routed, flat, 0)
    count = table(source * e + expert, routed, r * e).reshape(b, r, e)
    total = count.sum(axis=(1, 2))

    # Rows per rank: conservation and capacity.
    home_rows = count.sum(axis=1).reshape(b, r, epn).sum(axis=2)
    cap = total[:, None] // r + (np.arange(r) < total[:, None] % r)
    _require(p["home_rows"] == home_rows, "home_rows counts the rows under plain EP")
    share = home_rows if batch.planner == "home" else cap
    _require(p["rank_rows"] == share, "every rank computes its share")
    group_rows, sizes = p["group_rows"].astype(np.int64), p["group_sizes"].astype(np.int64)
    _require(group_rows >= 0, "no group has negative rows")
    _require(group_rows.sum(axis=2) == share, "a rank's groups hold its rows")
    _require(sizes == -(-group_rows // batch.padding) * batch.padding, "groups are padded")
    _require(sizes.sum(axis=2) <= rows, "the padded total fits NvS(s)")

    # Slots: foreign experts, ascending, used ones first, and only used ones have rows.
    slots = p["slot_expert"]
    used = slots >= 0
    _require((slots >= -1) & (slots < e), "slots are in range")
    _require(~used | (slots // epn != np.arange(r)[:, None]), "slots hold foreign experts")
    _require(~used[:, :, 1:] | (used[:, :, :-1] & (slots[:, :, 1:] > slots[:, :, :-1])), "slots ascend")
    _require(used == (group_rows[:, :, epn:] > 0), "slots in use have rows, others have none")
    if batch.planner == "home":
        _require(~used, "the home planner moves nothing")
    still = (home_rows == cap).all(axis=1)
    _require(~(still[:, None, None] & used), "a balanced routing moves nothing")
    own = np.broadcast_to(np.arange(e).reshape(r, epn), (b, r, epn))
    group_expert = np.concatenate([own, slots], axis=2)  # [B, R, G]
    alloc = np.zeros((b, r, e), np.int64)
    at = np.broadcast_to(np.arange(b)[:, None, None], group_expert.shape)
    on = np.broadcast_to(np.arange(r)[:, None], group_expert.shape)
    real = group_expert >= 0
    alloc[at[real], on[real], group_expert[real]] = group_rows[real]
    _require(alloc.sum(axis=1) == count.sum(axis=1), "rows are conserved per expert")

    # Places: routed ids and rows are one to one.
    dst_rank, dst_row = (p[name].reshape(b, -1).astype(np.int64) for name in ("dst_rank", "dst_row"))
    _require(((dst_rank >= 0) == routed) & ((dst_row >= 0) == routed), "exactly routed ids have a place")
    _require((dst_rank >= -1) & (dst_rank < r) & (dst_row >= -1) & (dst_row < rows), "places are in range")
    src = p["src"].astype(np.int64)
    there = src[every, np.maximum(dst_rank, 0), np.maximum(dst_row, 0)]
    _require(~routed | (there == np.arange(r * per_rank)), "src inverts the places")
    held = src >= 0
    _require(held.sum(axis=(1, 2)) == total, "no other row is used")

    # Rows: in the group of their expert, from its start; own rows first, then in source order.
    ends = np.cumsum(sizes, axis=2)
    row = np.arange(rows)
    lane = np.arange(b * r).reshape(b, r, 1) * (rows + 1)
    passed = np.bincount((lane + np.minimum(ends, rows)).reshape(-1), minlength=b * r * (rows + 1))
    group = np.cumsum(passed.reshape(b, r, rows + 1)[:, :, :-1], axis=2)  # [B, R, N] ends at or before the row
    group = np.minimum(group, 2 * epn - 1)
    start = np.take_along_axis(ends - sizes, group, axis=2)
    filled = (row < ends[:, :, -1:]) & (row - start < np.take_along_axis(group_rows, group, axis=2))
    _require(held == filled, "rows fill their groups from the start")
    safe = np.maximum(src, 0)
    wanted = np.take_along_axis(group_expert, group, axis=2)
    _require(~held | (flat[np.arange(b)[:, None, None], safe] == wanted), "rows lie in the group of their expert")
    away = safe // per_rank != np.arange(r)[:, None]
    key = np.where(held, (group * 2 + away) * (r * per_rank) + src, -1)
    high = np.maximum.accumulate(key, axis=2)
    _require(~held[:, :, 1:] | (key[:, :, 1:] > high[:, :, :-1]), "own rows come first, then others in source order")

    # Chains: of a token's rows on a rank, the first is the primary, and each leads to the next.
    token = np.where(routed, dst_rank, -1 - np.arange(r * per_rank)).reshape(b, r * s, k)  # unrouted: all distinct
    same = token[:, :, :, None] == token[:, :, None, :]
    place = dst_row.reshape(b, r * s, k)
    first = np.take_along_axis(place, same.argmax(axis=3), axis=2)
    later = same & (np.arange(k)[:, None] < np.arange(k))
    after = np.where(later.any(axis=3), np.take_along_axis(place, later.argmax(axis=3), axis=2), -1)
    for name, by_assignment in (("primary", first), ("next", after)):
        want = np.where(held, by_assignment.reshape(b, -1)[np.arange(b)[:, None, None], safe], -1)
        _require(p[name] == want, f"{name} links a token's rows on a rank in k order")

    # Locality: each rank keeps min(count, alloc) of its own rows, the first ones; the others ascend in rank.
    stays = routed & (dst_rank == source)
    kept = table(source * e + expert, stays, r * e).reshape(b, r, e)
    _require(kept == np.minimum(count, alloc), "each rank keeps what it can of its own rows")
    order = np.argsort(np.where(routed, flat, e), axis=1, kind="stable")  # by expert, then source, token, k

    def sorted_by_expert(a: Array) -> Array:
        return np.take_along_axis(np.broadcast_to(a, flat.shape), order, axis=1)

    run = sorted_by_expert(expert * r + source)
    ok = sorted_by_expert(routed)
    leaves = sorted_by_expert(~stays).astype(np.int64)
    step = np.diff(run * 2 + leaves, axis=1) >= 0
    _require(~ok[:, 1:] | step, "the rows that stay are the first of their source")
    goal = np.where(ok & (leaves == 1), sorted_by_expert(expert * r + dst_rank), -1)
    high = np.maximum.accumulate(goal, axis=1)
    _require((goal[:, 1:] < 0) | (goal[:, 1:] >= high[:, :-1]), "sources fill destinations in rank order")


def check(batch: Batch, rng: np.random.Generator, sample: float) -> dict[str, int]:
    """Plans a batch natively and checks it; a random share of it also against the oracle. Returns counts."""
    plans = native(batch)
    check_batch(batch, plans)
    compared = np.flatnonzero(rng.random(len(batch.ids)) < sample)
    for index in compared:
        try:
            compare(batch.ids[index], batch.shape, batch.padding, batch.planner)
        except (AssertionError, ValueError) as error:
            raise PlanError(f"equal to the oracle: {error}", int(index)) from error
    moved = (plans["slot_expert"] >= 0).any(axis=(1, 2))
    return {
        "routings": len(batch.ids),
        "compared_with_the_oracle": len(compared),
        "moved": int(moved.sum()),
        "cascade": int(plans["cascade"].sum()),
    }
