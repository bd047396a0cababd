// What the parts of the plan kernels share: block size, the part's state, the tables of the call.
#pragma once

#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/teams.cuh"

namespace moonep::plan {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kIdsOfThread = kTileIds / kThreads;
static_assert(kIdsOfThread == 4, "a thread takes all its ids at once");
constexpr int kBatch = 8;  // loads under way at a time
constexpr uint16_t kUnrouted = 0xffff;

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v) {
  return v.own().part[static_cast<int>(Part::kIds)];
}

__device__ inline PlanTables Tables(const RankViewGpu& v, const PlanArgs& a) {
  const PlanScratch& s = a.scratch;
  const int32_t* count = v.counts(v.rank, State(v).epoch & 1, 0);
  return {count, s.alloc, s.src_prefix, s.dst_prefix, s.group_row, a.plan.slot_expert};
}

// Ranks in turn, from this one on.
__device__ inline int32_t Peer(const RankViewGpu& v, int32_t turn) {
  const int32_t r = v.rank + turn;
  return r < v.shape.ranks ? r : r - v.shape.ranks;
}

}  // namespace moonep::plan
