// Where each row goes: closed-form from count[R, E], alloc[E, R] and a row's index among its rank's rows of its expert.
//
// Locality first: of expert e, rank d keeps min(count[d, e], alloc[e, d]) of its own rows; what remains of the sources
// (in rank order) fills what remains of the destinations (in rank order). Every rank computes the same tables.
#pragma once

#include <cstdint>

#include "xla_ffi/core/layout.h"
#include "xla_ffi/core/team.h"

namespace moonep {

// All tables of a plan that are not per row. Row-major; E experts, R ranks.
struct PlanTables {
  const int32_t* count;  // [R, E] rows that rank r routes to expert e
  const int32_t* alloc;  // [E, R] rows of expert e that rank d computes
  int32_t* src_prefix;   // [R, E] non-local rows of expert e on ranks before r
  int32_t* dst_prefix;   // [E, R] non-local places of expert e on ranks before d
  int32_t* group_row;    // [E, R] first row of expert e's group on rank d; -1 when it has none there
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

// The groups of one rank: own experts, then slots with the foreign experts in ascending id; each group starts at the
// padded end of the one before. Fills group_row and slot_expert of the rank; and, unless null, group_sizes (padded) and
// group_rows [2*epn]. Returns the rank's rows.
template <class Team>
MOONEP_HD int32_t BuildGroups(const Team& team, const DomainShape& d, const PlanTables& t, int32_t rank,
                              int32_t* group_sizes, int32_t* group_rows) {
  const int32_t epn = d.epn();
  const int32_t first = rank * epn;
  int32_t* slots = t.slot_expert + static_cast<int64_t>(rank) * epn;
  auto cell = [&](int e) { return static_cast<int64_t>(e) * d.ranks + rank; };
  auto padded = [&](int e) { return AlignUp(t.alloc[cell(e)], d.padding); };
  auto set = [&](int32_t group, int e, int64_t row) {
    t.group_row[cell(e)] = t.alloc[cell(e)] > 0 ? static_cast<int32_t>(row) : -1;
    if (group_sizes == nullptr) return;
    group_sizes[group] = static_cast<int32_t>(padded(e));
    group_rows[group] = t.alloc[cell(e)];
  };
  const int64_t own =
      team.scan(epn, [&](int i) { return padded(first + i); }, [&](int i, int64_t row) { set(i, first + i, row); });
  // Slots and rows in one scan: slots above bit 40, rows below.
  auto is_own = [&](int e) { return e >= first && e < first + epn; };
  auto foreign = [&](int e) { return !is_own(e) && t.alloc[cell(e)] > 0; };
  const int64_t all = team.scan(
      d.experts, [&](int e) { return foreign(e) ? (int64_t{1} << 40) + padded(e) : int64_t{0}; },
      [&](int e, int64_t before) {
        if (is_own(e)) return;
        if (!foreign(e)) {
          t.group_row[cell(e)] = -1;
          return;
        }
        const int32_t slot = static_cast<int32_t>(before >> 40);
        slots[slot] = e;
        set(epn + slot, e, own + (before & ((int64_t{1} << 40) - 1)));
      });
  for (int32_t slot = static_cast<int32_t>(all >> 40) + team.rank(); slot < epn; slot += team.size()) {
    slots[slot] = -1;
    if (group_sizes != nullptr) group_sizes[epn + slot] = group_rows[epn + slot] = 0;
  }
  return team.sum(d.experts, [&](int e) { return t.alloc[cell(e)]; });
}

// Place of the i-th row (token-then-k order) that rank `source` routes to `expert`.
MOONEP_HD inline Place Locate(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t source, int32_t i) {
  const int64_t first = static_cast<int64_t>(expert) * d.ranks;
  const int32_t local = LocalRows(d, t, expert, source);
  if (i < local) return {source, t.group_row[first + source] + i};
  const int32_t g = t.src_prefix[static_cast<int64_t>(source) * d.experts + expert] + (i - local);
  // The last rank whose places start at or before g; ranks without places share the start of the next one. Halving
  // until few are left, then all of them at once: loads that do not wait for each other.
  constexpr int32_t kFew = 8;
  const int32_t* starts = t.dst_prefix + first;
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
  low += later;
  const int32_t position = LocalRows(d, t, expert, low) + (g - t.dst_prefix[first + low]);
  return {low, t.group_row[first + low] + position};
}

// Most often all rows that a source routes to an expert lie in one stretch. Returns where it starts, packed, or -1 when
// there is none: the rows are split, are none, or their place does not fit.
constexpr int kRunRowBits = 24;
MOONEP_HD inline int32_t RunOf(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t source) {
  const int32_t rows = t.count[static_cast<int64_t>(source) * d.experts + expert];
  if (rows == 0) return -1;
  const Place first = Locate(d, t, expert, source, 0);
  const Place last = Locate(d, t, expert, source, rows - 1);
  const bool whole = first.rank == last.rank && last.row - first.row == rows - 1;
  return whole && last.row < 1 << kRunRowBits ? first.rank << kRunRowBits | first.row : -1;
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
