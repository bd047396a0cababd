"""What every plan must satisfy, checked by definition on its arrays: the invariants of the contract.

Knows the planner as little as it can, so that it judges the oracle and the native planner alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moonep_jax.reference import ReferencePlan, capacities, counts_of, recv_rows

Array = Any  # NumPy arrays of any dtype


def check_invariants(p: ReferencePlan, ids: Array) -> None:
    """Check the arrays of a plan for ``ids`` [R, s, K] against their definitions, without planning again.

    Raises:
        ValueError: names the first invariant that does not hold.
    """
    ranks, s, topk = ids.shape
    experts, rows, epn = p.experts, p.rows, p.experts // ranks
    counts = counts_of(ids, experts)
    total = int(counts.sum())
    every_rank = np.arange(ranks)
    home = np.arange(experts) // epn
    foreign = (p.alloc > 0) & (home[:, None] != every_rank)

    # How many rows, and where.
    _require((p.alloc >= 0).all(), "alloc has no negative rows")
    _require((p.alloc.sum(axis=1) == counts.sum(axis=0)).all(), "rows are conserved per expert")
    _require((p.rank_rows == p.alloc.sum(axis=0)).all(), "rank_rows counts the rows of each rank")
    home_rows = counts.sum(axis=0).reshape(ranks, epn).sum(axis=1)
    _require((p.home_rows == home_rows).all(), "home_rows counts the rows under plain EP")
    cap = capacities(total, ranks)
    if p.planner == "home":
        _require(not foreign.any() and p.kind == "home", "the home planner moves nothing")
    else:
        _require((p.rank_rows == cap).all(), "rank d computes exactly cap_d rows")
        if (home_rows == cap).all():
            _require(not foreign.any(), "balanced routing moves nothing")
        _require((p.kind == "balanced") == (not foreign.any()), "kind is balanced exactly when nothing moved")
    _require((foreign.sum(axis=0) <= epn).all(), "at most epn foreign experts per rank")

    # Groups.
    _require(((p.group_rows > 0).sum(axis=1) <= 2 * epn).all(), "at most G non-empty groups per rank")
    padded = -(-p.group_rows.astype(np.int64) // p.token_padding) * p.token_padding
    _require((p.group_sizes == padded).all(), "group_sizes are group_rows padded to token_padding")
    _require(rows == recv_rows(s, topk, experts, ranks, p.token_padding, p.planner), "buffers have NvS(s) rows")
    _require((padded.sum(axis=1) <= rows).all(), "the padded total fits NvS(s)")
    for d in every_rank:
        expected = np.full(epn, -1)
        held = np.flatnonzero(foreign[:, d])
        expected[: len(held)] = held
        _require((p.slot_expert[d] == expected).all(), "slots hold the foreign experts in ascending id")
    group_expert = np.concatenate([np.arange(experts).reshape(ranks, epn), p.slot_expert], axis=1)  # [R, G]
    per_group = np.where(group_expert >= 0, p.alloc[group_expert, every_rank[:, None]], 0)
    _require((p.group_rows == per_group).all(), "group_rows are the allocated rows")

    # Assignments and rows are one to one.
    flat = ids.reshape(-1).astype(np.int64)
    routed = (flat >= 0) & (flat < experts)
    dst_rank, dst_row = p.dst_rank.reshape(-1), p.dst_row.reshape(-1)
    _require(((dst_rank >= 0) == routed).all() and ((dst_row >= 0) == routed).all(), "exactly routed ids get a row")
    _require((dst_rank < ranks).all() and (dst_row < rows).all(), "destinations are in range")
    _require((p.src[dst_rank[routed], dst_row[routed]] == np.flatnonzero(routed)).all(), "src inverts dst")
    _require(int((p.src >= 0).sum()) == total, "each src is unique and no other row is used")

    # Rows of a rank: in their expert's group, own rows first, then source order; nothing in padding or tail.
    for d in every_rank:
        row = np.flatnonzero(p.src[d] >= 0)
        src = p.src[d, row].astype(np.int64)
        start = np.cumsum(padded[d]) - padded[d]
        real = np.concatenate([np.arange(a, a + n) for a, n in zip(start, p.group_rows[d], strict=True)])
        _require(np.array_equal(row, real), "rows fill their group from its start and nothing else")
        group = np.repeat(np.arange(2 * epn), p.group_rows[d])
        _require((flat[src] == group_expert[d, group]).all(), "rows lie in the group of their expert")
        from_others = src // (s * topk) != d
        key = (group * 2 + from_others) * flat.size + src
        _require((np.diff(key) > 0).all(), "own rows come first in a group, then the others in source order")

        # Chains: the rows of one token, in k order (src order).
        order = np.argsort(src)
        same = np.diff(src[order] // topk) == 0
        after = np.full(rows, -1)
        after[row[order][:-1][same]] = row[order][1:][same]
        _require((p.next[d] == after).all(), "next links a token's rows on a rank in k order")
        first = np.full(rows, -1)
        _, start_of, inverse = np.unique(src // topk, return_index=True, return_inverse=True)
        lowest = np.full(len(start_of), flat.size)
        np.minimum.at(lowest, inverse, src)
        first[row] = dst_row[lowest[inverse]]
        _require((p.primary[d] == first).all(), "primary is the row of the token's lowest k on the rank")

    # Locality. In (expert, source, token, k) order the rows that stay come first within a source, and the
    # destinations of those that leave ascend.
    order = np.flatnonzero(routed)
    order = order[np.argsort(flat[order], kind="stable")]
    expert, source, dst = flat[order], order // (s * topk), dst_rank[order]
    kept = np.zeros((experts, ranks), np.int64)
    np.add.at(kept, (expert[dst == source], source[dst == source]), 1)
    _require((kept == np.minimum(counts.T, p.alloc)).all(), "each rank keeps min(count, alloc) of its own rows")
    leaves = (dst != source).astype(np.int64)
    run = expert * ranks + source
    _require((np.diff(run * 2 + leaves) >= 0).all(), "the rows that stay are the first of their source")
    leaving = leaves == 1
    _require((np.diff((expert * ranks + dst)[leaving]) >= 0).all(), "sources fill destinations in rank order")


def _require(holds: object, invariant: str) -> None:
    if not holds:
        raise ValueError(f"check_invariants: the plan is wrong; violated: {invariant}")
