#include "xla_ffi/cpu/ops.h"

#include <sstream>
#include <utility>

#include "xla_ffi/cpu/row_calls.h"
#include "xla_ffi/cpu/weight_calls.h"

namespace moonep {
namespace {

std::string Dims(const Array& a) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < a.dims.size(); ++i) out << (i ? "," : "") << a.dims[i];
  out << "] of " << a.item_bytes << "-byte elements";
  return out.str();
}

// Python checks operands when it traces; this is the last line for callers that go round it.
class Checker {
 public:
  Checker(const char* op, std::string* wrong) : op_(op), wrong_(wrong) {}

  bool Counts(const CallArgs& a, size_t args, size_t rets) {
    if (a.args.size() == args && a.rets.size() == rets) return true;
    std::ostringstream text;
    text << op_ << ": wrong number of buffers; got " << a.args.size() << " operands and " << a.rets.size()
         << " results, expected " << args << " and " << rets << "; call it through moonep_jax";
    *wrong_ = text.str();
    return false;
  }
  bool Shape(const char* name, const Array& a, const std::vector<int64_t>& dims, int64_t item_bytes) {
    if (a.dims == dims && a.item_bytes == item_bytes) return true;
    Array expected;
    expected.dims = dims;
    expected.item_bytes = item_bytes;
    *wrong_ = std::string(op_) + ": " + name + " does not fit the domain; got " + Dims(a) + ", expected " +
              Dims(expected) + "; pass arrays of the shapes given to setup";
    return false;
  }

 private:
  const char* op_;
  std::string* wrong_;
};

std::unique_ptr<Call> MakePlan(const DomainShape& d, CallArgs a, Checker check) {
  if (!check.Counts(a, 1, 11)) return nullptr;
  const int64_t s = a.args[0].dims.empty() ? 0 : a.args[0].dims[0];
  if (s > d.tokens || !check.Shape("topk_ids", a.args[0], {s, d.topk}, 4)) return nullptr;
  const int64_t rows = d.recv_rows(s);
  const std::vector<std::vector<int64_t>> dims = {{s, d.topk}, {s, d.topk},  {rows},       {rows},
                                                  {rows},      {d.groups()}, {d.groups()}, {d.ranks, d.epn()},
                                                  {d.ranks},   {d.ranks},    {1}};
  for (size_t i = 0; i < dims.size(); ++i) {
    if (!check.Shape("a plan array", a.rets[i], dims[i], 4)) return nullptr;
  }
  return std::make_unique<PlanCall>(std::move(a), s);
}

std::unique_ptr<Call> MakeDispatch(const DomainShape& d, CallArgs a, Checker check) {
  const size_t weighted = a.kind == Kind::kDispatch ? 1 : 0;
  if (!check.Counts(a, 3 + weighted, 1 + weighted)) return nullptr;
  const int64_t s = a.args[2].dims.empty() ? 0 : a.args[2].dims[0];
  const int64_t rows = d.recv_rows(s);
  const int64_t item = d.row_bytes / d.hidden;
  if (s > d.tokens || !check.Shape("src", a.args[0], {rows}, 4) || !check.Shape("ticket", a.args[1], {1}, 4) ||
      !check.Shape("x", a.args[2], {s, d.hidden}, item) || !check.Shape("hidden", a.rets[0], {rows, d.hidden}, item)) {
    return nullptr;
  }
  if (weighted &&
      (!check.Shape("topk_weights", a.args[3], {s, d.topk}, 4) || !check.Shape("weights", a.rets[1], {rows}, 4))) {
    return nullptr;
  }
  return std::make_unique<DispatchCall>(std::move(a), s);
}

std::unique_ptr<Call> MakeCombine(const DomainShape& d, CallArgs a, Checker check) {
  const size_t returns = a.kind == Kind::kDispatchGrad ? 1 : 0;
  if (!check.Counts(a, 7, 1 + returns)) return nullptr;
  const int64_t s = a.args[0].dims.empty() ? 0 : a.args[0].dims[0];
  const int64_t rows = d.recv_rows(s);
  const int64_t item = d.row_bytes / d.hidden;
  if (s > d.tokens || !check.Shape("dst_rank", a.args[0], {s, d.topk}, 4) ||
      !check.Shape("src", a.args[1], {rows}, 4) || !check.Shape("primary", a.args[2], {rows}, 4) ||
      !check.Shape("next", a.args[3], {rows}, 4) || !check.Shape("ticket", a.args[4], {1}, 4) ||
      !check.Shape("out", a.args[5], {rows, d.hidden}, item) || !check.Shape("weights", a.args[6], {rows}, 4) ||
      !check.Shape("y", a.rets[0], {s, d.hidden}, item)) {
    return nullptr;
  }
  if (returns && !check.Shape("topk_weights", a.rets[1], {s, d.topk}, 4)) return nullptr;
  return std::make_unique<CombineCall>(std::move(a), s);
}

std::unique_ptr<Call> MakeWeights(const DomainShape& d, CallArgs a, Checker check, std::string* wrong) {
  if (a.args.size() < 3) {
    check.Counts(a, 3, 1);
    return nullptr;
  }
  if (!check.Counts(a, a.args.size(), a.args.size() - 2) ||
      !check.Shape("slot_expert", a.args[0], {d.ranks, d.epn()}, 4) || !check.Shape("ticket", a.args[1], {1}, 4)) {
    return nullptr;
  }
  if (d.stage_bytes / d.epn() < 64) {
    *wrong = "prefetch: the domain has no weight slots; got a call, expected none; give EPConfig.weights";
    return nullptr;
  }
  for (size_t i = 0; i < a.rets.size(); ++i) {
    const Array& in = a.args[i + 2];
    const Array& out = a.rets[i];
    const bool sized = !in.dims.empty() && !out.dims.empty() && in.item_bytes == out.item_bytes &&
                       std::vector<int64_t>(in.dims.begin() + 1, in.dims.end()) ==
                           std::vector<int64_t>(out.dims.begin() + 1, out.dims.end());
    const bool rows = sized && (in.dims[0] == d.groups() || in.dims[0] == d.epn()) &&
                      (out.dims[0] == d.groups() || out.dims[0] == d.epn()) && in.dims[0] + out.dims[0] >= d.groups();
    if (!rows) {
      check.Shape("a leaf", in, {d.epn()}, in.item_bytes);
      return nullptr;
    }
  }
  if (a.kind == Kind::kPrefetch) return std::make_unique<PrefetchCall>(std::move(a));
  for (const Array& leaf : a.rets) {
    if (leaf.type == ElementType::kOther) {
      *wrong = "reduce_grad: a leaf's dtype has no gradient; expected float32, float16 or bfloat16";
      return nullptr;
    }
  }
  return std::make_unique<ReduceGradCall>(std::move(a));
}

}  // namespace

std::unique_ptr<Call> MakeCall(const DomainShape& shape, CallArgs args, std::string* wrong) {
  const Kind kind = args.kind;
  const char* op = KindName(static_cast<uint64_t>(kind));
  Checker check(op, wrong);
  uint64_t signature = 14695981039346656037ull;  // FNV-1a over all dims and element sizes
  auto mix = [&signature](int64_t v) { signature = (signature ^ static_cast<uint64_t>(v)) * 1099511628211ull; };
  for (const auto* list : {&args.args, &args.rets}) {
    for (const Array& a : *list) {
      mix(a.item_bytes);
      for (int64_t dim : a.dims) mix(dim);
    }
  }
  std::unique_ptr<Call> call;
  switch (kind) {
    case Kind::kPlan:
      call = MakePlan(shape, std::move(args), check);
      break;
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      call = MakeDispatch(shape, std::move(args), check);
      break;
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      call = MakeCombine(shape, std::move(args), check);
      break;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      call = MakeWeights(shape, std::move(args), check, wrong);
      break;
  }
  if (!call) {
    if (wrong->empty()) *wrong = std::string(op) + ": more tokens than the domain's capacity; lower s or raise tokens";
    return nullptr;
  }
  call->signature = signature;
  return call;
}

}  // namespace moonep
