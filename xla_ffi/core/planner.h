// How many rows of each expert each rank computes, as moves away from home.
//
// At first all rows are at home. The lean plan moves surplus only; if it would give some rank more foreign experts than
// it has slots, the cascade plan, where each receiver is filled by one home, is taken instead. No pair (expert,
// receiver) moves twice: after a move the giver or the receiver is done, or the expert has no rows left at home.
#pragma once

#include <cstdint>

#include "xla_ffi/core/layout.h"
#include "xla_ffi/core/team.h"

namespace moonep {

struct Move {
  int32_t expert;
  int32_t to;
  int32_t rows;
};

// Memory of the planner, small enough for a block's shared memory.
struct PlannerState {
  int32_t* at_home;  // [E] rows that their home keeps
  int32_t* balance;  // [R] rows at home minus capacity
  int32_t* quota;    // [R] cascade: rows that the receiver gets ...
  int32_t* giver;    // [R] ... from this home
  int32_t* foreign;  // [R] foreign experts of the rank; later what receivers still get
  Move* moves;       // [E + R]
};

struct PlannerResult {
  int32_t moves;
  bool cascade;
};

MOONEP_HD constexpr int32_t MaxMoves(const DomainShape& d) { return d.experts + d.ranks; }

// Rows that rank r must compute of a total.
MOONEP_HD inline int32_t Capacity(int32_t total, int32_t ranks, int32_t r) {
  return total / ranks + (r < total % ranks ? 1 : 0);
}

template <class Team>
MOONEP_HD void StartAtHome(const Team& team, const DomainShape& d, const int32_t* totals, const int32_t* home_rows,
                           PlannerState s) {
  const int32_t total = team.sum(d.ranks, [&](int r) { return home_rows[r]; });
  for (int e = team.rank(); e < d.experts; e += team.size()) s.at_home[e] = totals[e];
  for (int r = team.rank(); r < d.ranks; r += team.size()) s.balance[r] = home_rows[r] - Capacity(total, d.ranks, r);
  team.sync();
}

// Moves up to `most` rows of home h's hottest expert (most rows still at home) to a rank. Returns how many.
template <class Team>
MOONEP_HD int32_t MoveHottest(const Team& team, int32_t epn, int32_t h, int32_t to, int32_t most, int32_t at,
                              PlannerState s) {
  const int32_t first = h * epn;
  const Largest hottest = team.largest(epn, [&](int i) { return s.at_home[first + i]; });
  const int32_t rows = most < hottest.value ? most : hottest.value;
  team.sync();
  team.single([&] {
    s.at_home[first + hottest.index] = hottest.value - rows;
    s.moves[at] = {first + hottest.index, to, rows};
  });
  return rows;
}

// `cascade` of the result says that some rank got more foreign experts than it has slots.
template <class Team>
MOONEP_HD PlannerResult LeanMoves(const Team& team, const DomainShape& d, PlannerState s) {
  const int32_t epn = d.epn();
  auto balance = team.board(d.ranks, [&](int r) { return s.balance[r]; }, s.balance);
  auto foreign = team.board(d.ranks, [](int) { return 0; }, s.foreign);
  for (int32_t count = 0;; ++count) {
    const Largest h = balance.largest();
    const Largest u = balance.smallest();
    if (h.value <= 0) {
      balance.store();
      return {count, foreign.largest().value > epn};
    }
    const int32_t rows = MoveHottest(team, epn, h.index, u.index, h.value < -u.value ? h.value : -u.value, count, s);
    balance.add(h.index, -rows);
    balance.add(u.index, rows);
    foreign.add(u.index, 1);
  }
}

// Cascade: each receiver gets one giver; a giver may go below its capacity and then becomes a receiver itself.
template <class Team>
MOONEP_HD void ChooseGivers(const Team& team, const DomainShape& d, PlannerState s) {
  for (int r = team.rank(); r < d.ranks; r += team.size()) s.giver[r] = -1;
  team.sync();
  auto balance = team.board(d.ranks, [&](int r) { return s.balance[r]; }, s.balance);
  for (;;) {
    const Largest h = balance.largest();
    const Largest u = balance.smallest();
    if (h.value <= 0) break;
    team.single([&] {
      s.giver[u.index] = h.index;
      s.quota[u.index] = -u.value;
    });
    balance.add(h.index, u.value);
    balance.add(u.index, -u.value);
  }
  balance.store();
}

// Cascade: home h fills its receivers. Homes have nothing in common but the counter of moves, so a team may take each.
template <class Team>
MOONEP_HD void FillReceivers(const Team& team, const DomainShape& d, int32_t h, PlannerState s, int32_t* count) {
  auto quota = team.board(d.ranks, [&](int r) { return s.giver[r] == h ? s.quota[r] : 0; }, s.foreign);
  for (;;) {
    const Largest to = quota.largest();
    if (to.value <= 0) return;
    quota.add(to.index, -MoveHottest(team, d.epn(), h, to.index, to.value, team.take(count), s));
  }
}

// totals [E] and their sums by home, home_rows [R] -> at_home, balance and moves. If the result says cascade, moves are
// left to FillReceivers for every home.
template <class Team>
MOONEP_HD PlannerResult PlanMoves(const Team& team, const DomainShape& d, const int32_t* totals,
                                  const int32_t* home_rows, PlannerState s) {
  StartAtHome(team, d, totals, home_rows, s);
  if (d.home) return {0, false};
  const PlannerResult lean = LeanMoves(team, d, s);
  if (!lean.cascade) return lean;
  team.sync();
  StartAtHome(team, d, totals, home_rows, s);
  ChooseGivers(team, d, s);
  return {0, true};
}

// Rows that a rank computes under the moves.
MOONEP_HD inline int32_t RankRows(const DomainShape& d, PlannerState s, int32_t total, int32_t rank) {
  return Capacity(total, d.ranks, rank) + s.balance[rank];
}

// alloc [E, R], rows of expert e that rank d computes, from the moves; alloc is zero before. The team may be another
// one than the planner's.
template <class Team>
MOONEP_HD void WriteAlloc(const Team& team, const DomainShape& d, PlannerState s, int32_t moves, int32_t* alloc) {
  for (int e = team.rank(); e < d.experts; e += team.size()) {
    alloc[static_cast<int64_t>(e) * d.ranks + d.home_of(e)] = s.at_home[e];
  }
  for (int i = team.rank(); i < moves; i += team.size()) {
    alloc[static_cast<int64_t>(s.moves[i].expert) * d.ranks + s.moves[i].to] = s.moves[i].rows;
  }
  team.sync();
}

}  // namespace moonep
