// How ranks wait for each other on the device: sync words, limits, the error record, and the tail of a data kernel.
//
// Rules: only a grid of one block or of one cluster waits for a peer - the hardware makes such a grid resident as a
// whole, so nothing here depends on what else is on the device; data kernels of larger grids publish in their tail. The
// host never takes part: epochs, limits and first-call marks live in device memory, so a captured graph replays
// correctly.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "xla_ffi/cuda/chunk.h"
#include "xla_ffi/cuda/launch.cuh"

namespace moonep {

__device__ inline uint64_t LoadAcquireSys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// For polling: an acquire load would drop the L1 cache at every turn.
__device__ inline uint64_t LoadRelaxedSys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void StoreReleaseSys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ inline uint64_t WallClockNs() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ inline uint32_t MixTag(uint32_t site_hash, int32_t ticket) {
  uint32_t h = site_hash ^ (static_cast<uint32_t>(ticket) * 0x9e3779b1u);
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  return h ^ (h >> 13);
}
__device__ inline uint64_t PackWord(uint32_t epoch, uint32_t tag) { return static_cast<uint64_t>(epoch) << 32 | tag; }

// Called by one thread. The first record wins: peers are told who has it, and the host last.
__device__ inline void RaiseError(const RankViewGpu& v, const ErrorRecord& record) {
  ControlBlockGpu& own = v.own();
  const uint64_t mine = static_cast<uint64_t>(v.rank) + 1;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&own.error[v.rank].value), 0ull, mine) != 0ull) return;
  own.record = record;
  *v.host_record = record;
  v.host_record->code = 0;
  for (int r = 0; r < v.shape.ranks; ++r) {
    if (r != v.rank) StoreReleaseSys(&v.control(r).error[v.rank].value, mine);
  }
  __threadfence_system();  // the host must not see the code before the rest
  *reinterpret_cast<volatile uint32_t*>(&v.host_record->code) = record.code;
}

// A peer has an error: take over its record, so that every rank reports the origin. Called by one thread.
__device__ inline void AdoptError(const RankViewGpu& v, int32_t peer) {
  LoadAcquireSys(&v.own().error[peer].value);  // the peer wrote its record before this word
  RaiseError(v, v.control(peer).record);
}

// One block; waits until every rank's word in `words` reaches `epoch` (and, if `tag` is given, carries it).
// Returns true on all threads when all came in time. Needs at least shape.ranks threads.
__device__ inline bool WaitForAll(const RankViewGpu& v, const SyncWord* words, uint32_t epoch, bool check_tag,
                                  ControlBlockGpu::PartState& part) {
  __shared__ uint64_t missing[2];
  __shared__ int32_t other;   // a rank that came with another call
  __shared__ int32_t failed;  // a rank with an error
  const int r = static_cast<int>(threadIdx.x);
  if (r == 0) {
    missing[0] = missing[1] = 0;
    other = failed = -1;
  }
  __syncthreads();
  ControlBlockGpu& own = v.own();
  if (r < v.shape.ranks) {
    const bool first = own.seen[part.tag % 1024] != part.tag;
    const uint64_t limit = first ? own.first_limit_ns : own.limit_ns;
    const uint64_t start = WallClockNs();
    for (uint32_t turn = 0;; ++turn) {
      const uint64_t word = LoadRelaxedSys(&words[r].value);
      const uint32_t got = static_cast<uint32_t>(word >> 32);
      if (static_cast<int32_t>(got - epoch) >= 0) {
        LoadAcquireSys(&words[r].value);  // what the peer wrote before it is now visible to later kernels
        if (check_tag && (got != epoch || static_cast<uint32_t>(word) != part.tag)) {
          atomicExch(&other, r);
          atomicOr(reinterpret_cast<unsigned long long*>(&missing[r / 64]), 1ull << (r % 64));
        }
        break;
      }
      if (turn % 64 == 63) {
        if (LoadRelaxedSys(&own.error[r].value) != 0) {
          atomicExch(&failed, r);
          break;
        }
        if (WallClockNs() - start > limit) {
          atomicOr(reinterpret_cast<unsigned long long*>(&missing[r / 64]), 1ull << (r % 64));
          break;
        }
      }
    }
  }
  __syncthreads();
  const bool complete = missing[0] == 0 && missing[1] == 0 && failed < 0;
  if (r == 0 && !complete) {
    if (failed >= 0) {
      AdoptError(v, failed);
    } else {
      RaiseError(v, {other >= 0 ? ErrorRecord::kMismatch : ErrorRecord::kTimeout,
                     part.kind,
                     part.ticket,
                     v.rank,
                     {missing[0], missing[1]},
                     own.limit_ns});
    }
  }
  if (r == 0 && complete && check_tag) own.seen[part.tag % 1024] = part.tag;
  return complete;
}

// A rank whose error word is set in this rank's control block, or -1. Called by a whole block of at least kMaxRanks
// threads.
__device__ inline int32_t FailedRank(const RankViewGpu& v) {
  __shared__ int32_t failed;
  __syncthreads();  // the call before may still read it
  if (threadIdx.x == 0) failed = -1;
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < v.shape.ranks && LoadRelaxedSys(&v.own().error[r].value) != 0) failed = r;  // any of them
  __syncthreads();
  return failed;
}

// Opens a call: its epoch, ticket and tag. Called by a whole block; `failed` comes from FailedRank. Returns whether the
// call may touch peers.
__device__ inline bool OpenCall(const RankViewGpu& v, Part which, const CallId& id, int32_t failed) {
  ControlBlockGpu::PartState& part = v.own().part[static_cast<int>(which)];
  __shared__ bool live;
  if (threadIdx.x == 0) {
    part.epoch += 1;
    part.kind = id.kind;
    // A plan's ticket is its epoch, without the sign bit: -1 says "poisoned".
    part.ticket = id.ticket != nullptr ? *id.ticket : static_cast<int32_t>(part.epoch & 0x7fffffffu);
    part.tag = MixTag(id.site_hash, id.ticket != nullptr ? part.ticket : 0);
    if (failed >= 0) {
      AdoptError(v, failed);
    } else if (part.busy != 0) {
      RaiseError(v, {ErrorRecord::kBusy, part.kind, part.ticket, v.rank, {0, 0}, 0});
    }
    live = failed < 0 && part.busy == 0 && part.ticket >= 0;
    part.busy = 1;
    part.live = live;
  }
  __syncthreads();
  return live;
}

// Opens a call and waits for its credits: a receiver may still copy out what was sent in the epoch before.
__device__ inline void BeginCall(const RankViewGpu& v, Part which, const CallId& id) {
  ControlBlockGpu& own = v.own();
  ControlBlockGpu::PartState& part = own.part[static_cast<int>(which)];
  const bool live = OpenCall(v, which, id, FailedRank(v));
  if (!live) return;
  const bool ok = WaitForAll(v, own.consumed[static_cast<int>(which)], part.epoch - 1, false, part);
  if (threadIdx.x == 0) part.live = ok;
}

// Waits for the data of all ranks; called by a whole block.
__device__ inline void WaitArrived(const RankViewGpu& v, Part which) {
  ControlBlockGpu& own = v.own();
  ControlBlockGpu::PartState& part = own.part[static_cast<int>(which)];
  if (part.live == 0) return;
  const bool ok = WaitForAll(v, own.arrived[static_cast<int>(which)], part.epoch, true, part);
  if (threadIdx.x == 0 && !ok) part.live = 0;
}

// The end of a data kernel. The last block to come here calls `publish` (all threads), after all writes of all blocks.
// Writes by bulk copies must have been waited for (complete, not read-only) by the threads that issued them.
template <class F>
__device__ inline void Tail(ControlBlockGpu::PartState& part, F publish) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // this block's writes, seen by the block that publishes ...
    last = atomicAdd(&part.blocks, 1u) + 1 == gridDim.x;
    if (last) part.blocks = 0;
    __threadfence();  // ... whose threads see them past the barrier below; their releases are cumulative
  }
  __syncthreads();
  if (last) publish();
}

// Called by a whole block: a thread per peer, since each release waits for the writes before it.
__device__ inline void PublishArrived(const RankViewGpu& v, Part which, const ControlBlockGpu::PartState& part) {
  const uint64_t word = PackWord(part.epoch, part.tag);
  for (int r = static_cast<int>(threadIdx.x); r < v.shape.ranks; r += static_cast<int>(blockDim.x)) {
    StoreReleaseSys(&v.control(r).arrived[static_cast<int>(which)][v.rank].value, word);
  }
}

// The same for credits. Ends the call: `live` false gives none, since nothing was sent.
__device__ inline void PublishConsumed(const RankViewGpu& v, Part which, ControlBlockGpu::PartState& part) {
  const uint64_t word = PackWord(part.epoch, part.tag);
  for (int r = static_cast<int>(threadIdx.x); part.live != 0 && r < v.shape.ranks; r += static_cast<int>(blockDim.x)) {
    StoreReleaseSys(&v.control(r).consumed[static_cast<int>(which)][v.rank].value, word);
  }
  if (threadIdx.x == 0) part.busy = 0;
}

// A whole call in a kernel of one cluster, for calls of so few bytes that launches would cost more than the work. The
// barrier of the cluster orders memory among its blocks, so what one block acquires from a peer the others may read,
// and what one block releases to a peer covers the writes of the others.
template <class Send, class Local>
__device__ inline void WholeCall(const RankViewGpu& v, Part which, const CallId& id, Send send, Local local) {
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  ControlBlockGpu::PartState& part = v.own().part[static_cast<int>(which)];
  const bool leads = cluster.block_rank() == 0;
  if (leads) BeginCall(v, which, id);
  cluster.sync();
  const bool live = part.live != 0;
  if (live) send();
  cluster.sync();
  if (leads && live) {
    PublishArrived(v, which, part);
    WaitArrived(v, which);
  }
  cluster.sync();
  local();
  cluster.sync();
  if (leads) PublishConsumed(v, which, part);
}

}  // namespace moonep
