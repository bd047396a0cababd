// How many rows of each expert each rank computes: alloc[E, R] from the experts' totals.
//
// At first all rows are at home. The lean plan moves surplus only; if it would give some rank more foreign experts than
// it has slots, the cascade plan, where each receiver is filled by one home, is taken instead.
#pragma once

#include <cstdint>

#include "xla_ffi/core/layout.h"
#include "xla_ffi/core/team.h"

namespace moonep {

// Scratch of Allocate, each [ranks].
struct PlannerScratch {
  int64_t* balance;
  int64_t* quota;
  int32_t* giver;
};

// Rows that rank r must compute of a total.
MOONEP_HD inline int64_t Capacity(int64_t total, int32_t ranks, int32_t r) {
  return total / ranks + (r < total % ranks ? 1 : 0);
}

template <class Team>
MOONEP_HD void AllocateHome(const Team& team, const DomainShape& d, const int32_t* totals, int32_t* alloc,
                            int64_t* balance) {
  const int64_t total = team.sum(d.experts, [&](int e) { return static_cast<int64_t>(totals[e]); });
  for (int64_t i = team.rank(); i < static_cast<int64_t>(d.experts) * d.ranks; i += team.size()) {
    const int32_t expert = static_cast<int32_t>(i / d.ranks);
    alloc[i] = i % d.ranks == d.home_of(expert) ? totals[expert] : 0;
  }
  for (int r = team.rank(); r < d.ranks; r += team.size()) {
    int64_t rows = 0;
    for (int i = 0; i < d.epn(); ++i) rows += totals[r * d.epn() + i];
    balance[r] = rows - Capacity(total, d.ranks, r);
  }
  team.sync();
}

// The expert of home h with most rows still at home.
template <class Team>
MOONEP_HD int32_t HottestAtHome(const Team& team, const DomainShape& d, const int32_t* alloc, int32_t h) {
  const int32_t first = h * d.epn();
  return first + team.argmax(d.epn(), [&](int i) { return alloc[static_cast<int64_t>(first + i) * d.ranks + h]; });
}

template <class Team>
MOONEP_HD int64_t MoveRows(const Team& team, const DomainShape& d, int32_t* alloc, int32_t expert, int32_t from,
                           int32_t to, int64_t most) {
  int32_t* row = alloc + static_cast<int64_t>(expert) * d.ranks;
  const int64_t m = most < row[from] ? most : row[from];
  team.sync();
  team.single([&] {
    row[from] -= static_cast<int32_t>(m);
    row[to] += static_cast<int32_t>(m);
  });
  team.sync();
  return m;
}

template <class Team>
MOONEP_HD void AllocateLean(const Team& team, const DomainShape& d, int32_t* alloc, int64_t* balance) {
  for (;;) {
    const int h = team.argmax(d.ranks, [&](int r) { return balance[r]; });
    if (balance[h] <= 0) return;
    const int u = team.argmax(d.ranks, [&](int r) { return -balance[r]; });
    const int64_t want = balance[h] < -balance[u] ? balance[h] : -balance[u];
    const int64_t m = MoveRows(team, d, alloc, HottestAtHome(team, d, alloc, h), h, u, want);
    team.single([&] {
      balance[h] -= m;
      balance[u] += m;
    });
    team.sync();
  }
}

template <class Team>
MOONEP_HD bool FitsInSlots(const Team& team, const DomainShape& d, const int32_t* alloc) {
  const int64_t too_full = team.sum(d.ranks, [&](int r) {
    int foreign = 0;
    for (int e = 0; e < d.experts; ++e) {
      foreign += d.home_of(e) != r && alloc[static_cast<int64_t>(e) * d.ranks + r] > 0;
    }
    return static_cast<int64_t>(foreign > d.epn());
  });
  return too_full == 0;
}

template <class Team>
MOONEP_HD void AllocateCascade(const Team& team, const DomainShape& d, int32_t* alloc, PlannerScratch s) {
  for (int r = team.rank(); r < d.ranks; r += team.size()) {
    s.giver[r] = -1;
    s.quota[r] = 0;
  }
  team.sync();
  // Each receiver gets one giver; a giver may go below its capacity and then becomes a receiver itself.
  for (;;) {
    const int h = team.argmax(d.ranks, [&](int r) { return s.balance[r]; });
    if (s.balance[h] <= 0) break;
    const int u = team.argmax(d.ranks, [&](int r) { return -s.balance[r]; });
    team.sync();
    team.single([&] {
      s.giver[u] = h;
      s.quota[u] = -s.balance[u];
      s.balance[h] += s.balance[u];
      s.balance[u] = 0;
    });
    team.sync();
  }
  for (int h = 0; h < d.ranks; ++h) {
    for (;;) {
      const int to =
          team.argmax(d.ranks, [&](int r) { return s.giver[r] == h ? s.quota[r] : static_cast<int64_t>(0); });
      if (s.giver[to] != h || s.quota[to] <= 0) break;
      const int64_t m = MoveRows(team, d, alloc, HottestAtHome(team, d, alloc, h), h, to, s.quota[to]);
      team.single([&] { s.quota[to] -= m; });
      team.sync();
    }
  }
}

// totals [E] -> alloc [E, R]. Returns true when the cascade plan was needed.
template <class Team>
MOONEP_HD bool Allocate(const Team& team, const DomainShape& d, const int32_t* totals, int32_t* alloc,
                        PlannerScratch s) {
  AllocateHome(team, d, totals, alloc, s.balance);
  if (d.home) return false;
  AllocateLean(team, d, alloc, s.balance);
  if (FitsInSlots(team, d, alloc)) return false;
  AllocateHome(team, d, totals, alloc, s.balance);
  AllocateCascade(team, d, alloc, s);
  return true;
}

}  // namespace moonep
