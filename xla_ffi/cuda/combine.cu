// combine and dispatch_grad: rows back to the sources of their tokens, and their sums.
//
// Begin, then rounds of a step and Wait, then a last step. A step sends a round's tokens (sums of each one's rows here,
// to its source) while other blocks add up what came in the round before. Few bytes: one launch does it all.
#include "xla_ffi/cuda/rows.cuh"

namespace moonep {
namespace {

constexpr int kThreads = 512;       // sums need more registers than copies
constexpr int kWholeThreads = 384;  // two bodies and the waits in one kernel: more would spill
constexpr int kUnroll = 4;          // loads in flight per lane, of one row

// The rows of one token on this rank are summed and stored in the source's return buffer. exact: every row travels as
// it is, its weight beside it. kEager: the row is loaded before it is known to matter, which is one trip to memory
// less.
template <class E, class V, bool kEager>
struct ReturnRows {
  const RankViewGpu& v;
  const CombineArgs& a;
  Tokens tokens;

  struct Ready {
    Piece piece;
    int32_t src;
    int32_t next;
    bool leads;
    float w;
    V data[kUnroll];
  };
  __device__ const std::byte* Out(int64_t row) const { return a.out + row * v.shape.row_bytes; }

  __device__ Ready Prepare(const Piece& piece) const {
    Ready r;
    r.piece = piece;
    if (piece.row < 0) return r;
    const int32_t i = piece.begin + Lane();
    if (kEager) Load(r.data, Out(piece.row), i, piece.end);
    const int32_t primary = a.primary[piece.row];
    r.src = a.src[piece.row];
    r.next = a.next[piece.row];
    r.w = a.w[piece.row];
    r.leads = v.shape.exact || primary == piece.row;
    return r;
  }
  __device__ void Finish(Ready& r) const {
    const Piece p = r.piece;
    const Source from = Source::Of(v, a.tokens, r.src);
    if (!Inside(from.rank, v.shape.ranks) || !tokens.Has(from.token)) return;
    const bool exact = v.shape.exact;
    const bool scaled = a.returned == nullptr;
    if (Lane() == 0 && p.begin == 0 && (exact || !scaled)) v.return_weights(from.rank)[from.assignment] = r.w;
    if (!r.leads) return;
    for (int32_t i = p.begin + Lane(); i < p.end; i += 32 * kUnroll) {
      if (!kEager || i != p.begin + Lane()) Load(r.data, Out(p.row), i, p.end);
      if (!exact) SumChain(r, scaled, i);
      Store(r.data, v.return_row(from.rank, from.assignment), i, p.end);
    }
  }
  // In chain order, rounded once. The next row of the chain is under way while this one is added.
  __device__ void SumChain(Ready& r, bool scaled, int32_t i) const {
    Sum<E, V> sum[kUnroll];
    int64_t link = r.next;
    float scale = scaled ? r.w : 1.0f;
    for (int steps = 1;; ++steps) {
      const bool more = steps < v.shape.topk && Inside(link, a.rows);
      V ahead[kUnroll];
      if (more) Load(ahead, Out(link), i, r.piece.end);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (steps == 1) {
          sum[u].Start(r.data[u], scale);
        } else {
          sum[u].Add(r.data[u], scale);
        }
      }
      if (!more) break;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) r.data[u] = ahead[u];
      scale = scaled ? a.w[link] : 1.0f;
      link = a.next[link];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) r.data[u] = sum[u].Rounded();
  }
};

// The source sums what came back, in ascending k, and rounds once. kBatch summands of kVectors vectors are loaded
// together: long pieces of few rows for bandwidth, short ones of many rows for latency.
template <class E, class V, int kVectors, int kBatch>
struct ReduceRows {
  const RankViewGpu& v;
  const CombineArgs& a;
  Tokens tokens;

  struct Ready {
    Piece piece;
    PerAssignment<int32_t> to_rank;
  };
  __device__ int64_t Token(const Piece& piece) const { return tokens.begin + piece.row; }
  __device__ Ready Prepare(const Piece& piece) const {
    if (piece.row < 0) return {piece, {-1, -1}};
    const int topk = v.shape.topk;
    return {piece, PerAssignment<int32_t>::Load(a.dst_rank + Token(piece) * topk, topk, -1)};
  }
  __device__ void Finish(const Ready& r) const {
    const Piece p = r.piece;
    const int topk = v.shape.topk;
    const bool exact = v.shape.exact;
    const bool scaled = exact && a.returned == nullptr;
    const int64_t first = Token(p) * topk;
    PerAssignment<float> weight{1.0f, 1.0f};
    if (scaled || a.returned != nullptr) {
      weight = PerAssignment<float>::Load(v.return_weights(v.rank) + first, topk, 0.0f);
    }
    if (a.returned != nullptr && p.begin == 0) {
      const auto give = [&](int k, int32_t rank, float value) {
        if (k < topk) a.returned[first + k] = rank >= 0 ? value : 0.0f;
      };
      give(Lane(), r.to_rank.low, weight.low);
      give(Lane() + 32, r.to_rank.high, weight.high);
    }
    const uint64_t summands = exact ? RoutedMask(r.to_rank) : PrimaryMask(r.to_rank, topk);
    for (int32_t begin = p.begin; begin < p.end; begin += 32 * kVectors) {
      const int32_t i = begin + Lane();
      Sum<E, V> sum[kVectors];
      for (uint64_t left = summands; left != 0;) {
        V data[kBatch][kVectors];
        float scale[kBatch];
        const bool start = left == summands;
        int count = 0;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (left == 0) continue;
          const int k = LowestBit(left);
          left &= left - 1;
          count = b + 1;
          scale[b] = scaled ? weight.At(k) : 1.0f;
          Load(data[b], v.return_row(v.rank, first + k), i, p.end);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (b >= count) continue;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            if (start && b == 0) {
              sum[u].Start(data[b][u], scale[b]);
            } else {
              sum[u].Add(data[b][u], scale[b]);
            }
          }
        }
      }
      V rounded[kVectors] = {};
#pragma unroll
      for (int u = 0; u < kVectors && summands != 0; ++u) rounded[u] = sum[u].Rounded();
      Store(rounded, a.y + Token(p) * v.shape.row_bytes, i, p.end);
    }
  }
};

template <class V>
__device__ inline void PoisonResults(const RankViewGpu& v, const CombineArgs& a, const Crew& crew) {
  Poison<V>(a.y, a.tokens * v.shape.row_bytes, crew);
  if (a.returned != nullptr) Poison<float>(a.returned, a.tokens * v.shape.topk * 4, crew);
}

template <class E, class V>
__global__ void __launch_bounds__(kThreads, 1)
    CombineStep(const __grid_constant__ RankViewGpu v, const __grid_constant__ CombineArgs a,
                const __grid_constant__ Step step, const __grid_constant__ Cut send,
                const __grid_constant__ Cut local) {
  RunStep(v, Part::kReturns, step, send, local, ReturnRows<E, V, false>{v, a, step.send},
          ReduceRows<E, V, 2, 1>{v, a, step.local}, [&](const Crew& crew) { PoisonResults<V>(v, a, crew); });
}

// The last step, which only sums: fewer registers, so twice the warps.
template <class E, class V>
__global__ void __launch_bounds__(kThreads, 2)
    CombineLast(const __grid_constant__ RankViewGpu v, const __grid_constant__ CombineArgs a,
                const __grid_constant__ Step step, const __grid_constant__ Cut, const __grid_constant__ Cut local) {
  __shared__ int32_t taken;
  StreamTurn();
  LetNextStart();
  RunLocal(v, Part::kReturns, step, Crew::Grid(), local, &taken, ReduceRows<E, V, 2, 1>{v, a, step.local},
           [&](const Crew& crew) { PoisonResults<V>(v, a, crew); });
}

template <class E, class V>
__global__ void __launch_bounds__(kWholeThreads, 1)
    CombineWhole(const __grid_constant__ RankViewGpu v, const __grid_constant__ CombineArgs a,
                 const __grid_constant__ CallId id, const __grid_constant__ Cut send,
                 const __grid_constant__ Cut local) {
  StreamTurn();
  const Tokens all{0, static_cast<int32_t>(a.tokens), true};
  WholeCall(
      v, Part::kReturns, id,
      [&] { return Pass(ReturnRows<E, V, true>{v, a, all}, Pieces(send, Crew::Grid(), nullptr)); },
      [&] { return Pass(ReduceRows<E, V, 1, 4>{v, a, all}, Pieces(local, Crew::Grid(), nullptr)); },
      [&] { PoisonResults<V>(v, a, Crew::Grid()); });
}

// Rows are summed element by element, so a vector holds one or more.
template <class F>
cudaError_t WithRows(RowType type, int64_t bytes, uintptr_t addresses, F f) {
  return WithRowType(type, [&](auto element) {
    constexpr size_t kElement = sizeof(typename decltype(element)::Storage);
    return WithVector<kElement>(bytes, addresses, [&](auto vector) { return f(element, vector); });
  });
}

}  // namespace

cudaError_t LaunchCombineStep(const RankViewGpu& v, const CombineArgs& a, const Step& step, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.out) | Address(a.y), [&](auto element, auto vector) {
    using E = decltype(element);
    using V = decltype(vector);
    const Cut send = Cut::Of(a.rows, VectorsOf<V>(v), int64_t{step.senders} * kThreads / 32);
    const Cut local = Cut::Of(step.local.count(), VectorsOf<V>(v), int64_t{step.locals} * kThreads / 32);
    return LaunchStep(step.last ? CombineLast<E, V> : CombineStep<E, V>, step, send, local, kThreads, stream, v, a);
  });
}

cudaError_t LaunchCombineWhole(const RankViewGpu& v, const CombineArgs& a, const CallId& id, cudaStream_t stream) {
  return WithRows(a.type, v.shape.row_bytes, Address(a.out) | Address(a.y), [&](auto element, auto vector) {
    using E = decltype(element);
    using V = decltype(vector);
    const LaunchShape shape = WholeShape(a.rows, VectorsOf<V>(v), kUnroll, kWholeThreads);
    const Cut send = Cut::Of(a.rows, VectorsOf<V>(v), WarpsOf(shape));
    const Cut local = Cut::Of(a.tokens, VectorsOf<V>(v), WarpsOf(shape));
    return LaunchKernel(CombineWhole<E, V>, shape, stream, v, a, id, send, local);
  });
}

}  // namespace moonep
