// plan: ids and counts of all ranks by one exchange, then tables and the place of every row.
//
// Every rank pushes its ids to all ranks and then computes everything itself; no scattered record crosses the link.
// What is pushed is double-buffered by the parity of the epoch: a rank pushes epoch n+2 only after it has passed the
// wait of n+1, which every rank enters after it is done with n. So plan needs no credits.
//
// PlanSend (a block per tile of ids) -> PlanTables (one cluster: waits, then one block decides the moves) -> PlanPlace
// (a block per tile and source). Few ids: PlanWhole, all of it in one cluster.
#include <algorithm>

#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/launch.cuh"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/teams.cuh"

namespace moonep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kRounds = kTileIds / kThreads;
constexpr int kBatch = 16;
constexpr uint16_t kUnrouted = 0xffff;

namespace cg = cooperative_groups;

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v) {
  return v.own().part[static_cast<int>(Part::kIds)];
}

__device__ inline PlanTables Tables(const RankViewGpu& v, const PlanArgs& a) {
  const PlanScratch& s = a.scratch;
  const int32_t* count = v.counts(v.rank, State(v).epoch & 1, 0);
  return {count, s.alloc, s.src_prefix, s.dst_prefix, s.group_row, a.plan.slot_expert};
}

__device__ inline int32_t Peer(const RankViewGpu& v, int32_t turn) {
  const int32_t r = v.rank + turn;
  return r < v.shape.ranks ? r : r - v.shape.ranks;
}

// Whether this block may push: the block that ends the push looks again, after all others.
__device__ inline bool MayPush(const RankViewGpu& v) { return FailedRank(v) < 0 && State(v).busy == 0; }

// Pushes a tile's ids and how many of them name each expert; adds those to the rank's counts. histogram: [E] shared.
__device__ inline void PushTile(const RankViewGpu& v, const PlanArgs& a, int64_t tile, int32_t* histogram) {
  const int experts = v.shape.experts;
  const uint32_t parity = (State(v).epoch + 1) & 1;  // the call is opened once all of its tiles are out
  const int64_t first = tile * a.tile;
  const int count = static_cast<int>(min(a.tile, a.tokens * v.shape.topk - first));
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
  // Four ids are one 8-byte store to each rank. The buffer holds whole stores, so the last one may be padded.
  const int i = static_cast<int>(threadIdx.x) * 4;
  if (i < count) {
    uint16_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t id = i + j < count ? a.ids[first + i + j] : -1;
      packed[j] = id >= 0 && id < experts ? static_cast<uint16_t>(id) : kUnrouted;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (packed[j] != kUnrouted) atomicAdd(&histogram[packed[j]], 1);
    }
    const uint2 store{static_cast<uint32_t>(packed[1]) << 16 | packed[0],
                      static_cast<uint32_t>(packed[3]) << 16 | packed[2]};
    for (int p = 0; p < v.shape.ranks; ++p) {
      *reinterpret_cast<uint2*>(v.ids(Peer(v, p), parity, v.rank) + first + i) = store;
    }
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    const int32_t here = histogram[e];
    if (here != 0) atomicAdd(&a.scratch.counts[e], here);
    for (int p = 0; p < v.shape.ranks; ++p) {
      v.tile_counts(Peer(v, p), parity, v.rank)[tile * experts + e] = static_cast<uint16_t>(here);
    }
  }
}

// After all tiles: opens the call, pushes the counts and publishes. One block.
__device__ inline void EndPush(const RankViewGpu& v, const PlanArgs& a, const CallId& id) {
  ControlBlockGpu::PartState& part = State(v);
  const bool live = OpenCall(v, Part::kIds, id, FailedRank(v));
  for (int e = static_cast<int>(threadIdx.x); e < v.shape.experts; e += kThreads) {
    const int32_t count = __ldcg(&a.scratch.counts[e]);  // other blocks added to it in the L2 cache
    a.scratch.counts[e] = 0;
    for (int p = 0; live && p < v.shape.ranks; ++p) v.counts(Peer(v, p), part.epoch & 1, v.rank)[e] = count;
  }
  __syncthreads();  // the releases cover the counts that other threads stored
  if (live) PublishArrived(v, Part::kIds, part);
}

// Room for the moves' rows in alloc is made before they are known.
__device__ inline void ClearAlloc(const RankViewGpu& v, const PlanArgs& a) {
  const int cells = v.shape.experts * v.shape.ranks;
  const int all = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < cells; i += all) {
    a.scratch.alloc[i] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    PlanSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a,
             const __grid_constant__ CallId id) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  LetNextStart();
  ClearAlloc(v, a);
  if (MayPush(v)) PushTile(v, a, blockIdx.x, shared);
  Tail(State(v), [&] { EndPush(v, a, id); });
}

// A warp decides the moves in shared memory (a chain of small argmax, which more threads would only slow down), then
// all threads of the block write alloc.
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
  s.moves = reinterpret_cast<Move*>(home_rows + d.ranks);  // [E + R]
  __shared__ int32_t moves;
  const int32_t* count = Tables(v, a).count;
  for (int e = static_cast<int>(threadIdx.x); e < d.experts; e += kThreads) {
    int32_t total = 0;
    for (int r = 0; r < d.ranks; r += kBatch) {  // loads first: each alone would wait for memory
      int32_t here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        here[i] = r + i < d.ranks ? count[static_cast<int64_t>(r + i) * d.experts + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) total += here[i];
    }
    totals[e] = total;
  }
  __syncthreads();
  const WarpTeam warp;
  const int epn = d.epn();
  for (int r = static_cast<int>(threadIdx.x) / 32; r < d.ranks; r += kWarps) {
    const int32_t rows = warp.sum(epn, [&](int i) { return totals[r * epn + i]; });
    if (warp.rank() == 0) a.plan.home_rows[r] = home_rows[r] = rows;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const PlannerResult result = PlanMoves(warp, d, totals, home_rows, s);
    if (threadIdx.x == 0) moves = result.moves;
  }
  __syncthreads();
  WriteAlloc(BlockTeam{}, d, s, moves, a.scratch.alloc);
}

// Rows without a token, wherever a row is not placed later.
__device__ inline void BlankRows(const PlanArgs& a, int worker, int workers) {
  for (int64_t i = worker; i < a.rows; i += workers) a.plan.src[i] = a.plan.primary[i] = a.plan.next[i] = -1;
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

// Everything that is not per row, by one cluster.
__device__ inline void MakeTables(const RankViewGpu& v, const PlanArgs& a, int32_t* shared) {
  const cg::cluster_group cluster = cg::this_cluster();
  ControlBlockGpu::PartState& part = State(v);
  const DomainShape& d = v.shape;
  const int block = static_cast<int>(cluster.block_rank());
  const int worker = block * kThreads + static_cast<int>(threadIdx.x);
  constexpr int kWorkers = kClusterBlocks * kThreads;
  const bool live = part.live != 0;
  if (worker == 0) {
    a.plan.ticket[0] = live ? part.ticket : -1;
    part.busy = 0;
  }
  if (!live) {
    BlankRows(a, worker, kWorkers);
    if (block == 0) PoisonTables(v, a);
    return;
  }
  if (block == 0) {
    Decide(v, a, shared);
  } else {  // meanwhile
    SumTiles(v, a, worker - kThreads, kWorkers - kThreads);
    BlankRows(a, worker - kThreads, kWorkers - kThreads);
  }
  cluster.sync();
  const PlanTables tables = Tables(v, a);
  auto groups = [&](const auto& team, int rank) {
    const bool mine = rank == v.rank;
    const int32_t rows =
        BuildGroups(team, d, tables, rank, mine ? a.plan.group_sizes : nullptr, mine ? a.plan.group_rows : nullptr);
    if (team.rank() == 0) a.plan.rank_rows[rank] = rows;
  };
  // Few ranks: many threads for each of them. Many ranks: many of them at a time.
  if (d.ranks <= 2 * kClusterBlocks) {
    for (int r = block; r < d.ranks; r += kClusterBlocks) groups(BlockTeam{}, r);
    for (int e = worker; e < d.experts; e += kWorkers) BuildPrefixes(SerialTeam{}, d, tables, e);
  } else {
    for (int r = worker / 32; r < d.ranks; r += kWorkers / 32) groups(WarpTeam{}, r);
    for (int e = worker / 32; e < d.experts; e += kWorkers / 32) BuildPrefixes(WarpTeam{}, d, tables, e);
  }
  cluster.sync();
  for (int cell = worker; cell < d.ranks * d.experts; cell += kWorkers) {
    const int source = cell / d.experts;
    a.scratch.runs[cell] = RunOf(d, tables, cell - source * d.experts, source);
  }
}

__global__ void __launch_bounds__(kThreads)
    PlanTablesKernel(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  const cg::cluster_group cluster = cg::this_cluster();
  if (cluster.block_rank() == 0) WaitArrived(v, Part::kIds);
  cluster.sync();
  LetNextStart();
  MakeTables(v, a, shared);
}

// The place of each id of a tile, in order. Of the own source all destinations are kept; of every source, the rows that
// this rank computes.
__device__ inline void PlaceTile(const RankViewGpu& v, const PlanArgs& a, int64_t tile, int source, int32_t* shared) {
  ControlBlockGpu::PartState& part = State(v);
  const DomainShape& d = v.shape;
  const int64_t n = a.tokens * d.topk;
  const int64_t first = tile * a.tile;
  const int count = static_cast<int>(min(a.tile, n - first));
  const bool own = source == v.rank;
  if (part.live == 0) {
    if (!own) return;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      a.plan.dst_rank[first + i] = a.plan.dst_row[first + i] = -1;
    }
    return;
  }
  int32_t* my_row = shared;             // [tile] row on this rank, or -1
  int32_t* before = my_row + kTileIds;  // [E] rows of the source before this tile; -1: none of its rows matter here
  int32_t* run = before + d.experts;    // [E] RunOf
  uint16_t* seen = reinterpret_cast<uint16_t*>(run + d.experts);  // [warps, E]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const PlanTables t = Tables(v, a);
  const uint16_t* ids = v.ids(v.rank, part.epoch & 1, source) + first;

  // Warps own consecutive ids, so that ranks among equal ids follow id order.
  constexpr int per_warp = 32 * kRounds;
  const int begin = min(warp * per_warp, count);
  const int end = min(begin + per_warp, count);
  uint16_t id[kRounds];
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    const int i = begin + 32 * u + lane;
    id[u] = i < end ? ids[i] : kUnrouted;
  }
  __syncthreads();  // the tile before may still use the shared memory
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * d.experts / 2; i += kThreads) {
    reinterpret_cast<uint32_t*>(seen)[i] = 0;
  }
  for (int e = static_cast<int>(threadIdx.x); e < d.experts; e += kThreads) {
    const int32_t r = a.scratch.runs[static_cast<int64_t>(source) * d.experts + e];
    const int32_t b = a.scratch.tile_prefix[(static_cast<int64_t>(source) * a.tiles + tile) * d.experts + e];
    const bool matters =
        own || (r >= 0 ? RunPlace(r, 0).rank == v.rank : t.group_row[static_cast<int64_t>(e) * d.ranks + v.rank] >= 0);
    before[e] = matters ? b : -1;
    run[e] = r;
  }
  __syncthreads();
  uint16_t* mine = seen + warp * d.experts;
  uint32_t peers[kRounds];  // lanes with the same id
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    if (id[u] != kUnrouted && before[id[u]] < 0) id[u] = kUnrouted;
    peers[u] = __match_any_sync(0xffffffffu, id[u]);
    const bool leads = lane == __ffs(static_cast<int>(peers[u])) - 1;
    if (id[u] != kUnrouted && leads) mine[id[u]] += static_cast<uint16_t>(__popc(peers[u]));
    __syncwarp();
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < d.experts; e += kThreads) {
    uint16_t here[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) here[w] = seen[w * d.experts + e];
    uint16_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      seen[w * d.experts + e] = sum;
      sum = static_cast<uint16_t>(sum + here[w]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    const int i = begin + 32 * u + lane;
    Place place{-1, -1};
    if (id[u] != kUnrouted) {
      const int32_t index = before[id[u]] + mine[id[u]] + __popc(peers[u] & ((1u << lane) - 1u));
      place = run[id[u]] >= 0 ? RunPlace(run[id[u]], index) : Locate(d, t, id[u], source, index);
    }
    __syncwarp();
    const bool leads = lane == __ffs(static_cast<int>(peers[u])) - 1;
    if (id[u] != kUnrouted && leads) mine[id[u]] += static_cast<uint16_t>(__popc(peers[u]));
    __syncwarp();
    if (i >= end) continue;
    my_row[i] = place.rank == v.rank ? place.row : -1;
    if (own) {
      a.plan.dst_rank[first + i] = place.rank;
      a.plan.dst_row[first + i] = place.row;
    }
  }
  __syncthreads();
  // A token's rows on this rank, in k order: the first is the primary, each names the next.
  for (int token = static_cast<int>(threadIdx.x); token * d.topk < count; token += kThreads) {
    int32_t primary = -1;
    int32_t last = -1;
    for (int k = 0; k < d.topk; ++k) {
      const int32_t row = my_row[token * d.topk + k];
      if (row < 0) continue;
      a.plan.src[row] = static_cast<int32_t>(source * n + first + token * d.topk + k);
      if (primary < 0) primary = row;
      a.plan.primary[row] = primary;
      if (last >= 0) a.plan.next[last] = row;
      last = row;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    PlanPlace(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  PlaceTile(v, a, blockIdx.x, static_cast<int>(blockIdx.y), shared);
}

__global__ void __launch_bounds__(kThreads)
    PlanWhole(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a,
              const __grid_constant__ CallId id) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  const cg::cluster_group cluster = cg::this_cluster();
  const int block = static_cast<int>(blockIdx.x);
  const int tiles = static_cast<int>(a.tiles);
  ClearAlloc(v, a);
  const bool may_push = MayPush(v);
  for (int tile = block; may_push && tile < tiles; tile += kClusterBlocks) PushTile(v, a, tile, shared);
  cluster.sync();
  if (block == 0) {
    EndPush(v, a, id);
    WaitArrived(v, Part::kIds);
  }
  cluster.sync();
  MakeTables(v, a, shared);
  cluster.sync();
  for (int item = block; item < tiles * v.shape.ranks; item += kClusterBlocks) {
    PlaceTile(v, a, item % tiles, item / tiles, shared);
  }
}

size_t PushShared(const DomainShape& d) { return static_cast<size_t>(d.experts) * 4; }

size_t TablesShared(const DomainShape& d) {
  return (static_cast<size_t>(d.experts) * 2 + static_cast<size_t>(d.ranks) * 5) * 4 +
         static_cast<size_t>(MaxMoves(d)) * sizeof(Move);
}

size_t PlaceShared(const DomainShape& d) {
  return (kTileIds + static_cast<size_t>(d.experts) * 2) * 4 + static_cast<size_t>(d.experts) * kWarps * 2;
}

}  // namespace

bool PlanIsSmall(const DomainShape& d, int64_t tokens) { return PlanTiles(d, tokens) * d.ranks <= 2 * kClusterBlocks; }

cudaError_t LaunchPlanWhole(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream) {
  const size_t shared = std::max(TablesShared(v.shape), PlaceShared(v.shape));
  return LaunchKernel(PlanWhole, {kClusterBlocks, kThreads, shared, kClusterBlocks}, stream, v, a, id);
}

cudaError_t LaunchPlanSend(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.tiles));
  return LaunchKernel(PlanSend, {grid, kThreads, PushShared(v.shape)}, stream, v, a, id);
}

cudaError_t LaunchPlanTables(const RankViewGpu& v, const PlanArgs& a, cudaStream_t stream) {
  return LaunchKernel(PlanTablesKernel, {kClusterBlocks, kThreads, TablesShared(v.shape), kClusterBlocks}, stream, v,
                      a);
}

cudaError_t LaunchPlanPlace(const RankViewGpu& v, const PlanArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.tiles), static_cast<unsigned>(v.shape.ranks));
  return LaunchKernel(PlanPlace, {grid, kThreads, PlaceShared(v.shape)}, stream, v, a);
}

}  // namespace moonep
