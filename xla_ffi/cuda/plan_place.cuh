// The rows of a plan: where each id of a tile goes, and which ids this rank's rows hold. A block per tile and source.
#pragma once

#include "xla_ffi/cuda/plan.cuh"

namespace moonep::plan {

inline size_t PlaceShared(const DomainShape& d, int64_t tile) {
  return (static_cast<size_t>(AlignUp(tile, kIdsOfThread)) + static_cast<size_t>(d.experts) * 2) * 4 +
         static_cast<size_t>(d.experts) * kWarps * 6;
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
  int32_t* my_row = shared;           // [tile] row on this rank, or -1
  int32_t* before = my_row + a.tile;  // [E] rows of the source before this tile; -1: none of its rows matter here
  int32_t* run = before + d.experts;  // [E] RunOf
  // [warps, E] lanes of the warp that hold the expert now; and its rows among the warp's ids so far. (A match
  // instruction would do the first without memory, and takes thirty times as long.)
  uint32_t* lanes = reinterpret_cast<uint32_t*>(run + d.experts);
  uint16_t* seen = reinterpret_cast<uint16_t*>(lanes + kWarps * d.experts);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const PlanTables t = Tables(v, a);
  const uint16_t* ids = v.ids(v.rank, part.epoch & 1, source) + first;

  __syncthreads();  // the tile before may still use the shared memory
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * kIdsOfThread; i < count; i += kThreads * kIdsOfThread) {
    const uint2 packed = *reinterpret_cast<const uint2*>(ids + i);
    const int4 unpacked{static_cast<int32_t>(packed.x & 0xffff), static_cast<int32_t>(packed.x >> 16),
                        static_cast<int32_t>(packed.y & 0xffff), static_cast<int32_t>(packed.y >> 16)};
    *reinterpret_cast<int4*>(my_row + i) = unpacked;  // ids at first
  }
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * d.experts * 3 / 2; i += kThreads) lanes[i] = 0;  // and seen
  for (int e = static_cast<int>(threadIdx.x); e < d.experts; e += kThreads) {
    const int32_t r = a.scratch.runs[source * d.experts + e];
    const int32_t b = a.scratch.tile_prefix[(source * a.tiles + tile) * d.experts + e];
    const bool matters =
        own || (r >= 0 ? RunPlace(r, 0).rank == v.rank : t.alloc[static_cast<int64_t>(e) * d.ranks + v.rank] > 0);
    before[e] = matters ? b : -1;
    run[e] = r;
  }
  __syncthreads();

  // Warps own consecutive ids, so that ranks among equal ids follow id order. First every warp counts, then it places.
  const int of_warp = static_cast<int>((a.tile + kThreads - 1) / kThreads) * 32;
  const int end = min((warp + 1) * of_warp, count);
  uint32_t* holders = lanes + warp * d.experts;
  uint16_t* so_far = seen + warp * d.experts;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int base = warp * of_warp; base < end; base += 32) {
      const int i = base + lane;
      const int32_t id = i < end ? my_row[i] : kUnrouted;
      const bool routed = id != kUnrouted && before[id] >= 0;
      Place place{-1, -1};
      if (__any_sync(kAllLanes, routed)) {
        if (routed) atomicOr(&holders[id], 1u << lane);
        __syncwarp();
        const uint32_t peers = routed ? holders[id] : 0;  // lanes with the same id
        if (pass == 1 && routed) {
          const int32_t index = before[id] + so_far[id] + __popc(peers & ((1u << lane) - 1u));
          place = run[id] >= 0 ? RunPlace(run[id], index) : Locate(d, t, id, source, index);
        }
        __syncwarp();
        if (lane == __ffs(static_cast<int>(peers)) - 1) {
          holders[id] = 0;
          so_far[id] = static_cast<uint16_t>(so_far[id] + __popc(peers));
        }
        __syncwarp();
      }
      if (pass == 0 || i >= end) continue;
      my_row[i] = place.rank == v.rank ? place.row : -1;
      if (own) {
        a.plan.dst_rank[first + i] = place.rank;
        a.plan.dst_row[first + i] = place.row;
      }
    }
    __syncthreads();
    if (pass == 1) break;
    for (int e = static_cast<int>(threadIdx.x); e < d.experts; e += kThreads) {
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
  for (int token = static_cast<int>(threadIdx.x); token * d.topk < count; token += kThreads) {
    int32_t primary = -1;
    int32_t last = -1;
#pragma unroll 1
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

}  // namespace moonep::plan
