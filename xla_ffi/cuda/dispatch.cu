// dispatch and combine_grad: rows to the ranks that compute them, and out of the shared memory into the result.
//
// Begin -> send (a grid of link_blocks: bulk copies, or vectors where sizes or addresses do not allow them) -> Wait ->
// expand (a grid of local_blocks). Few bytes: one launch does it all.
#include "xla_ffi/cuda/bulk.cuh"
#include "xla_ffi/cuda/rows.cuh"

namespace moonep {
namespace {

// Copies need few registers, so a block fills its SM. Bytes in flight decide: threads * unroll * 16.
constexpr int kThreads = 1024;
constexpr int kUnroll = 4;          // loads in flight per lane
constexpr int kWholeThreads = 768;  // two bodies and the waits in one kernel: more would spill

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

  // The rows that the token is stored to; the lanes store its weights, if `first`.
  __device__ Addresses Resolve(const RankViewGpu& v, const DispatchArgs& a, bool first) const {
    const bool weighted = first && a.topk_weights != nullptr;
    const auto address = [&](int32_t to_rank, int32_t to_row, float value) -> std::byte* {
      if (!Inside(to_rank, v.shape.ranks) || !Inside(to_row, v.shape.recv_rows(v.shape.tokens))) return nullptr;
      if (weighted) v.weights(to_rank)[to_row] = value;
      return v.row(to_rank, to_row);
    };
    return {PrimaryMask(rank, v.shape.topk),
            {address(rank.low, row.low, weight.low), address(rank.high, row.high, weight.high)}};
  }
};

// Each row of x is read once and stored to every distinct destination.
template <class V>
struct SendRows {
  const RankViewGpu& v;
  const DispatchArgs& a;

  struct Ready {
    Piece piece;
    Targets targets;
    V data[kUnroll];
  };
  __device__ const std::byte* X(int32_t token) const { return a.x + static_cast<int64_t>(token) * v.shape.row_bytes; }

  __device__ Ready Prepare(const Piece& piece) const {
    Ready r;
    r.piece = piece;
    if (piece.row < 0) return r;
    r.targets = Targets::Load(v, a, piece.row, piece.begin == 0);
    Load(r.data, X(piece.row), piece.begin + Lane(), piece.end);
    return r;
  }
  __device__ void Finish(Ready& r) const {
    const Piece p = r.piece;
    const Addresses to = r.targets.Resolve(v, a, p.begin == 0);
    for (int32_t begin = p.begin; begin < p.end; begin += 32 * kUnroll) {
      const int32_t i = begin + Lane();
      if (begin != p.begin) Load(r.data, X(p.row), i, p.end);
      to.ForEach([&](std::byte* row) { Store(r.data, row, i, p.end); });
    }
  }
};

// The received rows into the result; rows without a token become zero. kChains: each received row is read once and
// stored to all rows of its chain. Else every row reads its primary's received row, which is more bytes but no walk
// through a chain.
template <class V, bool kChains>
struct ExpandRows {
  const RankViewGpu& v;
  const DispatchArgs& a;

  struct Ready {
    Piece piece;
    int32_t src;
    int32_t primary;
  };
  __device__ Ready Prepare(const Piece& piece) const {
    if (piece.row < 0) return {piece, -1, -1};
    return {piece, a.src[piece.row], a.primary[piece.row]};
  }
  __device__ void Finish(const Ready& r, bool live) const {
    const Piece p = r.piece;
    const bool empty = !live || r.src < 0;
    if (a.weights != nullptr && Lane() == 0 && p.begin == 0) {
      a.weights[p.row] = empty ? (live ? 0.0f : __int_as_float(-1)) : v.weights(v.rank)[p.row];
    }
    if (empty) {
      V blank;
      memset(&blank, live ? 0 : 0xff, sizeof(V));  // all bits set: NaN in every float type
      V* to = reinterpret_cast<V*>(Hidden(p.row));
      for (int32_t i = p.begin + Lane(); i < p.end; i += 32) StoreOnce(to + i, blank);
      return;
    }
    if (kChains ? r.primary != p.row : !Inside(r.primary, a.rows)) return;  // stored with its primary
    for (int32_t i = p.begin + Lane(); i < p.end; i += 32 * kUnroll) {
      V data[kUnroll];
      Load(data, v.row(v.rank, r.primary), i, p.end);
      int64_t link = p.row;
      for (int steps = 0; steps < (kChains ? v.shape.topk : 1) && Inside(link, a.rows); ++steps) {
        Store(data, Hidden(link), i, p.end);
        if (kChains) link = a.next[link];
      }
    }
  }
  __device__ std::byte* Hidden(int64_t row) const { return a.hidden + row * v.shape.row_bytes; }
};

// -- bulk copies ------------------------------------------------------------------------------------------------------

// A warp has a ring of stages in shared memory: while the stores of one piece leave it, the next pieces come in. A
// stage is filled again once its stores are done, and they are while kDraining younger groups may still be leaving.
constexpr int kBulkWarps = 16;
constexpr int kStages = 3;
constexpr int kDraining = 1;
constexpr int64_t kPieceBytes = 16 * 1024;
constexpr int64_t kRingBytes = 216 * 1024;  // of 227 KiB that a block may have

struct BulkCut {
  int32_t parts;  // of a row
  int32_t bytes;  // of a stage
  int32_t warps;

  static BulkCut Of(int64_t row_bytes) {
    const int64_t parts = (row_bytes + kPieceBytes - 1) / kPieceBytes;
    const int64_t bytes = AlignUp((row_bytes + parts - 1) / parts, 128);
    return {static_cast<int32_t>((row_bytes + bytes - 1) / bytes), static_cast<int32_t>(bytes),
            static_cast<int32_t>(std::min<int64_t>(kBulkWarps, kRingBytes / (kStages * bytes)))};
  }
  size_t shared() const { return static_cast<size_t>(warps) * kStages * static_cast<size_t>(bytes); }
};

struct BulkPiece {
  uint32_t begin;  // into the row, bytes
  uint32_t bytes;  // 0: no more
  Targets targets;
};

__device__ inline void SendBulk(const RankViewGpu& v, const DispatchArgs& a, const BulkCut& cut, std::byte* shared) {
  __shared__ uint64_t loaded[kBulkWarps][kStages];
  const uint32_t row_bytes = static_cast<uint32_t>(v.shape.row_bytes);
  const uint32_t parts = static_cast<uint32_t>(cut.parts);
  const uint32_t items = static_cast<uint32_t>(a.tokens) * parts;
  const uint32_t step = gridDim.x * static_cast<uint32_t>(WarpsOfBlock());
  uint32_t next = blockIdx.x + static_cast<uint32_t>(WarpOfBlock()) * gridDim.x;
  std::byte* ring = shared + static_cast<int64_t>(WarpOfBlock()) * kStages * cut.bytes;
  uint64_t* barriers = loaded[WarpOfBlock()];
  const bool drives = Lane() == 0;  // the one lane that issues copies, and therefore waits for them
  if (drives) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) InitBarrier(&barriers[s]);
    PublishBarriers();
  }

  BulkPiece pieces[kStages];
  const auto fetch = [&](int s) {
    BulkPiece& p = pieces[s];
    p.bytes = 0;
    if (next >= items) return;
    const uint32_t token = next / parts;
    p.begin = (next - token * parts) * static_cast<uint32_t>(cut.bytes);
    p.bytes = min(static_cast<uint32_t>(cut.bytes), row_bytes - p.begin);
    next += step;
    if (drives) {
      const std::byte* x = a.x + static_cast<int64_t>(token) * row_bytes;
      BulkLoad(ring + static_cast<int64_t>(s) * cut.bytes, x + p.begin, p.bytes, &barriers[s]);
    }
    p.targets = Targets::Load(v, a, token, p.begin == 0);
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s < kStages - kDraining) {
      fetch(s);
    } else {
      pieces[s].bytes = 0;
    }
  }
  // One turn uses every stage once, so a stage's barrier is in the phase of the turn's parity.
  bool more = true;
  for (uint32_t parity = 0; more; parity ^= 1) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const BulkPiece& p = pieces[s];
      more = p.bytes != 0;
      if (!more) break;  // pieces come in order: none after this one either
      const Addresses to = p.targets.Resolve(v, a, p.begin == 0);
      if (drives) WaitLoaded(&barriers[s], parity);
      to.ForEach([&](std::byte* row) {
        if (drives) BulkStore(row + p.begin, ring + static_cast<int64_t>(s) * cut.bytes, p.bytes);
      });
      if (drives) {
        EndStoreGroup();
        WaitStoreGroups<kDraining>();
      }
      fetch((s + kStages - kDraining) % kStages);
    }
  }
  if (drives) WaitStoreGroups<0>();  // before Tail, whose release covers no store that is not known to be done
}

// -- kernels ----------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kBulkWarps * 32, 1)
    DispatchSendBulk(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                     const __grid_constant__ BulkCut cut) {
  extern __shared__ __align__(128) std::byte shared[];
  StreamTurn();
  LetNextStart();
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  if (part.live != 0) SendBulk(v, a, cut, shared);
  EndSend(v, Part::kRows, part);
}

template <class V>
__global__ void __launch_bounds__(kThreads, 1)
    DispatchSend(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                 const __grid_constant__ Cut cut) {
  __shared__ int32_t taken;
  StreamTurn();
  LetNextStart();
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  if (part.live != 0) Pass(SendRows<V>{v, a}, Pieces(cut, &taken)).Run();
  EndSend(v, Part::kRows, part);
}

template <class V>
__global__ void __launch_bounds__(kThreads, 1)
    DispatchExpand(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                   const __grid_constant__ Cut cut) {
  __shared__ int32_t taken;
  StreamTurn();
  LetNextStart();
  ControlBlockGpu::PartState& part = State(v, Part::kRows);
  Pass(ExpandRows<V, true>{v, a}, Pieces(cut, &taken)).Run(part.live != 0);
  EndLocal(v, Part::kRows, part);
}

template <class V>
__global__ void __launch_bounds__(kWholeThreads, 1)
    DispatchWhole(const __grid_constant__ RankViewGpu v, const __grid_constant__ DispatchArgs a,
                  const __grid_constant__ CallId id, const __grid_constant__ Cut send,
                  const __grid_constant__ Cut local) {
  StreamTurn();
  WholeCall(
      v, Part::kRows, id, [&] { return Pass(SendRows<V>{v, a}, Pieces(send, nullptr)); },
      [&] { return Pass(ExpandRows<V, false>{v, a}, Pieces(local, nullptr)); });
}

}  // namespace

bool RowsGoInBulk(const RankViewGpu& v, const void* x) {
  return (static_cast<uint64_t>(v.shape.row_bytes) | Address(x)) % 16 == 0;
}

cudaError_t LaunchDispatchSendBulk(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const BulkCut cut = BulkCut::Of(v.shape.row_bytes);
  const int64_t grid = std::clamp<int64_t>(a.tokens * cut.parts, 1, blocks);
  return LaunchKernel(DispatchSendBulk, {dim3(static_cast<unsigned>(grid)), cut.warps * 32, cut.shared()}, stream, v, a,
                      cut);
}

cudaError_t LaunchDispatchSend(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.x), [&](auto vector) {
    using V = decltype(vector);
    const Cut cut = Cut::Of(a.tokens, VectorsOf<V>(v), int64_t{blocks} * kThreads / 32);
    return LaunchKernel(DispatchSend<V>, ShapeFor(cut, blocks, kThreads), stream, v, a, cut);
  });
}

cudaError_t LaunchDispatchExpand(const RankViewGpu& v, const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.hidden), [&](auto vector) {
    using V = decltype(vector);
    const Cut cut = Cut::Of(a.rows, VectorsOf<V>(v), int64_t{blocks} * kThreads / 32);
    return LaunchKernel(DispatchExpand<V>, ShapeFor(cut, blocks, kThreads), stream, v, a, cut);
  });
}

cudaError_t LaunchDispatchWhole(const RankViewGpu& v, const DispatchArgs& a, const CallId& id, cudaStream_t stream) {
  return WithVector(v.shape.row_bytes, Address(a.x) | Address(a.hidden), [&](auto vector) {
    using V = decltype(vector);
    const LaunchShape shape = WholeShape(a.rows, VectorsOf<V>(v), kUnroll, kWholeThreads);
    const Cut send = Cut::Of(a.tokens, VectorsOf<V>(v), WarpsOf(shape));
    const Cut local = Cut::Of(a.rows, VectorsOf<V>(v), WarpsOf(shape));
    return LaunchKernel(DispatchWhole<V>, shape, stream, v, a, id, send, local);
  });
}

}  // namespace moonep
