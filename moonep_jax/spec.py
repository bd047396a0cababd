"""DomainSpec and Plan: the static description of a domain, and what `plan` returns. Values only.

Notation: S token capacity per rank, s <= S tokens of a call, K experts per token, H hidden, E experts, R ranks,
epn = E/R, N = NvS(s) rows of the dispatched buffer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from moonep_jax.config import EPConfig
from moonep_jax.topology import Topology


@dataclass(frozen=True)
class DomainSpec:
    """What a traced op knows of its domain: equal values trace and compile alike.

    Attributes:
      id: domain id, agreed by all processes of the mesh and never reused in a process.
      config: the domain's EPConfig.
      topology: axes, groups and ranks.
      debug: every call is checked (MOONEP_DEBUG).
    """

    id: int
    config: EPConfig
    topology: Topology
    debug: bool = False

    @property
    def ranks(self) -> int:
        """R, size of an EP group."""
        return self.topology.ranks

    @property
    def experts_per_rank(self) -> int:
        """Epn = E/R."""
        return self.config.experts // self.ranks


@dataclass(frozen=True)
class Plan:
    """Who computes what: one rank's view of a routing, as int32 arrays. A pytree; made by `Domain.plan` only.

    Every array is int32, so `a [n]` is 4*n bytes; together about 4*(2*s*K + 3*N + 4*epn + E + 2*R + 1) bytes, which is
    what a layer keeps for its backward pass. An *assignment* is one (token, k) pair; its global id is
    (rank*s + token)*K + k.

    Attributes:
      dst_rank: [s, K] rank that computes the assignment, -1: not routed.
      dst_row: [s, K] its row in that rank's dispatched buffer, -1: not routed.
      src: [N] global id of the assignment in each row of this rank's dispatched buffer, -1: no token.
      primary: [N] row of the token's lowest k on this rank (the one that crosses the link), -1: no token.
      next: [N] row of the token's next k on this rank, -1: none.
      group_sizes: [2*epn] rows of each group, padded to token_padding: pass it to the grouped GEMM.
      group_rows: [2*epn] rows of each group that hold a token.
      slot_expert: [R, epn] foreign expert in each rank's slots, ascending, -1: unused. Equal on all ranks.
      home_rows: [R] rows that each rank would compute under plain EP. Equal on all ranks.
      rank_rows: [R] rows that each rank computes. Equal on all ranks.
      ticket: [1] place of the plan in the domain's log; equal on all ranks. -1: the plan failed.
      domain: id of the domain that made the plan (static).
    """

    dst_rank: jax.Array
    dst_row: jax.Array
    src: jax.Array
    primary: jax.Array
    next: jax.Array
    group_sizes: jax.Array
    group_rows: jax.Array
    slot_expert: jax.Array
    home_rows: jax.Array
    rank_rows: jax.Array
    ticket: jax.Array
    domain: int = -1

    @property
    def tokens(self) -> int:
        """s of the call that made the plan: tokens per rank."""
        return self.dst_rank.shape[0]

    @property
    def rows(self) -> int:
        """N = NvS(s): rows of the dispatched buffer."""
        return self.src.shape[0]


PLAN_ARRAYS = tuple(f.name for f in dataclasses.fields(Plan) if f.name != "domain")
jax.tree_util.register_dataclass(Plan, data_fields=list(PLAN_ARRAYS), meta_fields=["domain"])


@dataclass(frozen=True)
class Dispatched:
    """What `dispatch` returns; a pytree.

    Attributes:
      hidden: [N, H] rows of this rank's groups, in the config's dtype. Rows that hold no token are zero.
      weights: [N] float32 route weight of each row, zero where the row holds no token.
      group_sizes: [2*epn] int32 rows per group, padded to token_padding.
      plan: the Plan used.
    """

    hidden: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    plan: Plan


jax.tree_util.register_dataclass(Dispatched, data_fields=["hidden", "weights", "group_sizes", "plan"], meta_fields=[])
