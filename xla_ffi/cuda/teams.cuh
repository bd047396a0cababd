// Device threads as the teams that run xla_ffi/core: a warp for chains of small decisions, a block for plain loops.
#pragma once

#include <cstdint>

#include "xla_ffi/core/team.h"

namespace moonep {

// All 32 lanes call every method together.
class WarpTeam {
 public:
  __device__ int rank() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int size() const { return 32; }
  __device__ void sync() const { __syncwarp(); }

  template <class F>
  __device__ void single(F f) const {
    if (rank() == 0) f();
    __syncwarp();
  }

  template <class F>
  __device__ int32_t sum(int n, F value) const {
    int32_t part = 0;
    for (int i = rank(); i < n; i += 32) part += value(i);
    return __reduce_add_sync(kAll, part);
  }

  template <class F>
  __device__ Largest largest(int n, F value) const {
    Largest best{INT32_MIN, INT32_MAX};
    for (int base = rank(); base < n; base += 32 * kBatch) {
      int32_t here[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) here[b] = base + 32 * b < n ? value(base + 32 * b) : INT32_MIN;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (here[b] > best.value) best = {here[b], base + 32 * b};
      }
    }
    const int32_t top = __reduce_max_sync(kAll, best.value);
    return {top, __reduce_min_sync(kAll, best.value == top ? best.index : INT32_MAX)};
  }

  template <class F, class Sink>
  __device__ int64_t scan(int n, F value, Sink sink) const {
    int64_t before = 0;
    for (int base = 0; base < n; base += 32 * kBatch) {
      int64_t here[kBatch];  // values first: they come from memory, and each alone would wait for it
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + 32 * b + rank();
        here[b] = i < n ? value(i) : 0;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int64_t sum = here[b];
        for (int offset = 1; offset < 32; offset *= 2) {
          const int64_t left = __shfl_up_sync(kAll, sum, offset);
          if (rank() >= offset) sum += left;
        }
        const int i = base + 32 * b + rank();
        if (i < n) sink(i, before + sum - here[b]);
        before += __shfl_sync(kAll, sum, 31);
      }
    }
    return before;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kBatch = 4;
};

// All threads of a one-dimensional block of whole warps call every method together.
class BlockTeam {
 public:
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  template <class F>
  __device__ int32_t sum(int n, F value) const {
    int32_t part = 0;
    for (int i = rank(); i < n; i += size()) part += value(i);
    return static_cast<int32_t>(Before(part).total);
  }

  template <class F, class Sink>
  __device__ int64_t scan(int n, F value, Sink sink) const {
    int64_t before = 0;
    for (int base = 0; base < n; base += size()) {
      const int i = base + rank();
      const Sums sums = Before(i < n ? value(i) : 0);
      if (i < n) sink(i, before + sums.before);
      before += sums.total;
    }
    return before;
  }

 private:
  struct Sums {
    int64_t before;  // of the threads before this one
    int64_t total;
  };

  __device__ Sums Before(int64_t here) const {
    __shared__ int64_t of_warp[32];
    const int lane = rank() % 32;
    const int warp = rank() / 32;
    int64_t sum = here;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += left;
    }
    __syncthreads();  // the one before may still read of_warp
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    Sums sums{sum - here, 0};
    for (int w = 0; w < size() / 32; ++w) {
      if (w < warp) sums.before += of_warp[w];
      sums.total += of_warp[w];
    }
    return sums;
  }
};

}  // namespace moonep
