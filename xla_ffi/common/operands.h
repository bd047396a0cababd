// What both backends know of a call: its kind, its operands, and whether they fit the domain. Free of XLA and CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/core/layout.h"

namespace moonep {

// Forward and backward uses are kinds of their own: they may run at the same time and must not match each other.
enum class Kind : int64_t {
  kPlan = 0,
  kDispatch = 1,
  kCombine = 2,
  kPrefetch = 3,
  kDispatchGrad = 4,  // rows travel as in combine
  kCombineGrad = 5,   // rows travel as in dispatch
  kReduceGrad = 6,
};
constexpr int64_t kKinds = 7;

inline const char* KindName(int64_t kind) {
  static const char* const names[kKinds] = {"plan",          "dispatch",     "combine",    "prefetch",
                                            "dispatch_grad", "combine_grad", "reduce_grad"};
  return kind >= 0 && kind < kKinds ? names[kind] : "unknown op";
}

enum class ElementType : int32_t { kOther = 0, kF32 = 1, kF16 = 2, kBF16 = 3 };

// An operand or a result: row-major memory that stays alive until the call is done.
struct Array {
  void* data = nullptr;
  std::vector<int64_t> dims;
  int64_t item_bytes = 0;
  ElementType type = ElementType::kOther;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : dims) n *= d;
    return n;
  }
  int64_t bytes() const { return elements() * item_bytes; }
  int32_t* i32() const { return static_cast<int32_t*>(data); }
  float* f32() const { return static_cast<float*>(data); }
  std::byte* raw() const { return static_cast<std::byte*>(data); }
};

// Operand order:
//   plan                     topk_ids -> the arrays of a Plan in order, ticket last
//   dispatch, combine_grad   dst_rank, dst_row, src, primary, next, ticket, x[, topk_weights] -> hidden[, weights]
//   combine, dispatch_grad   dst_rank, src, primary, next, ticket, out, w -> y[, w at home (dispatch_grad)]
//   prefetch, reduce_grad    slot_expert, ticket, leaves... -> leaves...
struct CallArgs {
  Kind kind;
  std::vector<Array> args;
  std::vector<Array> rets;

  // Place of the ticket among the operands; -1 for a plan, which makes one.
  int ticket_at() const;
  // s, tokens of the call; of plan, dispatch, combine and their gradients.
  int64_t tokens() const;
};

// What does not fit the domain, or an empty string. Python checks operands when it traces; this is the last line for
// callers that go round it, so that no kernel ever runs past a buffer.
std::string CheckOperands(const DomainShape& shape, const CallArgs& call);

}  // namespace moonep
