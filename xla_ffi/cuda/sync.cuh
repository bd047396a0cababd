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

// Adds to a counter of ep.stats(). The result is not used, so nobody waits for it; but a barrier of a cluster or a
// release that follows does. So it stands beside other stores, or at a kernel's end. Called by one thread.
__device__ inline void Count(uint64_t* counter, uint64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
}
__device__ inline void CountWait(const RankViewGpu& v, int32_t kind, uint64_t ns) {
  if (ns != 0) Count(&v.own().counters.wait_ns[kind], ns);
}

// Called by one thread. The first record wins: peers are told who has it, and the host last.
__device__ inline void RaiseError(const RankViewGpu& v, const ErrorRecord& record) {
  ControlBlockGpu& own = v.own();
  const uint64_t mine = static_cast<uint64_t>(v.rank) + 1;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&own.error[v.rank].value), 0ull, mine) != 0ull) return;
  own.record = record;
  ErrorRecord told = record;
  told.code = 0;
  *v.host_record = told;
  for (int r = 0; r < v.shape.ranks; ++r) {
    if (r != v.rank) StoreReleaseSys(&v.control(r).error[v.rank].value, mine);
  }
  __threadfence_system();  // the host must not see the code before the rest
  *reinterpret_cast<volatile uint32_t*>(&v.host_record->code) = own.record.code;
}

// What its kernels must know of a call.
struct CallState {
  uint32_t epoch;
  uint32_t tag;
  uint32_t site;
  uint32_t live;
  int32_t kind;
  int32_t ticket;
  uint32_t counts;     // CallId's
  uint32_t ahead;      // rounds of this call that follow the one being waited for: a peer may be there already
  uint64_t waited_ns;  // for credits; known to the first thread
};
__device__ inline CallState StateOf(const ControlBlockGpu::PartState& part) {
  return {part.epoch, part.tag, part.site, part.live, part.kind, part.ticket, 0, 0, 0};
}

// A peer has an error: take over its record, so that every rank reports the origin. Called by one thread.
__device__ inline void AdoptError(const RankViewGpu& v, int32_t peer, const CallState& call) {
  LoadAcquireSys(&v.own().error[peer].value);  // the peer wrote its record before this word
  ErrorRecord record = v.control(peer).record;
  if (record.kind < 0) {  // it was in no call: the first to miss it says in which one
    record.kind = call.kind;
    record.ticket = call.ticket;
    record.rank = v.rank;
  }
  RaiseError(v, record);
}

// Turns of a poll that acquire, each at the price of the L1 cache, so that a word which is about to come needs no
// second trip to memory. Later turns only look.
constexpr uint32_t kEagerTurns = 64;
// Turns are 32 bits, which is a quarter of an hour. They start just below the end, so that every wait of more than some
// 15 ms shows what happens there.
constexpr uint32_t kFirstTurn = 0u - (1u << 16);

// What a wait expects of a word, besides its epoch.
enum class Expect {
  kAnyTag,
  kTag,
  // A plan gives no credits, so a peer may be one epoch ahead, and its word of this epoch gone. It has then met this
  // rank's tag of this epoch and found it equal to its own. (tests/model/gpu.pml checks it.)
  kTagOrNext,
};

// One block; waits until every rank's word in `words` reaches `epoch` with what is expected. Returns true on all
// threads when all came in time. *waited_ns is the time that it took, for the first thread; 0 if all were there at the
// first look. Needs at least shape.ranks threads.
__device__ inline bool WaitForAll(const RankViewGpu& v, const SyncWord* words, uint32_t epoch, Expect expect,
                                  const CallState& call, uint64_t* waited_ns) {
  __shared__ uint64_t missing[2];
  __shared__ uint64_t since;  // when a thread saw that its rank was not there; all look at about the same time
  __shared__ int32_t other;   // a rank that came with another call
  __shared__ int32_t failed;  // a rank with an error
  const int r = static_cast<int>(threadIdx.x);
  if (r == 0) {
    missing[0] = missing[1] = since = 0;
    other = failed = -1;
  }
  __syncthreads();
  ControlBlockGpu& own = v.own();
  if (r < v.shape.ranks) {
    uint64_t start = 0;  // not known yet
    for (uint32_t turn = kFirstTurn;; ++turn) {
      const bool eager = turn - kFirstTurn < kEagerTurns;
      const uint64_t word = eager ? LoadAcquireSys(&words[r].value) : LoadRelaxedSys(&words[r].value);
      const uint32_t got = static_cast<uint32_t>(word >> 32);
      if (static_cast<int32_t>(got - epoch) >= 0) {
        if (!eager) LoadAcquireSys(&words[r].value);  // what the peer wrote before it is now visible here and later
        const bool same = got - epoch <= call.ahead && static_cast<uint32_t>(word) == call.tag;
        const bool next = expect == Expect::kTagOrNext && got == epoch + 1;
        if (expect != Expect::kAnyTag && !same && !next) {
          atomicExch(&other, r);
          atomicOr(reinterpret_cast<unsigned long long*>(&missing[r / 64]), 1ull << (r % 64));
        }
        break;
      }
      if (start == 0) {
        start = WallClockNs();
        since = start;
      }
      if (turn % 64 == 63) {
        // Any peer's error ends the wait, also that of one whose word is here: it knows who is missing. In turn,
        // because few threads may be left.
        const int peer = static_cast<int>((r + turn / 64) % static_cast<uint32_t>(v.shape.ranks));
        if (LoadRelaxedSys(&own.error[peer].value) != 0) {
          atomicExch(&failed, peer);
          break;
        }
        const bool first = own.seen[call.site % 1024] != call.site;
        if (WallClockNs() - start > (first ? own.first_limit_ns : own.limit_ns)) {
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
      AdoptError(v, failed, call);
    } else {
      RaiseError(v, {other >= 0 ? ErrorRecord::kMismatch : ErrorRecord::kTimeout,
                     call.kind,
                     call.ticket,
                     v.rank,
                     {missing[0], missing[1]},
                     own.seen[call.site % 1024] != call.site ? own.first_limit_ns : own.limit_ns});
    }
  }
  if (r == 0 && complete && expect != Expect::kAnyTag) own.seen[call.site % 1024] = call.site;
  *waited_ns = r == 0 && since != 0 ? WallClockNs() - since : 0;
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

// What a call starts from: words of which nothing depends on another, so all are one trip to memory.
struct Opening {
  uint32_t epoch;  // of the call before
  uint32_t busy;
  int32_t ticket;
};
__device__ inline Opening ReadOpening(const RankViewGpu& v, Part which, const CallId& id) {
  const ControlBlockGpu::PartState& part = v.own().part[static_cast<int>(which)];
  return {part.epoch, part.busy, id.ticket != nullptr ? *id.ticket : 0};
}

// This thread's part of a look at the peers' error words.
__device__ inline uint64_t ErrorOfPeer(const RankViewGpu& v) {
  const int r = static_cast<int>(threadIdx.x);
  return r < v.shape.ranks ? LoadRelaxedSys(&v.own().error[r].value) : 0;
}

// Makes all threads agree on what each has read: FailedRank, and `from` busy or not, which a call that should not be in
// flight may change meanwhile. Most often nothing is wrong, and this is one barrier. Called by a whole block.
__device__ inline int32_t Agree(const RankViewGpu& v, uint64_t error, Opening* from) {
  if (__syncthreads_or(error != 0 || from->busy != 0) == 0) return -1;
  from->busy = __syncthreads_or(from->busy != 0) != 0 ? 1 : 0;
  return FailedRank(v);
}

// What a call is: its epoch, ticket and tag, and whether it is live, that is, may touch peers. `failed` comes from
// FailedRank. Called by a whole block; all threads get it.
__device__ inline CallState DecideCall(const RankViewGpu& v, const CallId& id, int32_t failed, const Opening& from) {
  CallState call;
  call.epoch = from.epoch + 1;
  call.tag = MixTag(id.site_hash, from.ticket);
  call.site = id.site_hash;
  call.kind = id.kind;
  // A plan's ticket is its epoch, without the sign bit: -1 says "poisoned".
  call.ticket = id.ticket != nullptr ? from.ticket : static_cast<int32_t>(call.epoch & 0x7fffffffu);
  call.live = failed < 0 && from.busy == 0 && call.ticket >= 0 ? 1 : 0;
  call.counts = id.counts;
  call.ahead = 0;
  call.waited_ns = 0;
  if (threadIdx.x == 0) {
    if (failed >= 0) {
      AdoptError(v, failed, call);
    } else if (from.busy != 0) {
      RaiseError(v, {ErrorRecord::kBusy, call.kind, call.ticket, v.rank, {0, 0}, 0});
    } else if (call.ticket < 0) {
      // A plan that failed left an error: this one comes from elsewhere. The peers would wait for what is not sent.
      RaiseError(v, {ErrorRecord::kPoisoned, call.kind, call.ticket, v.rank, {0, 0}, 0});
    }
  }
  return call;
}

// Writes it down for the kernels that follow. Called by a whole block, after all of it has read the opening.
__device__ inline void RecordCall(const RankViewGpu& v, Part which, const CallState& call) {
  if (threadIdx.x != 0) return;
  ControlBlockGpu::PartState& part = v.own().part[static_cast<int>(which)];
  part.epoch = call.epoch;
  part.tag = call.tag;
  part.site = call.site;
  part.live = call.live;
  part.busy = 1;
  part.kind = call.kind;
  part.ticket = call.ticket;
  if (call.counts != 0) Count(&v.own().counters.calls[call.kind], 1);
  CountWait(v, call.kind, call.waited_ns);
}

// Decides on a call and waits for its credits: a receiver may still copy out what was sent in the epoch before. The
// caller records it.
__device__ inline CallState BeginCall(const RankViewGpu& v, Part which, const CallId& id) {
  const ControlBlockGpu& own = v.own();
  const SyncWord* credits = own.consumed[static_cast<int>(which)];
  const int r = static_cast<int>(threadIdx.x);
  const bool peer = r < v.shape.ranks;
  // Most often nothing is wrong and all credits are here: then this is the only trip to memory.
  Opening from = ReadOpening(v, which, id);
  const uint64_t error = ErrorOfPeer(v);
  const uint64_t credit = peer ? LoadAcquireSys(&credits[r].value) : 0;
  const bool late = peer && static_cast<int32_t>(static_cast<uint32_t>(credit >> 32) - from.epoch) < 0;
  const int32_t failed = Agree(v, error, &from);
  CallState call = DecideCall(v, id, failed, from);
  const bool wait = __syncthreads_or(late) != 0;
  if (wait && call.live != 0 && !WaitForAll(v, credits, from.epoch, Expect::kAnyTag, call, &call.waited_ns)) {
    call.live = 0;
  }
  return call;
}

// Waits for the data of all ranks; called by a whole block. Returns whether it came; *waited_ns as in WaitForAll.
__device__ inline bool WaitArrived(const RankViewGpu& v, Part which, const CallState& call, uint64_t* waited_ns) {
  *waited_ns = 0;
  const Expect expect = which == Part::kIds ? Expect::kTagOrNext : Expect::kTag;
  return call.live != 0 && WaitForAll(v, v.own().arrived[static_cast<int>(which)], call.epoch, expect, call, waited_ns);
}
// The same of the call that is recorded, which has `more` rounds after this one; the next one is the next epoch.
// Returns *waited_ns, for the caller to count.
__device__ inline uint64_t WaitArrived(const RankViewGpu& v, Part which, uint32_t more = 0) {
  ControlBlockGpu::PartState& part = v.own().part[static_cast<int>(which)];
  CallState call = StateOf(part);
  call.ahead = more;
  uint64_t waited_ns;
  const bool ok = WaitArrived(v, which, call, &waited_ns);
  if (threadIdx.x == 0 && !ok) part.live = 0;
  if (threadIdx.x == 0 && more != 0) part.epoch = call.epoch + 1;
  return waited_ns;
}

// The end of a data kernel. The last of `blocks` blocks to come here calls `publish` (all threads), after all writes of
// all of them.
template <class F>
__device__ inline void Tail(ControlBlockGpu::PartState& part, uint32_t blocks, F publish) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // this block's writes, seen by the block that publishes ...
    last = atomicAdd(&part.blocks, 1u) + 1 == blocks;
    if (last) part.blocks = 0;
    __threadfence();  // ... whose threads see them past the barrier below; their releases are cumulative
  }
  __syncthreads();
  if (last) publish();
}

// Called by a whole block: a thread per peer, since each release waits for the writes before it.
__device__ inline void PublishArrived(const RankViewGpu& v, Part which, const CallState& call) {
  const uint64_t word = PackWord(call.epoch, call.tag);
  for (int r = static_cast<int>(threadIdx.x); r < v.shape.ranks; r += static_cast<int>(blockDim.x)) {
    StoreReleaseSys(&v.control(r).arrived[static_cast<int>(which)][v.rank].value, word);
  }
}
__device__ inline void PublishArrived(const RankViewGpu& v, Part which, const ControlBlockGpu::PartState& part) {
  PublishArrived(v, which, StateOf(part));
}

// The same for credits. Ends the call: one that is not live gives none, since nothing was sent.
__device__ inline void PublishConsumed(const RankViewGpu& v, Part which, const CallState& call) {
  const uint64_t word = PackWord(call.epoch, call.tag);
  for (int r = static_cast<int>(threadIdx.x); call.live != 0 && r < v.shape.ranks; r += static_cast<int>(blockDim.x)) {
    StoreReleaseSys(&v.control(r).consumed[static_cast<int>(which)][v.rank].value, word);
  }
  if (threadIdx.x == 0) v.own().part[static_cast<int>(which)].busy = 0;
}
__device__ inline void PublishConsumed(const RankViewGpu& v, Part which, const ControlBlockGpu::PartState& part) {
  PublishConsumed(v, which, StateOf(part));
}

// The end of the blocks that send, and of those that copy out what was sent last.
__device__ inline void EndSend(const RankViewGpu& v, Part which, ControlBlockGpu::PartState& part, uint32_t blocks) {
  Tail(part, blocks, [&] {
    if (part.live != 0) PublishArrived(v, which, part);
  });
}
__device__ inline void EndLocal(const RankViewGpu& v, Part which, ControlBlockGpu::PartState& part, uint32_t blocks) {
  Tail(part, blocks, [&] { PublishConsumed(v, which, part); });
}

// A whole call in a kernel of one cluster, for calls of so few bytes that launches would cost more than the work.
// start_send() and start_local() give a pass over rows whose first loads, of what no peer writes, are under way: they
// overlap with the waits. Run() does it; poison() fills the results of a call that failed.
//
// The barrier of the cluster is a release and an acquire of all its threads, so what the first block acquires from a
// peer the others may read, and what it releases to a peer covers the writes of the others.
template <class StartSend, class StartLocal, class Poisoned>
__device__ inline void WholeCall(const RankViewGpu& v, Part which, const CallId& id, StartSend start_send,
                                 StartLocal start_local, Poisoned poison) {
  namespace cg = cooperative_groups;
  __shared__ CallState shared_call;
  __shared__ uint64_t waited_ns;  // not a register: the local part needs them all
  const cg::cluster_group cluster = cg::this_cluster();
  const bool leads = cluster.block_rank() == 0;
  // Read from the first block's shared memory, half as far away as the L2 cache. That block ends after all others have
  // read: a barrier follows each use.
  const CallState* call = cluster.map_shared_rank(&shared_call, 0);
  auto send = start_send();
  if (leads) {
    const CallState begun = BeginCall(v, which, id);
    if (threadIdx.x == 0) shared_call = begun;
  }
  cluster.sync();
  const CallState begun = *call;
  if (leads) RecordCall(v, which, begun);  // not before: the barrier would wait for these stores
  if (begun.live != 0) send.Run();
  cluster.sync();
  if (leads && begun.live != 0) PublishArrived(v, which, begun);
  auto local = start_local();
  if (leads) {
    uint64_t waited;
    const bool arrived = WaitArrived(v, which, begun, &waited);
    if (threadIdx.x == 0) {
      shared_call.live = arrived ? 1 : 0;
      waited_ns = waited;
    }
  }
  cluster.sync();
  const CallState arrived = *call;
  if (arrived.live != 0) {
    local.Run();
  } else {
    poison();
  }
  cluster.sync();
  if (leads) PublishConsumed(v, which, arrived);
  if (leads && threadIdx.x == 0) CountWait(v, arrived.kind, waited_ns);
}

}  // namespace moonep
