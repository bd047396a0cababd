// dispatch and combine: rows to the ranks that compute them and back. One warp moves one row, or a part of its columns,
// at a time.
#include <algorithm>

#include "xla_ffi/core/placement.h"
#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/vector.cuh"

namespace moonep {
namespace {

// Copies need few registers, so a block fills its SM; sums need more. Bytes in flight decide: threads * unroll * 16.
constexpr int kCopyThreads = 1024;
constexpr int kSumThreads = 512;
constexpr int kUnroll = 4;     // loads in flight per lane
constexpr int kSumUnroll = 2;  // where two blocks share an SM and its registers

__device__ inline int Lane() { return static_cast<int>(threadIdx.x) % 32; }

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v, Part part) {
  return v.own().part[static_cast<int>(part)];
}

// Calls body(row, begin, end) for every row, a warp each; with split > 1 for parts of its columns, in vectors, so that
// a few rows keep all warps busy. Blocks own every gridDim-th item; their warps take them as they get free, because
// chains differ in length.
template <class Body>
__device__ inline void ForRows(int64_t rows, int split, int64_t vectors, Body body) {
  __shared__ int32_t taken;
  if (threadIdx.x == 0) taken = 0;
  __syncthreads();
  const int64_t length = ((vectors + split - 1) / split + 31) / 32 * 32;
  const uint32_t items = static_cast<uint32_t>(rows * split);  // the launcher keeps it below 2^31
  for (;;) {
    int32_t turn = Lane() == 0 ? atomicAdd(&taken, 1) : 0;
    turn = __shfl_sync(0xffffffffu, turn, 0);
    const uint64_t item = blockIdx.x + static_cast<uint64_t>(turn) * gridDim.x;
    if (item >= items) return;
    const uint32_t row = static_cast<uint32_t>(item) / static_cast<uint32_t>(split);
    const int64_t begin = (static_cast<uint32_t>(item) - row * static_cast<uint32_t>(split)) * length;
    if (begin < vectors) body(static_cast<int64_t>(row), begin, min(begin + length, vectors));
  }
}

template <class V, int N>
__device__ inline void Load(V (&piece)[N], const std::byte* row, int64_t i, int64_t end) {
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (i + 32 * u < end) piece[u] = LoadOnce(reinterpret_cast<const V*>(row) + i + 32 * u);
  }
}

template <class V, int N>
__device__ inline void Store(const V (&piece)[N], std::byte* row, int64_t i, int64_t end) {
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (i + 32 * u < end) StoreOnce(reinterpret_cast<V*>(row) + i + 32 * u, piece[u]);
  }
}

// Bit k: assignment k of the token is a primary (see core/placement.h). All lanes call it; topk <= kMaxTopk.
__device__ inline uint64_t PrimaryMask(const int32_t* dst_rank_of_token, int topk) {
  const bool low = Lane() < topk && IsPrimary(dst_rank_of_token, Lane());
  const bool high = Lane() + 32 < topk && IsPrimary(dst_rank_of_token, Lane() + 32);
  return static_cast<uint64_t>(__ballot_sync(0xffffffffu, high)) << 32 | __ballot_sync(0xffffffffu, low);
}

__device__ inline uint64_t RoutedMask(const int32_t* dst_rank_of_token, int topk) {
  const bool low = Lane() < topk && dst_rank_of_token[Lane()] >= 0;
  const bool high = Lane() + 32 < topk && dst_rank_of_token[Lane() + 32] >= 0;
  return static_cast<uint64_t>(__ballot_sync(0xffffffffu, high)) << 32 | __ballot_sync(0xffffffffu, low);
}

__device__ inline int LowestBit(uint64_t mask) { return __ffsll(static_cast<long long>(mask)) - 1; }

// Plans come through the user's program: indices are checked before they become addresses.
__device__ inline bool Inside(int64_t i, int64_t n) { return i >= 0 && i < n; }

// Each row of x is read once and stored to every distinct destination, at the row of its primary there.
template <class V>
__global__ void __launch_bounds__(kCopyThreads, 1)
    DispatchSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a, int split) {
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  const int topk = v.shape.topk;
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const int64_t rows = v.shape.recv_rows(v.shape.tokens);
  if (part.live != 0) {
    ForRows(a.tokens, split, vectors, [&](int64_t t, int64_t begin, int64_t end) {
      const std::byte* x = a.x + t * v.shape.row_bytes;
      const int32_t* to_rank = a.dst_rank + t * topk;
      const int32_t* to_row = a.dst_row + t * topk;
      const uint64_t primaries = PrimaryMask(to_rank, topk);
      for (int64_t i = begin + Lane(); i < end; i += 32 * kUnroll) {
        V piece[kUnroll];
        Load(piece, x, i, end);
        for (uint64_t left = primaries; left != 0; left &= left - 1) {
          const int k = LowestBit(left);
          if (Inside(to_rank[k], v.shape.ranks) && Inside(to_row[k], rows)) {
            Store(piece, v.row(to_rank[k], to_row[k]), i, end);
          }
        }
      }
      for (int k = Lane(); a.topk_weights != nullptr && begin == 0 && k < topk; k += 32) {
        if (Inside(to_rank[k], v.shape.ranks) && Inside(to_row[k], rows)) {
          v.weights(to_rank[k])[to_row[k]] = a.topk_weights[t * topk + k];
        }
      }
    });
  }
  Tail(part, [&] {
    if (part.live != 0) PublishArrived(v, Part::kRows, part);
  });
}

// Each received row is read once and stored to all rows of its chain; rows without a token become zero.
template <class V>
__global__ void __launch_bounds__(kCopyThreads, 1)
    DispatchExpand(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a, int split) {
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const bool live = part.live != 0;
  V blank;
  memset(&blank, live ? 0 : 0xff, sizeof(V));  // all bits set: NaN in every float type
  ForRows(a.rows, split, vectors, [&](int64_t row, int64_t begin, int64_t end) {
    const bool empty = !live || a.src[row] < 0;
    if (a.weights != nullptr && Lane() == 0 && begin == 0) {
      a.weights[row] = empty ? (live ? 0.0f : __int_as_float(-1)) : v.weights(v.rank)[row];
    }
    if (empty) {
      V* to = reinterpret_cast<V*>(a.hidden + row * v.shape.row_bytes);
      for (int64_t i = begin + Lane(); i < end; i += 32) StoreOnce(to + i, blank);
      return;
    }
    if (a.primary[row] != row) return;  // stored with its primary
    for (int64_t i = begin + Lane(); i < end; i += 32 * kUnroll) {
      V piece[kUnroll];
      Load(piece, v.row(v.rank, row), i, end);
      int64_t link = row;
      for (int steps = 0; steps < v.shape.topk && Inside(link, a.rows); ++steps) {
        Store(piece, a.hidden + link * v.shape.row_bytes, i, end);
        link = a.next[link];
      }
    }
  });
  Tail(part, [&] { PublishConsumed(v, Part::kRows, part); });
}

// combine: the rows of one token on this rank are summed and stored in the source's return buffer. exact: every row
// travels as it is, its weight beside it.
template <class E, class V>
__global__ void __launch_bounds__(kSumThreads, 1)
    CombineSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ CombineArgs a, int split) {
  ControlBlockGpu::PartState& part = State(v, Part::kReturns);
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const uint32_t per_rank = static_cast<uint32_t>(a.tokens * v.shape.topk);
  const bool exact = v.shape.exact;
  const bool scaled = a.returned == nullptr;
  if (part.live != 0) {
    ForRows(a.rows, split, vectors, [&](int64_t row, int64_t begin, int64_t end) {
      const int32_t id = a.src[row];
      const bool leads = exact || a.primary[row] == row;
      if (!Inside(id, static_cast<int64_t>(per_rank) * v.shape.ranks)) return;
      const int32_t source = static_cast<int32_t>(static_cast<uint32_t>(id) / per_rank);
      const int64_t assignment = static_cast<uint32_t>(id) % per_rank;
      if (Lane() == 0 && begin == 0 && (exact || !scaled)) v.return_weights(source)[assignment] = a.w[row];
      if (!leads) return;
      for (int64_t i = begin + Lane(); i < end; i += 32 * kUnroll) {
        V piece[kUnroll];
        Load(piece, a.out + row * v.shape.row_bytes, i, end);
        if (!exact) {
          // The next row of the chain is under way while this one is added.
          Sum<E, V> sum[kUnroll];
          int64_t link = a.next[row];
          float scale = scaled ? a.w[row] : 1.0f;
          for (int steps = 1;; ++steps) {
            const bool more = steps < v.shape.topk && Inside(link, a.rows);
            V ahead[kUnroll];
            if (more) Load(ahead, a.out + link * v.shape.row_bytes, i, end);
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
              if (steps == 1) {
                sum[u].Start(piece[u], scale);
              } else {
                sum[u].Add(piece[u], scale);
              }
            }
            if (!more) break;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) piece[u] = ahead[u];
            scale = scaled ? a.w[link] : 1.0f;
            link = a.next[link];
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) piece[u] = sum[u].Rounded();
        }
        Store(piece, v.return_row(source, assignment), i, end);
      }
    });
  }
  Tail(part, [&] {
    if (part.live != 0) PublishArrived(v, Part::kReturns, part);
  });
}

// The source sums what came back, in ascending k, and rounds once.
template <class E, class V>
__global__ void __launch_bounds__(kSumThreads, 2)
    CombineReduce(const __grid_constant__ RankViewGpu v, const __grid_constant__ CombineArgs a, int split) {
  ControlBlockGpu::PartState& part = State(v, Part::kReturns);
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const int topk = v.shape.topk;
  const bool live = part.live != 0;
  const bool exact = v.shape.exact;
  const bool scaled = exact && a.returned == nullptr;
  const float* weights = v.return_weights(v.rank);
  V blank;
  memset(&blank, live ? 0 : 0xff, sizeof(V));
  ForRows(a.tokens, split, vectors, [&](int64_t t, int64_t begin, int64_t end) {
    const int32_t* to_rank = a.dst_rank + t * topk;
    for (int k = Lane(); a.returned != nullptr && begin == 0 && k < topk; k += 32) {
      const float value = to_rank[k] >= 0 ? weights[t * topk + k] : 0.0f;
      a.returned[t * topk + k] = live ? value : __int_as_float(-1);
    }
    const uint64_t summands = !live ? 0 : exact ? RoutedMask(to_rank, topk) : PrimaryMask(to_rank, topk);
    for (int64_t i = begin + Lane(); i < end; i += 32 * kSumUnroll) {
      Sum<E, V> sum[kSumUnroll];
      V piece[kSumUnroll];
      for (uint64_t left = summands; left != 0; left &= left - 1) {
        const int k = LowestBit(left);
        const float scale = scaled ? weights[t * topk + k] : 1.0f;
        Load(piece, v.return_row(v.rank, t * topk + k), i, end);
#pragma unroll
        for (int u = 0; u < kSumUnroll; ++u) {
          if (left == summands) {
            sum[u].Start(piece[u], scale);
          } else {
            sum[u].Add(piece[u], scale);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) piece[u] = summands != 0 ? sum[u].Rounded() : blank;
      Store(piece, a.y + t * v.shape.row_bytes, i, end);
    }
  });
  Tail(part, [&] { PublishConsumed(v, Part::kReturns, part); });
}

uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// Grid and split of a kernel over `rows` rows: no more blocks than there is work for, and parts of rows where there are
// fewer rows than warps.
struct Grid {
  int blocks;
  int split;
};
Grid GridFor(int64_t rows, int64_t vectors, int blocks, int threads) {
  const int64_t warps = static_cast<int64_t>(blocks) * threads / 32;
  const int64_t split = std::max<int64_t>(1, std::min(warps / std::max<int64_t>(rows, 1), (vectors + 31) / 32));
  const int64_t needed = (rows * split * 32 + threads - 1) / threads;
  return {static_cast<int>(std::min<int64_t>(blocks, std::max<int64_t>(needed, 1))), static_cast<int>(split)};
}

// A row type wider than the vector cannot be summed element by element: float32 rows are always 4-byte aligned.
template <class F>
cudaError_t WithRows(RowType type, int64_t bytes, uintptr_t addresses, F f) {
  return WithRowType(type, [&](auto element) {
    return WithVector(bytes, addresses, [&](auto vector) {
      using E = decltype(element);
      using V = decltype(vector);
      if constexpr (sizeof(V) >= sizeof(typename E::Storage)) return f(element, vector);
      return cudaErrorMisalignedAddress;
    });
  });
}

}  // namespace

cudaError_t LaunchDispatchSend(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.x), [&](auto vector) {
    const Grid g = GridFor(a.tokens, v.shape.row_bytes / sizeof(vector), blocks, kCopyThreads);
    DispatchSend<decltype(vector)><<<g.blocks, kCopyThreads, 0, stream>>>(v, a, g.split);
    return cudaGetLastError();
  });
}

cudaError_t LaunchDispatchExpand(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.hidden), [&](auto vector) {
    const Grid g = GridFor(a.rows, v.shape.row_bytes / sizeof(vector), blocks, kCopyThreads);
    DispatchExpand<decltype(vector)><<<g.blocks, kCopyThreads, 0, stream>>>(v, a, g.split);
    return cudaGetLastError();
  });
}

cudaError_t LaunchCombineSend(const RankViewGpu& v, const CombineArgs& a, int blocks, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.out), [&](auto element, auto vector) {
    const Grid g = GridFor(a.rows, v.shape.row_bytes / sizeof(vector), blocks, kSumThreads);
    CombineSend<decltype(element), decltype(vector)><<<g.blocks, kSumThreads, 0, stream>>>(v, a, g.split);
    return cudaGetLastError();
  });
}

cudaError_t LaunchCombineReduce(const RankViewGpu& v, const CombineArgs& a, int blocks, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.y), [&](auto element, auto vector) {
    const Grid g = GridFor(a.tokens, v.shape.row_bytes / sizeof(vector), blocks, kSumThreads);
    CombineReduce<decltype(element), decltype(vector)><<<g.blocks, kSumThreads, 0, stream>>>(v, a, g.split);
    return cudaGetLastError();
  });
}

}  // namespace moonep
