#include "xla_ffi/cuda/gpu_rank.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "xla_ffi/common/messages.h"
#include "xla_ffi/cuda/launch.cuh"

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

Part PartOf(Kind kind) {
  switch (kind) {
    case Kind::kPlan:
      return Part::kIds;
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      return Part::kRows;
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      return Part::kReturns;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      break;
  }
  return Part::kSlots;
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
  if (reads_ != nullptr) cudaStreamDestroy(reads_);
  cudaFree(scratch_memory_);
  cudaFreeHost(record_);
}

std::string GpuRank::Allocate() {
  const DomainShape& d = view_.shape;
  cudaDeviceProp properties{};
  if (cudaError_t e = cudaGetDeviceProperties(&properties, options_.device); e != cudaSuccess) {
    return CudaError("setup", e);
  }
  const int sms = properties.multiProcessorCount;
  if (options_.link_blocks <= 0 || options_.link_blocks > sms) options_.link_blocks = sms;
  if (options_.local_blocks <= 0 || options_.local_blocks > 2 * sms) options_.local_blocks = 2 * sms;

  if (cudaError_t e = cudaStreamCreateWithFlags(&reads_, cudaStreamNonBlocking); e != cudaSuccess) {
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

// Every kernel that a call of this domain may launch, whatever its operands' addresses are multiples of.
cudaError_t GpuRank::LoadKernels() {
  const LoadOnly load_only;
  const DomainShape& d = view_.shape;
  const CallId id{};
  cudaError_t first = cudaSuccess;
  const auto note = [&first](cudaError_t e) { first = first == cudaSuccess ? e : first; };
  PlanArgs plan{};
  plan.tile = PlanTile(d);
  plan.tiles = 1;
  note(LaunchBegin(view_, Part::kRows, id, nullptr));
  note(LaunchWait(view_, Part::kRows, nullptr));
  note(LaunchPlanSend(view_, plan, id, nullptr));
  note(LaunchPlanTables(view_, plan, nullptr));
  note(LaunchPlanPlace(view_, plan, nullptr));
  note(LaunchPlanWhole(view_, plan, id, nullptr));
  for (uintptr_t address = 1; address <= 16; address *= 2) {
    auto* at = reinterpret_cast<std::byte*>(address);
    DispatchArgs dispatch{};
    dispatch.tokens = dispatch.rows = 1;
    dispatch.x = dispatch.hidden = at;
    note(LaunchDispatchSend(view_, dispatch, 1, nullptr));
    note(LaunchDispatchSendBulk(view_, dispatch, 1, nullptr));
    note(LaunchDispatchExpand(view_, dispatch, 1, nullptr));
    note(LaunchDispatchWhole(view_, dispatch, id, nullptr));
    for (RowType type : {RowType::kF32, RowType::kF16, RowType::kBF16}) {
      const int64_t element = type == RowType::kF32 ? 4 : 2;
      if (element * d.hidden != d.row_bytes || element > static_cast<int64_t>(address)) continue;
      CombineArgs combine{};
      combine.tokens = combine.rows = 1;
      combine.out = combine.y = at;
      combine.type = type;
      note(LaunchCombineSend(view_, combine, 1, nullptr));
      note(LaunchCombineReduce(view_, combine, 1, nullptr));
      note(LaunchCombineWhole(view_, combine, id, nullptr));
    }
    WeightArgs weights{};
    weights.leaves = 1;
    weights.leaf[0].in = weights.leaf[0].out = at;
    for (const auto launch : {LaunchPrefetchSend, LaunchPrefetchExpand, LaunchReduceStage, LaunchReducePull}) {
      note(launch(view_, weights, 1, nullptr));
    }
  }
  return first;
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

bool GpuRank::Whole(const CallArgs& call) const {
  if (!options_.whole) return false;
  int64_t rows = 0;
  switch (call.kind) {
    case Kind::kPlan:
      return PlanIsSmall(view_.shape, call.tokens());
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      rows = call.rets[0].dims[0];
      break;
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      rows = call.args[5].dims[0] + call.tokens() * view_.shape.topk;
      break;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      return false;
  }
  // One cluster is kClusterBlocks SMs, which may be more than the rows were given.
  return options_.link_blocks >= kClusterBlocks && rows * view_.shape.row_bytes <= kWholeBytes;
}

bool GpuRank::Bulk(const CallArgs& call) const {
  return options_.bulk && (call.kind == Kind::kDispatch || call.kind == Kind::kCombineGrad) && !Whole(call) &&
         RowsGoInBulk(view_, call.args[6].raw());
}

int64_t GpuRank::Rounds(const CallArgs& call) const {
  return call.kind == Kind::kPrefetch || call.kind == Kind::kReduceGrad ? WeightRounds(Weights(call, 0)) : 1;
}

cudaError_t GpuRank::Launch(const CallArgs& call, uint32_t site_hash, int64_t round, Phase phase, cudaStream_t stream) {
  const int at = call.ticket_at();
  const CallId id{static_cast<int32_t>(call.kind), site_hash,
                  at < 0 ? nullptr : call.args[static_cast<size_t>(at)].i32(), round == 0 ? 1u : 0u};
  switch (call.kind) {
    case Kind::kPlan:
      return LaunchPlan(call, id, phase, stream);
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      return LaunchDispatch(call, id, phase, stream);
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      return LaunchCombine(call, id, phase, stream);
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      return LaunchWeights(call, id, round, phase, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t GpuRank::Prepost(const CallArgs& call, uint32_t site_hash, cudaStream_t stream) {
  const int at = call.ticket_at();
  const CallId id{static_cast<int32_t>(call.kind), site_hash,
                  at < 0 ? nullptr : call.args[static_cast<size_t>(at)].i32(), 0};
  return LaunchPrepost(view_, PartOf(call.kind), id, stream);
}

cudaError_t GpuRank::LaunchPlan(const CallArgs& call, const CallId& id, Phase phase, cudaStream_t stream) {
  const auto& r = call.rets;
  const int64_t s = call.tokens();
  const PlanArgs a{s,
                   call.args[0].i32(),
                   {r[0].i32(), r[1].i32(), r[2].i32(), r[3].i32(), r[4].i32(), r[5].i32(), r[6].i32(), r[7].i32(),
                    r[8].i32(), r[9].i32(), r[10].i32()},
                   scratch_,
                   view_.shape.recv_rows(s),
                   PlanTile(view_.shape),
                   PlanTiles(view_.shape, s)};
  switch (phase) {
    case Phase::kBegin:
      return cudaSuccess;  // the send opens the call
    case Phase::kSend:
      return LaunchPlanSend(view_, a, id, stream);
    case Phase::kWait:
      return LaunchPlanTables(view_, a, stream);
    case Phase::kLocal:
      return LaunchPlanPlace(view_, a, stream);
    case Phase::kWhole:
      return LaunchPlanWhole(view_, a, id, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t GpuRank::LaunchDispatch(const CallArgs& call, const CallId& id, Phase phase, cudaStream_t stream) {
  const auto& in = call.args;
  const bool weighted = call.kind == Kind::kDispatch;
  const DispatchArgs a{
      call.tokens(),       in[0].i32(), in[1].i32(), in[6].raw(),        weighted ? in[7].f32() : nullptr,
      in[2].i32(),         in[3].i32(), in[4].i32(), call.rets[0].raw(), weighted ? call.rets[1].f32() : nullptr,
      call.rets[0].dims[0]};
  switch (phase) {
    case Phase::kBegin:
      return LaunchBegin(view_, Part::kRows, id, stream);
    case Phase::kSend:
      return Bulk(call) ? LaunchDispatchSendBulk(view_, a, options_.link_blocks, stream)
                        : LaunchDispatchSend(view_, a, options_.link_blocks, stream);
    case Phase::kWait:
      return LaunchWait(view_, Part::kRows, stream);
    case Phase::kLocal:
      return LaunchDispatchExpand(view_, a, options_.local_blocks, stream);
    case Phase::kWhole:
      return LaunchDispatchWhole(view_, a, id, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t GpuRank::LaunchCombine(const CallArgs& call, const CallId& id, Phase phase, cudaStream_t stream) {
  const auto& in = call.args;
  const CombineArgs a{call.tokens(),
                      in[0].i32(),
                      in[1].i32(),
                      in[2].i32(),
                      in[3].i32(),
                      in[5].raw(),
                      in[6].f32(),
                      call.rets[0].raw(),
                      call.kind == Kind::kDispatchGrad ? call.rets[1].f32() : nullptr,
                      in[5].dims[0],
                      static_cast<RowType>(in[5].type)};
  switch (phase) {
    case Phase::kBegin:
      return LaunchBegin(view_, Part::kReturns, id, stream);
    case Phase::kSend:
      return LaunchCombineSend(view_, a, options_.link_blocks, stream);
    case Phase::kWait:
      return LaunchWait(view_, Part::kReturns, stream);
    case Phase::kLocal:
      return LaunchCombineReduce(view_, a, options_.local_blocks, stream);
    case Phase::kWhole:
      return LaunchCombineWhole(view_, a, id, stream);
  }
  return cudaErrorInvalidValue;
}

WeightArgs GpuRank::Weights(const CallArgs& call, int64_t round) const {
  WeightArgs a{};
  a.slot_expert = call.args[0].i32();
  a.window = view_.shape.stage_bytes / view_.shape.epn() / 64 * 64;
  a.round = round;
  a.leaves = static_cast<int32_t>(call.rets.size());
  int64_t start = 0;
  for (size_t i = 0; i < call.rets.size(); ++i) {
    const Array& in = call.args[i + 2];
    const Array& out = call.rets[i];
    const int64_t bytes = out.bytes() / out.dims[0];
    a.leaf[i] = {in.raw(),
                 out.raw(),
                 bytes,
                 start,
                 static_cast<int32_t>(in.dims[0]),
                 static_cast<int32_t>(out.dims[0]),
                 static_cast<int32_t>(out.type)};
    start += AlignUp(bytes, 64);
  }
  return a;
}

cudaError_t GpuRank::LaunchWeights(const CallArgs& call, const CallId& id, int64_t round, Phase phase,
                                   cudaStream_t stream) {
  const WeightArgs a = Weights(call, round);
  const bool push = call.kind == Kind::kPrefetch;
  switch (phase) {
    case Phase::kBegin:
      return LaunchBegin(view_, Part::kSlots, id, stream);
    case Phase::kSend:
      return push ? LaunchPrefetchSend(view_, a, options_.link_blocks, stream)
                  : LaunchReduceStage(view_, a, options_.local_blocks, stream);
    case Phase::kWait:
      return LaunchWait(view_, Part::kSlots, stream);
    case Phase::kLocal:
      return push ? LaunchPrefetchExpand(view_, a, options_.local_blocks, stream)
                  : LaunchReducePull(view_, a, options_.link_blocks, stream);
    case Phase::kWhole:
      break;
  }
  return cudaErrorInvalidValue;
}

Counters GpuRank::counters(std::string* wrong) const {
  DeviceGuard guard(options_.device);
  Counters counters{};
  const auto* own = reinterpret_cast<const ControlBlockGpu*>(view_.chunk[view_.rank]);
  cudaError_t e = cudaMemcpyAsync(&counters, &own->counters, sizeof(counters), cudaMemcpyDeviceToHost, reads_);
  if (e == cudaSuccess) e = cudaStreamSynchronize(reads_);
  if (e != cudaSuccess) *wrong = CudaError("stats", e);
  return counters;
}

void GpuRank::Fail(const std::string& text) {
  if (!error().empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  failed_ = text;
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
  std::string culprits;
  for (int32_t i = 0; i < view_.shape.ranks; ++i) {
    if ((r.missing[i / 64] >> (i % 64) & 1) == 0) continue;
    missing.push_back(i);
    culprits += (culprits.empty() ? "" : ", ") + labels_[static_cast<size_t>(i)];
  }
  const std::string op = std::string(KindName(r.kind)) + ": ";
  const std::string seen = " (ticket " + std::to_string(r.ticket) + ", seen by " +
                           (r.rank >= 0 && r.rank < view_.shape.ranks ? labels_[static_cast<size_t>(r.rank)] : "?") +
                           ")";
  switch (code) {
    case ErrorRecord::kTimeout:
      return op + "missing ranks " + List(missing) + " after " + Seconds(static_cast<int64_t>(r.waited_ns)) +
             "; expected all " + std::to_string(view_.shape.ranks) + " of " + group_ + "; " + culprits +
             " did not make the call - it may have died, be stuck, or have taken another branch; if it is only slow, "
             "raise timeout_s or first_call_timeout_s" +
             seen;
    case ErrorRecord::kMismatch:
      return op + "ranks made different calls at the same time; got another op, place or plan from ranks " +
             List(missing) + " of " + group_ + ", expected the same program order on all ranks; " + culprits +
             " differ: run the same compiled program on every rank" + seen;
    case ErrorRecord::kBusy:
      return op +
             "two calls of one kind are in flight on one device; got a second one before the first was done, expected "
             "one after the other; order them by data, or turn concurrent command buffers off" +
             seen;
    default:
      return op + "failed with code " + std::to_string(code) + seen;
  }
}

}  // namespace moonep
