// The threads of one CUDA block as the team that runs xla_ffi/core on a device. One-dimensional blocks of whole warps.
#pragma once

#include <cstdint>

namespace moonep {

class BlockTeam {
 public:
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  template <class F>
  __device__ void single(F f) const {
    if (threadIdx.x == 0) f();
    __syncthreads();
  }

  template <class F>
  __device__ int64_t sum(int n, F value) const {
    int64_t part = 0;
    for (int i = rank(); i < n; i += size()) part += value(i);
    for (int offset = 16; offset > 0; offset /= 2) part += __shfl_down_sync(kAll, part, offset);
    __shared__ int64_t parts[kMaxWarps];
    if (lane() == 0) parts[warp()] = part;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < warps(); ++w) total += parts[w];
    __syncthreads();  // before the next use of parts
    return total;
  }

  template <class F>
  __device__ int argmax(int n, F value) const {
    Best best{INT64_MIN, INT32_MAX};
    for (int i = rank(); i < n; i += size()) best = Better(best, {value(i), i});
    for (int offset = 16; offset > 0; offset /= 2) {
      const Best other{__shfl_down_sync(kAll, best.value, offset), __shfl_down_sync(kAll, best.index, offset)};
      best = Better(best, other);
    }
    __shared__ Best bests[kMaxWarps];
    if (lane() == 0) bests[warp()] = best;
    __syncthreads();
    best = bests[0];
    for (int w = 1; w < warps(); ++w) best = Better(best, bests[w]);
    __syncthreads();  // before the next use of bests
    return best.index;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kMaxWarps = 32;

  struct Best {
    int64_t value;
    int index;
  };
  // Ties go to the lowest index, whatever the order of the comparisons.
  static __device__ Best Better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
  }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int warps() const { return static_cast<int>(blockDim.x) / 32; }
};

}  // namespace moonep
