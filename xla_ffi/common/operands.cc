#include "xla_ffi/common/operands.h"

#include "xla_ffi/common/messages.h"

namespace moonep {
namespace {

std::string Dims(const Array& a) { return List(a.dims) + " of " + std::to_string(a.item_bytes) + "-byte elements"; }

struct Expected {
  const char* name;
  std::vector<int64_t> dims;
  int64_t item_bytes;
};

std::string Compare(const char* op, const std::vector<Array>& got, const std::vector<Expected>& expected) {
  if (got.size() != expected.size()) {
    return std::string(op) + ": wrong number of buffers; got " + std::to_string(got.size()) + ", expected " +
           std::to_string(expected.size()) + "; call it through moonep_jax";
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const Expected& e = expected[i];
    if (got[i].dims == e.dims && got[i].item_bytes == e.item_bytes) continue;
    const Array want{nullptr, e.dims, e.item_bytes, ElementType::kOther};
    return std::string(op) + ": " + e.name + " does not fit the domain; got " + Dims(got[i]) + ", expected " +
           Dims(want) + "; pass arrays of the shapes given to setup";
  }
  return "";
}

std::string CheckLeaves(const char* op, const DomainShape& d, const CallArgs& call) {
  if (call.args.size() < 3 || call.rets.size() + 2 != call.args.size()) {
    return std::string(op) + ": wrong number of buffers; got " + std::to_string(call.args.size()) + " operands and " +
           std::to_string(call.rets.size()) +
           " results, expected slot_expert, ticket and a result for each leaf; call " + "it through moonep_jax";
  }
  if (d.stage_bytes / d.epn() < 64) {
    return std::string(op) + ": the domain has no weight slots; got a call, expected none; give EPConfig.weights";
  }
  const std::vector<Array> head(call.args.begin(), call.args.begin() + 2);
  if (std::string wrong = Compare(op, head, {{"slot_expert", {d.ranks, d.epn()}, 4}, {"ticket", {1}, 4}});
      !wrong.empty()) {
    return wrong;
  }
  for (size_t i = 0; i < call.rets.size(); ++i) {
    const Array& in = call.args[i + 2];
    const Array& out = call.rets[i];
    const bool sized = !in.dims.empty() && !out.dims.empty() && in.item_bytes == out.item_bytes &&
                       std::vector<int64_t>(in.dims.begin() + 1, in.dims.end()) ==
                           std::vector<int64_t>(out.dims.begin() + 1, out.dims.end());
    // One side may hold the own experts only, the other holds the slots too.
    const bool fits = sized && (in.dims[0] == d.groups() || in.dims[0] == d.epn()) &&
                      (out.dims[0] == d.groups() || out.dims[0] == d.epn()) && in.dims[0] + out.dims[0] > d.groups();
    if (!fits) {
      return std::string(op) + ": a leaf does not fit the domain; got " + Dims(in) + " and " + Dims(out) +
             ", expected " + std::to_string(d.epn()) + " or " + std::to_string(d.groups()) +
             " experts; pass arrays of the shapes given to setup";
    }
    if (call.kind == Kind::kReduceGrad && out.type == ElementType::kOther) {
      return std::string(op) + ": a leaf's dtype has no gradient; got " + std::to_string(out.item_bytes) +
             "-byte elements, expected float32, float16 or bfloat16; stop the gradient of such a leaf";
    }
  }
  return "";
}

}  // namespace

int CallArgs::ticket_at() const {
  switch (kind) {
    case Kind::kPlan:
      return -1;
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      return 5;
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      return 4;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      return 1;
  }
  return -1;
}

int64_t CallArgs::tokens() const {
  // topk_ids [s, K] or dst_rank [s, K]
  return args.empty() || args[0].dims.empty() ? 0 : args[0].dims[0];
}

std::string CheckOperands(const DomainShape& d, const CallArgs& call) {
  const char* op = KindName(static_cast<int64_t>(call.kind));
  if (call.kind == Kind::kPrefetch || call.kind == Kind::kReduceGrad) return CheckLeaves(op, d, call);
  const int64_t s = call.tokens();
  if (s < 1 || s > d.tokens) {
    return std::string(op) + ": bad number of tokens; got " + std::to_string(s) + ", expected 1 to " +
           std::to_string(d.tokens) + "; lower s or raise EPConfig.tokens";
  }
  const int64_t n = d.recv_rows(s);
  const int64_t k = d.topk;
  const int64_t h = d.hidden;
  const int64_t item = d.row_bytes / d.hidden;
  const Expected dst_rank{"dst_rank", {s, k}, 4}, dst_row{"dst_row", {s, k}, 4}, ticket{"ticket", {1}, 4};
  const Expected src{"src", {n}, 4}, primary{"primary", {n}, 4}, next{"next", {n}, 4};
  std::vector<Expected> args, rets;
  switch (call.kind) {
    case Kind::kPlan:
      args = {{"topk_ids", {s, k}, 4}};
      rets = {dst_rank,
              dst_row,
              src,
              primary,
              next,
              {"group_sizes", {d.groups()}, 4},
              {"group_rows", {d.groups()}, 4},
              {"slot_expert", {d.ranks, d.epn()}, 4},
              {"home_rows", {d.ranks}, 4},
              {"rank_rows", {d.ranks}, 4},
              ticket};
      break;
    case Kind::kDispatch:
      args = {dst_rank, dst_row, src, primary, next, ticket, {"x", {s, h}, item}, {"topk_weights", {s, k}, 4}};
      rets = {{"hidden", {n, h}, item}, {"weights", {n}, 4}};
      break;
    case Kind::kCombineGrad:
      args = {dst_rank, dst_row, src, primary, next, ticket, {"dy", {s, h}, item}};
      rets = {{"rows", {n, h}, item}};
      break;
    case Kind::kCombine:
      args = {dst_rank, src, primary, next, ticket, {"out", {n, h}, item}, {"weights", {n}, 4}};
      rets = {{"y", {s, h}, item}};
      break;
    case Kind::kDispatchGrad:
      args = {dst_rank, src, primary, next, ticket, {"rows", {n, h}, item}, {"weights", {n}, 4}};
      rets = {{"dx", {s, h}, item}, {"dtopk_weights", {s, k}, 4}};
      break;
    case Kind::kPrefetch:
    case Kind::kReduceGrad:
      break;
  }
  std::string wrong = Compare(op, call.args, args);
  return wrong.empty() ? Compare(op, call.rets, rets) : wrong;
}

}  // namespace moonep
