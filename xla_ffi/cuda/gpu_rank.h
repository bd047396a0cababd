// One local rank of a domain on a GPU: turns calls into launches, and error records into text. Host code, no XLA.
//
// A call runs in phases - begin, send, wait, local - so that several ranks of one process can be launched phase by
// phase on one device (a kernel that waits must never be queued before the kernels that it waits for).
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/operands.h"
#include "xla_ffi/cuda/chunk.h"
#include "xla_ffi/cuda/kernels.h"

namespace moonep {

struct GpuRankOptions {
  int device = 0;        // CUDA ordinal in this process
  int link_blocks = 0;   // grid of kernels that write to or read from peers; 0: the library's choice
  int local_blocks = 0;  // grid of kernels that stay on the device; 0: the library's choice
  bool whole = true;     // calls of few bytes are one launch
  int rounds = 0;        // calls of rows that are several launches: 0 by their bytes, 1 in one round, else in several
  uint64_t limit_ns = 0;
  uint64_t first_limit_ns = 0;
};

// Phases of a call, in order; kWhole is all of them in one launch.
enum class Phase : int { kBegin = 0, kSend = 1, kWait = 2, kLocal = 3, kWhole = 4 };
constexpr int kPhases = 4;

class GpuRank {
 public:
  // Allocates what its kernels need besides the chunk and writes the limits into the control block. *wrong says what
  // failed, and then the rank must not be used.
  GpuRank(const DomainShape& shape, int32_t rank, const std::vector<std::byte*>& chunks, const GpuRankOptions& options,
          std::vector<std::string> labels, std::string group, std::string* wrong);
  ~GpuRank();
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  // Launches a whole call on a stream; returns what is wrong, or an empty string. Only enqueues.
  std::string Enqueue(const CallArgs& call, int64_t channel, int64_t site, cudaStream_t stream);

  // Of a checked call: its rounds, whether one launch does all of it, and one phase of one round.
  int64_t Rounds(const CallArgs& call) const;
  bool Whole(const CallArgs& call) const;
  cudaError_t Launch(const CallArgs& call, uint32_t site_hash, int64_t round, Phase phase, cudaStream_t stream);

  // Before Launch of kBegin, when this rank is timed alone: its peers' words for the call.
  cudaError_t Prepost(const CallArgs& call, uint32_t site_hash, cudaStream_t stream);

  // Text of the first error that this rank knows of, or an empty string. Synchronises nothing.
  std::string error() const;
  // Puts this rank in error, from any thread (what a check outside of the calls has found), and tells its peers that it
  // is. A first error stays.
  void Fail(const std::string& text);
  // Tells the peers that no more calls will come: they and the calls in flight need not wait for their limits.
  void Leave();
  const DomainShape& shape() const { return view_.shape; }
  int device() const { return options_.device; }
  // Of all calls so far, replays of captured graphs included, read from the device; waits for none of them.
  Counters counters(std::string* wrong) const;
  // Calls enqueued by handlers; replays of a captured graph do not come here.
  uint64_t enqueued() const { return enqueued_.load(); }

 private:
  std::string Allocate();
  void Raise(ErrorRecord::Code code);
  cudaError_t LoadKernels();
  cudaError_t LaunchPlan(const CallArgs& call, const CallId& id, Phase phase, cudaStream_t stream);
  cudaError_t LaunchDispatch(const CallArgs& call, const CallId& id, int64_t round, Phase phase, cudaStream_t stream);
  cudaError_t LaunchCombine(const CallArgs& call, const CallId& id, int64_t round, Phase phase, cudaStream_t stream);
  template <class F>
  cudaError_t LaunchRows(Part part, const CallId& id, int64_t rounds, int64_t round, Phase phase, bool copies,
                         int64_t tokens, cudaStream_t stream, F launch);
  Step StepOf(int64_t tokens, int64_t rounds, int64_t round, bool copies) const;
  cudaError_t LaunchWeights(const CallArgs& call, const CallId& id, int64_t round, Phase phase, cudaStream_t stream);
  WeightArgs Weights(const CallArgs& call, int64_t round) const;

  RankViewGpu view_ = {};
  GpuRankOptions options_;
  int sms_ = 0;
  std::vector<std::string> labels_;  // [ranks], for messages
  std::string group_;
  PlanScratch scratch_ = {};
  void* scratch_memory_ = nullptr;
  cudaStream_t side_ = nullptr;  // of its own: any other stream may wait for kernels that wait for peers
  std::atomic<uint64_t> enqueued_{0};
  ErrorRecord* record_ = nullptr;  // host address of view_.host_record
  mutable std::mutex mutex_;       // guards the text
  std::string failed_;             // given to Fail
};

uint32_t SiteHash(int64_t kind, int64_t channel, int64_t site);

}  // namespace moonep
