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

template <class Team>
MOONEP_HD void BuildPrefixes(const Team& team, const DomainShape& d, const PlanTables& t) {
  for (int e = team.rank(); e < d.experts; e += team.size()) {
    int32_t sources = 0;
    int32_t places = 0;
    for (int r = 0; r < d.ranks; ++r) {
      const int64_t re = static_cast<int64_t>(r) * d.experts + e;
      const int64_t er = static_cast<int64_t>(e) * d.ranks + r;
      const int32_t local = LocalRows(d, t, e, r);
      t.src_prefix[re] = sources;
      t.dst_prefix[er] = places;
      sources += t.count[re] - local;
      places += t.alloc[er] - local;
    }
  }
}

// Lays out the groups of every rank: own experts, then slots with the foreign experts in ascending id; each group
// starts at the padded end of the one before. Fills group_row, slot_expert, and for rank `me` group_sizes (padded) and
// group_rows [2*epn].
template <class Team>
MOONEP_HD void BuildGroups(const Team& team, const DomainShape& d, const PlanTables& t, int32_t me,
                           int32_t* group_sizes, int32_t* group_rows) {
  const int32_t epn = d.epn();
  for (int r = team.rank(); r < d.ranks; r += team.size()) {
    int64_t row = 0;
    auto add_group = [&](int32_t group, int32_t expert) {
      const int64_t er = static_cast<int64_t>(expert) * d.ranks + r;
      const int32_t rows = t.alloc[er];
      const int64_t padded = AlignUp(rows, d.padding);
      t.group_row[er] = rows > 0 ? static_cast<int32_t>(row) : -1;
      if (r == me) {
        group_sizes[group] = static_cast<int32_t>(padded);
        group_rows[group] = rows;
      }
      row += padded;
    };
    for (int i = 0; i < epn; ++i) add_group(i, r * epn + i);
    int32_t slot = 0;
    for (int e = 0; e < d.experts; ++e) {
      if (d.home_of(e) == r) continue;
      if (t.alloc[static_cast<int64_t>(e) * d.ranks + r] == 0) {
        t.group_row[static_cast<int64_t>(e) * d.ranks + r] = -1;
      } else {
        t.slot_expert[static_cast<int64_t>(r) * epn + slot] = e;
        add_group(epn + slot++, e);
      }
    }
    for (; slot < epn; ++slot) {
      t.slot_expert[static_cast<int64_t>(r) * epn + slot] = -1;
      if (r == me) group_sizes[epn + slot] = group_rows[epn + slot] = 0;
    }
  }
}

// Place of the i-th row (token-then-k order) that rank `source` routes to `expert`.
MOONEP_HD inline Place Locate(const DomainShape& d, const PlanTables& t, int32_t expert, int32_t source, int32_t i) {
  const int64_t first = static_cast<int64_t>(expert) * d.ranks;
  const int32_t local = LocalRows(d, t, expert, source);
  if (i < local) return {source, t.group_row[first + source] + i};
  const int32_t g = t.src_prefix[static_cast<int64_t>(source) * d.experts + expert] + (i - local);
  // The last rank whose places start at or before g; ranks without places share the start of the next one.
  int32_t low = 0;
  int32_t high = d.ranks - 1;
  while (low < high) {
    const int32_t mid = (low + high + 1) / 2;
    if (t.dst_prefix[first + mid] <= g) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  const int32_t position = LocalRows(d, t, expert, low) + (g - t.dst_prefix[first + low]);
  return {low, t.group_row[first + low] + position};
}

// The primary of an assignment crosses the link for all of its token's rows on that rank: it is the one of lowest k.
MOONEP_HD inline bool IsPrimary(const int32_t* dst_rank_of_token, int32_t k) {
  for (int32_t j = 0; j < k; ++j) {
    if (dst_rank_of_token[j] == dst_rank_of_token[k]) return false;
  }
  return dst_rank_of_token[k] >= 0;
}

}  // namespace moonep
