// The ops of the CPU backend: what each call copies in and out. Free of XLA; made by the handlers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/cpu/call.h"
#include "xla_ffi/cpu/element.h"

namespace moonep {

// An operand or a result: row-major memory that stays alive until the call is done.
struct Array {
  void* data = nullptr;
  std::vector<int64_t> dims;
  int64_t item_bytes = 0;
  ElementType type = ElementType::kOther;
  bool is_int32 = false;

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

struct CallArgs {
  Kind kind;
  std::vector<Array> args;
  std::vector<Array> rets;
};

// Builds the call of its kind, or says in *wrong what does not fit the domain. Operand order:
//   plan                     topk_ids -> the arrays of PlanArrays in order, ticket
//   dispatch, combine_grad   src, ticket, x[, topk_weights] -> hidden[, weights]
//   combine, dispatch_grad   dst_rank, src, primary, next, ticket, out, w -> y[, w at home (dispatch_grad)]
//   prefetch, reduce_grad    slot_expert, ticket, leaves... -> leaves...
std::unique_ptr<Call> MakeCall(const DomainShape& shape, CallArgs args, std::string* wrong);

}  // namespace moonep
