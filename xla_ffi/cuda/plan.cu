// plan: ids and counts of all ranks by one exchange, then tables and the place of every row.
//
// Every rank pushes its ids to all ranks and then computes everything itself; no scattered record crosses the link.
// What is pushed is double-buffered by the parity of the epoch: a rank pushes epoch n+2 only after it has passed the
// wait of n+1, which every rank enters after it is done with n. So plan needs no credits.
//
// PlanSend (a block per tile of ids) -> PlanTables (one cluster: waits, then one block decides the moves) -> PlanPlace
// (a block per tile and source). Few ids: PlanWhole, all of it in one cluster.
#include <algorithm>

#include "xla_ffi/cuda/launch.cuh"
#include "xla_ffi/cuda/plan.cuh"
#include "xla_ffi/cuda/plan_place.cuh"
#include "xla_ffi/cuda/plan_tables.cuh"

namespace moonep {
namespace {

using namespace plan;

constexpr int kPeersOfBlock = 8;  // that a block pushes its tile to

// Pushes a tile's ids, and how many of them name each expert, to some peers, in turn from this rank on; with the first
// of them, adds to the rank's counts. histogram: [E] shared.
__device__ inline void PushTile(const RankViewGpu& v, const PlanArgs& a, int64_t tile, int first_turn, int turns,
                                int32_t* histogram) {
  const int experts = v.shape.experts;
  const int64_t first = tile * a.tile;
  const int count = static_cast<int>(min(a.tile, a.tokens * v.shape.topk - first));
  const int end_turn = min(first_turn + turns, v.shape.ranks);
  const Opening from{State(v).epoch, State(v).busy, 0};
  const uint32_t parity = (from.epoch + 1) & 1;  // the call is opened once all of its tiles are out
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) histogram[e] = 0;
  // The block that ends the push looks again, after all others.
  if (__syncthreads_or(ErrorOfPeer(v) != 0 || from.busy != 0) != 0) return;
  const int i = static_cast<int>(threadIdx.x) * kIdsOfThread;
  if (i < count) {
    uint16_t packed[kIdsOfThread];
#pragma unroll
    for (int j = 0; j < kIdsOfThread; ++j) {
      const int32_t id = i + j < count ? a.ids[first + i + j] : -1;
      packed[j] = id >= 0 && id < experts ? static_cast<uint16_t>(id) : kUnrouted;
    }
    // One 8-byte store to each rank. The buffer holds whole stores, so the last one may be padded.
    const uint2 store{static_cast<uint32_t>(packed[1]) << 16 | packed[0],
                      static_cast<uint32_t>(packed[3]) << 16 | packed[2]};
#pragma unroll 1
    for (int p = first_turn; p < end_turn; ++p) {
      *reinterpret_cast<uint2*>(v.ids(Peer(v, p), parity, v.rank) + first + i) = store;
    }
#pragma unroll
    for (int j = 0; j < kIdsOfThread; ++j) {
      if (packed[j] != kUnrouted) atomicAdd(&histogram[packed[j]], 1);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    const int32_t here = histogram[e];
    if (here != 0 && first_turn == 0) atomicAdd(&a.scratch.counts[e], here);
#pragma unroll 1
    for (int p = first_turn; p < end_turn; ++p) {
      v.tile_counts(Peer(v, p), parity, v.rank)[tile * experts + e] = static_cast<uint16_t>(here);
    }
  }
  __syncthreads();  // the next tile clears the histogram
}

// After all tiles: opens the call, pushes the counts and publishes. One block.
__device__ inline CallState EndPush(const RankViewGpu& v, const PlanArgs& a, const CallId& id) {
  Opening from = ReadOpening(v, Part::kIds, id);
  const int32_t failed = Agree(v, ErrorOfPeer(v), &from);
  const CallState call = DecideCall(v, id, failed, from);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < v.shape.experts; e += kThreads) {
    const int32_t count = __ldcg(&a.scratch.counts[e]);  // other blocks added to it in the L2 cache
    a.scratch.counts[e] = 0;
#pragma unroll 1
    for (int p = 0; call.live != 0 && p < v.shape.ranks; ++p) {
      v.counts(Peer(v, p), call.epoch & 1, v.rank)[e] = count;
    }
  }
  RecordCall(v, Part::kIds, call);
  __syncthreads();  // the releases cover the counts that other threads stored
  if (call.live != 0) PublishArrived(v, Part::kIds, call);
  return call;
}

// What later kernels write here and there: nothing is moved, and no row holds a token.
__device__ inline void Blank(const RankViewGpu& v, const PlanArgs& a) {
  const int64_t cells = v.shape.experts * v.shape.ranks;
  const int64_t workers = gridDim.x * gridDim.y * kThreads;
  const int64_t worker = (blockIdx.y * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t i = worker; i < max(cells, a.rows); i += workers) {
    if (i < cells) a.scratch.alloc[i] = 0;
    if (i < a.rows) a.plan.src[i] = a.plan.primary[i] = a.plan.next[i] = -1;
  }
}

__global__ void __launch_bounds__(kThreads)
    PlanSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a,
             const __grid_constant__ CallId id) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  LetNextStart();
  PushTile(v, a, blockIdx.x, static_cast<int>(blockIdx.y) * kPeersOfBlock, kPeersOfBlock, shared);
  Blank(v, a);
  Tail(State(v), gridDim.x * gridDim.y, [&] { EndPush(v, a, id); });
}

__global__ void __launch_bounds__(kThreads)
    PlanTablesKernel(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  const auto cluster = cooperative_groups::this_cluster();
  uint64_t waited_ns = 0;
  if (cluster.block_rank() == 0) waited_ns = WaitArrived(v, Part::kIds);
  cluster.sync();
  LetNextStart();
  MakeTables(v, a, shared, waited_ns);
}

__global__ void __launch_bounds__(kThreads, 3)
    PlanPlace(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  // Tiles of this rank first: they take longest.
  PlaceTile(v, a, blockIdx.x, Peer(v, static_cast<int>(blockIdx.y)), shared);
}

__global__ void __launch_bounds__(kThreads)
    PlanWhole(const __grid_constant__ RankViewGpu v, const __grid_constant__ PlanArgs a,
              const __grid_constant__ CallId id) {
  extern __shared__ int32_t shared[];
  StreamTurn();
  const auto cluster = cooperative_groups::this_cluster();
  const int block = static_cast<int>(blockIdx.x);
  const int tiles = static_cast<int>(a.tiles);
  for (int tile = block; tile < tiles; tile += kClusterBlocks) PushTile(v, a, tile, 0, v.shape.ranks, shared);
  Blank(v, a);
  cluster.sync();
  uint64_t waited_ns = 0;
  if (block == 0) {
    const CallState call = EndPush(v, a, id);
    if (!WaitArrived(v, Part::kIds, call, &waited_ns) && threadIdx.x == 0) State(v).live = 0;
  }
  cluster.sync();
  MakeTables(v, a, shared, waited_ns);
  cluster.sync();
  for (int item = block; item < tiles * v.shape.ranks; item += kClusterBlocks) {
    PlaceTile(v, a, item % tiles, item / tiles, shared);
  }
}

size_t PushShared(const DomainShape& d) { return static_cast<size_t>(d.experts) * 4; }

}  // namespace

bool PlanIsSmall(const DomainShape& d, int64_t tokens) { return PlanTiles(d, tokens) * d.ranks <= 2 * kClusterBlocks; }

cudaError_t LaunchPlanWhole(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream) {
  const size_t shared = std::max(TablesShared(v.shape), PlaceShared(v.shape));
  return LaunchKernel(PlanWhole, {kClusterBlocks, kThreads, shared, kClusterBlocks}, stream, v, a, id);
}

cudaError_t LaunchPlanSend(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.tiles),
                  static_cast<unsigned>((v.shape.ranks + kPeersOfBlock - 1) / kPeersOfBlock));
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
