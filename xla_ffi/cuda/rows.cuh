// What dispatch and combine share: pieces of rows dealt to warps, loads and stores of a piece, where a token goes. One
// warp moves one row, or a part of its columns, at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/launch.cuh"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/vector.cuh"

namespace moonep {

constexpr uint32_t kWarp = 0xffffffffu;

__device__ inline int Lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int WarpOfBlock() { return static_cast<int>(threadIdx.x) / 32; }
__device__ inline int WarpsOfBlock() { return static_cast<int>(blockDim.x) / 32; }

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v, Part part) {
  return v.own().part[static_cast<int>(part)];
}

// Plans come through the user's program: indices are checked before they become addresses.
__device__ inline bool Inside(int64_t i, int64_t n) { return i >= 0 && i < n; }

// -- pieces -----------------------------------------------------------------------------------------------------------

// Rows, cut into parts where there are fewer of them than warps. Counted in vectors.
struct Cut {
  int32_t rows;
  int32_t parts;
  int32_t length;
  int32_t vectors;  // of a row

  static Cut Of(int64_t rows, int64_t vectors, int64_t warps) {
    const int64_t most = (vectors + 31) / 32;  // a vector per lane
    const int64_t parts = std::max<int64_t>(1, std::min(warps / std::max<int64_t>(rows, 1), most));
    const int64_t length = AlignUp((vectors + parts - 1) / parts, 32);
    return {static_cast<int32_t>(rows), static_cast<int32_t>((vectors + length - 1) / length),
            static_cast<int32_t>(length), static_cast<int32_t>(vectors)};
  }
  int64_t pieces() const { return int64_t{rows} * parts; }
};

struct Piece {
  int32_t row;  // -1: no more
  int32_t begin;
  int32_t end;
};

// The pieces of one warp. Blocks own every gridDim-th; with `taken`, a counter in shared memory, the warps of a block
// take them as they get free, because chains differ in length.
class Pieces {
 public:
  __device__ Pieces(const Cut& cut, int32_t* taken) : cut_(cut), taken_(taken), turn_(WarpOfBlock()) {
    if (taken == nullptr) return;
    if (threadIdx.x == 0) *taken = WarpsOfBlock();
    __syncthreads();
  }

  // All lanes call it and get the same.
  __device__ Piece Take() {
    if (first_) {
      first_ = false;
    } else if (taken_ == nullptr) {
      turn_ += WarpsOfBlock();
    } else {
      const int32_t turn = Lane() == 0 ? atomicAdd(taken_, 1) : 0;
      turn_ = __shfl_sync(kWarp, turn, 0);
    }
    const uint64_t item = blockIdx.x + static_cast<uint64_t>(turn_) * gridDim.x;
    const uint32_t parts = static_cast<uint32_t>(cut_.parts);
    if (item >= static_cast<uint64_t>(cut_.rows) * parts) return {-1, 0, 0};
    const uint32_t row =
        static_cast<uint32_t>(item) / parts;  // there are parts only where there are fewer of them than warps
    const int32_t begin = static_cast<int32_t>(static_cast<uint32_t>(item) - row * parts) * cut_.length;
    return {static_cast<int32_t>(row), begin, min(begin + cut_.length, cut_.vectors)};
  }

 private:
  const Cut& cut_;
  int32_t* taken_;
  int32_t turn_;
  bool first_ = true;
};

// All pieces of a warp. Rows is a kind of work: Prepare(piece) asks for what no peer writes and waits for nothing,
// Finish(ready, ...) does the rest. The first piece is prepared at once, so its loads may overlap with a wait.
template <class Rows>
class Pass {
 public:
  __device__ Pass(const Rows& rows, const Pieces& pieces)
      : rows_(rows), pieces_(pieces), ready_(rows_.Prepare(pieces_.Take())) {}

  template <class... State>
  __device__ void Run(State... state) {
    while (ready_.piece.row >= 0) {
      rows_.Finish(ready_, state...);
      ready_ = rows_.Prepare(pieces_.Take());
    }
  }

 private:
  Rows rows_;
  Pieces pieces_;
  typename Rows::Ready ready_;
};

template <class V, int N>
__device__ inline void Load(V (&data)[N], const std::byte* row, int32_t i, int32_t end) {
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (i + 32 * u < end) data[u] = LoadOnce(reinterpret_cast<const V*>(row) + i + 32 * u);
  }
}

template <class V, int N>
__device__ inline void Store(const V (&data)[N], std::byte* row, int32_t i, int32_t end) {
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (i + 32 * u < end) StoreOnce(reinterpret_cast<V*>(row) + i + 32 * u, data[u]);
  }
}

// -- tokens -----------------------------------------------------------------------------------------------------------

// Something of each assignment of a token: lane l holds those of k = l and k = l + 32. topk <= kMaxTopk.
template <class T>
struct PerAssignment {
  T low;
  T high;

  static __device__ PerAssignment Load(const T* of_token, int topk, T none) {
    return {Lane() < topk ? of_token[Lane()] : none, Lane() + 32 < topk ? of_token[Lane() + 32] : none};
  }
  // All lanes call it, with the same k.
  __device__ T At(int k) const {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(__shfl_sync(kWarp, reinterpret_cast<uint64_t>(k < 32 ? low : high), k % 32));
    } else {
      return __shfl_sync(kWarp, k < 32 ? low : high, k % 32);
    }
  }
};

// Bit k: assignment k is routed.
__device__ inline uint64_t RoutedMask(const PerAssignment<int32_t>& to_rank) {
  return static_cast<uint64_t>(__ballot_sync(kWarp, to_rank.high >= 0)) << 32 | __ballot_sync(kWarp, to_rank.low >= 0);
}

// Bit k: assignment k is a primary, the first of its token on its rank (IsPrimary in core/placement.h).
__device__ inline uint64_t PrimaryMask(const PerAssignment<int32_t>& to_rank, int topk) {
  const auto leads = [](int32_t rank) { return __ffs(static_cast<int>(__match_any_sync(kWarp, rank))) - 1 == Lane(); };
  const uint32_t low = __ballot_sync(kWarp, leads(to_rank.low) && to_rank.low >= 0);
  if (topk <= 32) return low;
  bool high = leads(to_rank.high) && to_rank.high >= 0;
#pragma unroll 4
  for (int k = 0; k < 32; ++k) high = __shfl_sync(kWarp, to_rank.low, k) != to_rank.high && high;
  return static_cast<uint64_t>(__ballot_sync(kWarp, high)) << 32 | low;
}

__device__ inline int LowestBit(uint64_t mask) { return __ffsll(static_cast<long long>(mask)) - 1; }

// -- launches ---------------------------------------------------------------------------------------------------------

inline uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

template <class V>
int64_t VectorsOf(const RankViewGpu& v) {
  return v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
}

// No more blocks than there is work for.
inline LaunchShape ShapeFor(const Cut& cut, int blocks, int threads) {
  const int64_t needed = (cut.pieces() * 32 + threads - 1) / threads;
  return {dim3(static_cast<unsigned>(std::clamp<int64_t>(needed, 1, blocks))), threads};
}

// A call in one cluster: threads for its bytes, since a small block starts and meets sooner, and since several clusters
// find room on a device that is shared. A wait needs a thread per rank.
constexpr int kLeastThreads = 256;
static_assert(kLeastThreads >= kMaxRanks);
inline LaunchShape WholeShape(int64_t rows, int64_t vectors, int unroll, int most_threads) {
  const int64_t each = int64_t{32} * unroll * kClusterBlocks;
  const int64_t warps = (rows * vectors + each - 1) / each;
  const int64_t threads = std::clamp<int64_t>(warps * 32, kLeastThreads, most_threads);
  return {kClusterBlocks, static_cast<int>(threads), 0, kClusterBlocks};
}
inline int64_t WarpsOf(const LaunchShape& shape) { return int64_t{shape.grid.x} * shape.threads / 32; }

}  // namespace moonep
