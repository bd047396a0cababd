// dispatch and combine_grad: rows to the ranks that compute them, and out of the shared memory into the result.
//
// Begin, then rounds of a step and Wait, then a last step. A step sends a round's tokens (blocks that the link keeps
// busy) while other blocks expand the rows of the round before; the first one expands the rows that never leave their
// rank, which go from operand to result. Few bytes: one launch does it all.
#include "xla_ffi/cuda/rows.cuh"

namespace moonep {
namespace {

// Copies need few registers, so a block fills its SM. Bytes in flight decide: threads * unroll * 16.
constexpr int kThreads = 1024;
constexpr int kUnroll = 4;           // loads in flight per lane
constexpr size_t kLeastElement = 2;  // bytes
constexpr int kWholeThreads = 768;   // two bodies and the waits in one kernel: more would spill

// The primary's row on each distinct destination of a token.
struct Addresses {
  uint64_t primaries;  // bit k
  PerAssignment<std::byte*> of;

  // Calls body(address) on all lanes.
  template <class Body>
  __device__ void ForEach(Body body) const {
    for (uint64_t left = primaries; left != 0; left &= left - 1) {
      std::byte* to = of.At(LowestBit(left));
      if (to != nullptr) body(to);
    }
  }
};

// Where a token and its weights go.
struct Targets {
  PerAssignment<int32_t> rank;
  PerAssignment<int32_t> row;
  PerAssignment<float> weight;

  // `first`: the piece that takes the weights along.
  static __device__ Targets Load(const RankViewGpu& v, const DispatchArgs& a, int64_t token, bool first) {
    const int topk = v.shape.topk;
    Targets t{PerAssignment<int32_t>::Load(a.dst_rank + token * topk, topk, -1),
              PerAssignment<int32_t>::Load(a.dst_row + token * topk, topk, -1),
              {0.0f, 0.0f}};
    if (first && a.topk_weights != nullptr) {
      t.weight = PerAssignment<float>::Load(a.topk_weights + token * topk, topk, 0.0f);
    }
    return t;
  }

  // The rows that the token is stored to, on other ranks; the lanes store its weights, if `first`.
  __device__ Addresses Resolve(const RankViewGpu& v, const DispatchArgs& a, bool first) const {
    const bool weighted = first && a.topk_weights != nullptr;
    const auto address = [&](int32_t to_rank, int32_t to_row, float value) -> std::byte* {
      if (to_rank == v.rank || !Inside(to_rank, v.shape.ranks)) return nullptr;
      if (!Inside(to_row, v.shape.recv_rows(v.shape.tokens))) return nullptr;
      if (weighted) v.weights(to_rank)[to_row] = value;
      return v.row(to_rank, to_row);
    };
    return {PrimaryMask(rank, v.shape.topk),
            {address(rank.low, row.low, weight.low), address(rank.high, row.high, weight.high)}};
  }
};

// Each row of x is read once and stored to every distinct destination but this rank.
template <class V>
struct SendRows {
  const RankViewGpu& v;
  const DispatchArgs& a;
  Tokens tokens;

  struct Ready {
    Piece piece;
    Targets targets;
    V data[kUnroll];
  };
  __device__ int64_t Token(const Piece& piece) const { return tokens.begin + piece.row; }
  __device__ const std::byte* X(const Piece& piece) const { return a.x + Token(piece) * v.shape.row_bytes; }

  __device__ Ready Prepare(const Piece& piece) const {
    Ready r;
    r.piece = piece;
    if (piece.row < 0) return r;
    r.targets = Targets::Load(v, a, Token(piece), piece.begin == 0);
    Load(r.data, X(piece), piece.begin + Lane(), piece.end);
    return r;
  }
  __device__ void Finish(Ready& r) const {
    const Piece p = r.piece;
    const Addresses to = r.targets.Resolve(v, a, p.begin == 0);
    for (int32_t begin = p.begin; begin < p.end; begin += 32 * kUnroll) {
      const int32_t i = begin + Lane();
      if (begin != p.begin) Load(r.data, X(p), i, p.end);
      to.ForEach([&](std::byte* row) { Store(r.data, row, i, p.end); });
    }
  }
};

// Rows into the result: received ones, this rank's own tokens out of x, and zeros where there is no token. kChains:
// each source is read once and stored to all rows of its chain. Else every row reads its primary's, which is more bytes
// but no walk through a chain.
template <class V, bool kChains>
struct ExpandRows {
  const RankViewGpu& v;
  const DispatchArgs& a;
  Tokens tokens;

  struct Ready {
    Piece piece;
    int32_t src;
    int32_t primary;
  };
  __device__ Ready Prepare(const Piece& piece) const {
    if (piece.row < 0) return {piece, -1, -1};
    return {piece, a.src[piece.row], a.primary[piece.row]};
  }
  __device__ void Finish(const Ready& r) const {
    const Piece p = r.piece;
    const Source from = Source::Of(v, a.tokens, r.src);
    const bool blank = from.rank < 0;
    const bool own = from.rank == v.rank;
    if (!(blank || own ? tokens.at_home : tokens.Has(from.token))) return;
    if (a.weights != nullptr && Lane() == 0 && p.begin == 0) {
      a.weights[p.row] = blank ? 0.0f : own ? a.topk_weights[from.assignment] : v.weights(v.rank)[p.row];
    }
    if (blank) {
      V* to = reinterpret_cast<V*>(Hidden(p.row));
      for (int32_t i = p.begin + Lane(); i < p.end; i += 32) StoreOnce(to + i, V{});
      return;
    }
    if (kChains ? r.primary != p.row : !Inside(r.primary, a.rows)) return;  // stored with its primary
    const std::byte* row = own ? a.x + int64_t{from.token} * v.shape.row_bytes : v.row(v.rank, r.primary);
    for (int32_t i = p.begin + Lane(); i < p.end; i += 32 * kUnroll) {
      V data[kUnroll];
      Load(data, row, i, p.end);
      int64_t link = p.row;
      for (int steps = 0; steps < (kChains ? v.shape.topk : 1) && Inside(link, a.rows); ++steps) {
        Store(data, Hidden(link), i, p.end);
        if (kChains) link = a.next[link];
      }
    }
  }
  __device__ std::byte* Hidden(int64_t row) const { return a.hidden + row * v.shape.row_bytes; }
};

template <class V>
__device__ inline void PoisonResults(const RankViewGpu& v, const DispatchArgs& a, const Crew& crew) {
  Poison<V>(a.hidden, a.rows * v.shape.row_bytes, crew);
  if (a.weights != nullptr) Poison<float>(a.weights, a.rows * 4, crew);
}

template <class V>
__global__ void __launch_bounds__(kThreads, 1)
    DispatchStep(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                 const __grid_constant__ Step step, const __grid_constant__ Cut send,
                 const __grid_constant__ Cut local) {
  RunStep(v, Part::kRows, step, send, local, SendRows<V>{v, a, step.send}, ExpandRows<V, true>{v, a, step.local},
          [&](const Crew& crew) { PoisonResults<V>(v, a, crew); });
}

template <class V>
__global__ void __launch_bounds__(kWholeThreads, 1)
    DispatchWhole(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                  const __grid_constant__ CallId id, const __grid_constant__ Cut send,
                  const __grid_constant__ Cut local) {
  StreamTurn();
  const Tokens all{0, static_cast<int32_t>(a.tokens), true};
  WholeCall(
      v, Part::kRows, id, [&] { return Pass(SendRows<V>{v, a, all}, Pieces(send, Crew::Grid(), nullptr)); },
      [&] { return Pass(ExpandRows<V, false>{v, a, all}, Pieces(local, Crew::Grid(), nullptr)); },
      [&] { PoisonResults<V>(v, a, Crew::Grid()); });
}

}  // namespace

cudaError_t LaunchDispatchStep(const RankViewGpu& v, const DispatchArgs& a, const Step& step, cudaStream_t stream) {
  return WithVector<kLeastElement>(v.shape.row_bytes, Address(a.x) | Address(a.hidden), [&](auto vector) {
    using V = decltype(vector);
    const Cut send = Cut::Of(step.send.count(), VectorsOf<V>(v), int64_t{step.senders} * kThreads / 32);
    const int64_t rows = step.local.at_home || step.local.count() > 0 ? a.rows : 0;
    const Cut local = Cut::Of(rows, VectorsOf<V>(v), int64_t{step.locals} * kThreads / 32);
    return LaunchStep(DispatchStep<V>, step, send, local, kThreads, stream, v, a);
  });
}

cudaError_t LaunchDispatchWhole(const RankViewGpu& v, const DispatchArgs& a, const CallId& id, cudaStream_t stream) {
  return WithVector<kLeastElement>(v.shape.row_bytes, Address(a.x) | Address(a.hidden), [&](auto vector) {
    using V = decltype(vector);
    const LaunchShape shape = WholeShape(a.rows, VectorsOf<V>(v), kUnroll, kWholeThreads);
    const Cut send = Cut::Of(a.tokens, VectorsOf<V>(v), WarpsOf(shape));
    const Cut local = Cut::Of(a.rows, VectorsOf<V>(v), WarpsOf(shape));
    return LaunchKernel(DispatchWhole<V>, shape, stream, v, a, id, send, local);
  });
}

}  // namespace moonep
