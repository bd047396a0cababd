// One rank's plan arrays on the host, from the ids of all ranks: tables by xla_ffi/core, then rows in id order.
// Knows neither XLA nor shared memory, so that tests run it for any number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/core/placement.h"
#include "xla_ffi/core/planner.h"

namespace moonep {

// Arrays of a Plan (moonep_jax/spec.py says what each means); s tokens per rank, N = recv_rows(s).
struct PlanArrays {
  int32_t* dst_rank;     // [s, K]
  int32_t* dst_row;      // [s, K]
  int32_t* src;          // [N]
  int32_t* primary;      // [N]
  int32_t* next;         // [N]
  int32_t* group_sizes;  // [2*epn]
  int32_t* group_rows;   // [2*epn]
  int32_t* slot_expert;  // [R, epn]
  int32_t* home_rows;    // [R]
  int32_t* rank_rows;    // [R]
};

// What the ranks learn of each other: ids [s, K] and counts [E] of every rank.
struct PlanInputs {
  std::vector<const int32_t*> ids;
  std::vector<const int32_t*> counts;
};

inline void CountIds(const DomainShape& d, const int32_t* ids, int64_t n, int32_t* counts) {
  for (int32_t e = 0; e < d.experts; ++e) counts[e] = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] >= 0 && ids[i] < d.experts) ++counts[ids[i]];
  }
}

// The part of a plan that does not depend on rows; alike on all ranks.
class HostTables {
 public:
  HostTables(const DomainShape& d, const PlanInputs& in)
      : d_(d),
        count_(Cells()),
        alloc_(Cells()),
        src_prefix_(Cells()),
        dst_prefix_(Cells()),
        group_row_(Cells()),
        slot_expert_(static_cast<size_t>(d.experts)),
        home_rows_(static_cast<size_t>(d.ranks), 0),
        at_home_(static_cast<size_t>(d.experts)),
        moves_(static_cast<size_t>(MaxMoves(d))) {
    const size_t experts = static_cast<size_t>(d.experts);
    const size_t ranks = static_cast<size_t>(d.ranks);
    std::vector<int32_t> totals(experts, 0);
    for (size_t r = 0; r < ranks; ++r) {
      for (size_t e = 0; e < experts; ++e) {
        count_[r * experts + e] = in.counts[r][e];
        totals[e] += in.counts[r][e];
        total_ += in.counts[r][e];
      }
    }
    for (size_t e = 0; e < experts; ++e) home_rows_[e / static_cast<size_t>(d.epn())] += totals[e];
    balance_.resize(ranks);
    std::vector<int32_t> quota(ranks), giver(ranks), foreign(ranks);
    state_ = {at_home_.data(), balance_.data(), quota.data(), giver.data(), foreign.data(), moves_.data()};
    result_ = PlanMoves(SerialTeam{}, d, totals.data(), home_rows_.data(), state_);
    for (int32_t h = 0; result_.cascade && h < d.ranks; ++h) {
      FillReceivers(SerialTeam{}, d, h, state_, &result_.moves);
    }
    WriteAlloc(SerialTeam{}, d, state_, result_.moves, alloc_.data());
    for (int32_t e = 0; e < d.experts; ++e) BuildPrefixes(SerialTeam{}, d, tables(), e);
  }

  void Groups(int32_t me, const PlanArrays& out) {
    const SerialTeam team;
    std::vector<int32_t> slots_row(static_cast<size_t>(d_.ranks));
    for (int32_t r = 0; r < d_.ranks; ++r) {
      const bool mine = r == me;
      slots_row[static_cast<size_t>(r)] =
          BuildOwnGroups(team, d_, tables(), at_home_.data(), r, mine ? out.group_sizes : nullptr, out.group_rows);
      out.home_rows[r] = home_rows_[static_cast<size_t>(r)];
      out.rank_rows[r] = RankRows(d_, state_, total_, r);
    }
    const int32_t epn = d_.epn();
    BuildSlots(team, d_, tables(), moves_.data(), result_.moves, slots_row.data(), me, out.group_sizes + epn,
               out.group_rows + epn);
    for (size_t i = 0; i < slot_expert_.size(); ++i) out.slot_expert[i] = slot_expert_[i];
  }

  PlanTables tables() {
    return {count_.data(),      alloc_.data(),     src_prefix_.data(),
            dst_prefix_.data(), group_row_.data(), slot_expert_.data()};
  }
  bool cascade() const { return result_.cascade; }
  const std::vector<int32_t>& alloc() const { return alloc_; }

 private:
  size_t Cells() const { return static_cast<size_t>(d_.experts) * static_cast<size_t>(d_.ranks); }

  DomainShape d_;
  std::vector<int32_t> count_, alloc_, src_prefix_, dst_prefix_, group_row_, slot_expert_, home_rows_;
  std::vector<int32_t> at_home_, balance_;
  std::vector<Move> moves_;
  PlannerState state_ = {};
  PlannerResult result_ = {};
  int32_t total_ = 0;
};

// Where this rank's assignments go.
inline void PlaceSource(const DomainShape& d, const PlanTables& t, int32_t me, const int32_t* ids, int64_t n,
                        const PlanArrays& out) {
  std::vector<int32_t> seen(static_cast<size_t>(d.experts), 0);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t e = ids[i];
    Place p{-1, -1};
    if (e >= 0 && e < d.experts) p = Locate(d, t, e, me, seen[static_cast<size_t>(e)]++);
    out.dst_rank[i] = p.rank;
    out.dst_row[i] = p.row;
  }
}

// Which assignments of all ranks this rank's rows hold, and how the rows of one token hang together.
inline void PlaceHosted(const DomainShape& d, const PlanTables& t, int32_t me, const PlanInputs& in, int64_t s,
                        const PlanArrays& out) {
  const int64_t rows = d.recv_rows(s);
  for (int64_t i = 0; i < rows; ++i) out.src[i] = out.primary[i] = out.next[i] = -1;
  for (int32_t r = 0; r < d.ranks; ++r) {
    std::vector<int32_t> seen(static_cast<size_t>(d.experts), 0);
    const int32_t* ids = in.ids[static_cast<size_t>(r)];
    for (int64_t token = 0; token < s; ++token) {
      int32_t first = -1;
      int32_t last = -1;
      for (int32_t k = 0; k < d.topk; ++k) {
        const int32_t e = ids[token * d.topk + k];
        if (e < 0 || e >= d.experts) continue;
        const int32_t i = seen[static_cast<size_t>(e)]++;
        if (t.alloc[static_cast<int64_t>(e) * d.ranks + me] == 0) continue;
        const Place p = Locate(d, t, e, r, i);
        if (p.rank != me) continue;
        out.src[p.row] = static_cast<int32_t>((r * s + token) * d.topk + k);
        if (first < 0) first = p.row;
        out.primary[p.row] = first;
        if (last >= 0) out.next[last] = p.row;
        last = p.row;
      }
    }
  }
}

}  // namespace moonep
