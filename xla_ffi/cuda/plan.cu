// plan: ids of all ranks by one exchange, counts, tables, and the place of every row.
//
// Every rank pushes its ids to all ranks and then computes everything itself; no scattered record crosses the link.
// The ids buffer is double-buffered by the parity of the epoch: a rank pushes epoch n+2 only after it has passed the
// wait of n+1, which every rank enters after it is done with n. So plan needs no credits.
#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/teams.cuh"

namespace moonep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 2048;  // most ids per block; a tile holds whole tokens
constexpr int kRounds = kTile / kThreads;
constexpr int kTablesThreads = 1024;
constexpr int kBatch = 16;
constexpr uint16_t kUnrouted = 0xffff;
constexpr int kPushThreads = 256;

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v) {
  return v.own().part[static_cast<int>(Part::kIds)];
}

__device__ inline uint32_t Pack(int32_t id, int32_t experts) {
  return id >= 0 && id < experts ? static_cast<uint32_t>(id) : kUnrouted;
}

__global__ void __launch_bounds__(kPushThreads) PushIds(const __grid_constant__ RankViewGpu v, const PlanArgs a) {
  ControlBlockGpu::PartState& part = State(v);
  if (part.live != 0) {
    const int64_t n = a.tokens * v.shape.topk;
    const uint32_t parity = part.epoch & 1;
    // Eight ids are one 16-byte store to each rank; the buffer holds whole vectors, so the last one may be padded.
    for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * 8; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x * 8) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t low = i + 2 * j < n ? Pack(a.ids[i + 2 * j], v.shape.experts) : kUnrouted;
        const uint32_t high = i + 2 * j + 1 < n ? Pack(a.ids[i + 2 * j + 1], v.shape.experts) : kUnrouted;
        packed[j] = high << 16 | low;
      }
      for (int p = 0; p < v.shape.ranks; ++p) {
        int r = v.rank + p;
        r = r < v.shape.ranks ? r : r - v.shape.ranks;
        *reinterpret_cast<uint4*>(v.ids(r, parity, v.rank) + i) = *reinterpret_cast<uint4*>(packed);
      }
    }
  }
  Tail(part, [&] {
    if (part.live != 0) PublishArrived(v, Part::kIds, part);
  });
}

// Block (tile, source): how many of the tile's ids name each expert. The last block of a source turns its column of
// tiles into exclusive sums and counts. All blocks together blank the row arrays.
__global__ void __launch_bounds__(kThreads) CountTiles(const __grid_constant__ RankViewGpu v, const PlanArgs a) {
  ControlBlockGpu::PartState& part = State(v);
  extern __shared__ int32_t histogram[];  // [E]
  const int source = static_cast<int>(blockIdx.y);
  const int tiles = static_cast<int>(gridDim.x);
  const int64_t block = blockIdx.x + static_cast<int64_t>(gridDim.x) * blockIdx.y;
  const int64_t blocks = static_cast<int64_t>(gridDim.x) * gridDim.y;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < a.rows; i += blocks * blockDim.x) {
    a.plan.src[i] = a.plan.primary[i] = a.plan.next[i] = -1;
  }
  if (part.live == 0) return;
  const int experts = v.shape.experts;
  const int64_t n = a.tokens * v.shape.topk;
  const uint16_t* ids = v.ids(v.rank, part.epoch & 1, source);
  for (int e = threadIdx.x; e < experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * a.tile;
  for (int64_t i = first + threadIdx.x; i < min(first + a.tile, n); i += blockDim.x) {
    if (ids[i] != kUnrouted) atomicAdd(&histogram[ids[i]], 1);
  }
  __syncthreads();
  int32_t* table = a.scratch.tile_counts + static_cast<int64_t>(source) * tiles * experts;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    table[static_cast<int64_t>(blockIdx.x) * experts + e] = histogram[e];
  }
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&a.scratch.tiles_done[source], 1) + 1 == tiles;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) a.scratch.tiles_done[source] = 0;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t sum = 0;
    for (int tile = 0; tile < tiles; tile += kBatch) {  // loads first: each alone would wait for memory
      int32_t* cell = table + static_cast<int64_t>(tile) * experts + e;
      int32_t here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) here[i] = tile + i < tiles ? cell[static_cast<int64_t>(i) * experts] : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile + i < tiles) cell[static_cast<int64_t>(i) * experts] = sum;
        sum += here[i];
      }
    }
    a.scratch.count[static_cast<int64_t>(source) * experts + e] = sum;
  }
}

// One block: a warp decides the moves in shared memory (a chain of small argmax, which more threads would only slow
// down), then all threads write alloc.
__global__ void __launch_bounds__(kTablesThreads) DecideMoves(const __grid_constant__ RankViewGpu v, const PlanArgs a) {
  ControlBlockGpu::PartState& part = State(v);
  if (part.live == 0) return;
  extern __shared__ int32_t shared[];
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
  for (int e = threadIdx.x; e < d.experts; e += blockDim.x) {
    int32_t total = 0;
    for (int r = 0; r < d.ranks; ++r) total += a.scratch.count[static_cast<int64_t>(r) * d.experts + e];
    totals[e] = total;
  }
  __syncthreads();
  const WarpTeam warp;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < d.ranks; r += kTablesThreads / 32) {
    const int32_t rows = warp.sum(d.epn(), [&](int i) { return totals[r * d.epn() + i]; });
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

// A block for each rank's groups, then a warp for each expert's prefixes.
__global__ void __launch_bounds__(kThreads) MakeTables(const __grid_constant__ RankViewGpu v, const PlanArgs a) {
  ControlBlockGpu::PartState& part = State(v);
  const DomainShape& d = v.shape;
  const int block = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const bool live = part.live != 0;
  if (block == 0 && thread == 0) {
    a.plan.ticket[0] = live ? part.ticket : -1;
    part.busy = 0;
  }
  if (!live) {  // safe for whoever uses it: no rows anywhere, and a ticket that every op refuses
    if (block != 0) return;
    for (int i = thread; i < d.groups(); i += kThreads) a.plan.group_sizes[i] = a.plan.group_rows[i] = 0;
    for (int i = thread; i < d.experts; i += kThreads) a.plan.slot_expert[i] = -1;
    for (int i = thread; i < d.ranks; i += kThreads) a.plan.home_rows[i] = a.plan.rank_rows[i] = 0;
    return;
  }
  const PlanTables tables = a.scratch.tables(a.plan.slot_expert);
  if (block < d.ranks) {
    const bool mine = block == v.rank;
    const int32_t rows = BuildGroups(BlockTeam{}, d, tables, block, mine ? a.plan.group_sizes : nullptr,
                                     mine ? a.plan.group_rows : nullptr);
    if (thread == 0) a.plan.rank_rows[block] = rows;
    return;
  }
  const int expert = (block - d.ranks) * kWarps + thread / 32;
  if (expert < d.experts) BuildPrefixes(WarpTeam{}, d, tables, expert);
}

// Block (tile, source): the place of each id, in order. Of the own source all destinations are kept; of every source,
// the rows that this rank computes.
__global__ void __launch_bounds__(kThreads) PlaceRows(const __grid_constant__ RankViewGpu v, const PlanArgs a) {
  ControlBlockGpu::PartState& part = State(v);
  extern __shared__ int32_t shared[];
  const DomainShape& d = v.shape;
  const int source = static_cast<int>(blockIdx.y);
  const int64_t n = a.tokens * d.topk;
  const int64_t first = blockIdx.x * a.tile;
  const int count = static_cast<int>(min(a.tile, n - first));
  if (part.live == 0) {
    if (source != v.rank) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) a.plan.dst_rank[first + i] = a.plan.dst_row[first + i] = -1;
    return;
  }
  int32_t* my_row = shared;               // [tile] row on this rank, or -1
  int32_t* first_seen = my_row + a.tile;  // [E] rows of the source before this tile; -1: none of its rows matter here
  uint16_t* seen = reinterpret_cast<uint16_t*>(first_seen + d.experts);  // [warps, E]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const PlanTables t = a.scratch.tables(a.plan.slot_expert);
  const uint16_t* ids = v.ids(v.rank, part.epoch & 1, source) + first;
  const int32_t* before = a.scratch.tile_counts + (static_cast<int64_t>(source) * gridDim.x + blockIdx.x) * d.experts;

  // Warps own consecutive ids, so that ranks among equal ids follow id order.
  constexpr int per_warp = 32 * kRounds;
  const int begin = min(warp * per_warp, count);
  const int end = min(begin + per_warp, count);
  for (int i = threadIdx.x; i < kWarps * d.experts / 2; i += blockDim.x) reinterpret_cast<uint32_t*>(seen)[i] = 0;
  for (int e = threadIdx.x; e < d.experts; e += blockDim.x) {
    const bool hosted = t.group_row[static_cast<int64_t>(e) * d.ranks + v.rank] >= 0;
    first_seen[e] = source == v.rank || hosted ? before[e] : -1;
  }
  __syncthreads();
  uint16_t* mine = seen + warp * d.experts;
  uint16_t id[kRounds];
  uint32_t peers[kRounds];  // lanes with the same id
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    const int i = begin + 32 * u + lane;
    id[u] = i < end ? ids[i] : kUnrouted;
  }
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    peers[u] = __match_any_sync(0xffffffffu, id[u]);
    const bool leads = lane == __ffs(static_cast<int>(peers[u])) - 1;
    if (id[u] != kUnrouted && leads) mine[id[u]] += static_cast<uint16_t>(__popc(peers[u]));
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < d.experts; e += blockDim.x) {
    uint16_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const uint16_t here = seen[w * d.experts + e];
      seen[w * d.experts + e] = sum;
      sum = static_cast<uint16_t>(sum + here);
    }
  }
  __syncthreads();
  int32_t index[kRounds];  // among the source's rows of the expert; -1: not looked for here
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    index[u] = -1;
    if (id[u] != kUnrouted && first_seen[id[u]] >= 0) {
      index[u] = first_seen[id[u]] + mine[id[u]] + __popc(peers[u] & ((1u << lane) - 1u));
    }
    __syncwarp();
    const bool leads = lane == __ffs(static_cast<int>(peers[u])) - 1;
    if (id[u] != kUnrouted && leads) mine[id[u]] += static_cast<uint16_t>(__popc(peers[u]));
    __syncwarp();
  }
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    const int i = begin + 32 * u + lane;
    if (i >= end) continue;
    const Place place = index[u] >= 0 ? Locate(d, t, id[u], source, index[u]) : Place{-1, -1};
    my_row[i] = place.rank == v.rank ? place.row : -1;
    if (source == v.rank) {
      a.plan.dst_rank[first + i] = place.rank;
      a.plan.dst_row[first + i] = place.row;
    }
  }
  __syncthreads();
  // A token's rows on this rank, in k order: the first is the primary, each names the next.
  for (int token = threadIdx.x; token * d.topk < count; token += blockDim.x) {
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

}  // namespace

int64_t PlanTile(const DomainShape& d) { return static_cast<int64_t>(kTile / d.topk) * d.topk; }

int64_t PlanTiles(const DomainShape& d, int64_t tokens) { return (tokens * d.topk + PlanTile(d) - 1) / PlanTile(d); }

cudaError_t LaunchPlanPush(const RankViewGpu& v, const PlanArgs& a, int blocks, cudaStream_t stream) {
  PushIds<<<blocks, kPushThreads, 0, stream>>>(v, a);
  return cudaGetLastError();
}

cudaError_t LaunchPlanPlace(const RankViewGpu& v, const PlanArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(PlanTiles(v.shape, a.tokens)), static_cast<unsigned>(v.shape.ranks));
  const size_t histogram = static_cast<size_t>(v.shape.experts) * 4;
  const size_t place = (static_cast<size_t>(a.tile) + static_cast<size_t>(v.shape.experts)) * 4 +
                       static_cast<size_t>(v.shape.experts) * kWarps * 2;
  CountTiles<<<grid, kThreads, histogram, stream>>>(v, a);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  const size_t decide = (static_cast<size_t>(v.shape.experts) * 2 + static_cast<size_t>(v.shape.ranks) * 5) * 4 +
                        static_cast<size_t>(MaxMoves(v.shape)) * sizeof(Move);
  DecideMoves<<<1, kTablesThreads, decide, stream>>>(v, a);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  MakeTables<<<v.shape.ranks + (v.shape.experts + kWarps - 1) / kWarps, kThreads, 0, stream>>>(v, a);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  if (place > 48 * 1024) {
    cudaError_t e =
        cudaFuncSetAttribute(PlaceRows, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(place));
    if (e != cudaSuccess) return e;
  }
  PlaceRows<<<grid, kThreads, place, stream>>>(v, a);
  return cudaGetLastError();
}

}  // namespace moonep
