// GpuRank's calls as launches: which kernels an op is made of, and how they get a call's operands.
#include <algorithm>

#include "xla_ffi/cuda/gpu_rank.h"
#include "xla_ffi/cuda/launch.cuh"

namespace moonep {
namespace {

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

// Rounds of a large call of rows, in eighths of its tokens. The last one's rows are expanded or reduced when nothing is
// left to send, so it is small; each round costs a wait, so there are few.
constexpr int kRoundEnds[] = {0, 4, 7, 8};
constexpr int64_t kRounds = 3;

// A call of rows that moves this much overlaps sending with local work: then a round's wait, some 4 us, is little
// beside what it hides.
constexpr int64_t kRoundBytes = int64_t{64} << 20;

// Blocks that send unless the user says how many. Copies need few to keep a link busy, and leave the others for what is
// local; sums read far more than they send, and take all, or all but a few where there is local work, too.
constexpr int kCopySenders = 48;

Tokens TokensOf(int64_t tokens, int64_t rounds, int64_t round) {
  if (rounds == 1) return {0, static_cast<int32_t>(tokens), false};
  return {static_cast<int32_t>(tokens * kRoundEnds[round] / 8),
          static_cast<int32_t>(tokens * kRoundEnds[round + 1] / 8), false};
}

}  // namespace

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
  const Step step{{0, 1, false}, {0, 1, true}, 1, 1, false};
  const Step last{{0, 0, false}, {0, 1, false}, 0, 1, true};
  note(LaunchBegin(view_, Part::kRows, id, nullptr));
  note(LaunchWait(view_, Part::kRows, 0, nullptr));
  note(LaunchRaise(view_, ErrorRecord::kClosed, nullptr));
  note(LaunchPlanSend(view_, plan, id, nullptr));
  note(LaunchPlanTables(view_, plan, nullptr));
  note(LaunchPlanPlace(view_, plan, nullptr));
  note(LaunchPlanWhole(view_, plan, id, nullptr));
  for (uintptr_t address = 1; address <= 16; address *= 2) {
    auto* at = reinterpret_cast<std::byte*>(address);
    if (address > 1) {  // rows have no elements of one byte
      DispatchArgs dispatch{};
      dispatch.tokens = dispatch.rows = 1;
      dispatch.x = dispatch.hidden = at;
      note(LaunchDispatchStep(view_, dispatch, step, nullptr));
      note(LaunchDispatchWhole(view_, dispatch, id, nullptr));
    }
    for (RowType type : {RowType::kF32, RowType::kF16, RowType::kBF16}) {
      const int64_t element = type == RowType::kF32 ? 4 : 2;
      if (element * d.hidden != d.row_bytes || element > static_cast<int64_t>(address)) continue;
      CombineArgs combine{};
      combine.tokens = combine.rows = 1;
      combine.out = combine.y = at;
      combine.type = type;
      note(LaunchCombineStep(view_, combine, step, nullptr));
      note(LaunchCombineStep(view_, combine, last, nullptr));
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
  return (options_.link_blocks == 0 || options_.link_blocks >= kClusterBlocks) &&
         rows * view_.shape.row_bytes <= kWholeBytes;
}

// The same on every rank: by sizes, which are, and not by addresses.
int64_t GpuRank::Rounds(const CallArgs& call) const {
  const bool dispatch = call.kind == Kind::kDispatch || call.kind == Kind::kCombineGrad;
  switch (call.kind) {
    case Kind::kPlan:
      return 1;
    case Kind::kDispatch:
    case Kind::kCombineGrad:
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      if (Whole(call)) return 1;
      if (options_.rounds != 0) return options_.rounds == 1 ? 1 : kRounds;
      if (dispatch && view_.shape.ranks == 1) return 1;  // nothing to send
      return (dispatch ? call.rets[0] : call.args[5]).bytes() >= kRoundBytes ? kRounds : 1;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      break;
  }
  return WeightRounds(Weights(call, 0));
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
      return LaunchDispatch(call, id, round, phase, stream);
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      return LaunchCombine(call, id, round, phase, stream);
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
  // A round of weights is a call of its own.
  const Part part = PartOf(call.kind);
  return LaunchPrepost(view_, part, id, part == Part::kSlots ? 1 : static_cast<uint32_t>(Rounds(call)), stream);
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

// A call of rows: its step `round` of `rounds`, or, with round == rounds, the one that follows the last wait.
Step GpuRank::StepOf(int64_t tokens, int64_t rounds, int64_t round, bool copies) const {
  Step step{};
  step.last = round == rounds;
  step.local.at_home = round == 0 && copies;
  const bool alone = copies && view_.shape.ranks == 1;  // nothing is sent: one block publishes
  if (round > 0 && !alone) step.local = TokensOf(tokens, rounds, round - 1);
  if (step.last) {
    step.locals = options_.local_blocks;
    return step;
  }
  if (!alone) step.send = TokensOf(tokens, rounds, round);
  const bool beside = round > 0 || copies;  // there is local work
  const int most = beside ? sms_ - sms_ / 8 : sms_;
  step.senders = std::min(options_.link_blocks != 0 ? options_.link_blocks : copies ? kCopySenders : sms_, most);
  if (alone) step.senders = 1;
  if (beside) step.locals = std::max(1, std::min(options_.local_blocks, sms_ - step.senders));
  return step;
}

template <class F>
cudaError_t GpuRank::LaunchRows(Part part, const CallId& id, int64_t rounds, int64_t round, Phase phase, bool copies,
                                int64_t tokens, cudaStream_t stream, F launch) {
  switch (phase) {
    case Phase::kBegin:
      return round == 0 ? LaunchBegin(view_, part, id, stream) : cudaSuccess;
    case Phase::kSend:
      return launch(StepOf(tokens, rounds, round, copies));
    case Phase::kWait:
      return LaunchWait(view_, part, static_cast<uint32_t>(rounds - 1 - round), stream);
    case Phase::kLocal:
      return round == rounds - 1 ? launch(StepOf(tokens, rounds, rounds, copies)) : cudaSuccess;
    case Phase::kWhole:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t GpuRank::LaunchDispatch(const CallArgs& call, const CallId& id, int64_t round, Phase phase,
                                    cudaStream_t stream) {
  const auto& in = call.args;
  const bool weighted = call.kind == Kind::kDispatch;
  const DispatchArgs a{
      call.tokens(),       in[0].i32(), in[1].i32(), in[6].raw(),        weighted ? in[7].f32() : nullptr,
      in[2].i32(),         in[3].i32(), in[4].i32(), call.rets[0].raw(), weighted ? call.rets[1].f32() : nullptr,
      call.rets[0].dims[0]};
  if (phase == Phase::kWhole) return LaunchDispatchWhole(view_, a, id, stream);
  return LaunchRows(Part::kRows, id, Rounds(call), round, phase, true, call.tokens(), stream,
                    [&](const Step& step) { return LaunchDispatchStep(view_, a, step, stream); });
}

cudaError_t GpuRank::LaunchCombine(const CallArgs& call, const CallId& id, int64_t round, Phase phase,
                                   cudaStream_t stream) {
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
  if (phase == Phase::kWhole) return LaunchCombineWhole(view_, a, id, stream);
  return LaunchRows(Part::kReturns, id, Rounds(call), round, phase, false, call.tokens(), stream,
                    [&](const Step& step) { return LaunchCombineStep(view_, a, step, stream); });
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
  const int link_blocks = options_.link_blocks != 0 ? options_.link_blocks : sms_;
  switch (phase) {
    case Phase::kBegin:
      return LaunchBegin(view_, Part::kSlots, id, stream);
    case Phase::kSend:
      return push ? LaunchPrefetchSend(view_, a, link_blocks, stream)
                  : LaunchReduceStage(view_, a, options_.local_blocks, stream);
    case Phase::kWait:
      return LaunchWait(view_, Part::kSlots, 0, stream);
    case Phase::kLocal:
      return push ? LaunchPrefetchExpand(view_, a, options_.local_blocks, stream)
                  : LaunchReducePull(view_, a, link_blocks, stream);
    case Phase::kWhole:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace moonep
