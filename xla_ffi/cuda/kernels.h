// Launchers of all kernels: raw device pointers and a stream, no XLA. Each returns the launch's error.
//
// A call is: Begin (one block: next epoch, credits) -> a data kernel that sends and publishes in its tail -> Wait (one
// block) -> a local kernel that expands or reduces and gives the credits back. `blocks` is the grid of data kernels.
// Large calls of rows send in rounds, each an epoch of its own, and a round's local work is done beside the next send.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "xla_ffi/core/placement.h"
#include "xla_ffi/core/planner.h"
#include "xla_ffi/cuda/chunk.h"

namespace moonep {

// A plan's arrays in device memory (moonep_jax/spec.py says what each means).
struct PlanPointers {
  int32_t* dst_rank;
  int32_t* dst_row;
  int32_t* src;
  int32_t* primary;
  int32_t* next;
  int32_t* group_sizes;
  int32_t* group_rows;
  int32_t* slot_expert;
  int32_t* home_rows;
  int32_t* rank_rows;
  int32_t* ticket;
};

cudaError_t LaunchBegin(const RankViewGpu& v, Part part, const CallId& id, cudaStream_t stream);
// `more`: rounds of the call that follow this one.
cudaError_t LaunchWait(const RankViewGpu& v, Part part, uint32_t more, cudaStream_t stream);
// Puts the rank in error with a record of its own that names it, and tells its peers; beside any of its calls.
cudaError_t LaunchRaise(const RankViewGpu& v, ErrorRecord::Code code, cudaStream_t stream);

// For timing one rank alone: posts its peers' words for all `rounds` of the call that follows on the stream.
cudaError_t LaunchPrepost(const RankViewGpu& v, Part part, const CallId& id, uint32_t rounds, cudaStream_t stream);
// For comparison in benchmarks: a plain copy by `blocks` blocks; bytes and addresses are multiples of 16.
cudaError_t LaunchCopy(void* to, const void* from, int64_t bytes, int blocks, cudaStream_t stream);

// -- plan (plan.cu) ---------------------------------------------------------------------------------------------------

// Device memory of one rank that only its own kernels use.
struct PlanScratch {
  int32_t* counts;       // [E], zero between launches
  int32_t* alloc;        // [E, R]
  int32_t* src_prefix;   // [R, E]
  int32_t* dst_prefix;   // [E, R]
  int32_t* group_row;    // [E, R]
  int32_t* runs;         // [R, E] RunOf
  int32_t* tile_prefix;  // [R, tiles, E]
};

struct PlanArgs {
  int64_t tokens;
  const int32_t* ids;  // [s, K]
  PlanPointers plan;
  PlanScratch scratch;
  int64_t rows;   // N
  int64_t tile;   // PlanTile(shape)
  int64_t tiles;  // PlanTiles(shape, tokens)
};

// Few ids: one launch.
bool PlanIsSmall(const DomainShape& d, int64_t tokens);
cudaError_t LaunchPlanWhole(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream);

// Else three: push ids and counts (opens the call by itself), wait and make the tables, place the rows.
cudaError_t LaunchPlanSend(const RankViewGpu& v, const PlanArgs& a, const CallId& id, cudaStream_t stream);
cudaError_t LaunchPlanTables(const RankViewGpu& v, const PlanArgs& a, cudaStream_t stream);
cudaError_t LaunchPlanPlace(const RankViewGpu& v, const PlanArgs& a, cudaStream_t stream);

// -- rows (dispatch.cu, combine.cu) -----------------------------------------------------------------------------------

// A call of rows that moves no more than this is one launch of one cluster: its few SMs take longer over the bytes, and
// three launches are saved. Measured on an H200: 11 against 19 us at 0.1 MB, even at about 2 MB.
constexpr int64_t kWholeBytes = int64_t{1} << 20;

// Tokens of every rank, by their number on it. Rows that need no peer belong to none of them.
struct Tokens {
  int32_t begin;
  int32_t end;
  bool at_home;  // and rows that need no peer

  MOONEP_HD bool Has(int32_t token) const { return token >= begin && token < end; }
  MOONEP_HD int32_t count() const { return end - begin; }
};

// One launch of a call: some blocks send a round's tokens while the others copy out those of the round before. No block
// waits for anything.
struct Step {
  Tokens send;
  Tokens local;
  int32_t senders;  // blocks
  int32_t locals;   // blocks
  bool last;        // nothing is left to send
};

// Row elements, numbered as ElementType in xla_ffi/common/operands.h.
enum class RowType : int32_t { kF32 = 1, kF16 = 2, kBF16 = 3 };

struct DispatchArgs {
  int64_t tokens;
  const int32_t* dst_rank;    // [s, K]
  const int32_t* dst_row;     // [s, K]
  const std::byte* x;         // [s, H]
  const float* topk_weights;  // [s, K], or null
  const int32_t* src;         // [N]
  const int32_t* primary;     // [N]
  const int32_t* next;        // [N]
  std::byte* hidden;          // [N, H]
  float* weights;             // [N], or null with topk_weights
  int64_t rows;               // N
};
cudaError_t LaunchDispatchStep(const RankViewGpu& v, const DispatchArgs& a, const Step& step, cudaStream_t stream);
cudaError_t LaunchDispatchWhole(const RankViewGpu& v, const DispatchArgs& a, const CallId& id, cudaStream_t stream);

struct CombineArgs {
  int64_t tokens;
  const int32_t* dst_rank;  // [s, K]
  const int32_t* src;       // [N]
  const int32_t* primary;   // [N]
  const int32_t* next;      // [N]
  const std::byte* out;     // [N, H]
  const float* w;           // [N]: scales the rows (combine), or travels home (dispatch_grad)
  std::byte* y;             // [s, H]
  float* returned;          // [s, K] in dispatch_grad, else null
  int64_t rows;             // N
  RowType type;
};
cudaError_t LaunchCombineStep(const RankViewGpu& v, const CombineArgs& a, const Step& step, cudaStream_t stream);
cudaError_t LaunchCombineWhole(const RankViewGpu& v, const CombineArgs& a, const CallId& id, cudaStream_t stream);

// -- weights (weights.cu) ---------------------------------------------------------------------------------------------

constexpr int kMaxLeaves = 16;

struct Leaf {
  const std::byte* in;  // [epn or 2*epn, bytes]
  std::byte* out;       // [epn or 2*epn, bytes]
  int64_t bytes;        // of one expert
  int64_t start;        // in an expert's run of leaves, a multiple of 64
  int32_t in_rows;
  int32_t out_rows;
  int32_t type;  // RowType, or 0: bytes without arithmetic
};

struct WeightArgs {
  const int32_t* slot_expert;  // [R, epn]
  int64_t window;              // bytes of an expert that a round moves
  int64_t round;
  int32_t leaves;
  Leaf leaf[kMaxLeaves];
};
int64_t WeightRounds(const WeightArgs& a);

// prefetch: homes push the round's window of replicated experts into the slots of their replicas' ranks ...
cudaError_t LaunchPrefetchSend(const RankViewGpu& v, const WeightArgs& a, int blocks, cudaStream_t stream);
// ... which copy them to the result; the first round also copies own experts and fills unused slots.
cudaError_t LaunchPrefetchExpand(const RankViewGpu& v, const WeightArgs& a, int blocks, cudaStream_t stream);
// reduce_grad: replicas stage their gradients in their own slots ...
cudaError_t LaunchReduceStage(const RankViewGpu& v, const WeightArgs& a, int blocks, cudaStream_t stream);
// ... and homes pull and add them, in rank order.
cudaError_t LaunchReducePull(const RankViewGpu& v, const WeightArgs& a, int blocks, cudaStream_t stream);

}  // namespace moonep
