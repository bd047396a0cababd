"""The oracle: what every op means, in plain NumPy over all ranks of one group at once.

Written to be obviously right, from the written semantics and independent of the native code: nothing here calls the
native module or JAX, and only numpy is imported. Tests and benchmarks compare every backend with it.

Notation
--------
    R   ranks of the group                      s   rows of x per rank in this call
    K   experts per token                       H   hidden size
    E   experts                                 A   token_padding, a power of two
    epn experts per rank, E / R                 G   groups per rank, 2 * epn: own experts, then slots
    N   rows of a rank's dispatched buffer, ``recv_rows``
    T   routed rows of all ranks                cap_r  T // R + (r < T % R)

    home(e) = e // epn. An *assignment* is one (source rank, token, k); its global id is (rank * s + token) * K + k.
    An id outside [0, E) is not routed: it takes no row, contributes 0 and gets 0 gradient.
    ``count[r, e]`` are the assignments of rank r to expert e, ``alloc[e, d]`` the rows of expert e computed on rank d.

Every array leads with the axis of ranks. fp32 sums start from their first row, products are rounded before they are
added (no FMA), and each step rounds to the row dtype once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Kind = Literal["home", "balanced", "lean", "cascade"]

# Overflow to inf and inf * 0 are what the native code computes too; they are no reason to warn.
_QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore"}


@dataclasses.dataclass(frozen=True, eq=False)
class ReferencePlan:
    """The plan of all ranks. Integer arrays are int32 unless stated; -1 stands for "none".

    Attributes:
        dst_rank: [R, s, K] destination rank of each assignment; -1: not routed.
        dst_row: [R, s, K] row in the destination's dispatched buffer; -1: not routed.
        src: [R, N] global assignment id of the row; -1: the row holds no token.
        primary: [R, N] row of the primary of this row's token on this rank (its lowest k here); -1: no token.
        next: [R, N] row of the token's next k on this rank; -1: the chain ends, or no token.
        group_sizes: [R, G] rows per group, padded to token_padding (0 for an empty group).
        group_rows: [R, G] rows per group that hold a token.
        slot_expert: [R, epn] the foreign experts in each rank's slots, ascending; -1: unused.
        home_rows: [R] rows each rank would compute under plain EP.
        rank_rows: [R] rows each rank computes.
        alloc: [E, R] int64, rows of each expert computed on each rank.
        kind: which plan was taken; "balanced" when the exact planner had nothing to move.
        token_padding: A.
        planner: "exact" or "home".
    """

    dst_rank: Array
    dst_row: Array
    src: Array
    primary: Array
    next: Array
    group_sizes: Array
    group_rows: Array
    slot_expert: Array
    home_rows: Array
    rank_rows: Array
    alloc: Array
    kind: Kind
    token_padding: int
    planner: str

    @property
    def ranks(self) -> int:
        """R."""
        return self.alloc.shape[1]

    @property
    def experts(self) -> int:
        """E."""
        return self.alloc.shape[0]

    @property
    def rows(self) -> int:
        """N."""
        return self.src.shape[1]


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def recv_rows(tokens: int, topk: int, experts: int, ranks: int, token_padding: int, planner: str = "exact") -> int:
    """N: rows of a rank's dispatched buffer that hold any routing of ``tokens`` tokens per rank."""
    epn = _experts_per_rank(experts, ranks)
    if _checked_planner(planner) == "home":
        return align_up(ranks * tokens * topk + (token_padding - 1) * epn, token_padding)
    return align_up(tokens * topk + (token_padding - 1) * 2 * epn, token_padding)


def counts_of(ids: Array, experts: int) -> Array:
    """``count`` [R, E] int64: assignments of each rank to each expert; ids [R, s, K] outside [0, E) are not routed."""
    flat = ids.reshape(ids.shape[0], -1).astype(np.int64)
    keep = (flat >= 0) & (flat < experts)
    return np.stack([np.bincount(row[ok], minlength=experts) for row, ok in zip(flat, keep, strict=True)])


def capacities(total: int, ranks: int) -> Array:
    """``cap`` [R] int64: rows each rank computes when ``total`` rows are shared equally."""
    return total // ranks + (np.arange(ranks) < total % ranks)


def allocate(counts: Array, planner: str = "exact") -> tuple[Array, Kind]:
    """Decide where rows are computed: ``alloc`` [E, R] int64 and the kind of plan, from ``counts`` [R, E].

    Ties go to the lowest index (``argmax`` and ``argmin`` return the first).
    """
    ranks, experts = counts.shape
    epn = _experts_per_rank(experts, ranks)
    at_home = counts.sum(axis=0).astype(np.int64)
    alloc = np.zeros((experts, ranks), np.int64)
    home = np.arange(experts) // epn
    alloc[np.arange(experts), home] = at_home
    if _checked_planner(planner) == "home":
        return alloc, "home"

    home_rows = at_home.reshape(ranks, epn).sum(axis=1)
    balance = home_rows - capacities(int(at_home.sum()), ranks)
    if not balance.any():
        return alloc, "balanced"
    lean = _lean(alloc.copy(), balance.copy(), epn)
    foreign = (lean > 0) & (home[:, None] != np.arange(ranks))
    if foreign.sum(axis=0).max() <= epn:
        return lean, "lean"
    return _cascade(alloc, balance, epn), "cascade"


def _lean(alloc: Array, balance: Array, epn: int) -> Array:
    """Move surplus only: from the fullest home's hottest expert to the emptiest rank, until no rank has a surplus."""
    while balance.max() > 0:
        h, u = int(balance.argmax()), int(balance.argmin())
        e = h * epn + int(alloc[h * epn : (h + 1) * epn, h].argmax())
        moved = min(balance[h], -balance[u], alloc[e, h])
        _move(alloc, e, h, u, moved)
        balance[h] -= moved
        balance[u] += moved
    return alloc


def _cascade(alloc: Array, balance: Array, epn: int) -> Array:
    """Fill each receiver from one home, so that it never holds more than epn foreign experts.

    The home may give more than its surplus; it then becomes a receiver itself, and is filled by another home.
    """
    ranks = len(balance)
    quota = np.zeros((ranks, ranks), np.int64)
    while balance.max() > 0:
        h, u = int(balance.argmax()), int(balance.argmin())
        quota[h, u] = -balance[u]
        balance[h] += balance[u]
        balance[u] = 0
    for h in range(ranks):
        while quota[h].max() > 0:
            d = int(quota[h].argmax())
            e = h * epn + int(alloc[h * epn : (h + 1) * epn, h].argmax())
            moved = min(alloc[e, h], quota[h, d])
            _move(alloc, e, h, d, moved)
            quota[h, d] -= moved
    return alloc


def _move(alloc: Array, expert: int, source: int, target: int, rows: int) -> None:
    alloc[expert, source] -= rows
    alloc[expert, target] += rows


def plan(ids: Array, experts: int, token_padding: int = 8, planner: str = "exact") -> ReferencePlan:
    """Plan one call from the router's choices ``ids`` [R, s, K] of all ranks."""
    ranks, s, topk = ids.shape
    epn = _experts_per_rank(experts, ranks)
    rows = recv_rows(s, topk, experts, ranks, token_padding, planner)
    counts = counts_of(ids, experts)
    alloc, kind = allocate(counts, planner)

    # Groups: own experts, then the foreign ones in ascending id; each starts at the padded end of the one before.
    slot_expert = np.full((ranks, epn), -1, np.int64)
    group_rows = np.zeros((ranks, 2 * epn), np.int64)
    group_of = np.full((experts, ranks), -1, np.int64)
    for d in range(ranks):
        own = np.arange(d * epn, (d + 1) * epn)
        foreign = np.setdiff1d(np.flatnonzero(alloc[:, d]), own)
        slot_expert[d, : len(foreign)] = foreign
        group_of[own, d] = np.arange(epn)
        group_of[foreign, d] = epn + np.arange(len(foreign))
        group_rows[d, :epn] = alloc[own, d]
        group_rows[d, epn : epn + len(foreign)] = alloc[foreign, d]
    group_sizes = -(-group_rows // token_padding) * token_padding
    group_start = np.cumsum(group_sizes, axis=1) - group_sizes

    # Routed assignments in (expert, source rank, token, k) order, each with its index among its rank's rows of the
    # expert. The global id is in (rank, token, k) order, so a stable sort by expert is enough.
    flat = ids.reshape(-1).astype(np.int64)
    routed = np.flatnonzero((flat >= 0) & (flat < experts))
    routed = routed[np.argsort(flat[routed], kind="stable")]
    expert, source = flat[routed], routed // (s * topk)
    per_source = counts.T  # [E, R], in the order of the list
    index = _index_in_runs(per_source)

    # Locality: each rank keeps the first of its own rows. What is left of the sources, listed by (expert, source),
    # meets what is left of the destinations, listed by (expert, destination), one to one.
    local = np.minimum(per_source, alloc)
    stays = index < local[expert, source]
    place = index.copy()  # place within the group
    dst = source.copy()
    open_rows = alloc - local
    dst[~stays] = np.repeat(np.tile(np.arange(ranks), experts), open_rows.reshape(-1))
    place[~stays] = local[expert[~stays], dst[~stays]] + _index_in_runs(open_rows)
    row = group_start[dst, group_of[expert, dst]] + place

    dst_rank = np.full(flat.shape, -1, np.int64)
    dst_row = np.full(flat.shape, -1, np.int64)
    src = np.full((ranks, rows), -1, np.int64)
    dst_rank[routed], dst_row[routed] = dst, row
    src[dst, row] = routed
    dst_rank, dst_row = dst_rank.reshape(ids.shape), dst_row.reshape(ids.shape)
    primary, following = _chains(dst_rank, dst_row, rows)

    def i32(a: Array) -> Array:
        return a.astype(np.int32)

    return ReferencePlan(
        dst_rank=i32(dst_rank),
        dst_row=i32(dst_row),
        src=i32(src),
        primary=i32(primary),
        next=i32(following),
        group_sizes=i32(group_sizes),
        group_rows=i32(group_rows),
        slot_expert=i32(slot_expert),
        home_rows=i32(counts.sum(axis=0).reshape(ranks, epn).sum(axis=1)),
        rank_rows=i32(alloc.sum(axis=0)),
        alloc=alloc,
        kind=kind,
        token_padding=token_padding,
        planner=planner,
    )


def _index_in_runs(lengths: Array) -> Array:
    """0, 1, .. within each of the consecutive runs of the given lengths (any shape, read in C order)."""
    lengths = lengths.reshape(-1)
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _chains(dst_rank: Array, dst_row: Array, rows: int) -> tuple[Array, Array]:
    """``primary`` and ``next`` [R, N]: the rows of one token on one rank, linked in k order."""
    ranks, _, topk = dst_rank.shape
    routed = dst_rank >= 0
    # together[.., k, j]: k and j are rows of one token on one rank.
    together = (dst_rank[..., :, None] == dst_rank[..., None, :]) & routed[..., :, None]
    later = together & (np.arange(topk)[:, None] < np.arange(topk))
    first_k, next_k = together.argmax(axis=-1), later.argmax(axis=-1)
    has_next = later.any(axis=-1)
    first_row = np.take_along_axis(dst_row, first_k, axis=-1)
    next_row = np.where(has_next, np.take_along_axis(dst_row, next_k, axis=-1), -1)
    primary = np.full((ranks, rows), -1, np.int64)
    following = np.full((ranks, rows), -1, np.int64)
    primary[dst_rank[routed], dst_row[routed]] = first_row[routed]
    following[dst_rank[routed], dst_row[routed]] = next_row[routed]
    return primary, following


def dispatch(p: ReferencePlan, x: Array, topk_weights: Array | None = None) -> tuple[Array, Array]:
    """Write tokens to their rows: ``hidden`` [R, N, H] in x's dtype and ``weights`` [R, N] float32.

    Args:
        p: the plan.
        x: [R, s, H].
        topk_weights: [R, s, K] float32; None means ones. Rows without a token are zero in both results.
    """
    topk = p.dst_rank.shape[2]
    hidden = np.zeros((p.ranks, p.rows, x.shape[2]), x.dtype)
    weights = np.zeros((p.ranks, p.rows), np.float32)
    held = p.src >= 0
    hidden[held] = x.reshape(-1, x.shape[2])[p.src[held] // topk]
    weights[held] = 1 if topk_weights is None else topk_weights.reshape(-1)[p.src[held]]
    return hidden, weights


def combine(p: ReferencePlan, out: Array, weights: Array | None = None, mode: str = "dedup") -> Array:
    """Sum each token's rows: ``y`` [R, s, H] in out's dtype; a token with no routed row gets 0.

    Args:
        p: the plan.
        out: [R, N, H]; rows without a token are never read.
        weights: [R, N] float32; each row is scaled by its own, in fp32, first. None: not scaled.
        mode: "dedup": the destination sums the rows of a token in fp32 in k order and rounds once; the source sums
            those in fp32 in ascending k of the primaries and rounds once. "exact": the source sums the K fp32 rows in
            ascending k and rounds once; nothing is rounded to the row dtype before that.
    """
    if mode not in ("dedup", "exact"):
        raise ValueError(f"combine: unknown mode; got {mode!r}, expected 'dedup' or 'exact'; pass one of these")
    with np.errstate(**_QUIET):
        values = out.astype(np.float32)
        if weights is not None:
            values = values * weights.astype(np.float32)[..., None]
        taken = p.dst_rank >= 0
        if mode == "dedup":
            values = _sum_chains(p, values).astype(out.dtype).astype(np.float32)
            taken &= p.primary[p.dst_rank, p.dst_row] == p.dst_row  # a -1 index reads some row; `taken` is False there
        y = np.zeros((*p.dst_rank.shape[:2], out.shape[2]), np.float32)
        started = np.zeros(y.shape[:2], bool)
        for k in range(p.dst_rank.shape[2]):
            use = taken[..., k]
            row = values[p.dst_rank[..., k][use], p.dst_row[..., k][use]]
            y[use] = np.where(started[use][:, None], y[use] + row, row)
            started |= use
        return y.astype(out.dtype)


def _sum_chains(p: ReferencePlan, values: Array) -> Array:
    """Each primary row plus the rest of its chain, in k order; other rows are 0."""
    rank, row = np.nonzero((p.src >= 0) & (p.primary == np.arange(p.rows)))
    total = values[rank, row]
    current = p.next[rank, row]
    while (current >= 0).any():
        on = current >= 0
        total[on] += values[rank[on], current[on]]
        current[on] = p.next[rank[on], current[on]]
    result = np.zeros_like(values)
    result[rank, row] = total
    return result


def dispatch_grad(
    p: ReferencePlan, ct_hidden: Array, ct_weights: Array | None = None, mode: str = "dedup"
) -> tuple[Array, Array]:
    """The transpose of ``dispatch``: (dx [R, s, H] in ct_hidden's dtype, dtopk_weights [R, s, K] float32).

    dx is ``combine`` of the unscaled cotangent. ``ct_weights`` [R, N] goes back to its assignment; None means zeros.
    """
    dtopk = np.zeros(p.dst_rank.shape, np.float32)
    if ct_weights is not None:
        routed = p.dst_rank >= 0
        dtopk[routed] = ct_weights[p.dst_rank[routed], p.dst_row[routed]]
    return combine(p, ct_hidden, None, mode), dtopk


def combine_grad(p: ReferencePlan, dy: Array, out: Array, weights: Array | None = None) -> tuple[Array, Array | None]:
    """The transpose of ``combine`` (both modes): (dout [R, N, H] in out's dtype, dweights [R, N] float32 or None).

    dout is dy of the row's token times the row's weight in fp32, rounded once; dweights is the dot product of dy and
    the row, summed in float64. Rows without a token get zero; dweights is None when there were no weights.
    """
    arrived, _ = dispatch(p, dy)
    if weights is None:
        return arrived.astype(out.dtype), None
    held = p.src >= 0
    dout = np.zeros(out.shape, out.dtype)
    dweights = np.zeros(weights.shape, np.float32)
    with np.errstate(**_QUIET):
        dout[held] = (arrived[held].astype(np.float32) * weights[held].astype(np.float32)[:, None]).astype(out.dtype)
        dweights[held] = (arrived[held].astype(np.float64) * out[held].astype(np.float64)).sum(axis=1)
    return dout, dweights


def prefetch(p: ReferencePlan, w: Array) -> Array:
    """Own experts, then the experts in the slots: [R, epn, *shape] -> [R, 2*epn, *shape]; unused slots are zero."""
    epn = w.shape[1]
    full = np.zeros((w.shape[0], 2 * epn, *w.shape[2:]), w.dtype)
    full[:, :epn] = w
    rank, slot = np.nonzero(p.slot_expert >= 0)
    e = p.slot_expert[rank, slot]
    full[rank, epn + slot] = w[e // epn, e % epn]
    return full


def reduce_grad(p: ReferencePlan, ct: Array) -> Array:
    """The transpose of ``prefetch``: [R, 2*epn, *shape] -> [R, epn, *shape] in ct's dtype.

    The home's gradient, then the replicas' in ascending rank, added in fp32 and rounded once.
    """
    epn = ct.shape[1] // 2
    with np.errstate(**_QUIET):
        total = ct[:, :epn].astype(np.float32)
        for rank in range(p.ranks):
            for slot in range(epn):
                e = int(p.slot_expert[rank, slot])
                if e >= 0:
                    total[e // epn, e % epn] += ct[rank, epn + slot].astype(np.float32)
        return total.astype(ct.dtype)


def dense_moe(x: Array, ids: Array, topk_weights: Array, gate: Array, up: Array, down: Array) -> Array:
    """The whole layer without parallelism, in float64: [T, H].

    y[t] = sum over k of topk_weights[t, k] * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e], e = ids[t, k].

    Args:
        x: [T, H].
        ids: [T, K]; ids outside [0, E) contribute 0, repeated ids are summed.
        topk_weights: [T, K].
        gate: [E, H, F].
        up: [E, H, F].
        down: [E, F, H].
    """
    x64 = x.astype(np.float64)
    y = np.zeros(x64.shape)
    for e in range(gate.shape[0]):
        token, k = np.nonzero(ids == e)
        rows = x64[token]
        a = rows @ gate[e].astype(np.float64)
        # x * sigmoid(x), written with tanh so that exp cannot overflow.
        hidden = a * (0.5 * (1 + np.tanh(0.5 * a))) * (rows @ up[e].astype(np.float64))
        scale = topk_weights[token, k].astype(np.float64)[:, None]
        np.add.at(y, token, scale * (hidden @ down[e].astype(np.float64)))
    return y


def maxvio(counts: Array) -> float:
    """Rows of the hottest expert over the mean, minus 1; ``counts`` [..., E] is summed over leading axes."""
    return rank_max_over_mean(counts.reshape(-1, counts.shape[-1]).sum(axis=0)) - 1


def rank_max_over_mean(rows: Array) -> float:
    """Rows of the fullest rank over the mean, for ``rows`` [R]; 1 when there are none."""
    return float(rows.max() / rows.mean()) if rows.any() else 1.0


def _experts_per_rank(experts: int, ranks: int) -> int:
    if ranks < 1 or experts < 1 or experts % ranks:
        raise ValueError(
            f"reference: experts do not divide among ranks; got experts={experts}, ranks={ranks}, "
            "expected a positive multiple; change one of them"
        )
    return experts // ranks


def _checked_planner(planner: str) -> str:
    if planner not in ("exact", "home"):
        raise ValueError(f"reference: unknown planner; got {planner!r}, expected 'exact' or 'home'; pass one of these")
    return planner
