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

// How a warp compares numbers that have an index: as one number, the lower index as the larger part. Good for indices
// below 512 and numbers of less than 2^22 in size.
struct Narrow {
  static constexpr int kBits = 9;
  static constexpr int32_t kLast = (1 << kBits) - 1;

  int32_t best = INT32_MIN;
  __device__ void Offer(int32_t value, int32_t index) { best = max(best, value * (1 << kBits) + (kLast - index)); }
  __device__ Largest Of() const {
    const int32_t top = __reduce_max_sync(kAllLanes, best);
    return {top >> kBits, kLast - (top & kLast)};
  }
};
// The same for any. A lane's offers come in ascending order of their indices.
struct Wide {
  Largest best{INT32_MIN, INT32_MAX};
  __device__ void Offer(int32_t value, int32_t index) {
    if (value > best.value) best = {value, index};
  }
  __device__ Largest Of() const {
    const int32_t top = __reduce_max_sync(kAllLanes, best.value);
    return {top, __reduce_min_sync(kAllLanes, best.value == top ? best.index : INT32_MAX)};
  }
};

template <class Contest, int kPerLane>
class LaneBoard {
 public:
  template <class F>
  __device__ LaneBoard(int n, F value, int32_t* array) : n_(n), array_(array) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) value_[j] = Index(j) < n ? value(Index(j)) : 0;
  }
  __device__ Largest largest() const { return Best<1>(); }
  __device__ Largest smallest() const {
    const Largest best = Best<-1>();
    return {-best.value, best.index};
  }
  __device__ void add(int index, int32_t delta) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) value_[j] += Index(j) == index ? delta : 0;
  }
  __device__ void store() const {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (Index(j) < n_) array_[Index(j)] = value_[j];
    }
    __syncwarp();
  }

 private:
  __device__ int Index(int j) const { return static_cast<int>(threadIdx.x) % 32 + 32 * j; }
  template <int kSign>
  __device__ Largest Best() const {
    Contest contest;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (Index(j) < n_) contest.Offer(kSign * value_[j], Index(j));
    }
    return contest.Of();
  }

  int n_;
  int32_t* array_;
  int32_t value_[kPerLane];
};

// A whole warp; boards of up to 32 * kPerLane numbers.
template <class Contest, int kPerLane>
class WarpTeam : public LaneTeam<32> {
 public:
  template <class F>
  __device__ void single(F f) const {
    if (rank() == 0) f();
    __syncwarp();
  }

  __device__ int32_t take(int32_t* counter) const {
    const int32_t before = rank() == 0 ? atomicAdd(counter, 1) : 0;
    return __shfl_sync(kAllLanes, before, 0);
  }

  template <class F>
  __device__ int32_t sum(int n, F value) const {
    int32_t part = 0;
#pragma unroll 1
    for (int i = rank(); i < n; i += 32) part += value(i);
    return __reduce_add_sync(kAllLanes, part);
  }

  template <class F>
  __device__ Largest largest(int n, F value) const {
    Contest contest;
#pragma unroll 1
    for (int base = rank(); base < n; base += 32 * kBatch) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (base + 32 * b < n) contest.Offer(value(base + 32 * b), base + 32 * b);
      }
    }
    return contest.Of();
  }

  template <class F>
  __device__ LaneBoard<Contest, kPerLane> board(int n, F value, int32_t* array) const {
    return LaneBoard<Contest, kPerLane>(n, value, array);
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
