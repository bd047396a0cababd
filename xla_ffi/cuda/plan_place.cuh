// The rows of a plan: where each id of a tile goes, and which ids this rank's rows hold. A block per tile and source.
#pragma once

#include "xla_ffi/cuda/plan.cuh"

namespace moonep::plan {

constexpr int kFewIds = 256;  // for one warp in order; more are worth the work of joining the counts of many

inline size_t PlaceShared(const DomainShape& d) {
  const size_t experts = static_cast<size_t>(d.experts);
  return (kTileIds + experts * 2) * 4 + kTileIds * 2 + experts * kWarps * 6;
}

// The place of each id of a tile, in order. Of the own source all destinations are kept; of every source, the rows that
// this rank computes.
__device__ inline void PlaceTile(const RankViewGpu& v, const PlanArgs& a, int64_t tile, int source, int32_t* shared) {
  ControlBlockGpu::PartState& part = State(v);
  const DomainShape& d = v.shape;
  const int64_t n = a.tokens * d.topk;
  const int64_t first = tile * a.tile;
  const int count = static_cast<int>(min(a.tile, n - first));
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const bool own = source == v.rank;
  const auto keep = [&](int i, Place place) {
    if (!own) return;
    a.plan.dst_rank[first + i] = place.rank;
    a.plan.dst_row[first + i] = place.row;
  };
  if (part.live == 0) {
    for (int i = thread; i < count; i += kThreads) keep(i, {-1, -1});
    return;
  }
  int32_t* my_row = shared;                                         // [tile] at first the id; then the row here, or -1
  uint16_t* list = reinterpret_cast<uint16_t*>(my_row + kTileIds);  // [tile] places in the tile of ids that matter here
  int32_t* before = my_row + kTileIds + kTileIds / 2;  // [E] rows of the source before this tile; -1: none matters
  int32_t* run = before + d.experts;                   // [E] RunOf
  // [warps, E] lanes of the warp that hold the expert now; and its rows among the warp's ids so far. (A match
  // instruction would do the first without memory, and takes thirty times as long.)
  uint32_t* lanes = reinterpret_cast<uint32_t*>(run + d.experts);
  __shared__ int32_t of_warp[kWarps];  // ids of the list
  const PlanTables t = Tables(v, a);
  const int mine = thread * kIdsOfThread;
  uint2 packed{0xffffffffu, 0xffffffffu};
  if (mine < count) packed = *reinterpret_cast<const uint2*>(v.ids(v.rank, part.epoch & 1, source) + first + mine);
  __syncthreads();  // the tile before may still use the shared memory
#pragma unroll 1
  for (int e = thread; e < d.experts; e += kThreads) {
    const int32_t r = a.scratch.runs[source * d.experts + e];
    const int32_t b = a.scratch.tile_prefix[(source * a.tiles + tile) * d.experts + e];
    const bool matters =
        own || (r >= 0 ? RunPlace(r, 0).rank == v.rank : t.alloc[static_cast<int64_t>(e) * d.ranks + v.rank] > 0);
    before[e] = matters ? b : -1;
    run[e] = r;
  }
  __syncthreads();

  // The list, in order.
  const int32_t ids[kIdsOfThread] = {static_cast<int32_t>(packed.x & 0xffff), static_cast<int32_t>(packed.x >> 16),
                                     static_cast<int32_t>(packed.y & 0xffff), static_cast<int32_t>(packed.y >> 16)};
  uint32_t matter = 0;
#pragma unroll
  for (int j = 0; j < kIdsOfThread; ++j) {
    if (mine + j >= count) break;
    const bool matters = ids[j] != kUnrouted && before[ids[j]] >= 0;
    matter |= matters ? 1u << j : 0u;
    my_row[mine + j] = matters ? ids[j] : -1;
    if (!matters) keep(mine + j, {-1, -1});
  }
  int32_t at = __popc(matter);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t left = __shfl_up_sync(kAllLanes, at, offset);
    if (lane >= offset) at += left;
  }
  if (lane == 31) of_warp[warp] = at;
  at -= __popc(matter);
  __syncthreads();
  int length = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) at += of_warp[w];
    length += of_warp[w];
  }
  for (; matter != 0; matter &= matter - 1)
    list[at++] = static_cast<uint16_t>(mine + __ffs(static_cast<int>(matter)) - 1);

  // Warps own consecutive parts of it, so that ranks among equal ids follow id order. First every warp counts, then it
  // places.
  const int warps = length <= kFewIds ? 1 : kWarps;
  uint16_t* seen = reinterpret_cast<uint16_t*>(lanes + warps * d.experts);
  for (int i = thread; i < warps * d.experts; i += kThreads) {
    lanes[i] = 0;
    seen[i] = 0;
  }
  __syncthreads();
  const int share = (length + 32 * warps - 1) / (32 * warps) * 32;
  const int end = warp < warps ? min((warp + 1) * share, length) : 0;
  uint32_t* holders = lanes + warp * d.experts;
  uint16_t* so_far = seen + warp * d.experts;
#pragma unroll 1
  for (int pass = warps == 1 ? 1 : 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int base = warp * share; base < end; base += 32) {
      const bool listed = base + lane < end;
      const int i = listed ? list[base + lane] : 0;
      const int32_t id = listed ? my_row[i] : 0;
      if (listed) atomicOr(&holders[id], 1u << lane);
      __syncwarp();
      const uint32_t peers = listed ? holders[id] : 0;  // lanes with the same id
      if (pass == 1 && listed) {
        const int32_t index = before[id] + so_far[id] + __popc(peers & ((1u << lane) - 1u));
        const Place place = run[id] >= 0 ? RunPlace(run[id], index) : Locate(d, t, id, source, index);
        my_row[i] = place.rank == v.rank ? place.row : -1;
        keep(i, place);
      }
      __syncwarp();
      if (lane == __ffs(static_cast<int>(peers)) - 1) {
        holders[id] = 0;
        so_far[id] = static_cast<uint16_t>(so_far[id] + __popc(peers));
      }
      __syncwarp();
    }
    __syncthreads();
    if (pass == 1) break;
#pragma unroll 1
    for (int e = thread; e < d.experts; e += kThreads) {
      uint16_t sum = 0;
#pragma unroll 1
      for (int w = 0; w < kWarps; w += kBatch) {
        uint16_t here[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) here[i] = seen[(w + i) * d.experts + e];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          seen[(w + i) * d.experts + e] = sum;
          sum = static_cast<uint16_t>(sum + here[i]);
        }
      }
    }
    __syncthreads();
  }
  // A token's rows on this rank, in k order: the first is the primary, each names the next.
  int32_t primaries = 0;
  for (int token = thread; token * d.topk < count; token += kThreads) {
    int32_t primary = -1;
    int32_t last = -1;
#pragma unroll 1
    for (int k = 0; k < d.topk; ++k) {
      const int32_t row = my_row[token * d.topk + k];
      if (row < 0) continue;
      a.plan.src[row] = static_cast<int32_t>(source * n + first + token * d.topk + k);
      if (primary < 0) {
        primary = row;
        ++primaries;
      }
      a.plan.primary[row] = primary;
      if (last >= 0) a.plan.next[last] = row;
      last = row;
    }
  }
  if (own) return;
  primaries = __reduce_add_sync(kAllLanes, primaries);
  if (lane == 0 && primaries != 0) Count(&v.own().counters.link_rows, static_cast<uint64_t>(primaries));
}

}  // namespace moonep::plan
