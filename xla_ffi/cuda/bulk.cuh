// Bulk copies (TMA) between global and shared memory, and the barriers that say when one has landed. PTX in words, no
// more; knows no rows. Sizes and addresses are multiples of 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonep {

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// A barrier of one phase per copy: the thread that asks for bytes is the only one to arrive.
__device__ inline void InitBarrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
}
// After the last InitBarrier: copies belong to the async proxy, and would not see what the generic one has written.
__device__ inline void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy into shared memory; its phase of `barrier` is over once all bytes are there.
__device__ inline void BulkLoad(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// Waits for a phase. Whoever has seen its end sees the bytes, in both proxies: a BulkStore of them needs no fence.
__device__ inline void WaitLoaded(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Starts a copy out of shared memory.
__device__ inline void BulkStore(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
}
// The stores of this thread since the last call are one group, perhaps an empty one.
__device__ inline void EndStoreGroup() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread are unfinished. Finished means written, not only read from shared
// memory: the weaker wait would be enough to use the memory again, but not to tell a peer, and nothing would show it.
template <int kPending>
__device__ inline void WaitStoreGroups() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace moonep
