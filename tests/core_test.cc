// The planner and the placement of xla_ffi/core on one thread, without XLA or Python: rules that hold for any counts.
//
// Random shapes and counts from fixed seeds. tests/test_planner.py compares the same code with the oracle.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "xla_ffi/core/layout.h"
#include "xla_ffi/core/placement.h"
#include "xla_ffi/core/planner.h"
#include "xla_ffi/core/team.h"

namespace {

using moonep::DomainShape;
using moonep::Place;
using moonep::SerialTeam;

#define CHECK(condition, seed)                                                                    \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      std::fprintf(stderr, "%s:%d: seed %u: not so: %s\n", __FILE__, __LINE__, seed, #condition); \
      std::exit(1);                                                                               \
    }                                                                                             \
  } while (false)

size_t At(int64_t i) { return static_cast<size_t>(i); }

// The plan of all ranks, as HostTables and the kernels make it.
struct Plan {
  explicit Plan(const DomainShape& shape, std::vector<int32_t> counts)
      : d(shape), count(std::move(counts)), totals(At(d.experts)), home_rows(At(d.ranks)) {
    for (int32_t r = 0; r < d.ranks; ++r) {
      for (int32_t e = 0; e < d.experts; ++e) totals[At(e)] += count[At(int64_t{r} * d.experts + e)];
    }
    for (int32_t e = 0; e < d.experts; ++e) {
      home_rows[At(d.home_of(e))] += totals[At(e)];
      total += totals[At(e)];
    }
    const SerialTeam team;
    state = {at_home.data(), balance.data(), quota.data(), giver.data(), foreign.data(), moves.data()};
    result = moonep::PlanMoves(team, d, totals.data(), home_rows.data(), state);
    cascade = result.cascade;
    for (int32_t h = 0; result.cascade && h < d.ranks; ++h) {
      moonep::FillReceivers(team, d, h, state, &result.moves);
    }
    moonep::WriteAlloc(team, d, state, result.moves, alloc.data());
    for (int32_t e = 0; e < d.experts; ++e) moonep::BuildPrefixes(team, d, tables(), e);
    for (int32_t r = 0; r < d.ranks; ++r) {
      std::vector<int32_t>& sizes = group_sizes[At(r)];
      std::vector<int32_t>& rows = group_rows[At(r)];
      sizes.assign(At(d.groups()), -1);
      rows.assign(At(d.groups()), -1);
      slots_row[At(r)] = moonep::BuildOwnGroups(team, d, tables(), at_home.data(), r, sizes.data(), rows.data());
    }
    for (int32_t r = 0; r < d.ranks; ++r) {
      moonep::BuildSlots(team, d, tables(), moves.data(), result.moves, slots_row.data(), r,
                         group_sizes[At(r)].data() + d.epn(), group_rows[At(r)].data() + d.epn());
    }
  }

  Plan(const Plan&) = delete;  // `state` points into it

  moonep::PlanTables tables() {
    return {count.data(), alloc.data(), src_prefix.data(), dst_prefix.data(), group_row.data(), slot_expert.data()};
  }
  int32_t Alloc(int32_t e, int32_t r) const { return alloc[At(int64_t{e} * d.ranks + r)]; }
  int32_t Count(int32_t r, int32_t e) const { return count[At(int64_t{r} * d.experts + e)]; }

  DomainShape d;
  std::vector<int32_t> count, totals, home_rows;
  size_t cells = At(int64_t{d.experts} * d.ranks);
  std::vector<int32_t> alloc = std::vector<int32_t>(cells), src_prefix = alloc, dst_prefix = alloc, group_row = alloc;
  std::vector<int32_t> slot_expert = std::vector<int32_t>(At(d.experts)), at_home = slot_expert;
  std::vector<int32_t> balance = std::vector<int32_t>(At(d.ranks)), quota = balance, giver = balance;
  std::vector<int32_t> foreign = balance, slots_row = balance;
  std::vector<moonep::Move> moves = std::vector<moonep::Move>(At(moonep::MaxMoves(d)));
  std::vector<std::vector<int32_t>> group_sizes = std::vector<std::vector<int32_t>>(At(d.ranks));
  std::vector<std::vector<int32_t>> group_rows = group_sizes;
  moonep::PlannerState state = {};
  moonep::PlannerResult result = {};
  bool cascade = false;
  int32_t total = 0;
};

// Every row stays a row of its expert, every rank computes what it must, and the moves are the difference.
void CheckAllocation(Plan& plan, unsigned seed) {
  const DomainShape& d = plan.d;
  CHECK(plan.result.moves <= moonep::MaxMoves(d), seed);
  for (int32_t e = 0; e < d.experts; ++e) {
    int32_t rows = 0;
    for (int32_t r = 0; r < d.ranks; ++r) {
      CHECK(plan.Alloc(e, r) >= 0, seed);
      rows += plan.Alloc(e, r);
    }
    CHECK(rows == plan.totals[At(e)], seed);
  }
  bool balanced = true;
  for (int32_t r = 0; r < d.ranks; ++r) {
    const int32_t capacity = moonep::Capacity(plan.total, d.ranks, r);
    balanced = balanced && plan.home_rows[At(r)] == capacity;
    int32_t rows = 0;
    int32_t foreign = 0;
    for (int32_t e = 0; e < d.experts; ++e) {
      rows += plan.Alloc(e, r);
      foreign += d.home_of(e) != r && plan.Alloc(e, r) > 0 ? 1 : 0;
    }
    CHECK(rows == (d.home ? plan.home_rows[At(r)] : capacity), seed);
    CHECK(rows == moonep::RankRows(d, plan.state, plan.total, r), seed);
    CHECK(foreign <= d.epn(), seed);
    if (d.home) CHECK(foreign == 0, seed);
  }
  if (balanced || d.home) CHECK(plan.result.moves == 0 && !plan.cascade, seed);
  for (int32_t i = 0; i < plan.result.moves; ++i) {
    const moonep::Move& move = plan.moves[At(i)];
    CHECK(move.rows > 0 && move.to != d.home_of(move.expert), seed);
    for (int32_t j = 0; j < i; ++j) {
      CHECK(plan.moves[At(j)].expert != move.expert || plan.moves[At(j)].to != move.to, seed);
    }
  }
}

// A lean plan moves the surplus alone. It is given up only where it would need more slots than there are.
void CheckKind(const Plan& plan, unsigned seed) {
  if (plan.d.home) return;
  int32_t surplus = 0;
  int32_t moved = 0;
  for (int32_t r = 0; r < plan.d.ranks; ++r) {
    const int32_t over = plan.home_rows[At(r)] - moonep::Capacity(plan.total, plan.d.ranks, r);
    surplus += over > 0 ? over : 0;
  }
  for (int32_t i = 0; i < plan.result.moves; ++i) moved += plan.moves[At(i)].rows;
  CHECK(plan.cascade ? moved >= surplus : moved == surplus, seed);

  Plan lean(plan.d, plan.count);
  moonep::StartAtHome(SerialTeam{}, lean.d, lean.totals.data(), lean.home_rows.data(), lean.state);
  CHECK(moonep::LeanMoves(SerialTeam{}, lean.d, lean.state).cascade == plan.cascade, seed);
}

// Groups: own experts, then slots in ascending id; each starts where the padded one before ends; all fit the buffer.
void CheckGroups(Plan& plan, unsigned seed) {
  const DomainShape& d = plan.d;
  for (int32_t r = 0; r < d.ranks; ++r) {
    int32_t row = 0;
    int32_t before = -1;
    for (int32_t g = 0; g < d.groups(); ++g) {
      const bool own = g < d.epn();
      const int32_t e = own ? r * d.epn() + g : plan.slot_expert[At(int64_t{r} * d.epn() + g - d.epn())];
      const int32_t rows = plan.group_rows[At(r)][At(g)];
      const int32_t size = plan.group_sizes[At(r)][At(g)];
      CHECK(size == moonep::AlignUp(rows, d.padding), seed);
      if (e < 0) {
        CHECK(rows == 0, seed);
        continue;
      }
      if (!own) {
        CHECK(e > before && d.home_of(e) != r && rows > 0, seed);
        before = e;
      }
      CHECK(rows == plan.Alloc(e, r), seed);
      CHECK(plan.group_row[At(int64_t{e} * d.ranks + r)] == row, seed);
      row += size;
    }
    CHECK(row <= d.recv_rows(d.tokens), seed);
  }
}

// Every routed row has a place of its own, in its expert's group; a rank keeps its own rows first; runs agree.
void CheckPlaces(Plan& plan, unsigned seed) {
  const DomainShape& d = plan.d;
  const moonep::PlanTables t = plan.tables();
  std::vector<std::vector<bool>> taken(At(d.ranks), std::vector<bool>(At(d.recv_rows(d.tokens))));
  for (int32_t source = 0; source < d.ranks; ++source) {
    for (int32_t e = 0; e < d.experts; ++e) {
      const int32_t run = moonep::RunOf(d, t, e, source);
      for (int32_t i = 0; i < plan.Count(source, e); ++i) {
        const Place p = moonep::Locate(d, t, e, source, i);
        CHECK(p.rank >= 0 && p.rank < d.ranks, seed);
        const int32_t first = plan.group_row[At(int64_t{e} * d.ranks + p.rank)];
        CHECK(p.row >= first && p.row < first + plan.Alloc(e, p.rank), seed);
        CHECK(!taken[At(p.rank)][At(p.row)], seed);
        taken[At(p.rank)][At(p.row)] = true;
        CHECK((i < moonep::LocalRows(d, t, e, source)) == (p.rank == source), seed);
        if (run >= 0) {
          const Place same = moonep::RunPlace(run, i);
          CHECK(same.rank == p.rank && same.row == p.row, seed);
        }
      }
    }
  }
}

// Counts of `tokens * topk` rows or fewer per rank, with one to all experts hot.
Plan RandomPlan(unsigned seed) {
  std::mt19937 random(seed);
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
  DomainShape d;
  d.ranks = 1 + below(seed % 8 == 0 ? 40 : 9);
  d.experts = d.ranks * (1 + below(5));
  d.topk = 1 + below(4);
  d.tokens = 1 + below(40);
  d.padding = 1 << below(5);
  d.home = seed % 16 == 5;
  const int32_t hot = 1 + below(d.experts);
  const int32_t offset = below(d.experts);
  std::vector<int32_t> count(At(int64_t{d.ranks} * d.experts));
  for (int32_t r = 0; r < d.ranks; ++r) {
    const int32_t routed = seed % 3 == 0 ? below(d.tokens * d.topk + 1) : d.tokens * d.topk;
    for (int32_t i = 0; i < routed; ++i) {
      const int32_t e = below(10) == 0 ? below(d.experts) : (offset + below(hot)) % d.experts;
      ++count[At(int64_t{r} * d.experts + e)];
    }
  }
  return Plan(d, std::move(count));
}

void CheckPrimaries(unsigned seed) {
  const int32_t ranks[] = {2, 0, 2, -1, 0, 1, -1};
  const bool primary[] = {true, true, false, false, false, true, false};
  for (int32_t k = 0; k < 7; ++k) CHECK(moonep::IsPrimary(ranks, k) == primary[k], seed);
}

// Parts of a chunk start on pages, follow each other and do not overlap.
void CheckLayout(unsigned seed) {
  DomainShape d;
  d.ranks = 4;
  d.experts = 8;
  d.topk = 3;
  d.tokens = 100;
  d.row_bytes = 130;
  d.stage_bytes = 5000;
  const moonep::ChunkLayout l = moonep::ChunkLayout::Of(d, 777);
  const int64_t starts[] = {l.ids, l.counts, l.rows, l.weights, l.returns, l.return_weights, l.slots, l.bytes};
  const int64_t sizes[] = {1200, 32, 100 * 192, 1200, 300 * 192, 1200, 5000};
  CHECK(l.row_stride == 192 && l.ids >= 777, seed);
  for (int i = 0; i < 7; ++i) {
    CHECK(starts[i] % 4096 == 0 && starts[i] + sizes[i] <= starts[i + 1], seed);
  }
}

}  // namespace

int main() {
  int lean = 0;
  int cascade = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Plan plan = RandomPlan(seed);
    CheckAllocation(plan, seed);
    CheckKind(plan, seed);
    CheckGroups(plan, seed);
    CheckPlaces(plan, seed);
    ++(plan.cascade ? cascade : lean);
  }
  CHECK(lean > 100 && cascade > 100, 0u);  // both kinds were met
  CheckPrimaries(0);
  CheckLayout(0);
  std::printf("%d lean plans, %d cascade plans\n", lean, cascade);
  return 0;
}
