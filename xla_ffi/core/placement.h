// Where each row goes: closed-form from count[R, E], alloc[E, R] and a row's index among its rank's rows of its expert.
//
// Locality first: of expert e, rank d keeps min(count[d, e], alloc[e, d]) of its own rows; what remains of the sources
// (in rank order) fills what remains of the destinations (in rank order). Every rank computes the same tables.
#pragma once

#include <cstdint>

#include "xla_ffi/core/layout.h"
#include "xla_ffi/core/planner.h"
#include "xla_ffi/core/team.h"

namespace moonep {

// All tables of a plan that are not per row. Row-major; E experts, R ranks.
struct PlanTables {
  const int32_t* count;  // [R, E] rows that rank r routes to expert e
  const int32_t* alloc;  // [E, R] rows of expert e that rank d computes
  int32_t* src_prefix;   // [R, E] non-local rows of expert e on ranks before r
  int32_t* dst_prefix;   // [E, R] non-local places of expert e on ranks before d
  int32_t* group_row;    // [E, R] first row of expert e's group on rank d, where it has one
  int32_t* slot_expert;  // [R, epn] foreign experts of rank d, ascending; -1 unused
};

struct Place {
  int32_t rank;
  int32_t row;
};

MOONEP_HD inline int32_t LocalRows(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t rank) {
  const int32_t have = t.count[static_cast<int64_t>(rank) * d.experts + expert];
  const int32_t room = t.alloc[static_cast<int64_t>(expert) * d.ranks + rank];
  return have < room ? have : room;
}

// src_prefix and dst_prefix of one expert.
template <class Team>
MOONEP_HD void BuildPrefixes(const Team& team, const DomainShape& d, const PlanTables& t, int32_t expert) {
  auto source = [&](int r) { return static_cast<int64_t>(r) * d.experts + expert; };
  auto place = [&](int r) { return static_cast<int64_t>(expert) * d.ranks + r; };
  // Both sums in one scan: each is below 2^31.
  team.scan(
      d.ranks,
      [&](int r) {
        const int64_t local = LocalRows(d, t, expert, r);
        return (t.count[source(r)] - local) << 32 | (t.alloc[place(r)] - local);
      },
      [&](int r, int64_t before) {
        t.src_prefix[source(r)] = static_cast<int32_t>(before >> 32);
        t.dst_prefix[place(r)] = static_cast<int32_t>(before & 0xffffffff);
      });
}

// The groups of a rank's own experts; each starts at the padded end of the one before. Fills group_row and, unless
// null, group_sizes (padded) and group_rows [epn]. Returns where the slots start.
template <class Team>
MOONEP_HD int32_t BuildOwnGroups(const Team& team, const DomainShape& d, const PlanTables& t, const int32_t* at_home,
                                 int32_t rank, int32_t* group_sizes, int32_t* group_rows) {
  const int32_t epn = d.epn();
  const int32_t first = rank * epn;
  auto padded = [&](int i) { return PadRows(at_home[first + i], d.padding); };
  return static_cast<int32_t>(team.scan(epn, padded, [&](int i, int64_t row) {
    t.group_row[static_cast<int64_t>(first + i) * d.ranks + rank] = static_cast<int32_t>(row);
    if (group_sizes == nullptr) return;
    group_sizes[i] = padded(i);
    group_rows[i] = at_home[first + i];
  }));
}

// The slots of all ranks: a rank's foreign experts in ascending id. slots_row [R] is where each rank's slots start.
// Fills slot_expert and group_row, and group_sizes and group_rows [epn] of the slots of rank `me`. Moves are few, and
// none names a pair of expert and rank twice: a move's slot is the number of moves to the same rank with a lower
// expert.
template <class Team>
MOONEP_HD void BuildSlots(const Team& team, const DomainShape& d, const PlanTables& t, const Move* moves, int32_t count,
                          const int32_t* slots_row, int32_t me, int32_t* group_sizes, int32_t* group_rows) {
  const int32_t epn = d.epn();
  for (int i = team.rank(); i < d.experts; i += team.size()) t.slot_expert[i] = -1;
  for (int i = team.rank(); i < epn; i += team.size()) group_sizes[i] = group_rows[i] = 0;
  team.sync();
  for (int i = team.rank(); i < count; i += team.size()) {
    const Move move = moves[i];
    int32_t slot = 0;
    int32_t row = slots_row[move.to];
#if defined(__CUDA_ARCH__)
#pragma unroll 4
#endif
    for (int j = 0; j < count; ++j) {
      const bool below = moves[j].to == move.to && moves[j].expert < move.expert;
      slot += below ? 1 : 0;
      row += below ? PadRows(moves[j].rows, d.padding) : 0;
    }
    t.slot_expert[move.to * epn + slot] = move.expert;
    t.group_row[static_cast<int64_t>(move.expert) * d.ranks + move.to] = row;
    if (move.to != me) continue;
    group_sizes[slot] = PadRows(move.rows, d.padding);
    group_rows[slot] = move.rows;
  }
}

// The rank that holds non-local place g of an expert: the last one whose places start at or before g. Ranks without
// places share the start of the next one.
MOONEP_HD inline int32_t RankOf(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t g) {
  const int32_t* starts = t.dst_prefix + static_cast<int64_t>(expert) * d.ranks;
  // Most experts are at home only.
  const int32_t home = d.home_of(expert);
  if (starts[home] <= g && (home + 1 == d.ranks || g < starts[home + 1])) return home;
  // Halving until few are left, then all of them at once: loads that do not wait for each other.
  constexpr int32_t kFew = 8;
  int32_t low = 0;
  int32_t high = d.ranks - 1;
  while (high - low >= kFew) {
    const int32_t mid = (low + high + 1) / 2;
    if (starts[mid] <= g) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  int32_t later = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int32_t k = 1; k < kFew; ++k) later += low + k <= high && starts[low + k] <= g ? 1 : 0;
  return low + later;
}

// A row's place on the rank that holds non-local place g, behind that rank's own rows.
MOONEP_HD inline Place PlaceOn(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t rank, int32_t g) {
  const int64_t cell = static_cast<int64_t>(expert) * d.ranks + rank;
  return {rank, t.group_row[cell] + LocalRows(d, t, expert, rank) + (g - t.dst_prefix[cell])};
}

// Place of the i-th row (token-then-k order) that rank `source` routes to `expert`.
MOONEP_HD inline Place Locate(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t source, int32_t i) {
  const int32_t local = LocalRows(d, t, expert, source);
  if (i < local) return {source, t.group_row[static_cast<int64_t>(expert) * d.ranks + source] + i};
  const int32_t g = t.src_prefix[static_cast<int64_t>(source) * d.experts + expert] + (i - local);
  return PlaceOn(d, t, expert, RankOf(d, t, expert, g), g);
}

// Most often all rows that a source routes to an expert lie in one stretch. Returns where it starts, packed, or -1 when
// there is none: the rows are split, are none, or their place does not fit.
constexpr int kRunRowBits = 24;
MOONEP_HD inline int32_t RunOf(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t source) {
  const int32_t rows = t.count[static_cast<int64_t>(source) * d.experts + expert];
  const int32_t local = LocalRows(d, t, expert, source);
  if (rows == 0 || (local > 0 && local < rows)) return -1;
  Place first{source, t.group_row[static_cast<int64_t>(expert) * d.ranks + source]};
  if (local == 0) {
    const int32_t g = t.src_prefix[static_cast<int64_t>(source) * d.experts + expert];
    const int32_t rank = RankOf(d, t, expert, g);
    const int64_t cell = static_cast<int64_t>(expert) * d.ranks + rank;
    const int32_t end = t.dst_prefix[cell] + t.alloc[cell] - LocalRows(d, t, expert, rank);
    if (g + rows > end) return -1;
    first = PlaceOn(d, t, expert, rank, g);
  }
  return first.row + rows <= 1 << kRunRowBits ? first.rank << kRunRowBits | first.row : -1;
}
MOONEP_HD inline Place RunPlace(int32_t run, int32_t i) {
  return {run >> kRunRowBits, (run & ((1 << kRunRowBits) - 1)) + i};
}

// The primary of an assignment crosses the link for all of its token's rows on that rank: it is the one of lowest k.
MOONEP_HD inline bool IsPrimary(const int32_t* dst_rank_of_token, int32_t k) {
  for (int32_t j = 0; j < k; ++j) {
    if (dst_rank_of_token[j] == dst_rank_of_token[k]) return false;
  }
  return dst_rank_of_token[k] >= 0;
}

}  // namespace moonep
