// GpuRank besides its launches: memory of its own, errors and their texts, counters.
#include "xla_ffi/cuda/gpu_rank.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "xla_ffi/common/messages.h"

namespace moonep {
namespace {

// Kernels are launched on the rank's device whatever the thread's current one is, and leave that as it was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

std::string CudaError(const char* what, cudaError_t e) {
  return std::string(what) + ": CUDA call failed; got " + cudaGetErrorName(e) + " (" + cudaGetErrorString(e) +
         "), expected success; see the first error of the process";
}

}  // namespace

uint32_t SiteHash(int64_t kind, int64_t channel, int64_t site) {
  uint64_t h = 14695981039346656037ull;
  for (uint64_t v : {static_cast<uint64_t>(kind), static_cast<uint64_t>(channel), static_cast<uint64_t>(site)}) {
    h = (h ^ v) * 1099511628211ull;
    h ^= h >> 29;
  }
  return static_cast<uint32_t>(h ^ (h >> 32));
}

GpuRank::GpuRank(const DomainShape& shape, int32_t rank, const std::vector<std::byte*>& chunks,
                 const GpuRankOptions& options, std::vector<std::string> labels, std::string group, std::string* wrong)
    : options_(options), labels_(std::move(labels)), group_(std::move(group)) {
  view_.shape = shape;
  view_.layout = ChunkLayoutGpu::Of(shape);
  view_.rank = rank;
  for (size_t r = 0; r < chunks.size() && r < kMaxRanks; ++r) view_.chunk[r] = chunks[r];
  DeviceGuard guard(options_.device);
  *wrong = Allocate();
}

GpuRank::~GpuRank() {
  DeviceGuard guard(options_.device);
  if (side_ != nullptr) cudaStreamDestroy(side_);
  cudaFree(scratch_memory_);
  cudaFreeHost(record_);
}

std::string GpuRank::Allocate() {
  const DomainShape& d = view_.shape;
  cudaDeviceProp properties{};
  if (cudaError_t e = cudaGetDeviceProperties(&properties, options_.device); e != cudaSuccess) {
    return CudaError("setup", e);
  }
  sms_ = properties.multiProcessorCount;
  options_.link_blocks = std::clamp(options_.link_blocks, 0, sms_);
  if (options_.local_blocks <= 0 || options_.local_blocks > 2 * sms_) options_.local_blocks = 2 * sms_;

  if (cudaError_t e = cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking); e != cudaSuccess) {
    return CudaError("setup", e);
  }
  const size_t experts = static_cast<size_t>(d.experts);
  const size_t ranks = static_cast<size_t>(d.ranks);
  const size_t cells = experts * ranks;
  const size_t tiles = static_cast<size_t>(PlanTiles(d, d.tokens));
  const size_t bytes = (ranks * tiles * experts + experts + cells * 5) * 4;
  if (cudaError_t e = cudaMalloc(&scratch_memory_, bytes); e != cudaSuccess) return CudaError("setup", e);
  if (cudaError_t e = cudaMemset(scratch_memory_, 0, bytes); e != cudaSuccess) return CudaError("setup", e);
  auto* at = static_cast<std::byte*>(scratch_memory_);
  auto take = [&at](size_t count) {
    auto* p = reinterpret_cast<int32_t*>(at);
    at += count * 4;
    return p;
  };
  scratch_.counts = take(experts);
  for (int32_t** table :
       {&scratch_.alloc, &scratch_.src_prefix, &scratch_.dst_prefix, &scratch_.group_row, &scratch_.runs}) {
    *table = take(cells);
  }
  scratch_.tile_prefix = take(ranks * tiles * experts);

  if (cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&record_), sizeof(ErrorRecord), cudaHostAllocMapped);
      e != cudaSuccess) {
    return CudaError("setup", e);
  }
  std::memset(static_cast<void*>(record_), 0, sizeof(ErrorRecord));
  if (cudaError_t e = cudaHostGetDevicePointer(reinterpret_cast<void**>(&view_.host_record), record_, 0);
      e != cudaSuccess) {
    return CudaError("setup", e);
  }
  const uint64_t limits[2] = {options_.limit_ns, options_.first_limit_ns};
  ControlBlockGpu* own = reinterpret_cast<ControlBlockGpu*>(view_.chunk[view_.rank]);
  if (cudaError_t e = cudaMemcpy(&own->limit_ns, limits, sizeof(limits), cudaMemcpyHostToDevice); e != cudaSuccess) {
    return CudaError("setup", e);
  }
  if (cudaError_t e = LoadKernels(); e != cudaSuccess) return CudaError("setup", e);
  return "";
}

std::string GpuRank::Enqueue(const CallArgs& call, int64_t channel, int64_t site, cudaStream_t stream) {
  if (std::string wrong = CheckOperands(view_.shape, call); !wrong.empty()) return wrong;
  if (call.rets.size() > kMaxLeaves && call.args.size() == call.rets.size() + 2) {
    return std::string(KindName(static_cast<int64_t>(call.kind))) + ": too many leaves; got " +
           std::to_string(call.rets.size()) + ", expected at most " + std::to_string(kMaxLeaves) +
           "; stack some of them or call prefetch twice";
  }
  enqueued_.fetch_add(1);
  DeviceGuard guard(options_.device);
  const uint32_t hash = SiteHash(static_cast<int64_t>(call.kind), channel, site);
  const int64_t rounds = Rounds(call);
  const bool whole = Whole(call);
  for (int64_t round = 0; round < rounds; ++round) {
    cudaError_t e = whole ? Launch(call, hash, round, Phase::kWhole, stream) : cudaSuccess;
    for (int phase = 0; !whole && phase < kPhases && e == cudaSuccess; ++phase) {
      e = Launch(call, hash, round, static_cast<Phase>(phase), stream);
    }
    if (e != cudaSuccess) return CudaError(KindName(static_cast<int64_t>(call.kind)), e);
  }
  return "";
}

Counters GpuRank::counters(std::string* wrong) const {
  DeviceGuard guard(options_.device);
  Counters counters{};
  const auto* own = reinterpret_cast<const ControlBlockGpu*>(view_.chunk[view_.rank]);
  cudaError_t e = cudaMemcpyAsync(&counters, &own->counters, sizeof(counters), cudaMemcpyDeviceToHost, side_);
  if (e == cudaSuccess) e = cudaStreamSynchronize(side_);
  if (e != cudaSuccess) *wrong = CudaError("stats", e);
  return counters;
}

void GpuRank::Fail(const std::string& text) {
  if (!error().empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed_ = text;
  }
  Raise(ErrorRecord::kReported);
}

void GpuRank::Leave() { Raise(ErrorRecord::kClosed); }

// Failures have nobody to be told to: the peers find out by their limits.
void GpuRank::Raise(ErrorRecord::Code code) {
  DeviceGuard guard(options_.device);
  if (LaunchRaise(view_, code, side_) == cudaSuccess) cudaStreamSynchronize(side_);
}

std::string GpuRank::error() const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.empty()) return failed_;
  }
  if (record_ == nullptr) return "";
  const uint32_t code = reinterpret_cast<const volatile ErrorRecord*>(record_)->code;
  if (code == ErrorRecord::kNone) return "";
  std::atomic_thread_fence(std::memory_order_acquire);
  const ErrorRecord r = *record_;
  std::vector<int32_t> missing;
  std::vector<int32_t> here;
  std::string culprits;
  for (int32_t i = 0; i < view_.shape.ranks; ++i) {
    const bool lacks = (r.missing[i / 64] >> (i % 64) & 1) != 0;
    (lacks ? missing : here).push_back(i);
    if (!lacks) continue;
    culprits += (culprits.empty() ? "" : ", ") + labels_[static_cast<size_t>(i)];
  }
  const std::string op = std::string(r.kind < 0 ? "close" : KindName(r.kind)) + ": ";
  const std::string by = r.rank >= 0 && r.rank < view_.shape.ranks ? labels_[static_cast<size_t>(r.rank)] : "?";
  const std::string seen = " (ticket " + std::to_string(r.ticket) + ", seen by " + by + ")";
  switch (code) {
    case ErrorRecord::kTimeout:
      return op + "missing ranks " + List(missing) + " after " + Seconds(static_cast<int64_t>(r.waited_ns)) +
             "; got ranks " + List(here) + " of " + group_ + ", expected all " + std::to_string(view_.shape.ranks) +
             "; " + culprits +
             " did not make the call - it may have died, be stuck, or have taken another branch; if it is only slow, "
             "raise timeout_s or first_call_timeout_s" +
             seen;
    case ErrorRecord::kMismatch:
      return op + "ranks made different calls at the same time; got another op, place or plan from ranks " +
             List(missing) + " of " + group_ + ", expected the same program order on all ranks; " + culprits +
             " differ: run the same compiled program on every rank" + seen;
    case ErrorRecord::kClosed:
      return ClosedByPeer(op, List(missing), culprits) + seen;
    case ErrorRecord::kReported:
      return op + "missing ranks " + List(missing) + ": " + culprits +
             " has found an error outside of the calls; got no more calls from it, expected all " +
             std::to_string(view_.shape.ranks) + " of " + group_ + "; see what it reported" + seen;
    case ErrorRecord::kBusy:
      return op +
             "two calls of one kind are in flight on one device; got a second one before the first was done, expected "
             "one after the other; order them by data, or turn concurrent command buffers off" +
             seen;
    case ErrorRecord::kPoisoned:
      return PoisonedPlan(KindName(r.kind), r.ticket, by);
    default:
      return op + "failed with code " + std::to_string(code) + seen;
  }
}

}  // namespace moonep
