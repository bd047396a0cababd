// Device threads as the teams that run xla_ffi/core: lanes of a warp for chains of small decisions and for sums, a
// block for plain loops. What runs here runs once per call, out of cold instruction caches: small code is fast code.
#pragma once

#include <cstdint>

#include "xla_ffi/core/team.h"

namespace moonep {

constexpr unsigned kAllLanes = 0xffffffffu;

// kLanes neighbouring lanes; all lanes of the warp call every method together. kBatch: loads under way per lane.
template <int kLanes, int kBatch = 1>
class LaneTeam {
 public:
  __device__ int rank() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ int size() const { return kLanes; }
  __device__ void sync() const { __syncwarp(); }

  template <class F, class Sink>
  __device__ int64_t scan(int n, F value, Sink sink) const {
    int64_t before = 0;
#pragma unroll 1
    for (int base = rank(); base < n + rank(); base += kLanes * kBatch) {
      int64_t here[kBatch];  // values first: they come from memory, and each alone would wait for it
#pragma unroll
      for (int b = 0; b < kBatch; ++b) here[b] = base + kLanes * b < n ? value(base + kLanes * b) : 0;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int64_t sum = here[b];
#pragma unroll
        for (int offset = 1; offset < kLanes; offset *= 2) {
          const int64_t left = __shfl_up_sync(kAllLanes, sum, offset, kLanes);
          if (rank() >= offset) sum += left;
        }
        if (base + kLanes * b < n) sink(base + kLanes * b, before + sum - here[b]);
        before += __shfl_sync(kAllLanes, sum, kLanes - 1, kLanes);
      }
    }
    return before;
  }
};

// A whole warp. Wide is for values whose size reaches 2^22.
template <bool Wide>
class WarpTeam : public LaneTeam<32, 4> {
 public:
  template <class F>
  __device__ void single(F f) const {
    if (rank() == 0) f();
    __syncwarp();
  }

  template <class F>
  __device__ int32_t sum(int n, F value) const {
    int32_t part = 0;
#pragma unroll 1
    for (int i = rank(); i < n; i += 32) part += value(i);
    return __reduce_add_sync(kAllLanes, part);
  }

  // n <= 512 unless Wide. A value and its index are compared as one number, the lower index as the larger one.
  template <class F>
  __device__ Largest largest(int n, F value) const {
    constexpr int kBits = 9;
    constexpr int32_t kLast = (1 << kBits) - 1;
    Largest best{INT32_MIN, INT32_MAX};
#pragma unroll 1
    for (int base = rank(); base < n; base += 32 * kBatch) {
      int32_t here[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + 32 * b;
        here[b] = INT32_MIN;
        if (i < n) here[b] = Wide ? value(i) : value(i) * (1 << kBits) + (kLast - i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (here[b] > best.value) best = {here[b], base + 32 * b};
      }
    }
    const int32_t top = __reduce_max_sync(kAllLanes, best.value);
    if constexpr (Wide) return {top, __reduce_min_sync(kAllLanes, best.value == top ? best.index : INT32_MAX)};
    return {top >> kBits, kLast - (top & kLast)};
  }

 private:
  static constexpr int kBatch = 4;
};

// All threads of a one-dimensional block call every method together.
class BlockTeam {
 public:
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }
};

}  // namespace moonep
