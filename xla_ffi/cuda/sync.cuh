// How ranks wait for each other on the device: sync words, limits, the error record, and the tail of a data kernel.
//
// Rules: a block of a grid with more than one block never waits for a peer, so nothing here needs co-residency; data
// kernels publish in their tail, and kernels of one block wait. The host never takes part: epochs, limits and
// first-call marks live in device memory, so a captured graph replays correctly.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/chunk.h"

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

}  // namespace moonep
