// What dispatch and combine share: pieces of rows dealt to warps, loads and stores of a piece, where a token goes and
// comes from, and a call's steps. One warp moves one row, or a part of its columns, at a time.
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

// Rows, cut into parts where there are fewer of them than warps. Counted in vectors. (Pieces of several rows are
// slower: the last ones keep few warps busy for long.)
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

// Blocks that share pieces: some of a grid.
struct Crew {
  int32_t block;  // this one, among them
  int32_t blocks;

  static __device__ Crew Grid() { return {static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)}; }
};

// The pieces of one warp. Blocks own every blocks-th; with `taken`, a counter in shared memory, the warps of a block
// take them as they get free, because chains differ in length.
class Pieces {
 public:
  __device__ Pieces(const Cut& cut, const Crew& crew, int32_t* taken)
      : cut_(cut), crew_(crew), taken_(taken), turn_(WarpOfBlock()) {
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
    const uint64_t item = static_cast<uint64_t>(crew_.block) + static_cast<uint64_t>(turn_) * crew_.blocks;
    const uint32_t parts = static_cast<uint32_t>(cut_.parts);
    if (item >= static_cast<uint64_t>(cut_.rows) * parts) return {-1, 0, 0};
    // There are parts only where there are fewer rows than warps.
    const uint32_t row = static_cast<uint32_t>(item) / parts;
    const int32_t begin = static_cast<int32_t>(static_cast<uint32_t>(item) - row * parts) * cut_.length;
    return {static_cast<int32_t>(row), begin, min(begin + cut_.length, cut_.vectors)};
  }

 private:
  const Cut& cut_;
  Crew crew_;
  int32_t* taken_;
  int32_t turn_;
  bool first_ = true;
};

// All pieces of a warp. Rows is a kind of work: Prepare(piece) asks for what no peer writes and waits for nothing,
// Finish(ready) does the rest. The first piece is prepared at once, so its loads may overlap with a wait.
template <class Rows>
class Pass {
 public:
  __device__ Pass(const Rows& rows, const Pieces& pieces)
      : rows_(rows), pieces_(pieces), ready_(rows_.Prepare(pieces_.Take())) {}

  __device__ void Run() {
    while (ready_.piece.row >= 0) {
      rows_.Finish(ready_);
      ready_ = rows_.Prepare(pieces_.Take());
    }
  }

 private:
  Rows rows_;
  Pieces pieces_;
  typename Rows::Ready ready_;
};

// Fills an array with bits that are NaN in every float type: what a call gives that failed.
template <class V>
__device__ inline void Poison(void* to, int64_t bytes, const Crew& crew) {
  V blank;
  memset(&blank, 0xff, sizeof(V));
  const int64_t step = static_cast<int64_t>(crew.blocks) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(crew.block) * blockDim.x + threadIdx.x; i < bytes / sizeof(V); i += step) {
    StoreOnce(static_cast<V*>(to) + i, blank);
  }
}

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

// Where a row's token comes from.
struct Source {
  int32_t rank;  // -1: the row holds no token
  int32_t token;
  uint32_t assignment;  // of all of that rank

  static __device__ Source Of(const RankViewGpu& v, int64_t tokens, int32_t src) {
    if (src < 0) return {-1, -1, 0};
    const uint32_t topk = static_cast<uint32_t>(v.shape.topk);
    const uint32_t per_rank = static_cast<uint32_t>(tokens) * topk;
    const uint32_t rank = static_cast<uint32_t>(src) / per_rank;
    const uint32_t assignment = static_cast<uint32_t>(src) - rank * per_rank;
    return {static_cast<int32_t>(rank), static_cast<int32_t>(assignment / topk), assignment};
  }
};

// -- steps ------------------------------------------------------------------------------------------------------------

// The local part of a step. poison(crew) fills the results of a call that failed, in its last step: before that there
// may be more to come, and afterwards nothing is left of what earlier steps wrote.
template <class Local, class Poisoned>
__device__ inline void RunLocal(const RankViewGpu& v, Part which, const Step& step, const Crew& crew, const Cut& cut,
                                int32_t* taken, const Local& rows, Poisoned poison) {
  ControlBlockGpu::PartState& part = State(v, which);
  Pass pass(rows, Pieces(cut, crew, taken));  // its first loads and that of `live` are one trip to memory
  if (part.live != 0) {
    pass.Run();
  } else if (step.last) {
    poison(crew);
  }
  if (step.last) EndLocal(v, which, part, static_cast<uint32_t>(crew.blocks));
}

// A step: the first `senders` blocks send and publish, the others do the local part.
template <class Send, class Local, class Poisoned>
__device__ inline void RunStep(const RankViewGpu& v, Part which, const Step& step, const Cut& send, const Cut& local,
                               const Send& send_rows, const Local& local_rows, Poisoned poison) {
  __shared__ int32_t taken;
  StreamTurn();
  LetNextStart();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block >= step.senders) {
    RunLocal(v, which, step, {block - step.senders, step.locals}, local, &taken, local_rows, poison);
    return;
  }
  ControlBlockGpu::PartState& part = State(v, which);
  Pass pass(send_rows, Pieces(send, {block, step.senders}, &taken));
  if (part.live != 0) pass.Run();
  EndSend(v, which, part, static_cast<uint32_t>(step.senders));
}

// -- launches ---------------------------------------------------------------------------------------------------------

inline uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

template <class V>
int64_t VectorsOf(const RankViewGpu& v) {
  return v.shape.row_bytes / static_cast<int64_t>(sizeof(V));
}

// No more blocks than there is work for; but who sends publishes, and who is last ends the call.
inline int32_t Fit(int32_t blocks, const Cut& cut, int threads) {
  const int64_t needed = (cut.pieces() * 32 + threads - 1) / threads;
  return blocks == 0 ? 0 : static_cast<int32_t>(std::clamp<int64_t>(needed, 1, blocks));
}
template <class... Params, class... Args>
cudaError_t LaunchStep(void (*kernel)(Params...), Step step, const Cut& send, const Cut& local, int threads,
                       cudaStream_t stream, const Args&... args) {
  step.senders = Fit(step.senders, send, threads);
  step.locals = Fit(step.locals, local, threads);
  const dim3 grid(static_cast<unsigned>(step.senders + step.locals));
  return LaunchKernel(kernel, {grid, threads}, stream, args..., step, send, local);
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
