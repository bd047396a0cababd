// The part of a plan that does not depend on rows, made by one cluster: moves, groups, and where runs of rows start.
#pragma once

#include "xla_ffi/cuda/plan.cuh"

namespace moonep::plan {

inline size_t TablesShared(const DomainShape& d) {
  return (static_cast<size_t>(d.experts) * 2 + static_cast<size_t>(d.ranks) * 6) * 4 +
         static_cast<size_t>(MaxMoves(d)) * sizeof(Move);
}

// totals [E] in the first block's shared memory: rows of each expert, by eight lanes for each of a block's share of
// them. Called by all blocks of the cluster.
__device__ inline void SumCounts(const RankViewGpu& v, const PlanArgs& a, int32_t* totals) {
  const auto cluster = cooperative_groups::this_cluster();
  const DomainShape& d = v.shape;
  const int32_t* count = Tables(v, a).count;
  int32_t* to = cluster.map_shared_rank(totals, 0);
  constexpr int kLanes = 8;
  constexpr int kAtOnce = kClusterBlocks * kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first = static_cast<int>(cluster.block_rank()) * kThreads + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int base = 0; base < d.experts; base += kAtOnce) {  // lanes of a warp stay together
    const int e = base + first / kLanes;
    int32_t sum = 0;
#pragma unroll 4
    for (int r = lane; r < d.ranks && e < d.experts; r += kLanes) sum += count[r * d.experts + e];
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    if (lane == 0 && e < d.experts) to[e] = sum;
  }
}

// Moves, alloc and groups, by one block in its shared memory, which starts with the totals.
__device__ inline void Decide(const RankViewGpu& v, const PlanArgs& a, int32_t* shared) {
  const DomainShape& d = v.shape;
  int32_t* totals = shared;  // [E]
  PlannerState s{};
  s.at_home = totals + d.experts;     // [E]
  s.balance = s.at_home + d.experts;  // [R], and so on
  s.quota = s.balance + d.ranks;
  s.giver = s.quota + d.ranks;
  s.foreign = s.giver + d.ranks;
  int32_t* home_rows = s.foreign + d.ranks;
  int32_t* slots_row = home_rows + d.ranks;
  s.moves = reinterpret_cast<Move*>(slots_row + d.ranks);  // [E + R]
  __shared__ int32_t moves;
  __shared__ int32_t total;
  __shared__ bool cascade;
  const PlanTables t = Tables(v, a);
  const WarpTeam<Narrow, 1> warp;
  const int epn = d.epn();
  const int first = static_cast<int>(threadIdx.x) / 32;
  for (int r = first; r < d.ranks; r += kWarps) {
    const int32_t rows = warp.sum(epn, [&](int i) { return totals[r * epn + i]; });
    if (warp.rank() == 0) a.plan.home_rows[r] = home_rows[r] = rows;
  }
  __syncthreads();
  // A warp decides on moves: a chain of small argmax, which more threads would only slow down.
  const auto by_warp = [&](auto body) {
    if (total >= 1 << 22) {
      body(WarpTeam<Wide, kMaxRanks / 32>{});
    } else if (d.ranks > 32) {
      body(WarpTeam<Narrow, kMaxRanks / 32>{});
    } else {
      body(WarpTeam<Narrow, 1>{});
    }
  };
  if (first == 0) {
    const int32_t sum = warp.sum(d.ranks, [&](int r) { return home_rows[r]; });
    if (warp.rank() == 0) total = sum;
    __syncwarp();
    by_warp([&](const auto& team) {
      const PlannerResult result = PlanMoves(team, d, totals, home_rows, s);
      if (warp.rank() == 0) {
        moves = result.moves;
        cascade = result.cascade;
      }
    });
    for (int r = warp.rank(); r < d.ranks; r += 32) a.plan.rank_rows[r] = RankRows(d, s, total, r);
  }
  __syncthreads();
  if (cascade) {
    by_warp([&](const auto& team) {
      for (int h = first; h < d.ranks; h += kWarps) FillReceivers(team, d, h, s, &moves);
    });
    __syncthreads();
  }
  for (int r = first; r < d.ranks; r += kWarps) {
    const int32_t row =
        BuildOwnGroups(warp, d, t, s.at_home, r, r == v.rank ? a.plan.group_sizes : nullptr, a.plan.group_rows);
    if (warp.rank() == 0) slots_row[r] = row;
  }
  __syncthreads();
  const BlockTeam block;
  for (int i = static_cast<int>(threadIdx.x); i < moves; i += kThreads) {
    if (s.moves[i].to == v.rank) Count(&v.own().counters.moved_experts, 1);
  }
  if (threadIdx.x == 0) Count(&v.own().counters.rows, static_cast<uint64_t>(RankRows(d, s, total, v.rank)));
  BuildSlots(block, d, t, s.moves, moves, slots_row, v.rank, a.plan.group_sizes + epn, a.plan.group_rows + epn);
  WriteAlloc(block, d, s, moves, a.scratch.alloc);
}

// Per source, tile and expert: rows of the expert in the source's tiles before.
__device__ inline void SumTiles(const RankViewGpu& v, const PlanArgs& a, int worker, int workers) {
  const int experts = v.shape.experts;
  const int tiles = static_cast<int>(a.tiles);
  for (int column = worker; column < v.shape.ranks * experts; column += workers) {
    const int source = column / experts;
    const int e = column - source * experts;
    const uint16_t* in = v.tile_counts(v.rank, State(v).epoch & 1, source) + e;
    int32_t* out = a.scratch.tile_prefix + static_cast<int64_t>(source) * tiles * experts + e;
    int32_t sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += kBatch) {
      int32_t here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) here[i] = tile + i < tiles ? in[(tile + i) * experts] : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile + i < tiles) out[(tile + i) * experts] = sum;
        sum += here[i];
      }
    }
  }
}

// A failed plan is safe for whoever uses it: no rows anywhere, and a ticket that every op refuses.
__device__ inline void PoisonTables(const RankViewGpu& v, const PlanArgs& a) {
  const DomainShape& d = v.shape;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < d.groups(); i += kThreads) a.plan.group_sizes[i] = a.plan.group_rows[i] = 0;
  for (int i = thread; i < d.experts; i += kThreads) a.plan.slot_expert[i] = -1;
  for (int i = thread; i < d.ranks; i += kThreads) a.plan.home_rows[i] = a.plan.rank_rows[i] = 0;
}

// Everything that is not per row, by one cluster. waited_ns: for the peers' ids, known to the first thread.
__device__ inline void MakeTables(const RankViewGpu& v, const PlanArgs& a, int32_t* shared, uint64_t waited_ns) {
  const auto cluster = cooperative_groups::this_cluster();
  ControlBlockGpu::PartState& part = State(v);
  const DomainShape& d = v.shape;
  const int block = static_cast<int>(cluster.block_rank());
  const int worker = block * kThreads + static_cast<int>(threadIdx.x);
  constexpr int kWorkers = kClusterBlocks * kThreads;
  const bool live = part.live != 0;
  if (worker == 0) {
    a.plan.ticket[0] = live ? part.ticket : -1;
    part.busy = 0;
    CountWait(v, part.kind, waited_ns);
  }
  if (!live) {
    if (block == 0) PoisonTables(v, a);
    return;
  }
  SumCounts(v, a, shared);
  cluster.sync();
  if (block == 0) {
    Decide(v, a, shared);
  } else {  // meanwhile
    SumTiles(v, a, worker - kThreads, kWorkers - kThreads);
  }
  cluster.sync();
  const PlanTables tables = Tables(v, a);
  auto place = [&](const auto& team) {  // a team per expert; a lane per rank
    const int teams = kWorkers / team.size();
    for (int base = 0; base < d.experts; base += teams) {
      // Lanes of a warp stay together: those past the end repeat the last expert.
      const int e = min(base + worker / team.size(), d.experts - 1);
      BuildPrefixes(team, d, tables, e);
      team.sync();
      for (int r = team.rank(); r < d.ranks; r += team.size()) {
        a.scratch.runs[r * d.experts + e] = RunOf(d, tables, e, r);
      }
    }
  };
  if (d.ranks <= 8) {
    place(LaneTeam<8>{});
  } else {
    place(LaneTeam<32, kMaxRanks / 32>{});
  }
}

}  // namespace moonep::plan
