// dispatch and combine: rows to the ranks that compute them and back. One warp moves one row at a time.
#include "xla_ffi/core/placement.h"
#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/vector.cuh"

namespace moonep {
namespace {

// Copies need few registers, so a block fills its SM; sums need more. Bytes in flight decide: threads * kUnroll * 16.
constexpr int kCopyThreads = 1024;
constexpr int kSumThreads = 512;
constexpr int kUnroll = 4;     // loads in flight per lane
constexpr int kSumUnroll = 2;  // where two blocks share an SM and its registers

struct Warp {
  int64_t index, count;
  int lane;
};
__device__ inline Warp ThisWarp() {
  const int per_block = static_cast<int>(blockDim.x) / 32;
  return {static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / 32, static_cast<int64_t>(gridDim.x) * per_block,
          static_cast<int>(threadIdx.x) % 32};
}

// Chains differ in length, so warps take work as they get free: segments of rows, a row's side by side. The next item is
// asked for before the present one is worked on, which hides the way to memory.
constexpr int kSegment = 32 * kUnroll * 2;  // vectors
template <class Body>
__device__ inline void ForSegments(ControlBlockGpu::PartState& part, int64_t rows, int64_t vectors, Body body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t segments = (vectors + kSegment - 1) / kSegment;
  uint32_t ahead = lane == 0 ? atomicAdd(&part.next, 1u) : 0;
  for (;;) {
    const int64_t item = __shfl_sync(0xffffffffu, ahead, 0);
    if (item >= rows * segments) return;
    if (lane == 0) ahead = atomicAdd(&part.next, 1u);
    const int64_t first = item % segments * kSegment;
    body(item / segments, first, min(first + kSegment, vectors));
  }
}

// Bit k: assignment k of the token is a primary (see core/placement.h). All lanes call it; topk <= kMaxTopk.
__device__ inline uint64_t PrimaryMask(const int32_t* dst_rank_of_token, int topk, int lane) {
  const bool low = lane < topk && IsPrimary(dst_rank_of_token, lane);
  const bool high = lane + 32 < topk && IsPrimary(dst_rank_of_token, lane + 32);
  return static_cast<uint64_t>(__ballot_sync(0xffffffffu, high)) << 32 | __ballot_sync(0xffffffffu, low);
}

template <class V>
__device__ inline void LoadPieces(V (&piece)[kUnroll], const std::byte* row, int64_t i, int64_t vectors) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (i + 32 * u < vectors) piece[u] = LoadOnce(reinterpret_cast<const V*>(row) + i + 32 * u);
  }
}

// Plans come through the user's program: indices are checked before they become addresses.
__device__ inline bool Inside(int64_t i, int64_t n) { return i >= 0 && i < n; }

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v, Part part) {
  return v.own().part[static_cast<int>(part)];
}

// Each row of x is read once and stored to every distinct destination, at the row of its primary there.
template <class V>
__global__ void __launch_bounds__(kCopyThreads, 1) DispatchSend(const __grid_constant__ RankViewGpu v, DispatchArgs a) {
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  const int topk = v.shape.topk;
  if (part.live != 0) {
    const Warp w = ThisWarp();
    const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
    const int64_t rows = v.shape.recv_rows(v.shape.tokens);
    for (int64_t t = w.index; t < a.tokens; t += w.count) {
      const V* from = reinterpret_cast<const V*>(a.x + t * v.shape.row_bytes);
      const uint64_t primaries = PrimaryMask(a.dst_rank + t * topk, topk, w.lane);
      for (int64_t i = w.lane; i < vectors; i += 32 * kUnroll) {
        V piece[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (i + 32 * u < vectors) piece[u] = LoadOnce(from + i + 32 * u);
        }
        for (uint64_t left = primaries; left != 0; left &= left - 1) {
          const int k = __ffsll(static_cast<long long>(left)) - 1;
          const int32_t rank = a.dst_rank[t * topk + k];
          const int32_t row = a.dst_row[t * topk + k];
          if (!Inside(rank, v.shape.ranks) || !Inside(row, rows)) continue;
          V* to = reinterpret_cast<V*>(v.row(rank, row));
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (i + 32 * u < vectors) to[i + 32 * u] = piece[u];
          }
        }
      }
      if (a.topk_weights == nullptr) continue;
      for (int k = w.lane; k < topk; k += 32) {
        const int32_t rank = a.dst_rank[t * topk + k];
        const int32_t row = a.dst_row[t * topk + k];
        if (Inside(rank, v.shape.ranks) && Inside(row, rows)) v.weights(rank)[row] = a.topk_weights[t * topk + k];
      }
    }
  }
  Tail(part, [&] {
    if (part.live != 0) PublishArrived(v, Part::kRows, part);
  });
}

// Each received row is read once and stored to all rows of its chain; rows without a token become zero.
template <class V>
__global__ void __launch_bounds__(kCopyThreads, 1)
    DispatchExpand(const __grid_constant__ RankViewGpu v, DispatchArgs a) {
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const bool live = part.live != 0;
  V blank;
  memset(&blank, live ? 0 : 0xff, sizeof(V));  // all bits set: NaN in every float type
  ForSegments(part, a.rows, vectors, [&](int64_t row, int64_t begin, int64_t end) {
    V* to = reinterpret_cast<V*>(a.hidden + row * v.shape.row_bytes);
    const bool empty = !live || a.src[row] < 0;
    if (a.weights != nullptr && lane == 0 && begin == 0) {
      a.weights[row] = empty ? (live ? 0.0f : __int_as_float(-1)) : v.weights(v.rank)[row];
    }
    if (empty) {
      for (int64_t i = begin + lane; i < end; i += 32) StoreOnce(to + i, blank);
      return;
    }
    if (a.primary[row] != row) return;  // stored with its primary
    for (int64_t i = begin + lane; i < end; i += 32 * kUnroll) {
      V piece[kUnroll];
      LoadPieces(piece, v.row(v.rank, row), i, end);
      int64_t link = row;
      for (int steps = 0; steps < v.shape.topk && Inside(link, a.rows); ++steps) {
        V* out = reinterpret_cast<V*>(a.hidden + link * v.shape.row_bytes);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (i + 32 * u < end) StoreOnce(out + i + 32 * u, piece[u]);
        }
        link = a.next[link];
      }
    }
  });
  Tail(part, [&] {
    if (part.live != 0) PublishConsumed(v, Part::kRows, part);
    part.busy = 0;
  });
}

// combine: the rows of one token on this rank are summed and stored in the source's return buffer. exact: every row
// travels as it is, its weight beside it.
template <class E, class V>
__global__ void __launch_bounds__(kSumThreads, 1) CombineSend(const __grid_constant__ RankViewGpu v, CombineArgs a) {
  ControlBlockGpu::PartState& part = State(v, Part::kReturns);
  if (part.live != 0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
    const int64_t per_rank = a.tokens * v.shape.topk;
    const bool exact = v.shape.exact;
    const bool scaled = a.returned == nullptr;
    ForSegments(part, a.rows, vectors, [&](int64_t row, int64_t begin, int64_t end) {
      const int64_t id = a.src[row];
      if (!Inside(id, per_rank * v.shape.ranks)) return;
      const int32_t source = static_cast<int32_t>(id / per_rank);
      const int64_t assignment = id % per_rank;
      if (lane == 0 && begin == 0 && (exact || !scaled)) v.return_weights(source)[assignment] = a.w[row];
      if (!exact && a.primary[row] != row) return;
      V* to = reinterpret_cast<V*>(v.return_row(source, assignment));
      for (int64_t i = begin + lane; i < end; i += 32 * kUnroll) {
        V piece[kUnroll];
        LoadPieces(piece, a.out + row * v.shape.row_bytes, i, end);
        if (!exact) {
          // The next row of the chain is under way while this one is added.
          Sum<E, V> sum[kUnroll];
          int64_t link = a.next[row];
          float scale = scaled ? a.w[row] : 1.0f;
          for (int steps = 1;; ++steps) {
            const bool more = steps < v.shape.topk && Inside(link, a.rows);
            V ahead[kUnroll];
            if (more) LoadPieces(ahead, a.out + link * v.shape.row_bytes, i, end);
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
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (i + 32 * u < end) to[i + 32 * u] = piece[u];
        }
      }
    });
  }
  Tail(part, [&] {
    if (part.live != 0) PublishArrived(v, Part::kReturns, part);
  });
}

// The source sums what came back, in ascending k, and rounds once.
template <class E, class V>
__global__ void __launch_bounds__(kSumThreads, 2) CombineReduce(const __grid_constant__ RankViewGpu v, CombineArgs a) {
  ControlBlockGpu::PartState& part = State(v, Part::kReturns);
  const Warp w = ThisWarp();
  const int64_t vectors = v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
  const int topk = v.shape.topk;
  const bool live = part.live != 0;
  const bool exact = v.shape.exact;
  const bool scaled = exact && a.returned == nullptr;
  const float* weights = v.return_weights(v.rank);
  for (int64_t t = w.index; t < a.tokens; t += w.count) {
    const int32_t* to_rank = a.dst_rank + t * topk;
    if (a.returned != nullptr) {
      for (int k = w.lane; k < topk; k += 32) {
        const float value = to_rank[k] >= 0 ? weights[t * topk + k] : 0.0f;
        a.returned[t * topk + k] = live ? value : __int_as_float(-1);
      }
    }
    uint64_t summands = 0;
    if (live && exact) {
      for (int k = 0; k < topk; ++k) summands |= static_cast<uint64_t>(to_rank[k] >= 0) << k;
    } else if (live) {
      summands = PrimaryMask(to_rank, topk, w.lane);
    }
    V blank;
    memset(&blank, live ? 0 : 0xff, sizeof(V));
    V* y = reinterpret_cast<V*>(a.y + t * v.shape.row_bytes);
    for (int64_t i = w.lane; i < vectors; i += 32 * kSumUnroll) {
      Sum<E, V> sum[kSumUnroll];
      bool any = false;
      for (uint64_t left = summands; left != 0; left &= left - 1) {
        const int k = __ffsll(static_cast<long long>(left)) - 1;
        const float scale = scaled ? weights[t * topk + k] : 1.0f;
        const V* row = reinterpret_cast<const V*>(v.return_row(v.rank, t * topk + k));
        V piece[kSumUnroll];
#pragma unroll
        for (int u = 0; u < kSumUnroll; ++u) {
          if (i + 32 * u < vectors) piece[u] = LoadOnce(row + i + 32 * u);
        }
#pragma unroll
        for (int u = 0; u < kSumUnroll; ++u) {
          if (any) {
            sum[u].Add(piece[u], scale);
          } else {
            sum[u].Start(piece[u], scale);
          }
        }
        any = true;
      }
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) {
        if (i + 32 * u < vectors) StoreOnce(y + i + 32 * u, any ? sum[u].Rounded() : blank);
      }
    }
  }
  Tail(part, [&] {
    if (part.live != 0) PublishConsumed(v, Part::kReturns, part);
    part.busy = 0;
  });
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

uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace

cudaError_t LaunchDispatchSend(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.x), [&](auto vector) {
    DispatchSend<decltype(vector)><<<blocks, kCopyThreads, 0, stream>>>(v, a);
    return cudaGetLastError();
  });
}

cudaError_t LaunchDispatchExpand(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.hidden), [&](auto vector) {
    DispatchExpand<decltype(vector)><<<blocks, kCopyThreads, 0, stream>>>(v, a);
    return cudaGetLastError();
  });
}

cudaError_t LaunchCombineSend(const RankViewGpu& v, const CombineArgs& a, int blocks, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.out), [&](auto element, auto vector) {
    CombineSend<decltype(element), decltype(vector)><<<blocks, kSumThreads, 0, stream>>>(v, a);
    return cudaGetLastError();
  });
}

cudaError_t LaunchCombineReduce(const RankViewGpu& v, const CombineArgs& a, int blocks, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.y), [&](auto element, auto vector) {
    CombineReduce<decltype(element), decltype(vector)><<<blocks, kSumThreads, 0, stream>>>(v, a);
    return cudaGetLastError();
  });
}

}  // namespace moonep
