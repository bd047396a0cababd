// prefetch and reduce_grad: weights of handed-over experts to their replicas, gradients home. In rounds that fit the
// stage; a round moves the same window of bytes of every expert, so all replicas of an expert meet in one round.
#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"
#include "xla_ffi/cuda/vector.cuh"

namespace moonep {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kPiece = 64 * 1024;  // bytes that a block moves at a time
// Loads in flight per thread; narrow ones are for odd sizes, which need no more than to work without spills.
template <class V>
constexpr int kUnrollOf = sizeof(V) == 16 ? 8 : 4;
constexpr int kSumUnroll = 4;

__device__ inline ControlBlockGpu::PartState& State(const RankViewGpu& v) {
  return v.own().part[static_cast<int>(Part::kSlots)];
}

__device__ inline std::byte* Stage(const RankViewGpu& v, const WeightArgs& a, int32_t rank, int64_t slot) {
  return v.chunk[rank] + v.layout.slots + slot * a.window;
}

// The replicas of this rank's experts, by expert and in rank order. Built by every block for itself: a few hundred
// integers, against a launch and a trip through memory.
struct Replicas {
  int32_t found;                    // entries of list
  uint16_t list[kMaxExperts];       // places in slot_expert, in rank order
  uint16_t sorted[kMaxExperts];     // the same by expert
  uint16_t start[kMaxExperts + 1];  // of own expert e in sorted
  uint16_t active[kMaxExperts];     // own experts with replicas
  int32_t actives;
};

__device__ inline void FindReplicas(const RankViewGpu& v, const int32_t* slot_expert, Replicas* s) {
  const int epn = v.shape.epn();
  if (threadIdx.x < 32) {
    int32_t found = 0;
    for (int base = 0; base < v.shape.experts; base += 32) {
      const int i = base + static_cast<int>(threadIdx.x);
      const int32_t e = i < v.shape.experts ? slot_expert[i] : -1;
      const bool mine = e >= 0 && e < v.shape.experts && v.shape.home_of(e) == v.rank;
      const uint32_t mask = __ballot_sync(0xffffffffu, mine);
      if (mine) s->list[found + __popc(mask & ((1u << threadIdx.x) - 1u))] = static_cast<uint16_t>(i);
      found += __popc(mask);
    }
    if (threadIdx.x == 0) s->found = found;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < epn; e += blockDim.x) {
    uint16_t before = 0;
    for (int i = 0; i < s->found; ++i) before += slot_expert[s->list[i]] % epn < e ? 1 : 0;
    s->start[e] = before;
    uint16_t at = before;
    for (int i = 0; i < s->found; ++i) {
      if (slot_expert[s->list[i]] % epn == e) s->sorted[at++] = s->list[i];
    }
  }
  if (threadIdx.x == 0) s->start[epn] = static_cast<uint16_t>(s->found);
  __syncthreads();
  if (threadIdx.x == 0) {
    s->actives = 0;
    for (int e = 0; e < epn && s->found > 0; ++e) {
      if (s->start[e + 1] > s->start[e]) s->active[s->actives++] = static_cast<uint16_t>(e);
    }
  }
  __syncthreads();
}

// The bytes of a leaf that lie in this round's window.
struct Span {
  int64_t offset;  // into the leaf's part of an expert
  int64_t stage;   // into the slot's part of the stage
  int64_t bytes;
};
__device__ inline Span InWindow(const WeightArgs& a, const Leaf& leaf) {
  const int64_t begin = a.round * a.window;
  const int64_t from = max(begin, leaf.start);
  const int64_t to = min(begin + a.window, leaf.start + leaf.bytes);
  return {from - leaf.start, from - begin, max(to - from, static_cast<int64_t>(0))};
}

// Calls body(index, leaf, offset, bytes) for pieces of `count` things that each hold all leaves' spans, dealt to
// blocks. span(leaf) says what part of a leaf is wanted.
template <class SpanOf, class Body>
__device__ inline void ForPieces(const WeightArgs& a, int64_t count, SpanOf span_of, Body body) {
  const auto pieces_of = [](const Span& span) { return static_cast<uint32_t>((span.bytes + kPiece - 1) / kPiece); };
  uint32_t pieces = 0;
  for (int l = 0; l < a.leaves; ++l) pieces += pieces_of(span_of(a.leaf[l]));
  // 2^32 pieces would be 2^48 bytes.
  const uint32_t items = static_cast<uint32_t>(count) * pieces;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const uint32_t index = item / pieces;
    uint32_t piece = item - index * pieces;
    for (int l = 0; l < a.leaves; ++l) {
      const Span span = span_of(a.leaf[l]);
      const uint32_t of_leaf = pieces_of(span);
      if (piece < of_leaf) {
        body(index, a.leaf[l], span, piece * kPiece, min(kPiece, span.bytes - piece * kPiece));
        break;
      }
      piece -= of_leaf;
    }
  }
}

// Copies bytes with all threads of the block; to(k) for k < copies are the places it goes to.
template <class V, class To>
__device__ inline void CopyTo(const std::byte* from, int64_t bytes, int copies, To to) {
  constexpr int kUnroll = kUnrollOf<V>;
  const int64_t n = bytes / static_cast<int64_t>(sizeof(V));
  const V* in = reinterpret_cast<const V*>(from);
  for (int64_t i = threadIdx.x; i < n; i += static_cast<int64_t>(blockDim.x) * kUnroll) {
    V piece[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t j = i + static_cast<int64_t>(u) * blockDim.x;
      if (j < n) piece[u] = LoadOnce(in + j);
    }
    for (int k = 0; k < copies; ++k) {
      V* out = reinterpret_cast<V*>(to(k));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = i + static_cast<int64_t>(u) * blockDim.x;
        if (j < n) StoreOnce(out + j, piece[u]);
      }
    }
  }
}

template <class V>
__device__ inline void Fill(std::byte* to, int64_t bytes, int value) {
  V blank;
  memset(&blank, value, sizeof(V));
  V* out = reinterpret_cast<V*>(to);
  for (int64_t i = threadIdx.x; i < bytes / static_cast<int64_t>(sizeof(V)); i += blockDim.x) StoreOnce(out + i, blank);
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    PrefetchSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ WeightArgs a) {
  StreamTurn();
  LetNextStart();
  ControlBlockGpu::PartState& part = State(v);
  __shared__ Replicas replicas;
  if (part.live != 0) {
    FindReplicas(v, a.slot_expert, &replicas);
    const int epn = v.shape.epn();
    ForPieces(
        a, replicas.actives, [&](const Leaf& leaf) { return InWindow(a, leaf); },
        [&](uint32_t index, const Leaf& leaf, const Span& span, int64_t at, int64_t bytes) {
          const int e = replicas.active[index];
          const int first = replicas.start[e];
          const int copies = replicas.start[e + 1] - first;
          const int turn = static_cast<int>((v.rank + at / kPiece) % copies);  // homes start with different peers
          CopyTo<V>(leaf.in + e * leaf.bytes + span.offset + at, bytes, copies, [&](int k) {
            const int place = replicas.sorted[first + (k + turn) % copies];
            return Stage(v, a, place / epn, place % epn) + span.stage + at;
          });
        });
  }
  EndSend(v, Part::kSlots, part, gridDim.x);
}

__device__ inline bool SlotUsed(const RankViewGpu& v, const WeightArgs& a, int64_t slot) {
  return a.slot_expert[v.rank * v.shape.epn() + slot] >= 0;
}

// Rows of the results that need no other rank, but those that elsewhere(row) says are written from what others sent:
// the operand's row, or zeros where it has none. Only in the first round.
template <class V, class Elsewhere>
__device__ inline void LocalRows(const RankViewGpu& v, const WeightArgs& a, Elsewhere elsewhere) {
  ForPieces(
      a, v.shape.groups(), [](const Leaf& leaf) { return Span{0, 0, leaf.bytes}; },
      [&](uint32_t row, const Leaf& leaf, const Span&, int64_t at, int64_t bytes) {
        if (row >= leaf.out_rows || leaf.in == leaf.out || elsewhere(row)) return;
        std::byte* to = leaf.out + row * leaf.bytes + at;
        if (row < leaf.in_rows) {
          CopyTo<V>(leaf.in + row * leaf.bytes + at, bytes, 1, [&](int) { return to; });
        } else {
          Fill<V>(to, bytes, 0);
        }
      });
}

template <class V>
__device__ inline void PoisonAll(const WeightArgs& a) {
  for (int l = 0; l < a.leaves; ++l) {
    const int64_t bytes = a.leaf[l].bytes * a.leaf[l].out_rows;
    for (int64_t at = blockIdx.x * kPiece; at < bytes; at += static_cast<int64_t>(gridDim.x) * kPiece) {
      Fill<V>(a.leaf[l].out + at, min(kPiece, bytes - at), 0xff);
    }
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    PrefetchExpand(const __grid_constant__ RankViewGpu v, const __grid_constant__ WeightArgs a) {
  StreamTurn();
  ControlBlockGpu::PartState& part = State(v);
  const int epn = v.shape.epn();
  if (part.live == 0) {
    PoisonAll<V>(a);
  } else {
    if (a.round == 0) LocalRows<V>(v, a, [&](int64_t row) { return row >= epn && SlotUsed(v, a, row - epn); });
    ForPieces(
        a, epn, [&](const Leaf& leaf) { return InWindow(a, leaf); },
        [&](uint32_t slot, const Leaf& leaf, const Span& span, int64_t at, int64_t bytes) {
          if (!SlotUsed(v, a, slot)) return;
          CopyTo<V>(Stage(v, a, v.rank, slot) + span.stage + at, bytes, 1,
                    [&](int) { return leaf.out + (epn + slot) * leaf.bytes + span.offset + at; });
        });
  }
  EndLocal(v, Part::kSlots, part, gridDim.x);
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    ReduceStage(const __grid_constant__ RankViewGpu v, const __grid_constant__ WeightArgs a) {
  StreamTurn();
  LetNextStart();
  ControlBlockGpu::PartState& part = State(v);
  const int epn = v.shape.epn();
  if (part.live != 0) {
    ForPieces(
        a, epn, [&](const Leaf& leaf) { return InWindow(a, leaf); },
        [&](uint32_t slot, const Leaf& leaf, const Span& span, int64_t at, int64_t bytes) {
          if (!SlotUsed(v, a, slot)) return;
          const int64_t row = (epn + slot) * leaf.bytes + span.offset + at;
          CopyTo<V>(leaf.in + row, bytes, 1, [&](int) { return Stage(v, a, v.rank, slot) + span.stage + at; });
          // prefetch overwrote this row of its [2*epn] operand, so the operand's gradient there is zero.
          if (leaf.out_rows > epn) Fill<V>(leaf.out + row, bytes, 0);
        });
  }
  EndSend(v, Part::kSlots, part, gridDim.x);
}

template <class E, class V>
__device__ inline void AddReplicas(const RankViewGpu& v, const WeightArgs& a, const Replicas& replicas, int e,
                                   const std::byte* own, std::byte* out, int64_t stage, int64_t bytes) {
  const int epn = v.shape.epn();
  const int64_t n = bytes / static_cast<int64_t>(sizeof(V));
  const int64_t stride = blockDim.x;
  // One step of all sums at a time, from one rank's memory: loads that do not wait for each other.
  auto load = [&](V(&piece)[kSumUnroll], const std::byte* from, int64_t i) {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      if (i + u * stride < n) piece[u] = LoadOnce(reinterpret_cast<const V*>(from) + i + u * stride);
    }
  };
  for (int64_t i = threadIdx.x; i < n; i += stride * kSumUnroll) {
    Sum<E, V> sum[kSumUnroll];
    V piece[kSumUnroll];
    load(piece, own, i);
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) sum[u].Start(piece[u], 1.0f);
    for (int k = replicas.start[e]; k < replicas.start[e + 1]; ++k) {
      const int place = replicas.sorted[k];
      load(piece, Stage(v, a, place / epn, place % epn) + stage, i);
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) sum[u].Add(piece[u], 1.0f);
    }
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      if (i + u * stride < n) reinterpret_cast<V*>(out)[i + u * stride] = sum[u].Rounded();
    }
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    ReducePull(const __grid_constant__ RankViewGpu v, const __grid_constant__ WeightArgs a) {
  StreamTurn();
  ControlBlockGpu::PartState& part = State(v);
  const int epn = v.shape.epn();
  __shared__ Replicas replicas;
  if (part.live == 0) {
    PoisonAll<V>(a);
  } else {
    FindReplicas(v, a.slot_expert, &replicas);
    if (a.round == 0) {
      LocalRows<V>(v, a, [&](int64_t row) {
        return row < epn ? replicas.start[row + 1] > replicas.start[row] : SlotUsed(v, a, row - epn);
      });
    }
    ForPieces(
        a, replicas.actives, [&](const Leaf& leaf) { return InWindow(a, leaf); },
        [&](uint32_t index, const Leaf& leaf, const Span& span, int64_t at, int64_t bytes) {
          const int e = replicas.active[index];
          const int64_t row = e * leaf.bytes + span.offset + at;
          auto add = [&](auto element) {
            using E = decltype(element);
            if constexpr (sizeof(V) >= sizeof(typename E::Storage)) {
              AddReplicas<E, V>(v, a, replicas, e, leaf.in + row, leaf.out + row, span.stage + at, bytes);
            }
          };
          if (leaf.type == static_cast<int32_t>(RowType::kF32)) add(F32Gpu{});
          if (leaf.type == static_cast<int32_t>(RowType::kF16)) add(F16Gpu{});
          if (leaf.type == static_cast<int32_t>(RowType::kBF16)) add(BF16Gpu{});
        });
  }
  EndLocal(v, Part::kSlots, part, gridDim.x);
}

__global__ void __launch_bounds__(kThreads) PlainCopy(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t at = blockIdx.x * kPiece; at < bytes; at += static_cast<int64_t>(gridDim.x) * kPiece) {
    CopyTo<uint4>(from + at, min(kPiece, bytes - at), 1, [&](int) { return to + at; });
  }
}

// One vector width for all leaves: the widest that all sizes and addresses allow.
template <class F>
cudaError_t WithLeaves(const WeightArgs& a, F f) {
  uint64_t bits = 0;
  for (int l = 0; l < a.leaves; ++l) {
    bits |= static_cast<uint64_t>(a.leaf[l].bytes) | reinterpret_cast<uintptr_t>(a.leaf[l].in) |
            reinterpret_cast<uintptr_t>(a.leaf[l].out);
  }
  return WithVector<1>(0, bits, f);
}

}  // namespace

int64_t WeightRounds(const WeightArgs& a) {
  int64_t expert = 0;
  for (int l = 0; l < a.leaves; ++l) expert += AlignUp(a.leaf[l].bytes, 64);
  return (expert + a.window - 1) / a.window;
}

cudaError_t LaunchCopy(void* to, const void* from, int64_t bytes, int blocks, cudaStream_t stream) {
  PlainCopy<<<blocks, kThreads, 0, stream>>>(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  return cudaGetLastError();
}

#define MOONEP_LAUNCH_WEIGHTS(Kernel)                                                                      \
  cudaError_t Launch##Kernel(const RankViewGpu& v, const WeightArgs& a, int blocks, cudaStream_t stream) { \
    return WithLeaves(a, [&](auto vector) {                                                                \
      const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), kThreads};                              \
      return LaunchKernel(Kernel<decltype(vector)>, shape, stream, v, a);                                  \
    });                                                                                                    \
  }
MOONEP_LAUNCH_WEIGHTS(PrefetchSend)
MOONEP_LAUNCH_WEIGHTS(PrefetchExpand)
MOONEP_LAUNCH_WEIGHTS(ReduceStage)
MOONEP_LAUNCH_WEIGHTS(ReducePull)

}  // namespace moonep
